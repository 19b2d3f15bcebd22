"""Ranking: the hottest rows of a layer, the same on every machine and for every number type."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.placement import (
    hot_mask,
    map_mask,
    never_seen,
    place,
    ranking,
    top_mask,
)
from tests.formats.samples import FINGERPRINT, geometry
from tests.placement.cases import Case, cases


def best_by_trying(counts: Any, experts: int, hot: int) -> tuple[int, ...]:
    """Of all sets of `hot` rows the one that leaves least cold; among equals the lowest ids."""
    sets = combinations(range(experts), hot)
    return min(sets, key=lambda rows: (sum(counts[:experts]) - sum(counts[list(rows)]), rows))


@given(cases())
def test_placement_is_what_trying_every_set_finds(case: Case) -> None:
    built = place(case.counts, FINGERPRINT, case.geometry)
    for index, layer in enumerate(case.geometry.moe_layers):
        wanted = best_by_trying(case.counts[index], case.experts[index], case.hot[index])
        assert tuple(sorted(built.layers[str(layer)].hot)) == wanted


@given(cases())
def test_a_map_is_a_partition_in_the_order_of_heat(case: Case) -> None:
    built = place(case.counts, FINGERPRINT, case.geometry)
    assert rowmap.parse(built.to_bytes(), "rowmap.json") == built
    for index, layer in enumerate(case.geometry.moe_layers):
        rows = built.layers[str(layer)]
        order = rows.hot + rows.cold[::-1]
        assert sorted(order) == list(range(case.experts[index]))
        heat = case.counts[index, list(order)].tolist()
        assert heat == sorted(heat, reverse=True)


@given(cases())
def test_the_mask_is_the_front_of_the_ranking(case: Case) -> None:
    mask = hot_mask(case.counts, case.geometry)
    assert mask.sum(axis=1).tolist() == case.hot
    built = place(case.counts, FINGERPRINT, case.geometry)
    assert (map_mask(built, mask.shape[1]) == mask).all()


@given(cases(), st.integers(1, 1000))
def test_scaled_counts_give_the_same_map(case: Case, factor: int) -> None:
    counts = np.rint(case.counts * 4).astype(np.int64)
    whole = place(counts, FINGERPRINT, case.geometry)
    assert place(counts * factor, FINGERPRINT, case.geometry) == whole
    assert place(counts / 2.0, FINGERPRINT, case.geometry) == whole


@given(st.permutations(range(7)), st.integers(0, 7), st.integers(0, 1 << 30))
def test_other_names_for_experts_rename_the_map(names: list[int], hot: int, seed: int) -> None:
    counts = np.random.default_rng(seed).permutation(50)[:7][None, :]
    shape = geometry(experts=7, hot_rows=hot, moe_layers=(4,), top_k=1)
    renamed = np.empty_like(counts)
    renamed[:, names] = counts
    before = place(counts, FINGERPRINT, shape).layers["4"]
    after = place(renamed, FINGERPRINT, shape).layers["4"]
    assert after.hot == tuple(names[e] for e in before.hot)
    assert after.cold == tuple(names[e] for e in before.cold)


@given(cases(), st.integers(0, 1 << 30))
def test_the_order_of_transcripts_does_not_matter(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = rng.integers(0, 9, size=(5, *case.counts.shape))
    total = parts.sum(axis=0)
    again = parts[rng.permutation(5)].sum(axis=0)
    built = place(total, FINGERPRINT, case.geometry)
    assert place(again, FINGERPRINT, case.geometry).to_bytes() == built.to_bytes()


@given(cases())
def test_one_more_hot_row_is_never_colder(case: Case) -> None:
    more = [min(h + 1, e) for h, e in zip(case.hot, case.experts, strict=True)]
    few = top_mask(case.counts, case.experts, case.hot)
    many = top_mask(case.counts, case.experts, more)
    assert (many | ~few).all()


def test_many_placements_at_once_are_each_their_own() -> None:
    counts = np.random.default_rng(1).integers(0, 9, size=(4, 5, 3, 7))
    at_once = top_mask(counts, [7, 5, 6], [2, 5, 0])
    for place_in in np.ndindex(4, 5):
        one = top_mask(counts[place_in], [7, 5, 6], [2, 5, 0])
        assert (at_once[place_in] == one).all()


def test_the_boundary_is_exact_where_a_float_would_tie() -> None:
    big = 2**53
    counts = np.array([[big, big + 1, big - 1]])
    assert ranking(counts).tolist() == [[1, 0, 2]]
    assert top_mask(counts, [3], [1]).tolist() == [[False, True, False]]


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int32, np.float32, np.float64]
)
def test_any_number_type_ranks_alike(dtype: type) -> None:
    """An unsigned count negated before it is widened ranks the experts never seen first."""
    counts = np.array([[0, 127, 3, 0, 3]])
    assert ranking(counts.astype(dtype)).tolist() == [[1, 2, 4, 0, 3]]
    assert top_mask(counts.astype(dtype), [5], [2]).tolist() == [[False, True, True, False, False]]


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        (np.array([[1, -1]]), "found -1 to 1, expected finite counts of 0 or more"),
        (np.array([[1.0, np.nan]]), "found nan to nan, expected finite"),
        (np.array([[1.0, np.inf]]), "found 1.0 to inf, expected finite"),
        (np.array([[1, 2**63]], dtype=np.uint64), "found 9223372036854775808, expected at most"),
        (np.array([[True, False]]), "found bool with 2 dimensions"),
        (np.array([["a"]]), "found <U1 with 2 dimensions"),
        (np.array([1, 2]), "found int64 with 1 dimensions, expected integers or floats"),
        (np.array([[object()]]), "found object with 2 dimensions"),
    ],
)
def test_what_is_no_count_is_refused(counts: Any, found: str) -> None:
    with pytest.raises(FormatError) as refused:
        ranking(counts)
    assert str(refused.value).startswith("counts: array: ") and found in str(refused.value)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (2, 3)])
def test_counts_of_another_shape_are_refused(shape: tuple[int, int]) -> None:
    counts = np.ones(shape, dtype=np.int64)
    for use in (hot_mask, never_seen, lambda c, g: place(c, FINGERPRINT, g)):
        with pytest.raises(FormatError, match=r"counts: shape: .* at least 4 experts"):
            use(counts, geometry())


def test_experts_never_seen_are_last_by_id_and_listed() -> None:
    counts = np.array([[0, 7, 0, 1], [1, 2, 3, 4]])
    assert ranking(counts)[0].tolist() == [1, 3, 0, 2]
    assert never_seen(counts, geometry()) == {"0": (0, 2)}
    narrow = geometry(experts={"0": 3, "2": 4})
    assert never_seen(np.array([[0, 7, 1, 0], [0, 2, 3, 4]]), narrow) == {"0": (0,), "2": (0,)}
