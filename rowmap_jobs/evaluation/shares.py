"""How good a map is: shares of decode selections that it leaves in slow memory.

The headline is leave-one-session-out: each session is judged under the map of all the others.
Turns of a session share prompt and style, so leaving out single transcripts would flatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..formats.census import DECODE, Census
from ..formats.report import LayerReport
from ..formats.rowmap import Geometry, RowMap, per_layer
from ..formats.run import ColdShares
from ..placement import hot_mask, map_mask, positional_mask, top_mask
from .layout import check_census, sizes
from .resample import spread
from .support import border

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

AT_A_TIME = 1 << 20
"""Cells of one layer ranked at a time: memory stays small however many sessions there are."""


@dataclass(frozen=True)
class Evaluation:
    """Shares from 0 to 1. `random` is what a map drawn by lot leaves cold: 1 - H/E, by layers."""

    decode_tokens: int
    sessions: int
    own: float
    in_sample: float
    positional: float
    random: float
    interval: tuple[float, float]
    others: dict[str, float] = field(default_factory=dict)
    layers: tuple[LayerReport, ...] = ()

    @property
    def headroom(self) -> float | None:
        """(random - own) / (random - in sample); None where no map can gain anything."""
        gain = self.random - self.in_sample
        return (self.random - self.own) / gain if gain > 1e-9 else None

    def shares(self) -> ColdShares:
        """The part of it that a verdict carries."""
        return ColdShares(
            own=self.own,
            in_sample=self.in_sample,
            positional=self.positional,
            others=dict(self.others),
        )


def by_session(census: Census) -> I64:
    """Decode counts summed by session, int64[S,L,E], sessions in ascending order of their index."""
    sessions, index = np.unique(census.session, return_inverse=True)
    out = np.zeros((len(sessions), *census.counts.shape[2:]), dtype=np.int64)
    for transcript, session in enumerate(index):
        out[session] += census.counts[transcript, DECODE]
    return out


def left_out(counts: I64, geometry: Geometry, prior: F64 | None = None) -> I64:
    """Cold selections int64[S,L] of each session under the map of all other sessions.

    `counts` int64[S,L,E]; `prior` float[L,E] is added to the counts of every map (pseudo-counts
    of a small class that is shrunk to others). Ties go to the lower id, as in placement.
    """
    cold = np.zeros(counts.shape[:2], dtype=np.int64)
    step = max(1, AT_A_TIME // counts.shape[2])
    for layer, (experts, hot) in enumerate(sizes(geometry)):
        extra = 0 if prior is None else prior[layer, :experts]
        whole = counts[:, layer, :experts].sum(axis=0)
        for start in range(0, len(counts), step):
            own = counts[start : start + step, layer, :experts]
            rest = whole - own + extra
            mask = top_mask(rest[:, None], [experts], [hot])[:, 0]
            cold[start : start + step, layer] = np.where(mask, 0, own).sum(axis=1)
    return cold


def best_alone(counts: I64, geometry: Geometry) -> I64:
    """Cold selections int64[S,L] of each session under the best map for that session alone.

    No map of as many hot rows leaves less: the oracle.
    """
    cold = np.zeros(counts.shape[:2], dtype=np.int64)
    for layer, (experts, hot) in enumerate(sizes(geometry)):
        if hot < experts:
            ordered = np.partition(counts[:, layer, :experts], experts - hot - 1, axis=1)
            cold[:, layer] = ordered[:, : experts - hot].sum(axis=1)
    return cold


def cold_under(counts: I64, hot: Mask) -> I64:
    """Cold selections int64[S,L] of counts int64[S,L,E] under one map, bool[L,E]."""
    return np.asarray(np.einsum("sle,le->sl", counts, (~hot).astype(np.int64)), dtype=np.int64)


def share(cold: I64, counts: I64) -> float:
    """Cold selections over all selections, both of any shape; 0 where there are none."""
    return float(cold.sum()) / max(int(counts.sum()), 1)


def evaluate(
    census: Census,
    geometry: Geometry,
    others: Mapping[str, RowMap],
    seed: int = 0,
    prior: F64 | None = None,
) -> Evaluation:
    """Judge the map that the census gives for `geometry`; `others` are maps of other classes.

    Maps of another layout (layers, experts) are left out by the caller. `prior` float[L,E] are
    the pseudo-counts that the map was placed with, where it was. Raises FormatError when census
    and geometry differ in layers, experts or top-k.
    """
    check_census(census, geometry)
    counts = by_session(census)
    total = counts.sum(axis=0)
    width = total.shape[1]
    cold = left_out(counts, geometry, prior)
    hot = hot_mask(total if prior is None else total + prior, geometry)
    masks = {name: map_mask(rows, width) for name, rows in sorted(others.items())}
    by_position = positional_mask(geometry, width)
    return Evaluation(
        decode_tokens=int(census.rows[:, DECODE].sum()),
        sessions=len(counts),
        own=share(cold, total),
        in_sample=share(np.where(hot, 0, total), total),
        positional=share(np.where(by_position, 0, total), total),
        random=by_lot(total, geometry),
        interval=interval(cold.sum(axis=1), counts.sum(axis=(1, 2)), seed),
        others={name: share(np.where(mask, 0, total), total) for name, mask in masks.items()},
        layers=_layers(total, cold.sum(axis=0), geometry, by_position, masks),
    )


def _layers(
    total: I64, cold: I64, geometry: Geometry, by_position: Mask, masks: Mapping[str, Mask]
) -> tuple[LayerReport, ...]:
    own = cold / np.maximum(total.sum(axis=1), 1)
    positional = _by_layer(total, by_position)
    others = {name: _by_layer(total, mask) for name, mask in masks.items()}
    seen = np.where(total > 0, 1, 0).sum(axis=1)
    undecided = border(total, geometry)
    return tuple(
        LayerReport(
            layer=layer,
            own=float(own[i]),
            positional=float(positional[i]),
            others={name: float(shares[i]) for name, shares in others.items()},
            never_seen=per_layer(geometry.experts, layer) - int(seen[i]),
            undecided=undecided[i],
        )
        for i, layer in enumerate(geometry.moe_layers)
    )


def _by_layer(total: I64, hot: Mask) -> F64:
    """Cold share of each layer."""
    return np.asarray(np.where(hot, 0, total).sum(axis=1) / np.maximum(total.sum(axis=1), 1))


def by_lot(total: I64, geometry: Geometry) -> float:
    """Share that a map drawn by lot leaves cold: 1 - H/E, weighted by each layer's selections."""
    shares = np.array([1.0 - hot / experts for experts, hot in sizes(geometry)])
    weight = total.sum(axis=1)
    return float((shares * weight).sum() / max(int(weight.sum()), 1))


def interval(cold: I64, all_of: I64, seed: int) -> tuple[float, float]:
    """95% interval of sum(cold) / sum(all_of) over resampled sessions, int64[S] each.

    One session says nothing of the spread between sessions: then (0, 1).
    """
    return spread(cold, all_of, seed, unknown=(0.0, 1.0))
