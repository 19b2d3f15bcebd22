"""TensorRT-LLM: load balancer YAML and statistics folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import safe_yaml, safetensors_data, trtllm
from rowmap_jobs.exchange.base import Counts, Layout
from tests.exchange.made import line_of, passes_or_refuses, placements
from tests.exchange.routings import routings, same, summed

GOOD = """initial_global_assignments:
  3: [1, 0, 2, 1]
  4: [2, 1, 0, 0]
num_slots: 4
layer_updates_per_iter: 0
"""


def test_the_documented_form_is_read_with_absolute_layers() -> None:
    ranking = trtllm.read(GOOD.encode(), "x.yaml")
    assert ranking.order == {3: (1, 0, 2), 4: (0, 2, 1)} and ranking.complete
    assert ranking.notes[0] == "covers 2 layers: 3-4"


def test_block_lists_and_an_online_configuration() -> None:
    block = "initial_global_assignments:\n  3:\n  - 1\n  - 0\nnum_slots: 2\n"
    assert trtllm.read(block.encode(), "x").order == {3: (1, 0)}
    moving = GOOD.replace("per_iter: 0", "per_iter: 2").encode()
    assert "moves experts away" in trtllm.read(moving, "x").notes[-1]
    online = b"num_slots: 288\nlayer_updates_per_iter: 2\n"
    assert "for online balancing" in line_of(lambda: trtllm.read(online, "x"))


def test_a_map_that_lacks_the_draft_layer_is_refused_by_its_number() -> None:
    line = line_of(lambda: trtllm.read(GOOD.encode(), "x", layers=(3, 4, 61)))
    assert "found no layer 61, expected layers 3-4, 61" in line
    with_gap = GOOD.replace("  4:", "  6:").encode()
    assert trtllm.read(with_gap, "x").notes[0] == "covers 2 layers: 3, 6; nothing for 4-5"
    assert "no layer 4" in line_of(lambda: trtllm.write({3: [0]}, (3, 4)))


def bomb() -> str:
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (bomb(), "line 1: found an anchor or alias"),
        ("a: !!python/object/apply:os.system ['true']", "found the tag tag:yaml.org,2002:python"),
        ("a: !x 1", "found the tag !x"),
        ("a: 1\na: 2", "found the key a twice"),
        ("1: [0]\n1: [1]", "found the key 1 twice"),
        ("a: {b: {c: {d: {e: {f: {g: {h: {i: 1}}}}}}}}", "a nesting of 9"),
        ("[" * 20, "a nesting of 9"),
        ("[" * 100000, "nesting"),
        ("? [1, 2]\n: 3", "a collection as a key"),
        ("a: 1\n---\nb: 2", "a second document"),
        ("a: [1", "line 2 column 1"),
        ("a: \x00", "x: "),
        ("a: 0o17\nnum_slots: 017", "without leading zeros"),
    ],
)
def test_yaml_that_would_run_or_grow_is_refused(text: str, said: str) -> None:
    assert said in line_of(lambda: safe_yaml.load(text.encode("utf-8"), "x"))
    assert line_of(lambda: trtllm.read(text.encode("utf-8"), "x"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("num_slots: 4", "num_slots: 5"), "num_slots: found 5, expected 4"),
        (("num_slots: 4", "num_slots: four"), "num_slots: found four"),
        (("num_slots: 4", "slots: 4"), "found ['slots']"),
        (("[2, 1, 0, 0]", "[2, 1, 0]"), "layer 4: found 3 slots"),
        (("[2, 1, 0, 0]", "[2, 0, 0, 0]"), "layer 4: found no slot for expert 1"),
        (("[2, 1, 0, 0]", "[2, 1, 0, -1]"), "found expert -1"),
        (("[2, 1, 0, 0]", "[2, 1, 0, x]"), "initial_global_assignments.4: found x"),
        (("[2, 1, 0, 0]", "[2, 1, 0, 1.5]"), "found 1.5"),
        (("[2, 1, 0, 0]", "[2, 1, 0, true]"), "found True"),
        (("[2, 1, 0, 0]", "7"), "initial_global_assignments: found 4"),
        (("  4:", "  four:"), "found four"),
        (("  4:", "  -4:"), "layer -4"),
        (("per_iter: 0", "per_iter: -1"), "layer_updates_per_iter: found -1"),
    ],
)
def test_a_map_with_a_hole_or_another_type_is_refused(change: tuple[str, str], said: str) -> None:
    assert change[0] in GOOD
    assert said in line_of(lambda: trtllm.read(GOOD.replace(*change).encode(), "x"))


@given(placements())
def test_a_placement_comes_back_and_any_yaml_reader_reads_it(slots: dict[int, list[int]]) -> None:
    raw = trtllm.write(slots, slots)
    data = yaml.safe_load(raw)
    assert data["initial_global_assignments"] == slots and data["layer_updates_per_iter"] == 0
    assert safe_yaml.load(raw, "x") == data
    ranking = trtllm.read(raw, "x", layers=slots)
    assert sorted(ranking.order) == sorted(slots)


@given(st.binary(max_size=60) | st.text(" \n:-[]{},&*!'\"#|>%@?ab01", max_size=60).map(str.encode))
def test_random_bytes_never_pass(raw: bytes) -> None:
    assert passes_or_refuses(lambda: trtllm.read(raw, "x")) is None


SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("abc ", max_size=5)


@given(st.dictionaries(st.text("abc", max_size=4), SCALARS | st.lists(SCALARS, max_size=4)))
def test_plain_yaml_means_the_same_as_in_the_library(data: dict[str, Any]) -> None:
    assert safe_yaml.load(yaml.safe_dump(data).encode(), "x") == data


Ranks = list[dict[str, list[int]]]


def folder(path: Path, ranks: Ranks, meta: Any = None, dtype: str = "<i8") -> Path:
    path.mkdir(exist_ok=True)
    wanted = {"num_experts": 3, "num_experts_per_token": 2} if meta is None else meta
    (path / "meta_info.json").write_text(json.dumps(wanted))
    for rank, tables in enumerate(ranks):
        arrays = {key: np.array(row, dtype=dtype) for key, row in tables.items()}
        (path / f"rank{rank}.safetensors").write_bytes(safetensors_data.to_bytes(arrays, {}))
    return path


TWO: Ranks = [
    {"100_3": [1, 1, 0], "100_5": [0, 1, 1], "101_3": [2, 1, 1], "101_5": [1, 1, 2]},
    {"100_3": [1, 0, 1], "100_5": [1, 1, 0]},
]


def test_ranks_and_iterations_add_up(tmp_path: Path) -> None:
    where = folder(tmp_path, TWO)
    (where / "rank0_raw.safetensors").write_bytes(b"something else")
    (where / "rank0_numtokens.json").write_text("{}")
    counts = trtllm.read_statistics(where, "stats")
    assert counts.layout.layer_ids == (3, 5) and counts.layout.top_k == (2, 2)
    assert counts.decode.tolist() == [[[4, 2, 2], [2, 3, 3]]] and counts.rows is not None
    assert counts.rows.tolist() == [[0, 4]] and not counts.per_sequence
    assert counts.notes[0] == "iterations 100-101 of 2 ranks added up"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([{"100_3": [1, 1, 0], "102_3": [1, 1, 0]}], "found no iteration 101"),
        (
            [{"100_3": [1, 1, 0], "101_3": [1, 1, 0], "100_4": [1, 1, 0]}],
            "layer 4: found no counts of iteration 101",
        ),
        ([{"100_3": [1, 1, 0], "100_4": [2, 1, 1]}], "layer 4: found 4 selections, expected 2"),
        ([{"100_3": [1, 1, 1]}], "layer 3: found 3 selections"),
        ([{"100_3": [4, 0, 0]}], "counts"),
        ([{"100_3": [3, 1, 0], "100_4": [2, 1, 1]}], "layer 3: found 4 selections, 3 on one"),
        ([{"100_3": [2, 1, -1]}], "a negative or huge count"),
        ([{"100_3": [1, 1]}], "int64 [2]"),
        ([{"3": [1, 1, 0]}], "rank0.safetensors: 3: found"),
        ([{"100_-3": [1, 1, 0]}], "rank0.safetensors: 100_-3: found"),
        ([{"100_3": [0, 0, 0]}], "no selection in any layer"),
        ([{}], "0 layers"),
        ([], "rank*.safetensors"),
    ],
)
def test_statistics_that_are_not_whole_are_refused(tmp_path: Path, ranks: Ranks, said: str) -> None:
    where = folder(tmp_path, ranks)
    assert said in line_of(lambda: trtllm.read_statistics(where, "stats"))


def test_a_rank_that_is_missing_cut_or_no_file_is_refused(tmp_path: Path) -> None:
    where = folder(tmp_path, [*TWO, TWO[0]])
    third = where / "rank2.safetensors"
    raw = third.read_bytes()
    third.write_bytes(raw[:-3])
    assert "rank2.safetensors" in line_of(lambda: trtllm.read_statistics(where, "stats"))
    (where / "rank1.safetensors").unlink()
    third.write_bytes(raw)
    assert "no rank1.safetensors" in line_of(lambda: trtllm.read_statistics(where, "stats"))
    (where / "rank1.safetensors").symlink_to(third)
    assert "no rank1.safetensors" in line_of(lambda: trtllm.read_statistics(where, "stats"))
    (where / "meta_info.json").unlink()
    assert "meta_info.json" in line_of(lambda: trtllm.read_statistics(where, "stats"))
    assert "folder" in line_of(lambda: trtllm.read_statistics(where / "none", "stats"))


@pytest.mark.parametrize(
    "meta", [{}, [], {"num_experts": 0, "num_experts_per_token": 2}, {"num_experts": True}]
)
def test_statistics_without_their_numbers_are_refused(tmp_path: Path, meta: Any) -> None:
    where = folder(tmp_path, TWO, meta)
    assert "meta_info.json: num_exp" in line_of(lambda: trtllm.read_statistics(where, "stats"))


def test_a_layer_with_other_rows_can_be_skipped_by_name(tmp_path: Path) -> None:
    where = folder(tmp_path, [{"1_3": [1, 1, 0], "1_61": [2, 1, 1]}])
    assert "layer 61" in line_of(lambda: trtllm.read_statistics(where, "stats"))
    counts = trtllm.read_statistics(where, "stats", skip=(61,))
    assert counts.layout.layer_ids == (3,)


@given(made=routings())
def test_statistics_that_are_written_are_counted_the_same(
    made: Counts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    where = tmp_path_factory.mktemp("stats")
    alone = made.decode.sum(axis=0).max(axis=1) == made.decode.sum(axis=(0, 2))
    if passes_or_refuses(lambda: trtllm.write_statistics(made, where) or True) is None:
        # One expert a layer has it all: that is what a placeholder looks like.
        assert alone.all() and not list(where.iterdir())
        return
    assert sorted(path.name for path in where.iterdir()) == ["meta_info.json", "rank0.safetensors"]
    again = trtllm.read_statistics(where, "stats")
    decode = replace(summed(made), prefill=None)
    assert again.rows is not None and decode.rows is not None
    assert again.rows.tolist() == [[0, int(decode.rows[0, 1])]]
    assert same(again, decode, but=["names", "rows"])


def test_statistics_have_the_keys_and_types_of_the_recorder(tmp_path: Path) -> None:
    trtllm.write_statistics(decoded([[4, 2, 2], [2, 3, 3]]), tmp_path)
    meta = json.loads((tmp_path / "meta_info.json").read_text())
    assert meta == {"num_experts": 3, "num_experts_per_token": 2}
    arrays = safetensors_data.read(tmp_path / "rank0.safetensors", "x").arrays
    assert {key: row.tolist() for key, row in arrays.items()} == {
        "0_3": [4, 2, 2],
        "0_5": [2, 3, 3],
    }
    assert {row.dtype.str for row in arrays.values()} == {"<i8"}


def decoded(table: list[list[int]], top_k: tuple[int, ...] | None = (2, 2)) -> Counts:
    """Decode counts of layers 3 and 5, one row of the table each."""
    decode = np.array([table], dtype=np.int64)
    layout = Layout((3, 5), (len(table[0]),) * 2, top_k)
    return Counts(layout, decode, None, None, ("0",), False)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (decoded([[4, 2, 2], [2, 3, 3]], None), "top-k: found none"),
        (decoded([[4, 2, 2], [2, 3, 3]], (2, 1)), "top-k: found [1, 2], expected one number"),
        (
            replace(decoded([[4, 2, 2], [2, 3, 3]]), layout=Layout((3, 5), (3, 2), (2, 2))),
            "experts: found [2, 3], expected one number",
        ),
        (decoded([[4, 2, 2], [2, 2, 2]]), "layer 5: found 6 selections, expected 8"),
        (decoded([[1, 1, 1], [1, 1, 1]]), "layer 3: found 3 selections"),
        (decoded([[5, 2, 1], [2, 3, 3]]), "layer 3: found 8 selections, 5 on one"),
        (decoded([[0, 0, 0], [0, 0, 0]]), "no selection in any layer"),
        (decoded([[8, 0, 0], [8, 0, 0]]), "this is a placeholder"),
    ],
)
def test_what_statistics_cannot_say_is_not_written(
    counts: Counts, said: str, tmp_path: Path
) -> None:
    assert said in line_of(lambda: trtllm.write_statistics(counts, tmp_path))
    assert not list(tmp_path.iterdir())
