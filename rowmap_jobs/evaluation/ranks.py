"""Two rankings of the same experts compared: sets on both sides of the border, and orders."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..formats.evidence import Ranks
from ..formats.rowmap import Geometry, RowMap
from ..placement import hot_mask, map_mask
from .layout import sizes
from .support import border_mask

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

PAIRS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Ranking:
    """Scores [L,E] (higher is hotter), the hot rows bool[L,E] and the rows at the border."""

    scores: I64
    hot: Mask
    border: Mask


def of_counts(total: I64, geometry: Geometry) -> Ranking:
    """The ranking of counts int64[L,E]."""
    return Ranking(total, hot_mask(total, geometry), border_mask(total, geometry))


def of_map(rows: RowMap, width: int) -> Ranking:
    """The ranking that a map lists, hottest first; a map says nothing of its border."""
    scores = np.zeros((len(rows.geometry.moe_layers), width), dtype=np.int64)
    for index, layer in enumerate(rows.geometry.moe_layers):
        order = [*rows.layers[str(layer)].hot, *reversed(rows.layers[str(layer)].cold)]
        scores[index, order] = np.arange(len(order), 0, -1)
    return Ranking(scores, map_mask(rows, width), np.zeros(scores.shape, dtype=np.bool_))


def average_ranks(values: npt.NDArray[np.generic]) -> F64:
    """Ranks from 1, ascending, of a vector; equals share the average of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2.0)[inverse], dtype=np.float64)


def spearman(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> float | None:
    """Correlation of the average ranks of two vectors; None where one of them is constant."""
    middle = (len(a) + 1) / 2.0
    x, y = average_ranks(a) - middle, average_ranks(b) - middle
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / scale if scale > 0 else None


def kendall(a: npt.NDArray[np.generic], b: npt.NDArray[np.generic]) -> float | None:
    """tau-b of two vectors, exact with ties; None where one of them is constant.

    (concordant - discordant) / sqrt((pairs - ties in a)(pairs - ties in b)), by all pairs.
    """
    n = len(a)
    # Places among the distinct values order like the values and are small.
    x = np.unique(a, return_inverse=True)[1].astype(np.int32)
    y = np.unique(b, return_inverse=True)[1].astype(np.int32)
    step = max(1, PAIRS_AT_A_TIME // max(n, 1))
    agreed = 0
    for start in range(0, n, step):
        rows = slice(start, start + step)
        agreed += int(np.vdot(_signs(x[rows], x), _signs(y[rows], y)))
    pairs = n * (n - 1) // 2
    untied = (pairs - _ties(x)) * (pairs - _ties(y))
    return agreed / 2 / float(np.sqrt(float(untied))) if untied else None


def _signs(some: npt.NDArray[np.int32], every: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    # Sums of at most 2^20 signs are exact in float32, and its dot product is fast.
    signs = np.sign(some[:, None] - every[None, :]).ravel()
    return np.asarray(signs, dtype=np.float32)


def _ties(places: npt.NDArray[np.int32]) -> int:
    counts = np.bincount(places).astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def compare(a: Ranking, b: Ranking, geometry: Geometry) -> Ranks:
    """Ranking `b` against `a`, averaged over layers; orders also over the rows at the border.

    A layer counts for a number only where it has one: hot rows for the overlap, cold rows for the
    churn, two different scores for an order.
    """
    found: dict[str, list[float]] = {}

    def add(name: str, value: float | None) -> None:
        found.setdefault(name, [])
        if value is not None:
            found[name].append(value)

    for layer, (experts, _) in enumerate(sizes(geometry)):
        hot, other = a.hot[layer, :experts], b.hot[layer, :experts]
        both, either = int((hot & other).sum()), int((hot | other).sum())
        add("overlap", both / int(hot.sum()) if hot.any() else None)
        add("jaccard", both / either if either else None)
        cold = int((~hot).sum())
        add("churn", int((~hot & other).sum()) / cold if cold else None)
        x, y = a.scores[layer, :experts], b.scores[layer, :experts]
        add("spearman", spearman(x, y))
        add("kendall", kendall(x, y))
        near = (a.border | b.border)[layer, :experts] | (hot != other)
        add("spearman_border", spearman(x[near], y[near]))
        add("kendall_border", kendall(x[near], y[near]))
    means = {name: float(np.mean(values)) if values else None for name, values in found.items()}
    for name, empty in (("overlap", 1.0), ("jaccard", 1.0), ("churn", 0.0)):
        means[name] = empty if means[name] is None else means[name]
    return Ranks.model_validate(means)
