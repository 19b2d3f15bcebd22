"""Budgets: rows, lists, bytes, and one budget that all layers share."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.status import ModelGeometry
from rowmap_jobs.geometry import resolve
from rowmap_jobs.placement import budget, place
from tests.formats.samples import FINGERPRINT, geometry
from tests.placement.cases import Case, cases


def model(**over: Any) -> ModelGeometry:
    values: dict[str, Any] = {"experts": 4, "top_k": 2, "moe_layers": (0, 2), "row_bytes": 10}
    return ModelGeometry(**{**values, **over})


MIXED = {"experts": {"0": 4, "2": 8}, "row_bytes": {"0": 10, "2": 5}}


@pytest.mark.parametrize(
    ("over", "rows", "hot"),
    [({}, 3, [3, 3]), ({}, 0, [0, 0]), ({}, 4, [4, 4]), (MIXED, 6, [4, 6]), (MIXED, 8, [4, 8])],
)
def test_uniform_rows_fill_a_narrow_layer(over: dict[str, Any], rows: int, hot: list[int]) -> None:
    assert budget.uniform(model(**over), rows) == hot


@pytest.mark.parametrize("rows", [-1, 9])
def test_uniform_rows_out_of_range(rows: int) -> None:
    with pytest.raises(FormatError) as refused:
        budget.uniform(model(**MIXED), rows)
    expected = f"hot rows: rows per layer: found {rows}, expected 0 to 8, the experts"
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("rows", "hot"),
    [([1, 7], [1, 7]), ({"2": 7, "0": 1}, [1, 7]), ({2: 0, 0: 4}, [4, 0]), ((4, 8), [4, 8])],
)
def test_explicit_rows_by_list_or_by_absolute_layer(rows: Any, hot: list[int]) -> None:
    assert budget.explicit(model(**MIXED), rows) == hot


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1], "list: found 1 numbers, expected 2, one a layer"),
        ([1, 2, 3], "list: found 3 numbers, expected 2, one a layer"),
        ([5, 2], "layer 0: found 5, expected 0 to 4 (its experts)"),
        ([1, -1], "layer 2: found -1, expected 0 to 8 (its experts)"),
        ([1, 2.0], "layer 2: found 2.0, expected 0 to 8 (its experts)"),
        ([1, True], "layer 2: found True, expected 0 to 8 (its experts)"),
        ([1, "2"], "layer 2: found 2, expected 0 to 8 (its experts)"),
        # The second MoE layer is layer 2, not 1.
        ({0: 1, 1: 2}, "layers: found ['1', '2'], expected exactly the layers [0, 2]"),
        ({0: 1}, "layers: found ['2'], expected exactly the layers [0, 2]"),
        ({0: 1, "0": 2, 2: 1}, "layers: found a layer twice, expected exactly the layers [0, 2]"),
    ],
)
def test_explicit_rows_that_do_not_fit(rows: Any, message: str) -> None:
    with pytest.raises(FormatError) as refused:
        budget.explicit(model(**MIXED), rows)
    assert str(refused.value) == f"hot rows: {message}"


@pytest.mark.parametrize(
    ("over", "limit", "hot"),
    [({}, 59, [2, 2]), ({}, 60, [3, 3]), ({}, 0, [0, 0]), (MIXED, 65, [4, 5])],
)
def test_bytes_are_those_of_whole_rows(over: dict[str, Any], limit: int, hot: list[int]) -> None:
    assert budget.within_bytes(model(**over), limit) == hot
    shape = budget.with_rows(model(**over), hot)
    assert shape == resolve(model(**over), None, limit)
    assert budget.tier_bytes(shape)[0] <= limit


def test_negative_bytes() -> None:
    with pytest.raises(FormatError, match="hot rows: bytes: found -1, expected 0 or more"):
        budget.within_bytes(model(), -1)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"moe_layers": ()}, "geometry: layers: found [], expected a number for each of []"),
        (
            {"experts": {"0": 4}},
            "geometry: layers: found ['0'], expected a number for each of [0, 2]",
        ),
        ({"top_k": 5}, "geometry: topK: found 5, expected at most 4, the experts of layer 0"),
        ({"row_bytes": 0}, "geometry: rowBytes: found 0 in layer 0, expected 1 or more"),
    ],
)
def test_a_model_that_contradicts_itself(over: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        budget.with_rows(model(**over), [1, 1])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({}, []),
        ({"hot_rows": 4}, ["Every row is hot: there is nothing to choose"]),
        ({"hot_rows": {"0": 4, "2": 3}}, ["All rows are hot in layer 0."]),
        ({"hot_rows": 1}, ["Fewer hot rows than the 2 experts of a token in layers 0, 2: every"]),
        (
            {"hot_rows": {"0": 4, "2": 0}},
            ["All rows are hot in layer 0.", "Fewer hot rows than the 2 experts of a token in la"],
        ),
    ],
)
def test_budgets_that_a_reader_should_know_of(over: dict[str, Any], expected: list[str]) -> None:
    found = budget.notes(geometry(**over))
    assert len(found) == len(expected)
    assert all(note.startswith(part) for note, part in zip(found, expected, strict=True))


def test_many_layers_are_named_in_one_line() -> None:
    shape = geometry(hot_rows=1, moe_layers=tuple(range(40)))
    assert "layers 0, 1, 2, 3, 4, 5, 6, 7 and 32 more" in budget.notes(shape)[0]


def fast(case: Case, hot: tuple[int, ...], sizes: list[int]) -> float:
    """Bytes a token that the hottest rows of each layer make fast."""
    heat = [
        sorted(row[:e].tolist(), reverse=True)
        for row, e in zip(case.counts, case.experts, strict=True)
    ]
    return sum(sum(values[:h]) * s for values, h, s in zip(heat, hot, sizes, strict=True))


def best_fast(case: Case, sizes: list[int], limit: int, least: int, most: int) -> float:
    """By trying every set of rows, each row fast or not."""
    rows = [
        (index, float(value) * sizes[index], sizes[index])
        for index, e in enumerate(case.experts)
        for value in case.counts[index, :e]
    ]
    best = 0.0
    for chosen in product((0, 1), repeat=len(rows)):
        taken = [row for row, yes in zip(rows, chosen, strict=True) if yes]
        each = [sum(1 for row in taken if row[0] == i) for i in range(len(case.experts))]
        inside = all(min(least, e) <= n <= most for n, e in zip(each, case.experts, strict=True))
        if inside and sum(row[2] for row in taken) <= limit:
            best = max(best, sum(row[1] for row in taken))
    return best


@settings(max_examples=60)
@given(cases(layers=3, width=3), st.data())
def test_one_budget_is_within_its_bound_of_every_choice(case: Case, data: st.DataObject) -> None:
    layers = len(case.experts)
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=layers, max_size=layers))
    least, most = data.draw(st.sampled_from([(0, 9), (1, 9), (0, 2), (1, 2)]))
    floor = sum(min(least, e) * s for e, s in zip(case.experts, sizes, strict=True))
    limit = floor + data.draw(st.integers(0, 30))
    found = budget.fit(case.counts, case.experts, sizes, limit, least, most)
    assert found.used == sum(h * s for h, s in zip(found.rows, sizes, strict=True)) <= limit
    gap = best_fast(case, sizes, limit, least, most) - fast(case, found.rows, sizes)
    assert -1e-9 <= gap <= found.shortfall + 1e-9
    # Less than one row: the first that did not fit is no hotter than the hottest of all.
    dearest = max(
        float(case.counts[i, :e].max()) * s
        for i, (e, s) in enumerate(zip(case.experts, sizes, strict=True))
    )
    assert found.shortfall == 0 or found.shortfall < dearest
    if len(set(sizes)) == 1:
        assert gap <= 1e-9 and found.shortfall == 0


@settings(max_examples=60)
@given(cases(layers=4, width=6), st.data())
def test_a_larger_shared_budget_is_never_colder(case: Case, data: st.DataObject) -> None:
    layers = len(case.experts)
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    shares = [
        fast(case, budget.fit(case.counts, case.experts, sizes, limit).rows, sizes)
        for limit in range(sum(sizes) * 6 + 2)
    ]
    assert all(b >= a - 1e-9 for a, b in pairwise(shares))


def test_what_is_left_goes_to_the_next_colder_rows_that_fit() -> None:
    # 0.9 and 0.8 take 20 of 27; 0.7 takes 10 and does not fit; 0.4 and 0.1 take 3 each.
    weights = np.array([[0.9, 0.8, 0.7], [0.4, 0.1, 0.05]])
    found = budget.fit(weights, [3, 3], [10, 3], 27)
    assert found.rows == (2, 2) and found.used == 26
    # At most 0.7 x 7 bytes more with cut rows, of which 0.4 x 3 + 0.1 x 3 are there.
    assert found.shortfall == pytest.approx(0.7 * 7 - 1.5)


def test_the_shared_budget_follows_the_skew_and_the_bounds() -> None:
    counts = np.array([[90, 5, 3, 2], [25, 25, 25, 25]])
    assert budget.fit(counts, [4, 4], [1, 1], 5).rows == (1, 4)
    assert budget.fit(counts, [4, 4], [1, 1], 5, minimum=2).rows == (2, 3)
    assert budget.fit(counts, [4, 4], [1, 1], 5, maximum=3).rows == (2, 3)
    assert budget.fit(counts, [4, 4], [1, 1], 100).rows == (4, 4)
    assert budget.fit(counts, [4, 4], [1, 1], 0).rows == (0, 0)


@pytest.mark.parametrize(
    ("limit", "over", "message"),
    [
        (19, {"minimum": 1}, "budget: found 19, expected at least 20, 1 rows per layer"),
        (99, {"minimum": 3, "maximum": 2}, "minimum rows per layer: found 3, expected 0 to the"),
        (99, {"minimum": -1}, "minimum rows per layer: found -1, expected 0 or more"),
        (-1, {}, "budget: found -1, expected at least 0"),
    ],
)
def test_a_shared_budget_that_cannot_be_met(limit: int, over: dict[str, int], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        budget.fit(np.ones((2, 4)), [4, 4], [10, 10], limit, **over)
    assert str(refused.value).startswith(f"hot rows: {message}")


def test_n_per_layer_means_n_slots_for_each_layer_in_all() -> None:
    counts = np.array([[90, 5, 3, 2], [25, 26, 24, 25]])
    built, found = budget.across(counts, FINGERPRINT, model(row_bytes={"0": 10, "2": 7}), slots=4)
    assert found.used == 4 and found.shortfall == 0
    assert built.geometry.hot_rows == {"0": 1, "2": 3}
    assert built.layers["0"].hot == (0,) and built.layers["2"].hot == (1, 0, 3)
    assert built.order is not None
    assert built.order[:5] == ((0, 0), (2, 1), (2, 0), (2, 3), (2, 2))
    assert rowmap.parse(built.to_bytes(), "rowmap.json") == built


def test_a_byte_budget_counts_the_bytes_of_each_layers_rows() -> None:
    counts = np.array([[90, 5, 3, 2], [25, 26, 24, 25]])
    built, found = budget.across(counts, FINGERPRINT, model(row_bytes={"0": 10, "2": 7}), budget=31)
    assert found.used == 31 and built.geometry.hot_rows == {"0": 1, "2": 3}
    assert budget.tier_bytes(built.geometry)[0] == 31
    with pytest.raises(FormatError, match="found both, expected either slots or bytes"):
        budget.across(counts, FINGERPRINT, model(), slots=1, budget=1)
    with pytest.raises(FormatError, match="found neither, expected either slots or bytes"):
        budget.across(counts, FINGERPRINT, model())
    with pytest.raises(FormatError, match=r"weights: shape: found \[1, 4\]"):
        budget.across(counts[:1], FINGERPRINT, model(), slots=1)


@given(cases())
def test_an_order_has_the_map_in_front_and_the_hottest_first(case: Case) -> None:
    built = budget.with_order(case.counts, FINGERPRINT, case.geometry)
    assert rowmap.parse(built.to_bytes(), "rowmap.json") == built
    assert built.layers == place(case.counts, FINGERPRINT, case.geometry).layers
    assert built.order is not None
    layers = case.geometry.moe_layers
    heat = [float(case.counts[layers.index(layer), expert]) for layer, expert in built.order]
    hot = sum(case.hot)
    for part, rows in ((heat[:hot], built.order[:hot]), (heat[hot:], built.order[hot:])):
        keys = [(-value, *row) for value, row in zip(part, rows, strict=True)]
        assert keys == sorted(keys)


def test_layers_counted_differently_are_compared_by_probability() -> None:
    counts = np.array([[30, 10], [6, 4]])
    shares = budget.probabilities(counts, [40, 10])
    assert shares.tolist() == [[0.75, 0.25], [0.6, 0.4]]
    assert budget.probabilities(counts, 40).tolist() == [[0.75, 0.25], [0.15, 0.1]]
    assert budget.probabilities(counts * 0, 0).tolist() == [[0, 0], [0, 0]]
    # A third of 3 million and of 9 million rows is a tie, and goes to the lower layer.
    third = budget.probabilities(np.array([[1000003], [3000009]]), [3000009, 9000027])
    assert third[0, 0] == third[1, 0]
    with pytest.raises(FormatError, match="rows: array"):
        budget.probabilities(counts, [1, 2, 3])
