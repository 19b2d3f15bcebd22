"""What a reader of another system's file returns: counts or a ranking, without a fingerprint.

A file of counts seldom says which model it was taken from. The caller brings the fingerprint and
the geometry (from the model's folder, a census or a lane's status) and checks the layout against
them before a census or a map is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Layers with counts: absolute ids in ascending order, experts and top-k of each."""

    layer_ids: tuple[int, ...]
    experts: tuple[int, ...]
    top_k: tuple[int, ...] | None
    """None where the file does not say it and it cannot be told."""


@dataclass(frozen=True)
class Counts:
    """Counts of T sequences; int64, no negative, zero beyond a layer's experts.

    decode and prefill are int64[T,L,E]; rows is int64[T,2] (prefill, decode) or None when the file
    has no number of rows (it then follows from counts and top-k, if all layers agree).
    """

    layout: Layout
    decode: I64
    prefill: I64 | None
    rows: I64 | None
    names: tuple[str, ...]
    """One for each sequence: what the file calls it, or its place in the file."""
    per_sequence: bool
    """False when the file had only sums: then T is 1 and nothing can be left out."""
    notes: tuple[str, ...] = ()
    steps: I64 | None = None
    """Decode steps by rows of a step: steps[n-1] for n rows, int64[N]."""
    touched: I64 | None = None
    """Distinct experts summed over those steps, int64[N,L]."""


@dataclass(frozen=True)
class Ranking:
    """An order or a choice of experts without counts: `order[layer]` hottest first.

    A format that stores only the chosen (hot) experts gives them in `order`, and `complete` is
    False: the others follow by id.
    """

    order: dict[int, tuple[int, ...]]
    complete: bool
    hot: dict[int, int] | None = None
    """How many of each layer's order are hot, where the format says it."""
    notes: tuple[str, ...] = ()
