"""How good a map is: shares of decode selections that it leaves in slow memory.

The headline is leave-one-session-out: each session is judged under the map of all the others.
Turns of a session share prompt and style, so leaving out single transcripts would flatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .formats.census import DECODE, Census
from .formats.report import LayerReport
from .formats.rowmap import Geometry, RowMap, per_layer
from .formats.run import ColdShares
from .placement import hot_mask, hot_rows, map_mask, positional_mask

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

BOOTSTRAPS = 1000
BORDER_Z = 2.0


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
    np.add.at(out, index, census.counts[:, DECODE])
    return out


def left_out(counts: I64, geometry: Geometry) -> I64:
    """Cold selections int64[S,L] of each session under the map of all other sessions."""
    total = counts.sum(axis=0)
    cold = np.zeros(counts.shape[:2], dtype=np.int64)
    for index, own in enumerate(counts):
        hot = hot_mask(total - own, geometry)
        cold[index] = np.where(hot, 0, own).sum(axis=1)
    return cold


def evaluate(
    census: Census, geometry: Geometry, others: Mapping[str, RowMap], seed: int = 0
) -> Evaluation:
    """Judge the map that the census gives for `geometry`; `others` are maps of other classes.

    Maps of another layout (layers, experts) are left out by the caller.
    """
    counts = by_session(census)
    total = counts.sum(axis=0)
    width = total.shape[1]
    cold = left_out(counts, geometry)
    masks = {name: map_mask(rows, width) for name, rows in sorted(others.items())}
    in_layers = np.maximum(total.sum(axis=1), 1)
    own = cold.sum(axis=0) / in_layers
    positional = _share(total, positional_mask(geometry, width))
    other = {name: _share(total, mask) for name, mask in masks.items()}
    seen = np.where(total > 0, 1, 0).sum(axis=1)
    undecided = border(total, geometry)
    layers = tuple(
        LayerReport(
            layer=layer,
            own=float(own[i]),
            positional=float(positional[i]),
            others={name: float(share[i]) for name, share in other.items()},
            never_seen=per_layer(geometry.experts, layer) - int(seen[i]),
            undecided=undecided[i],
        )
        for i, layer in enumerate(geometry.moe_layers)
    )
    return Evaluation(
        decode_tokens=int(census.rows[:, DECODE].sum()),
        sessions=len(counts),
        own=_whole(cold.sum(axis=0), total),
        in_sample=_whole(np.where(hot_mask(total, geometry), 0, total).sum(axis=1), total),
        positional=_whole(np.where(positional_mask(geometry, width), 0, total).sum(axis=1), total),
        random=_random(total, geometry),
        interval=interval(cold.sum(axis=1), counts.sum(axis=(1, 2)), seed),
        others={
            name: _whole(np.where(mask, 0, total).sum(axis=1), total)
            for name, mask in masks.items()
        },
        layers=layers,
    )


def _share(total: I64, hot: npt.NDArray[np.bool_]) -> F64:
    """Cold share of each layer."""
    return np.asarray(np.where(hot, 0, total).sum(axis=1) / np.maximum(total.sum(axis=1), 1))


def _whole(cold: I64, total: I64) -> float:
    return float(cold.sum()) / max(int(total.sum()), 1)


def _random(total: I64, geometry: Geometry) -> float:
    experts = np.array([per_layer(geometry.experts, layer) for layer in geometry.moe_layers])
    shares = 1.0 - np.array(hot_rows(geometry)) / experts
    weight = total.sum(axis=1)
    return float((shares * weight).sum() / max(int(weight.sum()), 1))


def interval(cold: I64, all_of: I64, seed: int) -> tuple[float, float]:
    """95% interval of sum(cold) / sum(all_of) over resampled sessions (percentile bootstrap).

    int64[S] each. One session says nothing of the spread between sessions: then (0, 1).
    """
    sessions = len(cold)
    if sessions < 2 or not all_of.sum():
        return (0.0, 1.0)
    # Multinomial weights are how often each session is drawn in a resample.
    draws = np.random.default_rng(seed).multinomial(
        sessions, np.full(sessions, 1.0 / sessions), size=BOOTSTRAPS
    )
    shares = (draws @ cold) / np.maximum(draws @ all_of, 1)
    low, high = np.quantile(shares, (0.025, 0.975))
    return (float(low), float(high))


def border(total: I64, geometry: Geometry) -> list[int]:
    """Rows of each layer whose side of the border is within two standard errors.

    For a hot row of count c against the first cold row's count d, and the other way round:
    |c - d| / sqrt(c + d) < 2, counts being nearly Poisson.
    """
    out = []
    for index, (layer, hot) in enumerate(zip(geometry.moe_layers, hot_rows(geometry), strict=True)):
        experts = per_layer(geometry.experts, layer)
        counts = np.sort(total[index, :experts])[::-1].astype(np.float64)
        if not 0 < hot < experts:
            out.append(0)
            continue
        against = np.where(np.arange(experts) < hot, counts[hot], counts[hot - 1])
        spread = np.sqrt(np.maximum(counts + against, 1.0))
        out.append(int((np.abs(counts - against) < BORDER_Z * spread).sum()))
    return out
