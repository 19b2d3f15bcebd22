"""Small routing and the counts of it, made so that nothing of the readers is used."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from rowmap_jobs.exchange.base import Counts, Layout


def ids(rows: int, layers: int, experts: int, k: int, seed: int = 0) -> np.ndarray:
    """Ids int64[rows,layers,k], distinct in each row."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((rows, layers, experts)), axis=2)[:, :, :k]


def counted(array: np.ndarray, experts: int) -> np.ndarray:
    """Counts int64[L,E] one by one."""
    out = np.zeros((array.shape[1], experts), dtype=np.int64)
    for row in array.tolist():
        for layer, chosen in enumerate(row):
            for expert in chosen:
                out[layer, expert] += 1
    return out


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def same(one: Counts, other: Counts, *, but: Sequence[str] = ()) -> bool:
    """Equal in all but notes and the fields `but`."""
    for name in ("layout", "names", "per_sequence"):
        if name not in but and getattr(one, name) != getattr(other, name):
            return False
    for name in ("decode", "prefill", "rows", "steps", "touched"):
        if name in but:
            continue
        ours, theirs = getattr(one, name), getattr(other, name)
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and not np.array_equal(ours, theirs):
            return False
    return True


def summed(counts: Counts) -> Counts:
    """One sequence with the sums of all."""
    return replace(
        counts,
        decode=counts.decode.sum(axis=0, keepdims=True),
        prefill=None if counts.prefill is None else counts.prefill.sum(axis=0, keepdims=True),
        rows=None if counts.rows is None else counts.rows.sum(axis=0, keepdims=True),
        names=("all",),
        per_sequence=False,
    )


@st.composite
def routings(draw: st.DrawFn, sequences: int = 3, one_width: bool = True) -> Counts:
    """Counts of real rows: every sequence has a decode row, layers have gaps between their ids.

    Layers have the same number of experts, or each its own when `one_width` is False.
    """
    layers = tuple(sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=4))))
    k = draw(st.integers(1, 3))
    experts = draw(st.integers(k, 9))
    each = tuple(experts if one_width else draw(st.integers(k, 9)) for _ in layers)
    total = draw(st.integers(1, sequences))
    rows = np.array(
        [[draw(st.integers(0, 5)), draw(st.integers(1, 6))] for _ in range(total)], dtype=np.int64
    )
    seed = draw(st.integers(0, 10**6))
    tables = np.zeros((2, total, len(layers), max(each)), dtype=np.int64)
    for (t, phase), count in np.ndenumerate(rows):
        for index, size in enumerate(each):
            made = ids(int(count), 1, size, k, seed + 97 * t + 31 * phase + index)
            tables[phase, t, index, :size] = counted(made, size)[0]
    return Counts(
        layout=Layout(layers, each, (k,) * len(layers)),
        decode=tables[1],
        prefill=tables[0],
        rows=rows,
        names=tuple(f"request {t}" for t in range(total)),
        per_sequence=True,
    )
