"""Routing as JSON lines, in b12x's form and the plain one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import records
from rowmap_jobs.exchange.base import Counts, Layout
from tests.exchange.made import line_of, passes_or_refuses
from tests.exchange.routings import routings, same, summed

GEOMETRY = {3: 20, 7: 18}


def save(folder: Path, *lines: Any, name: str = "x.jsonl") -> Path:
    path = folder / name
    raw = b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


def geometry(counts: Counts) -> dict[int, int]:
    return dict(zip(counts.layout.layer_ids, counts.layout.experts, strict=True))


def b12x(layer: Any, ids: Any, phase: Any = "decode") -> dict[str, Any]:
    return {"layer": layer, "phase": phase, "expert_ids": ids}


def test_b12x_keeps_repeated_ids_and_skips_unused_places(tmp_path: Path) -> None:
    """The example of its own documentation."""
    path = save(
        tmp_path,
        b12x("layer.7", [17, 3, 17, -1]),
        b12x("layer.3", [17]),
        b12x("layer.7", [3], "prefill"),
    )
    counts = records.read(path, GEOMETRY)
    assert counts.layout == Layout((3, 7), (20, 18), None) and counts.rows is None
    assert counts.decode[0, 1, 17] == 2 and counts.decode[0, 1, 3] == 1
    assert counts.decode.sum() == 4 and not counts.per_sequence
    assert counts.prefill is not None and counts.prefill.sum() == counts.prefill[0, 1, 3] == 1


def test_b12x_with_top_k_has_rows(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        b12x("layer.7", [17, 3, -1, -1, 5, 4]),
        b12x("layer.3", [17, 3]),
        b12x("layer.3", [19, 3]),
        name="x.jsonl.gz",
    )
    counts = records.read(path, GEOMETRY, top_k=2)
    assert counts.rows is not None and counts.rows.tolist() == [[0, 2]]
    assert counts.layout.top_k == (2, 2)


def test_the_plain_form_has_sequences_phases_and_rows(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        {"layer": 3, "experts": [1, 2], "sequence": "a", "phase": "prefill"},
        {"layer": 7, "experts": [[5, 6, 7]], "sequence": "a", "phase": "prefill"},
        {"layer": 7, "experts": [[1, 2, 3], [3, 2, 0]], "sequence": 5},
        {"layer": 3, "experts": [[1, 2], [0, 1]], "sequence": 5},
    )
    counts = records.read(path, GEOMETRY)
    assert counts.names == ("a", "5") and counts.per_sequence
    assert counts.layout == Layout((3, 7), (20, 18), (2, 3))
    assert counts.rows is not None and counts.rows.tolist() == [[1, 0], [0, 2]]
    assert counts.decode[1, 0, :3].tolist() == [1, 2, 1]
    assert counts.decode[1, 1, :4].tolist() == [1, 1, 2, 2]
    assert counts.prefill is not None and counts.prefill[0, 1, 5:8].tolist() == [1, 1, 1]


def test_without_sequences_all_lines_are_one(tmp_path: Path) -> None:
    path = save(tmp_path, {"layer": 3, "experts": [1]}, {"layer": 7, "experts": [2]})
    counts = records.read(path, GEOMETRY)
    assert counts.names == ("all",) and not counts.per_sequence


PLAIN = {"layer": 3, "experts": [1, 2]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "lines: found none, expected a line of routing"),
        ([b"[1]"], "line 1: found list, expected a JSON object"),
        ([b"{"], "line 1: line 1 column 2: found Expecting"),
        ([{"layer": 3}], "line 1: found ['layer'], expected expert_ids or experts"),
        ([{**PLAIN, "expert_ids": [1]}], "expected expert_ids or experts, the same one in every"),
        ([PLAIN, b12x("layer.3", [1])], "line 2: found ['expert_ids', 'layer', 'phase'], expected"),
        ([{**PLAIN, "layer": 4}], "line 1 layer: found 4, expected one of the 2 layers"),
        ([{**PLAIN, "layer": "3"}], "line 1 layer: found 3, expected one of the 2 layers"),
        ([{**PLAIN, "layer": True}], "line 1 layer: found True, expected one of the 2 layers"),
        ([{**PLAIN, "phase": "draft"}], "line 1 phase: found draft, expected prefill or decode"),
        ([{**PLAIN, "sequence": None}], "line 1 sequence: found NoneType, expected a number or"),
        ([{**PLAIN, "sequence": "x" * 300}], "line 1 sequence: found str, expected a number or"),
        ([{**PLAIN, "experts": []}], "line 1: found no list of integers, expected a list of"),
        ([{**PLAIN, "experts": [[]]}], "line 1: found no list of integers, expected a list of"),
        ([{**PLAIN, "experts": [1, [2]]}], "line 1: found no list of integers, expected a list"),
        ([{**PLAIN, "experts": [1, True]}], "line 1: found no list of integers, expected a list"),
        ([{**PLAIN, "experts": [1, 2.0]}], "line 1: found no list of integers, expected a list"),
        ([{**PLAIN, "experts": [1, 1]}], "line 1: found ids [1, 1], expected 2 distinct ids"),
        ([{**PLAIN, "experts": [0, -1]}], "line 1: found expert -1, expected 0 to 19 in layer 3"),
        ([{**PLAIN, "experts": [0, 20]}], "line 1: found expert 20, expected 0 to 19 in layer 3"),
        ([{**PLAIN, "experts": [0, 1 << 70]}], "line 1: found expert 11805"),
        ([PLAIN, {**PLAIN, "experts": [1]}], "line 2: found 1 ids, expected 2 a row in layer 3"),
        ([PLAIN], "decode['all',layer 7]: found 0 rows, expected 1 as in layer 3"),
        ([b12x("layer.5", [1])], "line 1 layer: found 5, expected one of the 2 layers"),
        ([b12x("mlp", [1])], "line 1 layer: found None, expected one of the 2 layers"),
        ([b12x("layer.3", [-2])], "line 1: found expert -2, expected -1 to 19 in layer 3"),
        ([b12x("layer.7", [18])], "line 1: found expert 18, expected -1 to 17 in layer 7"),
        ([b12x("layer.3", [1], "verify")], "line 1 phase: found verify, expected prefill or"),
        ([b12x("layer.3", [1], None)], "line 1 phase: found None, expected prefill or decode"),
        ([b12x("layer.3", [-1, -1])], "counts: found no selection in any layer"),
        ([b12x("layer.3", [1] * 9), b12x("layer.7", [1] * 9)], "this is a placeholder"),
    ],
)
def test_lines_that_are_no_routing(tmp_path: Path, lines: list[Any], message: str) -> None:
    assert message in line_of(lambda: records.read(save(tmp_path, *lines), GEOMETRY))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b12x("layer.3", [1, 2, 3])], "line 1: found 3 ids, expected rows of 2"),
        ([b12x("layer.3", [1, 1])], "line 1: found ids [1, 1], expected 2 distinct ids"),
        ([b12x("layer.3", [1, -1])], "line 1: found ids [1, -1], expected 2 distinct ids"),
        ([b12x("layer.3", [1, 2])], "decode['all',layer 7]: found 0 rows, expected 1 as in"),
        ([{**PLAIN, "experts": [1]}], "line 1: found 1 ids, expected 2 a row in layer 3"),
        ([b12x("layer.3", [-1, -1])], "lines: found none, expected a line of routing at least"),
    ],
)
def test_rows_that_are_none_with_top_k(tmp_path: Path, lines: list[Any], message: str) -> None:
    assert message in line_of(lambda: records.read(save(tmp_path, *lines), GEOMETRY, top_k=2))


def test_a_top_k_that_cannot_be(tmp_path: Path) -> None:
    line = line_of(lambda: records.read(save(tmp_path, PLAIN), GEOMETRY, top_k=19))
    assert "top-k: found 19, expected 1 to 18" in line
    assert "geometry: found 0 layers" in line_of(lambda: records.read(save(tmp_path, PLAIN), {}))


@given(routings(one_width=False), st.booleans())
def test_plain_lines_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, made: Counts, one: bool
) -> None:
    folder = tmp_path_factory.mktemp("records")
    made = summed(made) if one else made
    records.write(made, folder / "x.jsonl")
    records.write_geometry(made.layout, folder / "geometry.json")
    found = records.read(folder / "x.jsonl", records.read_geometry(folder / "geometry.json"))
    assert same(found, made)


@given(routings(one_width=False))
def test_b12x_lines_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, made: Counts
) -> None:
    path = tmp_path_factory.mktemp("records") / "x.jsonl"
    records.write(made, path, "b12x")
    found = records.read(path, geometry(made), top_k=(made.layout.top_k or (0,))[0])
    assert same(found, summed(made))


@given(routings(one_width=False))
def test_b12x_without_rows_holds_the_sums(
    tmp_path_factory: pytest.TempPathFactory, made: Counts
) -> None:
    path = tmp_path_factory.mktemp("records") / "x.jsonl"
    bare = Counts(made.layout, made.decode, made.prefill, None, made.names, made.per_sequence)
    records.write(bare, path, "b12x")
    found = passes_or_refuses(lambda: records.read(path, geometry(made)))
    both = summed(made).decode[0] + (0 if made.prefill is None else made.prefill.sum(axis=0))
    if found is None:
        # One expert a layer has it all: that is what a placeholder looks like.
        assert (both.max(axis=1) == both.sum(axis=1)).all()
    else:
        assert same(found, summed(made), but=["rows", "layout"])
        assert found.layout == Layout(made.layout.layer_ids, made.layout.experts, None)
    assert "rows: found none" in line_of(lambda: records.write(bare, path))


def test_ids_are_counted_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"layer": layer, "experts": [n % 5, 9]} for n in range(50) for layer in (3, 7)]
    path = save(tmp_path, *lines)
    whole = records.read(path, GEOMETRY)
    monkeypatch.setattr(records, "_PENDING", 7)
    assert same(records.read(path, GEOMETRY), whole)
    assert whole.decode[0, :, 9].tolist() == [50, 50]


def test_more_sequences_than_a_census_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{**PLAIN, "sequence": n} for n in range(4)]
    monkeypatch.setattr(records, "MAX_TRANSCRIPTS", 3)
    line = line_of(lambda: records.read(save(tmp_path, *lines), GEOMETRY))
    assert "sequences: found 4 sequences" in line


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "top level: found list, expected experts by layer name"),
        ({}, "top level: found dict, expected experts by layer name"),
        ({"layer": 5}, "top level: found layer, expected each layer by its number"),
        ({"layer.3": 5, "3": 5}, "top level: found layer 3 twice, expected each layer by its"),
        ({"layer.3": 0}, "layer.3: found 0, expected 1 to 65536 experts"),
        ({"layer.3": True}, "layer.3: found True, expected 1 to 65536 experts"),
        ({"layer.3": 1 << 40}, "layer.3: found 1099511627776, expected 1 to 65536 experts"),
    ],
)
def test_a_geometry_that_is_none(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "geometry.json"
    path.write_text(json.dumps(data))
    assert message in line_of(lambda: records.read_geometry(path))


FILES = [
    json.dumps(line).encode()
    for line in (
        {"layer": 3, "experts": [[1, 2], [5, 4]], "sequence": "a"},
        b12x("layer.3", [1, 2, 5, -1]),
    )
]


@given(st.sampled_from(FILES), st.integers(0, 1 << 30), st.integers(0, 255))
def test_damaged_lines_are_refused_or_still_routing(
    tmp_path_factory: pytest.TempPathFactory, line: bytes, at: int, change: int
) -> None:
    raw = bytearray(line)
    at %= len(raw)
    if change:
        raw[at] ^= change
    else:
        del raw[at:]
    path = save(tmp_path_factory.mktemp("records"), bytes(raw))
    found = passes_or_refuses(lambda: records.read(path, {3: 20}))
    if found is not None:
        assert found.decode.min() >= 0 and 0 < found.decode.sum() + found.prefill.sum() <= 8
        if found.rows is not None:
            assert np.array_equal(found.decode.sum(axis=2), found.rows[:, 1:] * 2)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = save(tmp_path_factory.mktemp("records"), raw)
    line_of(lambda: records.read(path, GEOMETRY))
