"""Small worlds for the placement's properties: counts with many ties, layers of different width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from rowmap_jobs.formats.rowmap import Geometry
from tests.formats.samples import geometry


@dataclass(frozen=True)
class Case:
    counts: npt.NDArray[Any]
    experts: list[int]
    hot: list[int]

    @property
    def geometry(self) -> Geometry:
        layers = tuple(3 * index for index in range(len(self.experts)))

        def each(values: list[int]) -> dict[str, int]:
            return {str(layer): value for layer, value in zip(layers, values, strict=True)}

        return geometry(
            experts=each(self.experts),
            hot_rows=each(self.hot),
            moe_layers=layers,
            top_k=1,
            row_bytes=10,
        )


@st.composite
def cases(draw: st.DrawFn, layers: int = 3, width: int = 6, most: int = 5) -> Case:
    """Counts int64 or float64 [L,E], zero beyond a layer's experts."""
    number = draw(st.integers(1, layers))
    experts = draw(st.lists(st.integers(1, width), min_size=number, max_size=number))
    hot = [draw(st.integers(0, e)) for e in experts]
    counts = np.zeros((number, max(experts)), dtype=np.int64)
    for index, e in enumerate(experts):
        counts[index, :e] = draw(st.lists(st.integers(0, most), min_size=e, max_size=e))
    if draw(st.booleans()):
        return Case(counts / 4, experts, hot)
    return Case(counts, experts, hot)
