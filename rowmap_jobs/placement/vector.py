"""Hot rows that differ by layer, in few shapes, chosen once for a lane.

Layers differ in skew, so that one budget does more when flat layers get more rows. Every pair of
(hot, cold) sizes is a shape that kernels are tuned for and that is part of the compile hash: the
vector is chosen from the pooled profile of all classes, in steps of a quantum, and then holds for
every class's map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from .rank import against

SOURCE = "hot rows"


def choose_vector(
    pooled: npt.NDArray[Any],
    budget_rows: int,
    quantum: int,
    experts: Sequence[int] | None = None,
) -> list[int]:
    """Hot rows of each layer, int[L], that leave least of `pooled` [L,E] cold.

    At most `budget_rows` in all. Let H be the uniform number of that budget: a layer gets
    H + d x quantum rows for a whole d, so that uniform is one of the choices and never better, and
    no memory is lost to rounding. Layers with no more than H experts are hot whole. Every further
    step in a layer gains less than the one before, so taking the best steps first is exact. Ties
    go to the lower layer. `pooled` is made comparable by normalising each layer.
    Raises FormatError for a budget or quantum out of range.
    """
    each = [pooled.shape[-1]] * len(pooled) if experts is None else list(experts)
    wide = against(pooled, each, "pooled")
    if budget_rows < 0:
        raise FormatError(SOURCE, "rows in all", budget_rows, "0 or more")
    if quantum < 1:
        raise FormatError(SOURCE, "quantum", quantum, "1 or more")
    even = _uniform(each, budget_rows)
    first = even % quantum
    rows = [min(first, e) if e > even else e for e in each]
    steps = (budget_rows - sum(rows)) // quantum
    gains: list[float] = []
    owners: list[int] = []
    for layer, start in enumerate(rows):
        values = wide[layer, : each[layer]].astype(np.float64)
        ordered = np.sort(values)[::-1] / (float(values.sum()) or 1.0)
        whole = (each[layer] - start) // quantum * quantum
        gain = ordered[start : start + whole].reshape(-1, quantum).sum(axis=1)
        gains += gain.tolist()
        owners += [layer] * len(gain)
    # A layer's steps come in order: their gains descend, and equal ones stay as they are.
    for step in np.argsort(-np.array(gains), kind="stable")[:steps].tolist():
        rows[owners[step]] += quantum
    return rows


def _uniform(experts: Sequence[int], budget_rows: int) -> int:
    """The largest H with sum of min(H, experts) <= budget_rows."""
    low, high = 0, max(experts)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(middle, e) for e in experts) <= budget_rows:
            low = middle
        else:
            high = middle - 1
    return low
