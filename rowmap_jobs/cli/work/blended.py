"""Classes against each other's maps, and one map for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...evaluation import by_session, left_out
from ...evaluation.shares import share
from ...formats.census import Census
from ...formats.evidence import Matrix
from ...formats.rowmap import Fingerprint, Geometry, RowMap
from ...placement import place
from ...placement.budget import Shape, with_rows
from ...placement.profiles import best_blend, blended, judge, refused
from .placed import Budget, rows


@dataclass(frozen=True)
class Blended:
    """The matrix, and the blend whose regret it has."""

    matrix: Matrix
    weights: dict[str, float]
    regret: float
    refused: bool
    rows: RowMap
    """The blend's map."""


def geometry_of(shape: Shape, budget: Budget, censuses: Mapping[str, Census]) -> Geometry:
    """The geometry of all classes' maps under a budget; a quantum goes by their sum.

    Raises FormatError.
    """
    pooled = np.sum([census.decode() for census in censuses.values()], axis=0)
    return with_rows(shape, rows(shape, budget, pooled))


def judged(
    censuses: Mapping[str, Census],
    geometry: Geometry,
    fingerprint: Fingerprint,
    weights: Mapping[str, float] | None = None,
) -> Blended:
    """Every class under every map, its own left out by session, and a blend of two or more.

    Without weights the blend of least regret. It is refused when some single class's map loses
    less. Raises FormatError.
    """
    counts = {name: by_session(census) for name, census in censuses.items()}
    profiles = {name: each.sum(axis=0) for name, each in counts.items()}
    own = {name: share(left_out(each, geometry), each) for name, each in counts.items()}
    matrix = judge(profiles, geometry, own)
    if weights is None:
        blend = best_blend(profiles, geometry)
    else:
        blend = blended(profiles, weights, geometry)
    over = refused(blend.regret, np.array(matrix.regret))
    # The matrix speaks of the blend that is judged here.
    matrix = matrix.model_copy(update={"blend_regret": blend.regret, "blend_refused": over})
    placed = place(blend.profile, fingerprint, geometry)
    return Blended(matrix, blend.weights, blend.regret, over, placed)
