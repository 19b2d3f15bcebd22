"""How many rows of each layer are hot: a number, a list, bytes, or one budget for all layers.

Expected slow bytes of a step are J = sum over cold rows of s (1 - (1 - p)^n): p the probability
that a token chooses the row, s its bytes, n the rows of the step. A hot row saves 1 - (1 - p)^n
for each of its bytes, which grows with p whatever n and s are: under one budget of bytes rows are
taken by p alone, and sizes matter only for the last slots, where what is left is less than a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from ..formats.base import FormatError, refusal
from ..formats.rowmap import Fingerprint, Geometry, PerLayer, RowMap, build, per_layer
from ..formats.status import ModelGeometry
from ..geometry import uniform_rows
from .rank import F64, I64, Counts, against, checked, ranking

Shape = Geometry | ModelGeometry
"""What has moeLayers, experts, topK and rowBytes: a map's geometry or a model's."""

SOURCE = "hot rows"


def uniform(model: Shape, rows: int) -> list[int]:
    """`rows` hot rows in every layer; a layer with fewer experts is hot whole.

    Raises FormatError for a negative number and for more rows than any layer has experts.
    """
    experts = _values(model, model.experts)
    if not 0 <= rows <= max(experts):
        raise FormatError(SOURCE, "rows per layer", rows, f"0 to {max(experts)}, the experts")
    return [min(rows, e) for e in experts]


def within_bytes(model: Shape, budget: int) -> list[int]:
    """The largest uniform number of rows whose bytes (scales included) fit into `budget`."""
    if budget < 0:
        raise FormatError(SOURCE, "bytes", budget, "0 or more")
    _values(model, model.experts)
    _values(model, model.row_bytes)
    return _values(model, uniform_rows(model, budget))


def explicit(model: Shape, rows: Sequence[int] | Mapping[Any, int]) -> list[int]:
    """Hot rows a layer as the user wrote them: a list in layer order or {absolute layer: rows}.

    Returns int[L] in the order of moeLayers. Raises FormatError for another number of layers, a
    layer that the model does not have or lacks here, and rows outside 0 to the layer's experts.
    """
    layers, each = model.moe_layers, _values(model, model.experts)
    if isinstance(rows, Mapping):
        given = {str(layer): value for layer, value in rows.items()}
        wanted = {str(layer) for layer in layers}
        if set(given) != wanted or len(given) != len(rows):
            odd = sorted(set(given) ^ wanted) or "a layer twice"
            raise FormatError(SOURCE, "layers", odd, f"exactly the layers {list(layers)}")
        values = [given[str(layer)] for layer in layers]
    else:
        values = list(rows)
        if len(values) != len(layers):
            raise FormatError(
                SOURCE, "list", f"{len(values)} numbers", f"{len(layers)}, one a layer"
            )
    for layer, value, experts in zip(layers, values, each, strict=True):
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not 0 <= value <= experts:
            raise FormatError(SOURCE, f"layer {layer}", value, f"0 to {experts} (its experts)")
    return [int(value) for value in values]


def with_rows(model: Shape, rows: Sequence[int]) -> Geometry:
    """The geometry of maps with these hot rows a layer; one number where all are equal.

    Raises FormatError, also for a model whose numbers do not fit together.
    """
    values = explicit(model, rows)
    value: PerLayer = values[0]
    if len(set(values)) > 1:
        value = {str(layer): n for layer, n in zip(model.moe_layers, values, strict=True)}
    try:
        return Geometry(
            experts=model.experts,
            top_k=model.top_k,
            hot_rows=value,
            moe_layers=model.moe_layers,
            whole_layers=model.whole_layers,
            row_bytes=model.row_bytes,
        )
    except ValidationError as error:
        raise refusal("geometry", error) from None


def notes(geometry: Geometry) -> tuple[str, ...]:
    """What is odd about the budgets: nothing to choose, or less than a token needs."""
    layers = geometry.moe_layers
    hot, experts = _values(geometry, geometry.hot_rows), _values(geometry, geometry.experts)
    whole = [layer for layer, h, e in zip(layers, hot, experts, strict=True) if h == e]
    few = [layer for layer, h in zip(layers, hot, strict=True) if h < geometry.top_k]
    out = []
    if len(whole) == len(layers):
        out.append("Every row is hot: there is nothing to choose, and nothing is read slowly.")
    elif whole:
        out.append(f"All rows are hot in {_named(whole)}.")
    if few:
        out.append(
            f"Fewer hot rows than the {geometry.top_k} experts of a token in {_named(few)}: every "
            "token reads slow memory there."
        )
    return tuple(out)


def tier_bytes(geometry: Geometry) -> tuple[int, int]:
    """Bytes of the hot and of the cold rows of all layers, scales included."""
    sizes = _values(geometry, geometry.row_bytes)
    hot, experts = _values(geometry, geometry.hot_rows), _values(geometry, geometry.experts)
    fast = sum(h * s for h, s in zip(hot, sizes, strict=True))
    return fast, sum(e * s for e, s in zip(experts, sizes, strict=True)) - fast


@dataclass(frozen=True)
class Fit:
    """Hot rows under one budget for all layers."""

    rows: tuple[int, ...]
    """Hot rows of each layer, in layer order: the front of the layer's ranking."""
    used: int
    """Of the budget, in its unit."""
    shortfall: float
    """At most so much more of sum(s x p) could be fast by another choice; less than the s x p of
    the first row that did not fit, and 0 when all sizes are equal."""


def fit(
    weights: npt.NDArray[Any],
    experts: Sequence[int],
    sizes: Sequence[int],
    budget: int,
    minimum: int = 0,
    maximum: int | None = None,
) -> Fit:
    """Rows by descending weight p [L,E] over all layers while their sizes fit into `budget`.

    `minimum` and `maximum` bound the hot rows of every layer (a smaller layer: its experts). When a
    row does not fit, the next colder rows of smaller layers that do fit take what is left. With U
    the budget's optimum if rows could be cut (the taken rows and a part of the first that did not
    fit), no choice is better than U, so the shortfall against the best choice is at most
    U - taken. More budget is never colder: where two budgets first differ, the larger one takes a
    row that fills the rest at a weight no later row has.
    Raises FormatError when the minimum does not fit or exceeds the maximum.
    """
    wide = against(weights, experts, "weights")
    if len(sizes) != len(experts) or min(sizes) < 1:
        raise FormatError(SOURCE, "row bytes", list(sizes), f"{len(experts)} numbers of 1 or more")
    least = [min(minimum, e) for e in experts]
    most = [e if maximum is None else min(maximum, e) for e in experts]
    if minimum < 0 or any(low > high for low, high in zip(least, most, strict=True)):
        expected = f"0 to the maximum of {maximum}" if maximum is not None else "0 or more"
        raise FormatError(SOURCE, "minimum rows per layer", minimum, expected)
    used = sum(n * s for n, s in zip(least, sizes, strict=True))
    if used > budget:
        raise FormatError(SOURCE, "budget", budget, f"at least {used}, {minimum} rows per layer")
    taken, seen = [0] * len(experts), [0] * len(experts)
    full: set[int] = set()
    unit = gcd(*sizes)
    missed = 0.0
    for layer, weight in _descending(wide, experts):
        seen[layer] += 1
        if seen[layer] <= least[layer]:
            taken[layer] += 1
        elif seen[layer] > most[layer] or layer in full:
            continue
        elif used + sizes[layer] <= budget:
            used += sizes[layer]
            taken[layer] += 1
            missed -= weight * sizes[layer] if full else 0.0
        else:
            if not full:
                # All sizes are multiples of the unit: nobody can use a smaller rest.
                missed = weight * ((budget - used) // unit * unit)
            full.add(layer)
    return Fit(tuple(taken), used, max(missed, 0.0))


def across(
    weights: npt.NDArray[Any],
    fingerprint: Fingerprint,
    model: Shape,
    *,
    slots: int | None = None,
    budget: int | None = None,
    minimum: int = 0,
    maximum: int | None = None,
) -> tuple[RowMap, Fit]:
    """The map of one ranking over all layers, for engines whose rows share a budget (GGUF).

    Either `slots` rows in all (N per layer means N x layers slots) or `budget` bytes, not both.
    `weights` [L,E] are comparable between layers: see `probabilities`. The map has an `order`.
    Raises FormatError.
    """
    experts, sizes = _values(model, model.experts), _values(model, model.row_bytes)
    if (slots is None) == (budget is None):
        found = "neither" if slots is None else "both"
        raise FormatError(SOURCE, "budget", found, "either slots or bytes")
    limit, cost = (slots, [1] * len(experts)) if slots is not None else (budget, sizes)
    found_fit = fit(weights, experts, cost, int(limit or 0), minimum, maximum)
    return with_order(weights, fingerprint, with_rows(model, found_fit.rows)), found_fit


def with_order(weights: npt.NDArray[Any], fingerprint: Fingerprint, geometry: Geometry) -> RowMap:
    """The map of `weights` [L,E] with RowMap.order: hot rows, then cold rows, each hottest first.

    Ties go to the lower layer, then to the lower id.
    """
    wide = against(weights, _values(geometry, geometry.experts), "weights")
    layers: dict[int, tuple[list[int], list[int]]] = {}
    ranked: list[list[int]] = []
    for index, layer in enumerate(geometry.moe_layers):
        experts, hot = per_layer(geometry.experts, layer), per_layer(geometry.hot_rows, layer)
        order = ranking(wide[index : index + 1, :experts])[0].tolist()
        ranked.append(order)
        layers[layer] = (order[:hot], order[hot:][::-1])
    fast: list[tuple[int, int]] = []
    slow: list[tuple[int, int]] = []
    seen = [0] * len(ranked)
    for index, _ in _descending(wide, [len(order) for order in ranked]):
        layer = geometry.moe_layers[index]
        part = fast if seen[index] < per_layer(geometry.hot_rows, layer) else slow
        part.append((layer, ranked[index][seen[index]]))
        seen[index] += 1
    return build(fingerprint, geometry, layers, fast + slow)


def probabilities(counts: npt.NDArray[Any], rows: int | Sequence[int] | I64) -> F64:
    """P(expert in the top-k of one token), float64[L,E], from counts and rows (of each layer).

    Division rounds correctly: equal ratios stay equal, and different ones of fewer than 2^26 rows
    stay different. A layer without rows has zeros. Raises FormatError.
    """
    wide, each = checked(counts), np.asarray(rows, dtype=np.float64)
    if each.shape not in ((), (len(wide),)) or not (each >= 0).all():
        raise FormatError("rows", "array", each.tolist(), f"0 or more, one or {len(wide)} numbers")
    divisor = np.broadcast_to(np.maximum(each, 1.0), len(wide))
    return np.asarray(wide / divisor[:, None], dtype=np.float64)


def _descending(weights: Counts, experts: Sequence[int]) -> list[tuple[int, float]]:
    """(layer index, weight) of every row, hottest first; ties by layer. Ids follow a ranking."""
    real = np.arange(weights.shape[1])[None, :] < np.asarray(experts)[:, None]
    values, owner = weights[real], np.nonzero(real)[0]
    order = np.argsort(-values, kind="stable")
    return list(zip(owner[order].tolist(), values[order].tolist(), strict=True))


def _values(model: Shape, value: PerLayer) -> list[int]:
    """One number a layer. Raises FormatError for a model without layers or a layer left out."""
    layers = model.moe_layers
    if not layers or (isinstance(value, dict) and not {str(n) for n in layers} <= set(value)):
        found = f"{sorted(value) if isinstance(value, dict) else list(layers)}"
        raise FormatError("geometry", "layers", found, f"a number for each of {list(layers)}")
    return [per_layer(value, layer) for layer in model.moe_layers]


def _named(layers: list[int]) -> str:
    shown = ", ".join(str(layer) for layer in layers[:8])
    more = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {shown}{more}"
