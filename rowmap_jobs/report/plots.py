"""What a page draws beyond report.json: the decode counts and the hot rows of two maps. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from ..formats.rowmap import Geometry, RowMap, per_layer
from ..placement import map_mask

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Plots:
    """Arrays in the order of geometry.moeLayers; columns beyond a layer's experts are 0 and False.

    Too large for report.json: they come from the census and the maps.
    """

    counts: I64
    """int64[L,E]: decode selections."""
    hot: Mask
    """bool[L,E]: hot rows of the new map."""
    active: Mask | None = None
    """bool[L,E]: hot rows of the active map."""

    @classmethod
    def of(cls, counts: I64, rows: RowMap, active: RowMap | None = None) -> Self:
        """Plots of decode counts int64[L,E] and maps; both maps speak of the same layers."""
        width = widest(rows.geometry)
        new, old = map_mask(rows, width), None if active is None else map_mask(active, width)
        return cls(counts=counts[:, :width], hot=new, active=old)

    def fits(self, geometry: Geometry) -> None:
        """Raises ValueError unless the arrays have the layers and experts of `geometry`."""
        shape = (len(geometry.moe_layers), widest(geometry))
        for name in ("counts", "hot", "active"):
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise ValueError(f"plots.{name}: found shape {array.shape}, expected {shape}")

    def moved(self) -> I64 | None:
        """Rows of each layer that the new map makes hot, int64[L]; as many become cold where both
        maps have the same number of hot rows. None without an active map.
        """
        if self.active is None:
            return None
        return np.asarray((self.hot & ~self.active).sum(axis=1), dtype=np.int64)

    def active_share(self) -> F64 | None:
        """Cold share of each layer under the active map, float64[L]; None without one."""
        if self.active is None:
            return None
        cold = np.where(self.active, 0, self.counts).sum(axis=1)
        return np.asarray(cold / np.maximum(self.counts.sum(axis=1), 1), dtype=np.float64)


def widest(geometry: Geometry) -> int:
    """Experts of the layer that has the most."""
    return max(per_layer(geometry.experts, layer) for layer in geometry.moe_layers)


def experts_of(geometry: Geometry) -> I64:
    """Experts of each MoE layer, int64[L]."""
    layers = geometry.moe_layers
    return np.array([per_layer(geometry.experts, layer) for layer in layers], dtype=np.int64)


def hot_of(geometry: Geometry) -> I64:
    """Hot rows of each MoE layer, int64[L]."""
    layers = geometry.moe_layers
    return np.array([per_layer(geometry.hot_rows, layer) for layer in layers], dtype=np.int64)
