"""BigMoeOnEdge's route trace: turns become sequences, cells are checked whole."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import routetrace
from rowmap_jobs.exchange.base import Counts, Layout
from tests.exchange.made import line_of, passes_or_refuses
from tests.exchange.routings import routings, same

HEAD = """# route_trace v1
# model=/m/qwen3-n_expert=9.gguf arch=qwen3moe n_layer=6 n_expert=4 n_expert_used=2
# layer=1 expert_bytes=1802240 dense_bytes=46448640
"""
NAMES = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"
Cell = tuple[int, int, int, int, tuple[int, ...]]
# The last layer routes only the last token of the prompt.
CELLS: list[Cell] = [
    (0, 0, 0, 1, (0, 3)),
    (0, 0, 1, 1, (0, 1)),
    (0, 0, 1, 5, (2, 3)),
    (0, 1, 2, 1, (1, 2)),
    (0, 1, 2, 5, (0, 3)),
    (4, 0, 0, 1, (0, 1)),
    (4, 0, 0, 5, (1, 3)),
    (4, 1, 1, 1, (0, 1)),
    (4, 1, 1, 5, (3, 2)),
]


def trace(cells: list[Cell], head: str = HEAD, names: str = NAMES) -> bytes:
    lines = [head + names]
    for *place, experts in cells:
        for slot, expert in enumerate(experts):
            lines.append(",".join(map(str, [*place, slot, expert])) + ",nan,0,1802240")
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def refused(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    return line_of(lambda: routetrace.read(path, "x"))


@pytest.mark.parametrize("packed", [False, True])
def test_turns_are_sequences_and_uneven_prefill_is_left_out(path: Path, packed: bool) -> None:
    raw = trace(CELLS)
    path.write_bytes(gzip.compress(raw) if packed else raw)
    counts = routetrace.read(path, "x")
    assert counts.per_sequence and counts.names == ("turn 0", "turn 4")
    assert counts.layout.layer_ids == (1, 5) and counts.layout.experts == (4, 4)
    assert counts.decode.tolist() == [
        [[0, 1, 1, 0], [1, 0, 0, 1]],
        [[1, 1, 0, 0], [0, 0, 1, 1]],
    ]
    assert counts.prefill is None and counts.rows is not None
    assert counts.rows.tolist() == [[0, 1], [0, 1]]
    assert "prefill left out: its last layer routed the last token alone" in counts.notes


def test_prefill_is_kept_where_all_layers_have_it(path: Path) -> None:
    path.write_bytes(trace(CELLS[1:]))
    counts = routetrace.read(path, "x")
    assert counts.prefill is not None and counts.prefill.sum() == 8
    assert counts.rows is not None and counts.rows.tolist() == [[1, 1], [1, 1]]


def test_columns_go_by_their_names(path: Path) -> None:
    head, *rows = trace(CELLS).decode().removeprefix(HEAD).splitlines()
    turned = [",".join(row.split(",")[::-1]) for row in rows]
    lines = [HEAD + ",".join(head.split(",")[::-1]), *turned]
    path.write_text("\n".join(lines) + "\n")
    again = routetrace.read(path, "x").decode
    path.write_bytes(trace(CELLS))
    assert (routetrace.read(path, "x").decode == again).all()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "no line of column names"),
        (trace(CELLS, HEAD.replace("v1", "v2")), "line 1: found # route_trace v2"),
        (trace(CELLS, ""), "line 1: found turn,phase"),
        (trace(CELLS, "# route_trace v1\n"), "expected n_expert and n_expert_used"),
        (trace(CELLS, HEAD.replace("used=2", "used=5")), "a top-k within the experts"),
        (trace(CELLS, names=NAMES.replace("expert,", "id,")), "no column ['expert']"),
        (trace(CELLS, names=NAMES.replace("weight", "layer")), "no column ['layer']"),
        (trace([]), "found no row"),
        (trace(CELLS)[:-1], "an end without a newline"),
        (trace([*CELLS, (5, 1, 0, 1, (0, 4))]), "expert: found 0 to 4, expected 0 to 3"),
        (trace([*CELLS, (5, 1, 0, 1, (0, -1))]), "expert: found -1 to 3"),
        (trace([*CELLS, (5, 1, 0, 1, (2, 2))]), "turn 5 phase 1 step 0 layer 1: found an expert"),
        (trace([*CELLS, (5, 1, 0, 1, (2,))]), "layer 1: found 1 experts, expected 2 distinct"),
        (trace([*CELLS, CELLS[0]]), "found an expert twice"),
        (trace([*CELLS, (5, 1, 0, 1, (2, 1))]), "turn 5 layer 5: found 0 decode rows, expected 1"),
        (trace([*CELLS, (5, 2, 0, 1, (2, 1))]), "phase or step"),
        (trace([*CELLS, (5, 1, -1, 1, (2, 1))]), "phase or step"),
        (trace([*CELLS, (-5, 1, 1, 1, (2, 1))]), "turn or layer"),
        (trace([*CELLS, (5, 1, 1, 5000, (2, 1))]), "turn or layer"),
        (trace(CELLS) + b"1,1,1\n", "line 23: found 1,1,1"),
        (trace(CELLS) + b"1,1,1,x,0,0,nan,0,0\n", "line 23: found 1,1,1,x"),
        (trace(CELLS) + b"1" * 9000 + b"\n", "too long a line"),
        (b"# route_trace v1\n" * 3, "no line of column names"),
    ],
)
def test_a_trace_that_is_not_whole_is_refused(path: Path, raw: bytes, said: str) -> None:
    assert said in refused(path, raw)


def test_a_router_stuck_on_its_first_experts_is_not_found_hot(path: Path) -> None:
    cells: list[Cell] = [(0, 1, step, 1, (0,)) for step in range(9)]
    raw = trace(cells, HEAD.replace("used=2", "used=1"))
    assert "all selections of every layer on one expert" in refused(path, raw)


@given(data=st.data())
def test_changed_bytes_never_crash_the_reader(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(trace(CELLS))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("trace") / "x.csv"
    path.write_bytes(raw)
    counts = passes_or_refuses(lambda: routetrace.read(path, "x"))
    if counts is not None:
        assert (counts.decode.sum(axis=2) == counts.rows[:, 1:] * 2).all()


@given(raw=st.binary(max_size=80))
def test_random_bytes_never_pass(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("trace") / "x.csv"
    path.write_bytes(raw)
    line_of(lambda: routetrace.read(path, "x"))


@given(made=routings())
def test_a_trace_that_is_written_is_counted_the_same(
    made: Counts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "x.csv"
    routetrace.write(made, path, 61)
    again = passes_or_refuses(lambda: routetrace.read(path, "x"))
    if again is None:
        # One expert a layer has it all: that is what a placeholder looks like.
        both = made.decode.sum(axis=0) + (0 if made.prefill is None else made.prefill.sum(axis=0))
        assert (both.max(axis=1) == both.sum(axis=1)).all()
        return
    assert same(again, made, but=["names"])
    assert again.names == tuple(f"turn {t}" for t in range(len(made.names)))


TWO = Counts(
    Layout((1, 5), (3, 3), (2, 2)),
    np.array([[[1, 2, 1], [2, 1, 1]]]),
    np.array([[[1, 1, 0], [0, 1, 1]]]),
    np.array([[1, 2]]),
    ("a",),
    per_sequence=True,
)


def test_a_trace_of_counts_says_so_and_invents_no_measurement(path: Path) -> None:
    routetrace.write(TWO, path, 7)
    magic, facts, made_up, names, *rows = path.read_text().splitlines()
    assert magic == "# route_trace v1"
    assert facts == "# model=? arch=? n_layer=7 n_expert=3 n_expert_used=2"
    assert made_up.startswith("# made from counts") and "are made up" in made_up
    assert names == "turn,phase,step,layer,slot,expert"
    # Position by position through prompt and answer, each layer's two slots in turn.
    places = [row.rsplit(",", 1)[0] for row in rows]
    assert places == [
        f"0,{int(step > 0)},{step},{layer},{slot}"
        for step in range(3)
        for layer in (1, 5)
        for slot in range(2)
    ]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (replace(TWO, rows=None), "rows: found none"),
        (replace(TWO, layout=Layout((1, 5), (3, 3), None)), "top-k: found none"),
        (replace(TWO, rows=np.array([[1, 3]])), "decode[0,layer 1]: found 4 selections"),
        (
            replace(TWO, layout=Layout((1, 5), (3, 4), (2, 2))),
            "experts: found [3, 4], expected one",
        ),
        (
            replace(
                TWO,
                layout=Layout((1, 5), (3, 3), (1, 2)),
                decode=np.array([[[0, 2, 0], [2, 1, 1]]]),
                prefill=np.array([[[1, 0, 0], [0, 1, 1]]]),
            ),
            "top-k: found [1, 2], expected one number for all layers",
        ),
        (
            replace(TWO, decode=TWO.decode * 0, prefill=TWO.decode * 0, rows=np.array([[0, 0]])),
            "sequence 0: found no rows",
        ),
    ],
)
def test_counts_that_no_trace_can_have_are_not_written(
    counts: Counts, said: str, path: Path
) -> None:
    assert said in line_of(lambda: routetrace.write(counts, path, 6))
    assert not path.exists()


@pytest.mark.parametrize(("name", "most"), [("MAX_ROWS", 11), ("MAX_TURNS", 0), ("MAX_CELLS", 5)])
def test_no_trace_is_written_that_is_too_long_to_be_read(
    name: str, most: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routetrace.write(TWO, path, 6)
    path.unlink()
    monkeypatch.setattr(routetrace, name, most)
    line = line_of(lambda: routetrace.write(TWO, path, 6))
    assert "found 12 selections in 1 sequences" in line and not path.exists()
