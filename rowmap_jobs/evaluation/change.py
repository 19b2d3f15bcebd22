"""The map of a census against the one in force, on the same transcripts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..formats.census import Census
from ..formats.evidence import Change, Interval
from ..formats.rowmap import Geometry, RowMap, per_layer
from ..placement import map_mask, place
from .layout import check_census, check_map
from .resample import spread
from .shares import by_session, cold_under, left_out, share

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


def change(
    census: Census,
    geometry: Geometry,
    active: RowMap,
    candidate: RowMap | None = None,
    prior: F64 | None = None,
    seed: int = 0,
) -> Change:
    """What the census's own map, left out by session, saves against `active`.

    `candidate` is a map from elsewhere (a blend, another class) to judge in its place, as it is;
    what it knows of these transcripts then flatters it. `prior` float[L,E] are the pseudo-counts
    that the own map was placed with. Raises FormatError when layers or experts differ.
    """
    check_census(census, geometry)
    check_map(active, geometry, "active map")
    counts = by_session(census)
    if candidate is None:
        total = counts.sum(axis=0)
        weights = total if prior is None else total + prior
        new = place(weights, census.header.fingerprint, geometry)
        cold = left_out(counts, geometry, prior).sum(axis=1)
    else:
        check_map(candidate, geometry, "new map")
        new = candidate
        cold = cold_under(counts, map_mask(new, counts.shape[2])).sum(axis=1)
    return between(counts, active, new, cold, seed)


def between(counts: I64, active: RowMap, new: RowMap, cold: I64, seed: int) -> Change:
    """`active` against `new`, which leaves `cold` int64[S] of counts int64[S,L,E] cold."""
    width = counts.shape[2]
    before, after = map_mask(active, width), map_mask(new, width)
    was = cold_under(counts, before).sum(axis=1)
    low, high = saved(was, cold, counts, seed)
    moved = (after & ~before).sum(axis=1)
    layers = new.geometry.moe_layers
    row_bytes = [per_layer(new.geometry.row_bytes, layer) for layer in layers]
    return Change(
        active_digest=active.digest,
        new_digest=new.digest,
        active=share(was, counts),
        new=share(cold, counts),
        improvement=share(was, counts) - share(cold, counts),
        interval=Interval(low=low, high=high),
        rows_moved=int(moved.sum()),
        bytes_moved=sum(int(n) * size for n, size in zip(moved, row_bytes, strict=True)),
    )


def saved(was: I64, now: I64, counts: I64, seed: int) -> tuple[float, float]:
    """95% interval of the difference of two cold shares, `was` less `now`, int64[S] each.

    Both shares come from the same resampled sessions: what is common to them cancels.
    """
    return spread(was - now, counts.sum(axis=(1, 2)), seed, unknown=(-1.0, 1.0))
