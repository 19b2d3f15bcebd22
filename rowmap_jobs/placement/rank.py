"""Which rows are hot: in every layer the experts chosen most often in decode.

With the same fixed cost for every row, the expected number of slow reads is least when the rows
of highest selection probability are fast, whatever the rows per step: 1 - (1 - p)^n grows with p.
Ties go to the lower id; experts that were never chosen come last, in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from ..formats.rowmap import Fingerprint, Geometry, RowMap, build, per_layer

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Counts = I64 | F64
"""Whole counts, or weights made from them (shrunk, blended); never negative."""


def checked(counts: npt.NDArray[Any], source: str = "counts") -> Counts:
    """Counts of any width as int64 or float64, [...,L,E]; int64 and float64 are not copied.

    Widened before any arithmetic: the negative of an unsigned count would rank the coldest first.
    Raises FormatError for what is no number, negative, infinite, NaN or beyond int64.
    """
    kind = counts.dtype.kind
    if counts.ndim < 2 or kind not in "iuf":
        found = f"{counts.dtype} with {counts.ndim} dimensions"
        raise FormatError(source, "array", found, "integers or floats [layers, experts]")
    if kind == "u" and counts.size and int(counts.max()) > np.iinfo(np.int64).max:
        raise FormatError(source, "array", int(counts.max()), "at most 2^63 - 1")
    wide: Counts
    if kind == "f":
        wide = counts.astype(np.float64, copy=False)
    else:
        wide = counts.astype(np.int64, copy=False)
    if wide.size:
        # NaN makes both extremes NaN, and no comparison with it holds.
        low, high = wide.min(), wide.max()
        if not (low >= 0 and high < np.inf):
            raise FormatError(source, "array", f"{low} to {high}", "finite counts of 0 or more")
    return wide


def against(counts: npt.NDArray[Any], experts: Sequence[int], source: str = "counts") -> Counts:
    """`checked` counts [...,L,E] that have a row for each layer and a column for each expert."""
    wide = checked(counts, source)
    layers, width = wide.shape[-2:]
    if layers != len(experts) or width < max(experts, default=1):
        expected = f"[{len(experts)} layers, at least {max(experts, default=1)} experts]"
        raise FormatError(source, "shape", list(wide.shape), expected)
    return wide


def ranking(counts: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Experts of each layer, most chosen first: [L,E] of any number type to indices [L,E]."""
    return np.argsort(-checked(counts), axis=-1, kind="stable")


def experts_of(geometry: Geometry) -> list[int]:
    """Experts of each layer in the order of moeLayers."""
    return [per_layer(geometry.experts, layer) for layer in geometry.moe_layers]


def hot_rows(geometry: Geometry) -> list[int]:
    """Hot rows of each layer in the order of moeLayers."""
    return [per_layer(geometry.hot_rows, layer) for layer in geometry.moe_layers]


def never_seen(counts: npt.NDArray[Any], geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Experts without a selection, by absolute layer id; layers without any are left out."""
    seen = against(counts, experts_of(geometry)) > 0
    out = {}
    for index, layer in enumerate(geometry.moe_layers):
        experts = per_layer(geometry.experts, layer)
        missing = np.flatnonzero(~seen[index, :experts])
        if missing.size:
            out[str(layer)] = tuple(missing.tolist())
    return out


def top_mask(counts: npt.NDArray[Any], experts: Sequence[int], hot: Sequence[int]) -> Mask:
    """True for the `hot[l]` most chosen of the first `experts[l]` columns, bool[...,L,E].

    Leading dimensions (resamples, sessions) are ranked one by one. Equal to taking the first rows
    of `ranking`, by a threshold: sorting values is several times faster than sorting indices.
    """
    wide = against(counts, experts)
    width = wide.shape[-1]
    columns = np.arange(width)
    real = columns[None, :] < np.array(experts)[:, None]
    # What is no expert must rank behind the experts that were never chosen.
    values = wide if real.all() else np.where(real, wide, -1)
    wanted = np.array(hot)[:, None]
    border = np.minimum(width - wanted, width - 1)
    shape = (*wide.shape[:-1], 1)
    threshold = np.take_along_axis(
        np.sort(values, axis=-1), np.broadcast_to(border, shape), axis=-1
    )
    above, level = values > threshold, values == threshold
    left = wanted - above.sum(axis=-1, keepdims=True)
    # Of those level with the last hot row, the lower ids get the rows that are left.
    mask = above | (level & (np.cumsum(level, axis=-1) <= left))
    return np.asarray(mask & real)


def hot_mask(counts: npt.NDArray[Any], geometry: Geometry) -> Mask:
    """True where a row is hot, bool[...,L,E], for a placement by `counts` [...,L,E].

    Columns beyond a layer's experts are False.
    """
    return top_mask(counts, experts_of(geometry), hot_rows(geometry))


def positional_mask(geometry: Geometry, width: int) -> Mask:
    """True for the rows 0..H-1 of each layer: what offloading by position keeps."""
    hot = np.array(hot_rows(geometry))
    return np.asarray(np.arange(width)[None, :] < hot[:, None])


def map_mask(rows: RowMap, width: int) -> Mask:
    """True for the hot rows of a map, bool[L,E] in the order of its moeLayers."""
    mask = np.zeros((len(rows.geometry.moe_layers), width), dtype=np.bool_)
    for index, layer in enumerate(rows.geometry.moe_layers):
        mask[index, list(rows.layers[str(layer)].hot)] = True
    return mask


def place(counts: npt.NDArray[Any], fingerprint: Fingerprint, geometry: Geometry) -> RowMap:
    """The row map of decode counts or weights [L,E]: hot hottest first, cold coldest first."""
    wide = against(counts, experts_of(geometry))
    layers: dict[int, tuple[list[int], list[int]]] = {}
    for index, layer in enumerate(geometry.moe_layers):
        experts = per_layer(geometry.experts, layer)
        order = ranking(wide[index : index + 1, :experts])[0].tolist()
        hot = per_layer(geometry.hot_rows, layer)
        layers[layer] = (order[:hot], order[hot:][::-1])
    return build(fingerprint, geometry, layers)
