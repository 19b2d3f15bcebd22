"""Traffic and maps of a lane's classes side by side, each class under its own map left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..formats.census import Census
from ..formats.evidence import Matrix
from ..formats.rowmap import Geometry, RowMap
from ..placement import hot_mask, map_mask
from ..placement.profiles import judge
from .layout import check_census, check_map
from .shares import by_session, left_out, share

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Class:
    """Traffic of a class by session, int64[S,L,E], the hot rows of its map, bool[L,E], and what
    its traffic leaves cold under its own map, left out by session.
    """

    counts: I64
    hot: Mask
    own: float

    @property
    def total(self) -> I64:
        return np.asarray(self.counts.sum(axis=0), dtype=np.int64)


def others(
    maps: Mapping[str, RowMap], censuses: Mapping[str, Census], geometry: Geometry
) -> dict[str, Class]:
    """Every other class with a census; without a map of its own it gets the census's.

    Raises FormatError naming the class whose layers or experts differ.
    """
    out = {}
    for name, census in sorted(censuses.items()):
        check_census(census, geometry, f"census of class {name}")
        counts = by_session(census)
        if name in maps:
            check_map(maps[name], geometry, f"map of class {name}")
            hot = map_mask(maps[name], counts.shape[2])
        else:
            hot = hot_mask(counts.sum(axis=0), geometry)
        out[name] = Class(counts, hot, share(left_out(counts, geometry), counts))
    return out


def matrix(classes: Mapping[str, Class], geometry: Geometry) -> Matrix | None:
    """Every map on every traffic with a left-out diagonal, and what the best blend would lose.

    Classes without a selection say nothing; fewer than two that have some make no matrix: None.
    """
    totals = {name: item.total for name, item in classes.items()}
    counted = [name for name, total in totals.items() if total.any()]
    if len(counted) < 2:
        return None
    return judge(
        {name: totals[name] for name in counted},
        geometry,
        own={name: classes[name].own for name in counted},
        maps={name: classes[name].hot for name in counted},
    )
