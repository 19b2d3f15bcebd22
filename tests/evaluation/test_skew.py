"""Inequality, support of the border, distinct experts: by hand and by definition."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs.evaluation.skew import entropy, gini, gini_by_lot, skew, top_share
from rowmap_jobs.evaluation.support import border_mask, support
from rowmap_jobs.evaluation.unique import chances, expected, measured, unique
from rowmap_jobs.formats import census as census_format
from rowmap_jobs.placement import hot_mask
from tests.evaluation.test_shares import LOPSIDED, TWO_BY_THREE
from tests.evaluation.traffic import census_of, drawn, layout, popular

TOTAL = np.array(LOPSIDED, dtype=np.int64).sum(axis=0)  # [6, 2, 2] and [0, 1, 9]


@pytest.mark.parametrize(
    ("counts", "value"),
    [
        ([5, 5, 5, 5], 0.0),
        ([0, 0, 0, 8], 0.75),
        ([2, 6, 2], 8 / 30),
        ([0, 1, 9], 18 / 30),
        ([0, 0], 0.0),
        ([7], 0.0),
    ],
)
def test_gini(counts: list[int], value: float) -> None:
    assert float(gini(np.array(counts))) == pytest.approx(value)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any))
@settings(max_examples=100, deadline=None)
def test_gini_is_half_the_relative_mean_difference(counts: list[int]) -> None:
    n, whole = len(counts), sum(counts)
    apart = sum(abs(a - b) for a in counts for b in counts)
    assert float(gini(np.array(counts))) == pytest.approx(apart / (2 * n * whole), abs=1e-12)


def test_skew_of_two_by_three_by_hand() -> None:
    found = skew(TOTAL, TWO_BY_THREE)
    assert found.gini == pytest.approx((8 / 30 + 18 / 30) / 2)
    flat = -(0.6 * math.log(0.6) + 0.4 * math.log(0.2)) / math.log(3)
    steep = -(0.1 * math.log(0.1) + 0.9 * math.log(0.9)) / math.log(3)
    assert found.entropy == pytest.approx((flat + steep) / 2)
    assert found.top1 == found.top10 == pytest.approx((0.6 + 0.9) / 2)
    assert found.max_by_mean == pytest.approx((1.8 + 2.7) / 2)


def test_the_hottest_percent_is_rounded_up() -> None:
    counts = np.arange(45)  # 990 in all
    assert top_share(counts, 1) == pytest.approx(44 / 990)
    assert top_share(counts, 5) == pytest.approx((44 + 43 + 42) / 990)
    assert top_share(counts, 10) == pytest.approx((44 + 43 + 42 + 41 + 40) / 990)


def test_entropy_is_one_when_flat_and_nothing_for_one_expert() -> None:
    assert entropy(np.array([4, 4, 4])) == pytest.approx(1.0)
    assert entropy(np.array([0, 9, 0])) == 0.0


def test_lots_reach_the_gini_of_flat_traffic_and_not_that_of_skewed() -> None:
    shape, rng = layout(3, 32, 16, top_k=2), np.random.default_rng(1)
    flat = drawn(popular(3, 32, 0, spread=0.0), [2000], 2, rng).sum(axis=0)
    skewed = drawn(popular(3, 32, 0, spread=0.3), [2000], 2, rng).sum(axis=0)
    null = gini_by_lot(flat, shape, seed=0)
    # About sqrt(E / (pi N)), the mean difference of Poisson counts by their mean: 0.05.
    assert null == pytest.approx(math.sqrt(32 / (math.pi * 4000)), rel=0.15)
    assert skew(flat, shape).gini <= null < skew(skewed, shape).gini


def test_support_of_two_layers_by_hand() -> None:
    shape = layout(2, 3, 2)
    total = np.array([[100, 60, 0], [19, 21, 120]])
    found = support(total, shape)
    assert found.hits_median == pytest.approx((21 + 60) / 2)
    assert found.hits_border == pytest.approx((60 + 21) / 2)
    assert (found.under_20, found.never_seen, found.never) == (2, 1, {"0": (2,)})
    # Second layer: 21 hot against 19 cold, both within two standard errors of each other.
    assert found.undecided == 2
    assert border_mask(total, shape).tolist() == [[False] * 3, [True, True, False]]


def test_the_border_is_two_standard_errors_wide() -> None:
    # 30 / sqrt(170) = 2.3 is decided, 24 / sqrt(176) = 1.8 is not.
    assert not border_mask(np.array([[100, 70]]), layout(1, 2, 1)).any()
    assert border_mask(np.array([[100, 76]]), layout(1, 2, 1)).all()


def test_columns_that_are_no_experts_are_not_counted() -> None:
    shape = layout(2, 3, 1).model_copy(update={"experts": {"0": 2, "1": 3}})
    found = support(np.array([[5, 0, 0], [0, 3, 2]]), shape)
    assert found.never == {"0": (1,), "1": (0,)} and found.never_seen == 2
    assert skew(np.array([[5, 5, 0], [4, 4, 4]]), shape).gini == 0.0


def test_distinct_experts_of_two_by_three_by_hand() -> None:
    data = census_of(LOPSIDED, TWO_BY_THREE)
    chance = chances(data)
    assert chance.tolist() == [[0.6, 0.2, 0.2], [0.0, 0.1, 0.9]]
    assert expected(chance, 2).sum(axis=1).tolist() == pytest.approx([1.56, 1.18])
    found = {item.rows: item for item in unique(data, hot_mask(TOTAL, TWO_BY_THREE))}
    assert found[1].expected == pytest.approx(1.0) and found[1].cold == pytest.approx(5 / 20)
    assert found[2].expected == pytest.approx(1.37)
    assert found[2].cold == pytest.approx((0.36 + 0.36 + 0.19) / 2.74)
    assert found[2].measured is None


def test_a_uniform_router_reads_what_the_closed_form_says() -> None:
    # Six rows of 384 experts, top-6: 384 (1 - (1 - 6/384)^6) = 34.6.
    assert expected(np.full((1, 384), 6 / 384), 6).sum() == pytest.approx(34.6, abs=0.05)


def test_distinct_experts_as_measured_by_rows_of_a_step() -> None:
    data = replace(
        census_of(LOPSIDED, TWO_BY_THREE),
        steps=np.array([4, 0, 2], dtype=np.int64),
        touched=np.array([[4, 4], [0, 0], [5, 3]], dtype=np.int64),
    )
    census_format.check(data, "made")
    found = measured(data)
    assert {rows: layers.tolist() for rows, layers in found.items()} == {1: [1, 1], 3: [2.5, 1.5]}
    table = {item.rows: item.measured for item in unique(data, hot_mask(TOTAL, TWO_BY_THREE))}
    assert table[1] == 1.0 and table[2] is None and table[3] == 2.0


def test_of_distinct_experts_more_are_cold_than_of_selections() -> None:
    weights, shape = popular(2, 64, 0), layout(2, 64, 48, top_k=4)
    data = census_of(drawn(weights, [300], 4, np.random.default_rng(0)), shape)
    shares = [item.cold for item in unique(data, hot_mask(data.decode(), shape))]
    assert None not in shares and shares == sorted(shares, key=float)  # type: ignore[arg-type]
    assert float(shares[-1] or 0) > 2 * float(shares[0] or 0)
