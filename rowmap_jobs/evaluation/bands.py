"""Cold share by context length: a census of short prompts says little of long ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..formats.census import Census
from ..formats.evidence import Band
from .convergence import tokens_by_session

I64 = npt.NDArray[np.int64]

EDGES = (0, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Lower ends of the bands in prompt tokens; the last one has no upper end."""


def longest_prompts(census: Census) -> I64:
    """Prompt tokens of the longest transcript of each session, int64[S]."""
    sessions, index = np.unique(census.session, return_inverse=True)
    longest = np.zeros(len(sessions), dtype=np.int64)
    np.maximum.at(longest, index, census.prompt_len)
    return longest


def bands(
    census: Census, counts: I64, cold: I64, edges: tuple[int, ...] = EDGES
) -> tuple[Band, ...]:
    """Sessions by their longest prompt; only bands that have any.

    `counts` int64[S,L,E] is by_session's, `cold` int64[S,L] left_out's: each session is judged
    under the map of all others of every length, as it would be served.
    """
    longest, tokens = longest_prompts(census), tokens_by_session(census)
    place = np.searchsorted(np.array(edges), longest, side="right") - 1
    every = counts.sum(axis=(1, 2))
    out = []
    for index, low in enumerate(edges):
        inside = place == index
        if not inside.any():
            continue
        whole = max(int(every[inside].sum()), 1)
        out.append(
            Band(
                from_tokens=low,
                to_tokens=edges[index + 1] if index + 1 < len(edges) else None,
                sessions=int(inside.sum()),
                tokens=int(tokens[inside].sum()),
                own=float(cold[inside].sum()) / whole,
            )
        )
    return tuple(out)
