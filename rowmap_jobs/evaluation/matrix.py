"""Every class's map on every class's traffic, and whether one map for all would do.

A blend of classes looks well on its own mixture: one was seen to leave 2.1% cold there and to cost
the lane's class 10 to 17% of its speed. So a blend is measured by what the worst-off class loses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..formats.census import Census
from ..formats.evidence import Matrix
from ..formats.rowmap import Geometry, RowMap
from ..placement import hot_mask, map_mask
from .layout import check_census, check_map
from .shares import by_session, left_out, share

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
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
    """Shares of every traffic under every map, and the regrets; None for a single class."""
    if len(classes) < 2:
        return None
    names = tuple(classes)
    totals = {name: item.total for name, item in classes.items()}
    shares = np.array(
        [
            [
                item.own
                if name == traffic
                else share(np.where(item.hot, 0, totals[traffic]), totals[traffic])
                for traffic in names
            ]
            for name, item in classes.items()
        ]
    )
    own = shares.diagonal()
    regret = (shares - own[None, :]).max(axis=1)
    least = int(np.argmin(regret))
    blend = float((np.array(blended(classes, totals, geometry)) - own).max())
    return Matrix(
        classes=names,
        shares=tuple(tuple(float(value) for value in row) for row in shares),
        regret=tuple(float(value) for value in regret),
        minimax=names[least],
        blend_regret=blend,
        blend_refused=blend > float(regret[least]),
    )


def blended(
    classes: Mapping[str, Class], totals: Mapping[str, I64], geometry: Geometry
) -> list[float]:
    """Cold share of each class under a map of all in equal parts, left out by session.

    In every layer each class weighs the same, however much of it was recorded. The judged session
    is left out of the blend as it is of the diagonal; otherwise the blend alone would have seen
    what it is judged on.
    """
    out = []
    for name, item in classes.items():
        prior = np.zeros(totals[name].shape)
        mine = totals[name].sum(axis=1, keepdims=True).astype(np.float64)
        for other, total in totals.items():
            if other != name:
                prior += total * (mine / np.maximum(total.sum(axis=1, keepdims=True), 1))
        out.append(share(left_out(item.counts, geometry, prior), item.counts))
    return out
