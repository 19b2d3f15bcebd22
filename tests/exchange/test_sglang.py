"""SGLang: placements and counts from .pt, .json and JSON text; exactly one key out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import sglang
from rowmap_jobs.exchange.base import Counts, Ranking
from tests.exchange.made import line_of, passes_or_refuses, placements, tables
from tests.exchange.torch_bytes import genuine, keyed, number, tensor, text
from tests.exchange.torch_bytes import torch_zip as made


def read(raw: bytes | dict[str, Any], **options: Any) -> Any:
    return sglang.read(raw if isinstance(raw, bytes) else json.dumps(raw).encode(), "x", **options)


def refused(raw: bytes | dict[str, Any], **options: Any) -> str:
    return line_of(lambda: read(raw, **options))


def test_the_dump_of_mode_stat_gives_sums_of_absolute_layers() -> None:
    counts = read(genuine("sglang_stat"))
    assert isinstance(counts, Counts) and not counts.per_sequence
    # Layer 0 of the file is dense: a row of zeros, which is no layer whose expert 0 is hot.
    assert counts.layout.layer_ids == (1, 2, 3) and counts.layout.experts == (8, 8, 8)
    assert counts.decode.shape == (1, 3, 8) and counts.decode.dtype == np.int64
    assert counts.decode.sum(axis=2).tolist() == [[18, 18, 18]]
    assert "layers without a count (dense, or not recorded) left out: 0" in counts.notes
    assert any("3 buffered forward passes" in note for note in counts.notes)


def test_records_of_tokens_keep_prefill_apart_from_decode() -> None:
    counts = read(genuine("sglang_per_token"))
    assert counts.rows.tolist() == [[5, 2]] and counts.layout.top_k == (2, 2, 2)
    assert counts.prefill.sum(axis=2).tolist() == [[10, 10, 10]]
    assert counts.decode.sum(axis=2).tolist() == [[4, 4, 4]]


def test_records_of_passes_are_mapped_to_logical_experts() -> None:
    counts = read(genuine("sglang_per_pass"))
    assert counts.decode.sum(axis=2).tolist() == [[8, 8, 8]] and counts.rows is None


def record(number: int = 1, **over: Any) -> dict[str, Any]:
    ids = [[[-1, -1, -1]] * 2, [[0, 1, -1], [3, 1, -1]]]
    base = {"forward_pass_id": number, "rank": 0, "gatherer_key": "primary"}
    return base | {"input_ids": [5, 6], "forward_mode": 2, "topk_ids_of_layer": ids} | over


def dump(*records: Any, slots: Any = None, **over: Any) -> dict[str, Any]:
    slots = [[0, 1, 2, 3], [0, 1, 2, 2]] if slots is None else slots
    return {"records": list(records), "last_physical_to_logical_map": slots} | over


def test_physical_ids_become_logical_ones() -> None:
    counts = read(dump(record()), experts=4)
    # Slots 0, 1, 3, 1 of layer 1 hold the experts 0, 1, 2, 1.
    assert counts.layout.layer_ids == (1,)
    assert counts.decode.tolist() == [[[1, 2, 1, 0]]] and counts.rows.tolist() == [[0, 2]]


def test_draft_passes_are_left_out_and_verify_passes_said() -> None:
    draft = record(2, forward_mode=6, topk_ids_of_layer=[[[0, 1, -1]]] * 2, input_ids=[7])
    counts = read(dump(record(), draft, record(3, forward_mode=5)), experts=4)
    assert counts.decode.sum() == 8
    assert "draft passes were left out" in counts.notes
    assert any("rejected drafts included" in note for note in counts.notes)


ALIKE = [[[-1] * 3] * 2, [[0, 1, -1]] * 2]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([record(topk_ids_of_layer=[[[0, 0, -1]] * 2] * 2)], "an id twice in a row"),
        ([record(topk_ids_of_layer=[[[0, 1, -1], [2, -1, -1]]] * 2)], "2 experts in every row"),
        ([record(topk_ids_of_layer=[[[0, 4, -1]] * 2] * 2)], "ids below 4"),
        ([record(topk_ids_of_layer=[[[0, 1, -1]]] * 2)], "2 as input_ids"),
        ([record(topk_ids_of_layer=[[[0, 1]] * 2] * 3)], "3 layers"),
        ([record(topk_ids_of_layer=[[[0, 1], [-1, -1]], [[0, 1], [2, 3]]])], "in every MoE layer"),
        ([record(), record()], "the same pass twice"),
        ([record(forward_pass_id=None)], "no forward_pass_id"),
        ([record(forward_mode=9)], "forward_mode: found 9"),
        ([record(forward_mode=True)], "forward_mode: found True"),
        ([record(topk_ids_of_layer="ids")], "a tensor of 3 dimensions"),
        ([[]], "records[0]: found list"),
        ([], "0 records"),
        (
            [record(n, topk_ids_of_layer=ALIKE) for n in range(4)],
            "8 rows that choose the same experts",
        ),
        ([record(topk_ids_of_layer=[[[-1, -1]] * 2] * 2)], "no selection in any layer"),
        (
            [{"forward_pass_id": 1, "global_physical_count": [[1, -1, 0, 0]] * 2}],
            "counts of 0 or more",
        ),
        ([{"forward_pass_id": 1, "global_physical_count": [[1, 0]] * 2}], "[2, 2]"),
    ],
)
def test_records_that_cannot_be_routing_are_refused(records: list[Any], said: str) -> None:
    assert said in refused(dump(*records))


def test_a_dump_whose_slots_lie_is_refused() -> None:
    assert "0 to 2" in refused(dump(record(), slots=[[0, 3], [1, 2]]), experts=3)
    assert "last_physical_to_logical_map" in refused({"records": [record()]})
    assert "ids to 193514046488577" in refused(dump(record(), slots=[[0, 193514046488577]]))
    assert "cells" in refused(dump(record(), slots=[[0, 65535]] * 4000))
    assert "the key more" in refused(dump(record(), more=1))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"physical_to_logical_map": [[0]], "metadata": 1}, "found the key metadata too"),
        ({"physical_to_logical_map": [[0]], "logical_count": [[1]]}, "exactly one of"),
        ({"logical_count": [[1]], "layers": 1}, "found the key layers"),
        ({}, "exactly one of"),
        ({"counts": [[1]]}, "exactly one of"),
        ({"logical_count": [[0, 0], [0, 0]]}, "no selection in any layer"),
        ({"logical_count": [[9, 0], [7, 0]]}, "all selections of every layer on one expert"),
        ({"logical_count": [[1, -1], [1, 1]]}, "layer 0 expert 1: found a negative count"),
        ({"logical_count": [[[1, -1]], [[1, 3]]]}, "a negative count"),
        ({"logical_count": [[1 << 41, 1]]}, "a count beyond 2^40"),
        ({"logical_count": [[1, 2], [1]]}, "found 1 values"),
        ({"logical_count": [[1.5, 2]]}, "found 1.5"),
        ({"logical_count": [[True, 2]]}, "found bool"),
        ({"logical_count": [["1", 2]]}, "found str"),
        ({"logical_count": [[1 << 70, 2]]}, "an integer beyond 62 bits"),
        ({"logical_count": [[]]}, "an empty list"),
        ({"logical_count": []}, "an empty list"),
        ({"logical_count": 3}, "found int"),
        ({"logical_count": [1, 2]}, "found int"),
        ({"logical_count": [[[[1]]]]}, "found list"),
        ({"physical_to_logical_map": [[0, 2]]}, "no slot for expert 1"),
        ({"physical_to_logical_map": [[0, 1], [0, 0]]}, "layer 1: found no slot for expert 1"),
        ({"physical_to_logical_map": [[0, -1]]}, "found expert -1"),
        ({"physical_to_logical_map": [[0, 1 << 17]]}, "ids below 65536"),
    ],
)
def test_json_that_sglang_would_misread_is_refused(data: dict[str, Any], said: str) -> None:
    assert said in refused(data)


def test_experts_of_the_model_are_held_against_the_file() -> None:
    assert "8 of the model" in refused({"logical_count": [[1, 2]]}, experts=8)
    assert "expert 3" in refused({"physical_to_logical_map": [[0, 1, 2, 3]]}, experts=3)


@pytest.mark.parametrize(
    "value",
    [
        tensor((4096, 4096, 8), (0, 0, 0), 1),
        tensor((1, 1, 1, 1), (1, 1, 1, 1), 1),
        tensor((0, 4), (4, 1), 1),
        tensor((1, 1), (1, 1), 1, kind="BoolStorage"),
        number(3),
        text("x"),
    ],
)
def test_a_tensor_that_is_no_table_of_counts_is_refused(value: bytes) -> None:
    for key in ("logical_count", "physical_to_logical_map"):
        assert "x: " in refused(made(keyed(key, value), {"0": bytes(8)}))


def test_a_tensor_file_may_have_many_small_counts(tmp_path: Path) -> None:
    body = np.array([[5, 6], [7, 8]], dtype="<i8").tobytes()
    raw = made(keyed("logical_count", tensor((2, 2), (2, 1), 4)), {"0": body})
    assert read(raw).decode.tolist() == [[[5, 6], [7, 8]]]


@given(tables(), st.integers(0, 3))
def test_counts_come_back_from_the_one_key_that_is_written(counts: Counts, more: int) -> None:
    layers = counts.layout.layer_ids[-1] + 1 + more
    raw = sglang.write_counts(counts, layers)
    data = json.loads(raw)
    assert list(data) == ["logical_count"] and len(data["logical_count"]) == layers
    again = read(raw)
    assert again.layout.layer_ids == counts.layout.layer_ids
    assert (again.decode == counts.decode.sum(axis=0)).all()


@given(placements(), st.integers(0, 3))
def test_a_placement_comes_back_for_every_layer(slots: dict[int, list[int]], more: int) -> None:
    layers = max(slots) + 1 + more
    data = json.loads(sglang.write_map(slots, layers))
    assert list(data) == ["physical_to_logical_map"]
    table = data["physical_to_logical_map"]
    assert len(table) == layers and all(table[layer] == row for layer, row in slots.items())
    ranking = read(json.dumps(data).encode())
    assert isinstance(ranking, Ranking) and ranking.complete
    for layer, order in ranking.order.items():
        copies = [table[layer].count(expert) for expert in order]
        assert copies == sorted(copies, reverse=True) and sorted(order) == list(range(len(order)))


def test_a_layer_beyond_the_model_is_not_written() -> None:
    line = line_of(lambda: sglang.write_map({3: [0]}, 3))
    assert "found layer 3, expected 0 to 2" in line


@given(st.binary(max_size=100))
def test_random_bytes_never_pass(raw: bytes) -> None:
    assert passes_or_refuses(lambda: read(raw)) is None
