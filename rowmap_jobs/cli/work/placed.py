"""Row maps of a census under a budget of hot rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...census.filters import totals
from ...census.merge import weighted, weights
from ...formats.base import FormatError
from ...formats.census import Census
from ...formats.rowmap import Fingerprint, RowMap, per_layer
from ...placement import budget as budgets
from ...placement import place
from ...placement.budget import Shape
from ...placement.profiles import shrink
from ...placement.vector import choose_vector

F64 = npt.NDArray[np.float64]
Counts = npt.NDArray[Any]


@dataclass(frozen=True)
class Budget:
    """How many rows are hot: one of these, and `quantum` with `hot`."""

    hot: int | None = None
    per_layer: Sequence[Any] | Mapping[str, Any] | None = None
    hot_bytes: int | None = None
    global_bytes: int | None = None
    global_rows: int | None = None
    quantum: int | None = None

    @property
    def is_global(self) -> bool:
        """One ranking over all layers."""
        return self.global_bytes is not None or self.global_rows is not None


def fitting(shape: Shape, census: Census) -> None:
    """Refuse a census of other layers, experts or top-k than the model's. Raises FormatError."""
    layers = census.layer_ids.tolist()
    if layers != list(shape.moe_layers):
        raise FormatError("census", "layers", layers, f"{list(shape.moe_layers)}, the model's")
    for index, layer in enumerate(layers):
        experts, top_k = int(census.experts[index]), int(census.top_k[index])
        wanted = per_layer(shape.experts, layer)
        if (experts, top_k) != (wanted, shape.top_k):
            found = f"{experts} experts, top-{top_k}"
            expected = f"{wanted} experts, top-{shape.top_k}, the model's"
            raise FormatError("census", f"layer {layer}", found, expected)


def totals_of(
    census: Census,
    phase: Literal["prefill", "decode", "all"] = "decode",
    half_life: float | None = None,
    now: int = 0,
) -> Counts:
    """Selections [L,E] that a placement ranks by; with a half-life (seconds) older ones count less.

    Raises FormatError for a census without any.
    """
    if half_life is not None:
        counts: Counts = weighted(census, weights(census, now, half_life))
    else:
        counts = totals(census, phase)
    if not counts.any():
        found = f"no selection in {phase}"
        raise FormatError("census", "counts", found, "rows that a placement can rank by")
    return counts


def prior_of(
    counts: Counts, pooled: Sequence[Census], shape: Shape, kappa: float | None = None
) -> F64 | None:
    """Pseudo-counts [L,E] that a small class gets from the pool: kappa tokens of its profile.

    Placing by counts + prior is the Dirichlet shrinkage of `placement.profiles.shrink`. None
    without a pool. Raises FormatError.
    """
    if not pooled:
        return None
    pool = np.sum([totals(census) for census in pooled], axis=0)
    experts = [per_layer(shape.experts, layer) for layer in shape.moe_layers]
    # Without counts of its own a class is what the pool says: its profile, for one token.
    profile = shrink(np.zeros_like(counts), pool, top_k=shape.top_k, experts=experts)
    tokens = np.array(experts if kappa is None else [kappa] * len(experts), dtype=np.float64)
    return np.asarray(tokens[:, None] * profile)


def rows(shape: Shape, budget: Budget, counts: Counts | None = None) -> list[int]:
    """Hot rows of each layer for all budgets but the global ones. Raises FormatError.

    `counts` [L,E] are needed with a quantum: layers of less skew get more rows.
    """
    if budget.per_layer is not None:
        return budgets.explicit(shape, budget.per_layer)
    if budget.hot_bytes is not None:
        return budgets.within_bytes(shape, budget.hot_bytes)
    even = budgets.uniform(shape, budget.hot or 0)
    if budget.quantum is None or counts is None:
        return even
    experts = [per_layer(shape.experts, layer) for layer in shape.moe_layers]
    return choose_vector(counts, sum(even), budget.quantum, experts)


@dataclass(frozen=True)
class Placed:
    """A map, and what to know of it."""

    rows: RowMap
    notes: tuple[str, ...]


def placed(
    counts: Counts,
    fingerprint: Fingerprint,
    shape: Shape,
    budget: Budget,
    prior: F64 | None = None,
    order: bool = False,
) -> Placed:
    """The map of counts [L,E] plus `prior` under a budget; `order` adds one over all layers.

    Raises FormatError.
    """
    wanted = counts if prior is None else counts + prior
    if not budget.is_global:
        geometry = budgets.with_rows(shape, rows(shape, budget, wanted))
        if order:
            made = budgets.with_order(_comparable(wanted, shape), fingerprint, geometry)
        else:
            made = place(wanted, fingerprint, geometry)
        return Placed(made, budgets.notes(geometry))
    made, fit = budgets.across(
        _comparable(wanted, shape),
        fingerprint,
        shape,
        slots=budget.global_rows,
        budget=budget.global_bytes,
    )
    return Placed(made, (*_used(fit, budget), *budgets.notes(made.geometry)))


def _comparable(counts: Counts, shape: Shape) -> F64:
    """Chances [L,E] that a token chooses an expert: layers compare by them."""
    return budgets.probabilities(counts, (counts.sum(axis=1) / shape.top_k).tolist())


def _used(fit: budgets.Fit, budget: Budget) -> tuple[str, ...]:
    unit = "bytes" if budget.global_bytes is not None else "rows"
    whole = budget.global_bytes if budget.global_bytes is not None else budget.global_rows
    return (f"{fit.used:,} of {whole:,} {unit} used.",)
