"""How the map settles as sessions come in, and whether two halves of them agree."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..formats.census import DECODE, Census
from ..formats.evidence import Point, Ranks
from ..formats.rowmap import Geometry
from ..placement import hot_mask
from .layout import sizes
from .ranks import compare, of_counts
from .shares import share

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def by_age(census: Census) -> npt.NDArray[np.intp]:
    """Places of the sessions of `by_session`, oldest first: by their first `created`."""
    sessions, index = np.unique(census.session, return_inverse=True)
    created = np.full(len(sessions), np.iinfo(np.int64).max)
    np.minimum.at(created, index, census.created)
    return np.argsort(created, kind="stable")


def tokens_by_session(census: Census) -> I64:
    """Decode tokens of each session of `by_session`, int64[S]."""
    sessions, index = np.unique(census.session, return_inverse=True)
    tokens = np.zeros(len(sessions), dtype=np.int64)
    np.add.at(tokens, index, census.rows[:, DECODE])
    return tokens


def steps_up_to(sessions: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... below `sessions`: evenly spaced by their logarithm."""
    sizes_ = {1} | {step << power for power in range(sessions.bit_length()) for step in (2, 3)}
    return sorted(size for size in sizes_ if size < sessions)


def convergence(census: Census, counts: I64, geometry: Geometry) -> tuple[Point, ...]:
    """The map of the oldest n sessions, judged on all later ones; `counts` is by_session's.

    Judging on later ones is what a lane does, and no session is on both sides.
    """
    order, tokens = by_age(census), tokens_by_session(census)
    total = counts.sum(axis=0)
    final = hot_mask(total, geometry)
    seen, taken, out = np.zeros_like(total), 0, []
    for size in steps_up_to(len(counts)):
        for session in order[taken:size]:
            seen += counts[session]
        taken = size
        hot, rest = hot_mask(seen, geometry), total - seen
        out.append(
            Point(
                sessions=size,
                tokens=int(tokens[order[:size]].sum()),
                own=share(np.where(hot, 0, rest), rest),
                overlap=_overlap(hot, final, geometry),
            )
        )
    return tuple(out)


def _overlap(a: Mask, b: Mask, geometry: Geometry) -> float:
    """|hot and hot'| / H, averaged over the layers that have hot rows; 1 without any."""
    parts = [float((a[i] & b[i]).sum()) / hot for i, (_, hot) in enumerate(sizes(geometry)) if hot]
    return float(np.mean(parts)) if parts else 1.0


def halves(census: Census, counts: I64, geometry: Geometry) -> Ranks | None:
    """Rankings of two disjoint halves of the sessions, which take turns by age.

    Halves of rows or turns would share their sessions and agree however little was recorded.
    None for a single session.
    """
    if len(counts) < 2:
        return None
    first = np.zeros(counts.shape[1:], dtype=np.int64)
    for session in by_age(census)[0::2]:
        first += counts[session]
    second = counts.sum(axis=0) - first
    return compare(of_counts(first, geometry), of_counts(second, geometry), geometry)
