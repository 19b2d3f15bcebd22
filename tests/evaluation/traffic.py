"""Made traffic: routing of known popularity, and censuses of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from rowmap_jobs.formats import census as census_format
from rowmap_jobs.formats.census import Census
from rowmap_jobs.formats.rowmap import Geometry, per_layer
from tests.formats.samples import census as sample

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

ROW_BYTES = 18_800_640
GEOMETRY = Geometry(
    experts=384, top_k=6, hot_rows=295, moe_layers=tuple(range(40)), row_bytes=ROW_BYTES
)


def layout(layers: int, experts: int, hot: int, top_k: int = 1) -> Geometry:
    return Geometry(
        experts=experts,
        top_k=top_k,
        hot_rows=hot,
        moe_layers=tuple(range(layers)),
        row_bytes=10,
    )


def popular(layers: int, experts: int, seed: int, spread: float = 1.5) -> F64:
    """Lognormal popularity of each layer's experts, float[L,E]; a spread of 0 is flat."""
    return np.exp(np.random.default_rng(seed).normal(0.0, spread, (layers, experts)))


def drawn(
    weights: F64, rows: Sequence[int], top_k: int, rng: np.random.Generator, noise: float = 0.0
) -> I64:
    """Counts int64[S,L,E] of sessions of `rows` decode rows: top-k without repeats, row by row.

    `noise` is how far the taste of each session strays (log scale).
    """
    layers, experts = weights.shape
    out = np.zeros((len(rows), layers, experts), dtype=np.int64)
    for session, many in enumerate(rows):
        taste = np.log(weights) + rng.normal(0.0, noise, weights.shape)
        # The k largest of log-weights with Gumbel noise are k draws without repeats.
        keys = taste[None] + rng.gumbel(size=(many, layers, experts))
        chosen = np.argpartition(-keys, top_k - 1, axis=2)[:, :, :top_k]
        for layer in range(layers):
            out[session, layer] = np.bincount(chosen[:, layer].ravel(), minlength=experts)
    return out


def smooth(
    weights: F64, rows: Sequence[int], top_k: int, noise: float, rng: np.random.Generator
) -> I64:
    """Like `drawn`, cheaply: the expected counts rounded so that every sum is exact."""
    out = np.zeros((len(rows), *weights.shape), dtype=np.int64)
    for session, many in enumerate(rows):
        taste = weights * np.exp(rng.normal(0.0, noise, weights.shape))
        chance = taste / taste.sum(axis=1, keepdims=True) * top_k
        for _ in range(30):
            chance = np.minimum(chance, 1.0)
            chance *= top_k / chance.sum(axis=1, keepdims=True)
        ends = np.cumsum(np.minimum(chance, 1.0), axis=1) * many + rng.random((len(weights), 1))
        ends = np.floor(ends)
        ends[:, -1] = many * top_k
        out[session] = np.diff(ends, axis=1, prepend=0)
    return out


def census_of(
    counts: npt.ArrayLike,
    geometry: Geometry,
    session: Sequence[int] | None = None,
    created: Sequence[int] | None = None,
    prompt_len: Sequence[int] | None = None,
    traffic_class: str = "agent",
) -> Census:
    """A census of decode counts [N,L,E], one transcript each; checked like one from outside."""
    decode = np.asarray(counts, dtype=np.int64)
    many, layers, _ = decode.shape
    base = sample(1)
    both = np.stack([np.zeros_like(decode), decode], axis=1)
    rows = np.zeros((many, 2), dtype=np.int64)
    rows[:, 1] = decode[:, 0].sum(axis=1) // geometry.top_k
    made = replace(
        base,
        header=base.header.model_copy(update={"traffic_class": traffic_class}),
        counts=both,
        rows=rows,
        layer_ids=np.array(geometry.moe_layers, dtype=np.int32),
        experts=np.array(
            [per_layer(geometry.experts, layer) for layer in geometry.moe_layers], np.int32
        ),
        top_k=np.full(layers, geometry.top_k, dtype=np.int32),
        session=np.array(range(many) if session is None else session, dtype=np.int32),
        transcript_id=np.zeros((many, 32), dtype=np.uint8),
        fidelity=np.zeros(many, dtype=np.uint8),
        prompt_len=np.array([1] * many if prompt_len is None else prompt_len, dtype=np.int32),
        created=np.array([0] * many if created is None else created, dtype=np.int64),
    )
    census_format.check(made, "made census")
    return made
