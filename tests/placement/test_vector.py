"""Hot rows that differ by layer: within the budget, in few shapes, never worse than uniform."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.placement.vector import choose_vector
from tests.placement.cases import Case, cases


def cold(case: Case, rows: list[int]) -> float:
    """Cold shares of the layers, summed: each layer counts alike."""
    total = 0.0
    for values, experts, hot in zip(case.counts, case.experts, rows, strict=True):
        heat = np.sort(values[:experts])[::-1]
        total += float(heat[hot:].sum() / heat.sum()) if heat.sum() else 0.0
    return total


@given(cases(layers=3, width=7), st.integers(0, 21), st.integers(1, 4))
def test_no_other_vector_of_these_steps_is_better(case: Case, budget: int, quantum: int) -> None:
    rows = choose_vector(case.counts, budget, quantum, case.experts)
    assert sum(rows) <= budget
    most = max(case.experts)
    even = max(h for h in range(most + 1) if sum(min(h, e) for e in case.experts) <= budget)
    choices = [
        [h for h in range(e + 1) if (h - even) % quantum == 0] if e > even else [e]
        for e in case.experts
    ]
    assert all(row in choice for row, choice in zip(rows, choices, strict=True))
    fitting = [list(one) for one in product(*choices) if sum(one) <= budget]
    assert cold(case, rows) <= min(cold(case, one) for one in fitting) + 1e-9
    assert cold(case, rows) <= cold(case, [min(even, e) for e in case.experts]) + 1e-9


def test_alike_layers_stay_uniform_and_flat_ones_get_more() -> None:
    alike = np.tile(np.arange(12, 0, -1), (4, 1))
    assert choose_vector(alike, 32, 4) == [8, 8, 8, 8]
    skewed = np.array([[1000, 900, 5, 4, 3, 2, 1, 1], [9, 9, 9, 9, 9, 9, 9, 9]])
    assert choose_vector(skewed, 10, 1) == [2, 8]
    assert choose_vector(skewed, 10, 3) == [2, 8]
    # Counted ten times as often, a layer is not more important.
    assert choose_vector(skewed * np.array([[10], [1]]), 10, 1) == [2, 8]


@pytest.mark.parametrize(
    ("budget", "quantum", "message"),
    [(-1, 1, "rows in all: found -1"), (4, 0, "quantum: found 0, expected 1 or more")],
)
def test_refusals(budget: int, quantum: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        choose_vector(np.ones((2, 4)), budget, quantum)


def test_a_large_budget_takes_what_its_steps_reach() -> None:
    assert choose_vector(np.ones((2, 4)), 100, 3) == [4, 4]
    assert choose_vector(np.ones((2, 4)), 100, 3, [4, 2]) == [4, 2]
