"""Which rows are hot: in every layer the experts chosen most often in decode.

With the same fixed cost for every row, the expected number of slow reads is least when the rows
of highest selection probability are fast, whatever the rows per step: 1 - (1 - p)^n grows with p.
Ties go to the lower id; experts that were never chosen come last, in the order of their ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .formats.rowmap import Fingerprint, Geometry, RowMap, build, per_layer

I64 = npt.NDArray[np.int64]


def ranking(counts: I64) -> npt.NDArray[np.intp]:
    """Experts of each layer, most chosen first: int64[L,E] to indices [L,E]."""
    return np.argsort(-counts, axis=1, kind="stable")


def hot_rows(geometry: Geometry) -> list[int]:
    """Hot rows of each layer in the order of moeLayers."""
    return [per_layer(geometry.hot_rows, layer) for layer in geometry.moe_layers]


def hot_mask(counts: I64, geometry: Geometry) -> npt.NDArray[np.bool_]:
    """True where a row is hot, bool[L,E], for a placement by `counts` int64[L,E].

    Columns beyond a layer's experts are False.
    """
    layers, width = counts.shape
    experts = np.array([per_layer(geometry.experts, layer) for layer in geometry.moe_layers])
    # What is no expert must rank behind the experts that were never chosen.
    real = np.arange(width)[None, :] < experts[:, None]
    order = ranking(np.where(real, counts, -1))
    hot = np.arange(width)[None, :] < np.array(hot_rows(geometry))[:, None]
    mask = np.zeros((layers, width), dtype=np.bool_)
    np.put_along_axis(mask, order, hot, axis=1)
    return mask & real


def positional_mask(geometry: Geometry, width: int) -> npt.NDArray[np.bool_]:
    """True for the rows 0..H-1 of each layer: what offloading by position keeps."""
    hot = np.array(hot_rows(geometry))
    return np.asarray(np.arange(width)[None, :] < hot[:, None])


def map_mask(rows: RowMap, width: int) -> npt.NDArray[np.bool_]:
    """True for the hot rows of a map, bool[L,E] in the order of its moeLayers."""
    mask = np.zeros((len(rows.geometry.moe_layers), width), dtype=np.bool_)
    for index, layer in enumerate(rows.geometry.moe_layers):
        mask[index, list(rows.layers[str(layer)].hot)] = True
    return mask


def place(counts: I64, fingerprint: Fingerprint, geometry: Geometry) -> RowMap:
    """The row map of decode counts int64[L,E]: hot hottest first, cold coldest first."""
    layers: dict[int, tuple[list[int], list[int]]] = {}
    for index, layer in enumerate(geometry.moe_layers):
        experts = per_layer(geometry.experts, layer)
        order = ranking(counts[index : index + 1, :experts])[0].tolist()
        hot = per_layer(geometry.hot_rows, layer)
        layers[layer] = (order[:hot], order[hot:][::-1])
    return build(fingerprint, geometry, layers)
