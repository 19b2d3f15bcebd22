"""Placement files of vLLM's open pull requests, and what our own artifacts become for writers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given

from rowmap_jobs.exchange import convert, proposals
from tests.exchange.made import line_of, placements
from tests.formats.samples import census, row_map


def test_ranks_of_experts() -> None:
    raw = proposals.write_expert_to_ep_rank({3: [2, 0, 3, 1], 4: [0, 2, 1, 3]}, 2)
    assert json.loads(raw) == {"expert_to_ep_rank": [0, 1, 0, 1]}


@pytest.mark.parametrize(
    ("slots", "ranks", "said"),
    [
        ({3: [0, 1, 0]}, 1, "3 slots for 2 experts"),
        ({3: [0, 1, 2]}, 2, "3 experts on 2"),
        ({3: [0, 1], 4: [1, 0]}, 2, "layer 4: found another placement"),
        ({3: [0, 2]}, 1, "no slot for expert 1"),
        ({}, 1, "no layer"),
        ({3: []}, 1, "0 slots"),
    ],
)
def test_one_map_for_all_layers_cannot_say_more(
    slots: dict[int, list[int]], ranks: int, said: str
) -> None:
    assert said in line_of(lambda: proposals.write_expert_to_ep_rank(slots, ranks))


@given(placements())
def test_slots_of_each_layer_or_of_all(slots: dict[int, list[int]]) -> None:
    data = json.loads(proposals.write_initial_expert_map(slots, sorted(slots)))
    rows = data if isinstance(data[0], list) else [data] * len(slots)
    assert dict(zip(sorted(slots), rows, strict=True)) == slots


def test_a_layer_that_is_missing_is_not_written() -> None:
    assert "layers" in line_of(lambda: proposals.write_initial_expert_map({3: [0]}, [3, 4]))


def test_a_census_and_a_map_in_the_terms_of_the_writers() -> None:
    sample = census()
    counts = convert.from_census(sample)
    assert counts.layout.layer_ids == tuple(sample.layer_ids.tolist()) and counts.per_sequence
    assert (counts.decode.sum(axis=0) == sample.decode()).all()
    assert counts.prefill is not None and counts.rows is not None
    assert (counts.rows == sample.rows).all()
    ranking = convert.from_map(row_map())
    assert ranking.order == {0: (3, 1, 2, 0), 2: (0, 1, 2, 3)} and ranking.hot == {0: 2, 2: 2}
