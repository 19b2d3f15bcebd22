"""Rankings compared: sets by hand, correlations with ties by hand and by their definition."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs.evaluation.ranks import (
    average_ranks,
    compare,
    kendall,
    of_counts,
    of_map,
    spearman,
)
from rowmap_jobs.placement import place
from tests.evaluation.traffic import layout
from tests.formats.samples import FINGERPRINT


@pytest.mark.parametrize(
    ("a", "b", "rho", "tau"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0, 1.0),
        ([1, 2, 3, 4], [9, 7, 5, 3], -1.0, -1.0),
        # Ranks 1, 2.5, 2.5, 4: 4.5 / sqrt(4.5 x 5); five pairs agree, one is tied in a.
        ([1, 2, 2, 3], [1, 3, 2, 4], 4.5 / math.sqrt(22.5), 5 / math.sqrt(30)),
        # One swap of neighbours among five: 1 - 6 x 2 / (5 x 24); 9 agree, 1 does not.
        ([1, 2, 3, 4, 5], [1, 2, 4, 3, 5], 0.9, 0.8),
        # Ties on both sides: ranks 1.5 1.5 3.5 3.5 and 1 2.5 2.5 4; pairs 3 agree, of 4 and 5.
        ([0, 0, 1, 1], [0, 1, 1, 2], 3 / math.sqrt(4 * 4.5), 3 / math.sqrt(20)),
        # Beyond 32 bits and beyond what float64 tells apart.
        ([2**60, 2**60 + 1, 0], [2, 3, 1], 1.0, 1.0),
        ([5, 5, 5], [1, 2, 3], None, None),
        ([1], [1], None, None),
        ([], [], None, None),
    ],
)
def test_correlations(a: list[int], b: list[int], rho: float | None, tau: float | None) -> None:
    x, y = np.array(a, dtype=np.int64), np.array(b, dtype=np.int64)
    assert spearman(x, y) == (None if rho is None else pytest.approx(rho, abs=1e-12))
    assert kendall(x, y) == (None if tau is None else pytest.approx(tau, abs=1e-12))


def by_definition(a: list[int], b: list[int]) -> float | None:
    """tau-b pair by pair."""
    agreed = in_a = in_b = 0
    for (x, y), (u, v) in itertools.combinations(zip(a, b, strict=True), 2):
        agreed += ((x > u) - (x < u)) * ((y > v) - (y < v))
        in_a += x != u
        in_b += y != v
    return agreed / math.sqrt(in_a * in_b) if in_a and in_b else None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_kendall_is_its_definition(pairs: list[tuple[int, int]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    expected = by_definition(a, b)
    found = kendall(np.array(a, dtype=np.int64), np.array(b, dtype=np.int64))
    assert found == (None if expected is None else pytest.approx(expected, abs=1e-12))


def test_kendall_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, 50), rng.integers(0, 9, 50)
    whole = kendall(a, b)
    monkeypatch.setattr("rowmap_jobs.evaluation.ranks.PAIRS_AT_A_TIME", 120)
    assert kendall(a, b) == whole == pytest.approx(by_definition(a.tolist(), b.tolist()))


def test_equals_share_the_average_of_their_ranks() -> None:
    assert average_ranks(np.array([7, 3, 7, 7, 1])).tolist() == [4, 2, 4, 4, 1]


def test_sets_by_hand() -> None:
    # Of four, hot {0, 1} and {1, 2}: one of two stays, one of two cold rows becomes hot.
    shape = layout(1, 4, 2)
    a = of_counts(np.array([[400, 300, 200, 100]]), shape)
    b = of_counts(np.array([[200, 400, 300, 100]]), shape)
    found = compare(a, b, shape)
    assert (found.overlap, found.jaccard, found.churn) == (0.5, pytest.approx(1 / 3), 0.5)
    # Rows 0 and 2 are on different sides; no row is undecided: over these two the order turns.
    assert found.spearman_border == -1.0 and found.kendall_border == -1.0
    assert found.spearman == pytest.approx(0.4) and found.kendall == pytest.approx(1 / 3)


def test_with_few_cold_rows_overlap_hides_what_churn_shows() -> None:
    shape = layout(1, 10, 9)
    a = of_counts(np.arange(10, 0, -1)[None] * 1000, shape)
    b = of_counts(np.arange(1, 11)[None] * 1000, shape)
    found = compare(a, b, shape)
    assert found.overlap == pytest.approx(8 / 9) and found.churn == 1.0


def test_a_map_with_fewer_hot_rows_makes_no_cold_row_hot() -> None:
    shape = layout(1, 4, 2)
    counts = np.array([[400, 300, 200, 100]])
    narrow = of_map(place(counts, FINGERPRINT, layout(1, 4, 1)), 4)
    found = compare(of_counts(counts, shape), narrow, shape)
    assert (found.overlap, found.churn) == (0.5, 0.0)


def test_layers_are_averaged_and_not_mixed() -> None:
    shape = layout(2, 3, 1)
    a = of_counts(np.array([[9, 5, 1], [1, 5, 9]]), shape)
    b = of_counts(np.array([[9, 5, 1], [9, 5, 1]]), shape)
    found = compare(a, b, shape)
    assert (found.overlap, found.jaccard, found.spearman, found.kendall) == (0.5, 0.5, 0.0, 0.0)
    assert found.churn == pytest.approx((0 + 1 / 2) / 2)


def test_a_maps_own_order_is_its_ranking() -> None:
    shape = layout(2, 4, 2)
    counts = np.array([[1, 9, 5, 2], [7, 0, 3, 8]])
    rows = place(counts, FINGERPRINT, shape)
    found = compare(of_counts(counts, shape), of_map(rows, 4), shape)
    assert found.overlap == 1.0 and found.churn == 0.0
    assert found.spearman == 1.0 and found.kendall == 1.0


@pytest.mark.parametrize("hot", [0, 3])
def test_nothing_or_everything_hot_changes_nothing(hot: int) -> None:
    shape = layout(1, 3, hot)
    a, b = (of_counts(np.array([row]), shape) for row in ([3, 2, 1], [1, 2, 3]))
    found = compare(a, b, shape)
    assert (found.overlap, found.jaccard, found.churn) == (1.0, 1.0, 0.0)
