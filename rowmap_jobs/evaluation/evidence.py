"""Everything a report says beyond the shares that decide: one call for one census and its map."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..formats.census import Census
from ..formats.evidence import Baselines, Effect, Evidence
from ..formats.rowmap import Geometry, RowMap
from ..placement import hot_mask, map_mask
from . import matrix as classes_
from .bands import bands
from .change import between
from .convergence import convergence, halves
from .drift import regret
from .layout import check_census, check_map
from .matrix import Class, matrix
from .ranks import compare, of_counts, of_map
from .roofline import Fit, Speed, fit, roofline
from .shares import best_alone, by_lot, by_session, cold_under, left_out, share
from .skew import skew
from .support import support
from .unique import chances, expected, measured, unique

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

WORST = 5


def evidence(
    census: Census,
    geometry: Geometry,
    rows: RowMap,
    active: RowMap | None = None,
    other_maps: Mapping[str, RowMap] | None = None,
    other_censuses: Mapping[str, Census] | None = None,
    speed: Speed | None = None,
    seed: int = 0,
    prior: F64 | None = None,
) -> Evidence:
    """What `census` says of its map `rows`; parts whose input is missing are left out.

    `active` is the map in force, `other_maps` and `other_censuses` those of the lane's other
    classes by name, `speed` what was measured on the lane, `prior` float[L,E] the pseudo-counts
    that the map was placed with. `rows` with other hot rows than the census and the prior give is
    judged as it is: what it knows of this census then flatters it.
    Raises FormatError naming the census or map whose layers, experts or top-k differ.
    """
    check_census(census, geometry)
    check_map(rows, geometry, "map")
    counts = by_session(census)
    total = counts.sum(axis=0)
    cold = left_out(counts, geometry, prior)
    hot = map_mask(rows, total.shape[1])
    placed = hot_mask(total if prior is None else total + prior, geometry)
    judged = cold if np.array_equal(hot, placed) else cold_under(counts, hot)
    mine = Class(counts, hot, share(judged, counts))
    lot = by_lot(total, geometry)
    classes = classes_.others(other_maps or {}, _without(census, other_censuses or {}), geometry)
    fitted = None if speed is None else _fit(speed, census, geometry)
    before = None
    if active is not None:
        check_map(active, geometry, "active map")
        before = map_mask(active, total.shape[1])
    return Evidence(
        baselines=_baselines(mine, lot, geometry),
        skew=skew(total, geometry, seed),
        support=support(total, geometry),
        unique=unique(census, hot, () if speed is None else (speed.rows_per_step,)),
        convergence=convergence(census, counts, geometry),
        bands=bands(census, counts, judged),
        halves=halves(census, counts, geometry),
        worst_layers=_worst(judged, total, geometry),
        against_active=None
        if active is None
        else compare(of_counts(total, geometry), of_map(active, total.shape[1]), geometry),
        change=None if active is None else between(counts, active, rows, judged.sum(axis=1), seed),
        drift=None if active is None else regret(counts, active, cold.sum(axis=1), seed),
        matrix=matrix({census.header.traffic_class: mine, **classes}, geometry),
        effects=() if before is None else _effects(classes, before, hot, fitted),
        roofline=None
        if speed is None or fitted is None
        else roofline(
            fitted,
            speed,
            mine.own,
            lot,
            None if before is None else share(cold_under(counts, before), counts),
        ),
    )


def _without(census: Census, others: Mapping[str, Census]) -> dict[str, Census]:
    """The other classes; the judged census stands for its own."""
    return {name: item for name, item in others.items() if name != census.header.traffic_class}


def _baselines(mine: Class, lot: float, geometry: Geometry) -> Baselines:
    oracle = share(best_alone(mine.counts, geometry), mine.counts)
    gain = lot - oracle
    return Baselines(
        random=lot, oracle=oracle, headroom=(lot - mine.own) / gain if gain > 1e-9 else None
    )


def _worst(cold: I64, total: I64, geometry: Geometry) -> tuple[int, ...]:
    own = cold.sum(axis=0) / np.maximum(total.sum(axis=1), 1)
    order = np.argsort(-own, kind="stable")[:WORST]
    return tuple(geometry.moe_layers[index] for index in order)


def _fit(speed: Speed, census: Census, geometry: Geometry) -> Fit:
    """Distinct experts a step: as measured for as many rows, else as expected."""
    real = measured(census).get(speed.rows_per_step)
    if real is None:
        real = expected(chances(census), speed.rows_per_step).sum(axis=1)
    return fit(speed, geometry, real.tolist())


def _effects(
    classes: Mapping[str, Class], before: Mask, after: Mask, fitted: Fit | None
) -> tuple[Effect, ...]:
    out = []
    for name, item in classes.items():
        total = item.total
        now, then = (share(np.where(hot, 0, total), total) for hot in (before, after))
        out.append(
            Effect(
                traffic_class=name,
                now=now,
                then=then,
                tokens_per_second=None if fitted is None else fitted.band(then),
            )
        )
    return tuple(out)
