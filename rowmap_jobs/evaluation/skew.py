"""How unequal the experts of a layer are used, and how unequal lots alone would make them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..formats.evidence import Skew
from ..formats.rowmap import Geometry
from .layout import sizes

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

NULL_DRAWS = 200


def gini(counts: I64) -> F64:
    """Gini index over the last axis, [..., E] to [...]: 0 is equal, 1 - 1/E is one expert alone.

    sum((2i - E - 1) x_i) / (E sum(x)) over ascending x, i from 1; 0 where nothing was counted.
    """
    ordered = np.sort(counts, axis=-1).astype(np.float64)
    experts = ordered.shape[-1]
    weights = 2.0 * np.arange(1, experts + 1) - experts - 1
    return np.asarray((ordered @ weights) / (experts * np.maximum(ordered.sum(axis=-1), 1.0)))


def gini_by_lot(total: I64, geometry: Geometry, seed: int) -> float:
    """95th percentile of the mean Gini index over layers when lots choose the experts.

    As many selections a layer as in `total` int64[L,E], multinomial with equal chances.
    """
    rng = np.random.default_rng(seed)
    draws = np.zeros(NULL_DRAWS)
    for layer, (experts, _) in enumerate(sizes(geometry)):
        chances = np.full(experts, 1.0 / experts)
        draws += gini(rng.multinomial(int(total[layer].sum()), chances, size=NULL_DRAWS))
    return float(np.quantile(draws / len(total), 0.95))


def entropy(counts: I64) -> float:
    """Entropy of the shares of int64[E] by log(E): 1 is flat, 0 one expert; 1 without counts."""
    whole, experts = int(counts.sum()), len(counts)
    if not whole or experts < 2:
        return 1.0
    shares = counts[counts > 0] / whole
    return float(-(shares * np.log(shares)).sum() / np.log(experts))


def top_share(counts: I64, percent: int) -> float:
    """Share of the selections that the hottest `percent` of the experts take, rounded up."""
    few = -(-len(counts) * percent // 100)
    return float(np.sort(counts)[::-1][:few].sum() / max(int(counts.sum()), 1))


def skew(total: I64, geometry: Geometry, seed: int = 0) -> Skew:
    """Averages over the layers of int64[L,E]."""
    layers = [total[i, :experts] for i, (experts, _) in enumerate(sizes(geometry))]

    def mean(values: list[float]) -> float:
        return float(np.mean(values))

    return Skew(
        gini=mean([float(gini(counts)) for counts in layers]),
        gini_uniform=gini_by_lot(total, geometry, seed),
        entropy=mean([entropy(counts) for counts in layers]),
        top1=mean([top_share(counts, 1) for counts in layers]),
        top5=mean([top_share(counts, 5) for counts in layers]),
        top10=mean([top_share(counts, 10) for counts in layers]),
        max_by_mean=mean([_max_by_mean(counts) for counts in layers]),
    )


def _max_by_mean(counts: I64) -> float:
    whole = int(counts.sum())
    return float(counts.max()) * len(counts) / whole if whole else 1.0
