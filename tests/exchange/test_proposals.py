"""Placement files of vLLM's open pull requests, and what a map becomes for writers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given

from rowmap_jobs.exchange import convert, proposals, slots
from rowmap_jobs.exchange.base import Counts, Layout
from tests.exchange.made import line_of, placements
from tests.formats.samples import row_map


def test_ranks_of_experts() -> None:
    raw = proposals.write_expert_to_ep_rank({3: [2, 0, 3, 1], 4: [0, 2, 1, 3]}, 2)
    assert json.loads(raw) == {"expert_to_ep_rank": [0, 1, 0, 1]}


@pytest.mark.parametrize(
    ("table", "ranks", "said"),
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
    table: dict[int, list[int]], ranks: int, said: str
) -> None:
    assert said in line_of(lambda: proposals.write_expert_to_ep_rank(table, ranks))


@given(placements())
def test_slots_of_each_layer_or_of_all(table: dict[int, list[int]]) -> None:
    data = json.loads(proposals.write_initial_expert_map(table, sorted(table)))
    rows = data if isinstance(data[0], list) else [data] * len(table)
    assert dict(zip(sorted(table), rows, strict=True)) == table


def test_a_layer_that_is_missing_is_not_written() -> None:
    assert "layers" in line_of(lambda: proposals.write_initial_expert_map({3: [0]}, [3, 4]))


def test_a_map_in_the_terms_of_the_writers() -> None:
    ranking = convert.from_map(row_map())
    assert ranking.order == {0: (3, 1, 2, 0), 2: (0, 1, 2, 3)} and ranking.hot == {0: 2, 2: 2}


def test_a_placement_by_load_gives_the_busiest_expert_the_second_slot() -> None:
    layout = Layout((3, 9), (4, 4), None)
    decode = np.array([[[90, 5, 5, 6], [5, 5, 80, 6]]], dtype=np.int64)
    counts = Counts(layout, decode, None, None, ("0",), False)
    placed = slots.balanced(counts, ranks=2, slots=6)
    assert placed[3].count(0) >= 2
    assert placed[9].count(2) >= 2 and slots.check_slots(placed, "x", "slots") == 4
    assert sorted(slots.balanced(counts, 2)[3]) == [0, 1, 2, 3]
    assert line_of(lambda: slots.balanced(counts, 3))
