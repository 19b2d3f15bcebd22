"""The pure parts: small numbers that a reader can check by hand or by brute force."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.cli import text
from rowmap_jobs.cli.console import printable
from rowmap_jobs.cli.work import imported, placed, spread
from rowmap_jobs.cli.work.chosen import Choice, chosen
from rowmap_jobs.cli.work.compared import compared
from rowmap_jobs.cli.work.imported import Source
from rowmap_jobs.cli.work.judged import Case, judged
from rowmap_jobs.evaluation import evaluate
from rowmap_jobs.exchange.base import Ranking
from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.placement import hot_mask, map_mask, place
from rowmap_jobs.placement.profiles import shrink
from tests.evaluation import traffic
from tests.formats.samples import FINGERPRINT, geometry

SHAPE = geometry(experts=6, top_k=2, hot_rows=0)
COUNTS = st.lists(st.integers(0, 50), min_size=12, max_size=12).map(
    lambda values: np.array(values, dtype=np.int64).reshape(2, 6)
)


@given(own=COUNTS, pool=COUNTS, kappa=st.sampled_from([None, 0.0, 1.0, 6.0, 40.0]))
def test_placing_by_counts_and_prior_is_placing_by_shrinkage(
    own: np.ndarray, pool: np.ndarray, kappa: float | None
) -> None:
    census = traffic.census_of([same_rows(pool)], SHAPE)
    prior = placed.prior_of(own, [census], SHAPE, kappa)
    assert prior is not None
    shrunk = shrink(own, census.decode(), kappa, top_k=2, experts=[6, 6])
    order = np.argsort(-np.round(own + prior, 9), axis=1, kind="stable")
    values = np.take_along_axis(shrunk, order, axis=1)
    assert (np.diff(values, axis=1) <= 1e-9).all()


def same_rows(counts: np.ndarray) -> np.ndarray:
    """Decode counts that rows of two distinct experts can give, as many in both layers."""
    rows = 60
    out = np.zeros_like(counts)
    for layer, row in enumerate(counts):
        weights = (row + 1) / (row + 1).sum()
        keys = np.log(weights) + np.random.default_rng(int(row.sum())).gumbel(size=(rows, 6))
        np.add.at(out[layer], np.argsort(-keys, axis=1)[:, :2].ravel(), 1)
    return out


@given(counts=COUNTS, hot=st.integers(0, 6))
def test_one_number_and_its_list_place_the_same(counts: np.ndarray, hot: int) -> None:
    by_number = placed.placed(counts, FINGERPRINT, SHAPE, placed.Budget(hot=hot))
    by_list = placed.placed(counts, FINGERPRINT, SHAPE, placed.Budget(per_layer=[hot, hot]))
    by_bytes = placed.placed(counts, FINGERPRINT, SHAPE, placed.Budget(hot_bytes=hot * 20 + 19))
    assert by_number.rows == by_list.rows == by_bytes.rows
    ordered = placed.placed(counts, FINGERPRINT, SHAPE, placed.Budget(hot=hot), order=True)
    assert ordered.rows.row_set_digest == by_number.rows.row_set_digest
    assert ordered.rows.order is not None and len(ordered.rows.order) == 12


@given(counts=COUNTS, rows=st.integers(0, 12))
def test_a_global_budget_takes_the_most_chosen_rows_of_all(counts: np.ndarray, rows: int) -> None:
    made = placed.placed(counts, FINGERPRINT, SHAPE, placed.Budget(global_rows=rows)).rows
    mask = map_mask(made, 6)
    chance = counts / np.maximum(counts.sum(axis=1, keepdims=True) / 2, 1)
    assert mask.sum() == rows
    if 0 < rows < 12:
        assert chance[mask].min() >= chance[~mask].max() - 1e-12


def test_a_map_of_the_census_is_judged_as_evaluation_does_and_others_as_they_are() -> None:
    rng = np.random.default_rng(3)
    shape = traffic.layout(2, 8, 4, 2)
    counts = traffic.drawn(traffic.popular(2, 8, 5), [40] * 6, 2, rng)
    census = traffic.census_of(counts, shape)
    own = place(census.decode(), FINGERPRINT, shape)
    assert judged(Case(census, "", own), {}) == evaluate(census, shape, {})
    other = place(census.decode().max() - census.decode(), FINGERPRINT, shape)
    seen = judged(Case(census, "", other), {})
    hot = map_mask(other, 8)
    cold = counts[:, ~hot].sum() / counts.sum()
    assert seen.own == seen.in_sample == pytest.approx(cold)
    for index, layer in enumerate(seen.layers):
        part = counts[:, index][:, ~hot[index]].sum() / counts[:, index].sum()
        assert layer.own == pytest.approx(part)
    assert seen.interval[0] <= cold <= seen.interval[1]


def test_a_small_class_is_judged_with_the_prior_it_was_placed_with() -> None:
    shape = traffic.layout(2, 16, 8, 2)
    rng = np.random.default_rng(4)
    weights = traffic.popular(2, 16, 6)
    few = traffic.census_of(traffic.drawn(weights, [4] * 3, 2, rng), shape)
    pool = traffic.census_of(traffic.drawn(weights, [300] * 3, 2, rng), shape)
    prior = placed.prior_of(few.decode(), [pool], shape)
    rows = placed.placed(few.decode(), FINGERPRINT, shape, placed.Budget(hot=8), prior).rows
    assert prior is not None
    assert (map_mask(rows, 16) == hot_mask(few.decode() + prior, rows.geometry)).all()
    leaning = judged(Case(few, "", rows, prior=prior), {}).own
    alone = judged(Case(few, "", place(few.decode(), FINGERPRINT, rows.geometry)), {}).own
    assert leaning < alone


def test_what_moves_between_maps_is_counted_row_by_row() -> None:
    shape = geometry(row_bytes={"0": 10, "2": 7})
    a = rowmap.build(FINGERPRINT, shape, {0: ([3, 1], [0, 2]), 2: ([0, 1], [3, 2])})
    b = rowmap.build(FINGERPRINT, shape, {0: ([1, 0], [3, 2]), 2: ([2, 3], [0, 1])})
    found = compared(a, b)
    assert (found.moved, found.bytes_moved, found.same_rows) == ({0: 1, 2: 2}, 24, False)
    assert found.ranks.overlap == pytest.approx(0.25) and found.differ == ()
    assert compared(a, a).same_rows and compared(a, a).rows_moved == 0


def test_balance_is_mean_over_greatest_load_of_a_device() -> None:
    shape = traffic.layout(1, 4, 2, 1)
    census = traffic.census_of(np.array([[[6, 2, 1, 1]]]), shape)
    found = spread.spread(census, slots=4, groups=1, nodes=1, devices=2)
    assert found.plain == pytest.approx(5 / 8) and found.balance == pytest.approx(5 / 7)
    even = spread.spread(census, slots=6, groups=1, nodes=1, devices=2)
    assert even.balance > found.balance


def test_conditions_are_taken_together() -> None:
    shape = traffic.layout(1, 4, 2, 1)
    counts = np.array([[[1, 0, 0, 0]]] * 4)
    census = traffic.census_of(counts, shape, created=[1, 2, 3, 4], prompt_len=[10, 20, 10, 20])
    kept = chosen(census, Choice(since=2, prompt_tokens=(None, 15)))
    assert kept.created.tolist() == [3] and Choice().empty
    assert kept.header.selection.skipped == {"OtherPromptLength": 2, "OutsideWindow": 1}


def source(ranking: Ranking) -> Source:
    return Source(Path("x"), "llamacpp-pin", ranking, 0, "")


def test_a_placement_of_another_system_becomes_a_partition() -> None:
    some = Ranking({0: (3, 1), 2: ()}, complete=False)
    rows, _ = imported.map_of(source(some), geometry(), FINGERPRINT)
    assert rows.layers["0"].hot == (3, 1) and rows.layers["0"].cold == (2, 0)
    assert rows.layers["2"].hot == () and rows.geometry.hot_rows == {"0": 2, "2": 0}
    for wrong, says in (
        (Ranking({0: (3, 3)}, complete=False), "an expert twice"),
        (Ranking({0: (4,)}, complete=False), "expert 4"),
        (Ranking({1: (0,)}, complete=False), "layer 1"),
        (Ranking({0: (0, 1, 2, 3)}, complete=True), "no layer 2"),
        (Ranking({0: (0, 1, 2, 3), 2: (0, 1, 2, 3)}, complete=True), "without them"),
    ):
        with pytest.raises(FormatError, match=says):
            imported.map_of(source(wrong), geometry(), FINGERPRINT)


def test_sessions_are_numbered_as_they_come() -> None:
    names = ("b-1", "a-1", "b-2")
    assert imported.sessions(names, r"^(\w)-", "x") == (0, 1, 0)
    assert imported.sessions(names, r"\d", "x") == (0, 0, 1)
    assert imported.sessions(names, "file", "x") == (0, 0, 0)
    assert imported.sessions(names, "sequence", "x") is None


@given(st.text(max_size=50))
def test_only_printable_text_is_printed(value: str) -> None:
    shown = printable(value)
    assert shown.isprintable() and (shown == value) == value.isprintable()


def test_tables_and_facts_are_laid_out() -> None:
    assert text.table(("a", "n"), [("long", "1"), ("b", "22")]) == "a      n\nlong   1\nb     22"
    assert text.facts("t", [("x", "1"), ("long", "2")]) == "t\n  x     1\n  long  2"
    assert text.layers([0, 1, 2, 5]) == "0-2, 5 (4)" and text.layers([]) == "none (0)"
    assert text.span([3, 3]) == "3" and text.span([9, 3]) == "3 to 9"
