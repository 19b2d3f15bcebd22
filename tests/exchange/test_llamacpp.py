"""llama.cpp: traces, pin profiles, and tensor overrides that place whole layers."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import integers_csv, llamacpp, llamacpp_args
from rowmap_jobs.exchange.base import Counts, Ranking
from rowmap_jobs.formats import rowmap
from tests.exchange.made import line_of, passes_or_refuses, tables
from tests.formats.samples import FINGERPRINT, geometry, row_map

Reader = Callable[..., Any]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[bytes], Path]:
    def save(raw: bytes) -> Path:
        path = tmp_path / "x.csv"
        path.write_bytes(raw)
        return path

    return save


TRACE = b"2,0\n2,3\n5,1\n5,3\n2,0\n2,1\n5,3\n5,0\n"
Save = Callable[[bytes], Path]


def test_a_trace_is_counted_by_absolute_layer(saved: Save) -> None:
    counts = llamacpp.read_trace(saved(TRACE), "x", experts=4, top_k=2)
    assert counts.layout.layer_ids == (2, 5) and counts.layout.top_k == (2, 2)
    assert counts.decode.tolist() == [[[2, 1, 0, 1], [1, 1, 0, 2]]]
    assert "covers 2 layers: 2, 5; nothing for 3-4" in counts.notes
    unknown = llamacpp.read_trace(saved(TRACE.replace(b"3\n", b"2\n")), "x")
    assert unknown.layout.experts == (3, 3)
    assert "3 experts, the highest id + 1: those above it were never seen" in unknown.notes


def test_traces_of_two_prompts_may_be_joined_and_packed(saved: Save) -> None:
    twice = llamacpp.read_trace(saved(gzip.compress(TRACE + TRACE)), "x")
    assert (twice.decode == 2 * llamacpp.read_trace(saved(TRACE), "x").decode).all()
    windows = llamacpp.read_trace(saved(TRACE.replace(b"\n", b"\r\n")), "x")
    assert (2 * windows.decode == twice.decode).all()


def test_negative_ids_are_no_experts(saved: Save) -> None:
    counts = llamacpp.read_trace(saved(TRACE + b"5,-1\n9,-1\n"), "x")
    assert counts.decode.sum() == 8 and counts.layout.layer_ids == (2, 5)
    assert "2 selections with a negative id (no expert) passed over" in counts.notes


@pytest.mark.parametrize("block", [5, 7, 16])
def test_lines_that_lie_across_blocks_are_whole(
    saved: Save, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integers_csv, "BLOCK", block)
    counts = llamacpp.read_trace(saved(b"layer,expert\r\n" + TRACE), "x", experts=4)
    assert counts.decode.tolist() == [[[2, 1, 0, 1], [1, 1, 0, 2]]]
    assert "line 10: found 5;3" in line_of(
        lambda: llamacpp.read_trace(saved(b"layer,expert\n" + TRACE + b"5;3\n"), "x")
    )


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (TRACE + b"5,3", "line 9: found an end without a newline, expected whole lines"),
        (TRACE + b"5\n", "line 9: found 5, expected layer,expert in integers"),
        (TRACE + b"5,\n", "line 9: found 5,"),
        (TRACE + b",5\n", "line 9: found ,5"),
        (TRACE + b"\n", "line 9: found an empty line"),
        (TRACE + b"5,3,1\n", "line 9: found 5,3,1"),
        (TRACE + b"5,3.0\n", "line 9: found 5,3.0"),
        (TRACE + b"5, 3\n", "line 9: found 5, 3"),
        (TRACE + b"5,--3\n", "line 9: found 5,--3"),
        (TRACE + b"5,3-\n", "line 9: found 5,3-"),
        (TRACE + b"5,1-3\n", "line 9: found 5,1-3"),
        (TRACE + b"5,0x3\n", "line 9: found 5,0x3"),
        (TRACE + b"5,1234567890123\n", "line 9: found 5,1234567890123"),
        (TRACE + b"-1,3\n", "layer: found layer -1"),
        (TRACE + b"5000,3\n", "layer: found layer 5000"),
        (TRACE + b"5,70000\n", "layer 5: found expert 70000"),
        (b"4000,1\n1,60000\n", "4001 layers x 60001 experts"),
        (b"2,0,5\n", "found a column of counts"),
        (b"1\n", "line 1: found 1"),
        (b"1,2,3,4\n", "line 1: found 1,2,3,4"),
        (b"", "found no line"),
        (b"layer,expert\n", "found no line"),
        (b"5,-1\n", "no selection in any layer"),
        (b"2,0\n" * 9, "all selections of every layer on one expert"),
        (b"1" * 5000, "a line without an end"),
        (gzip.compress(TRACE, mtime=0)[:-9], "gzip"),
        (b"PK\x03\x04", "an end without a newline"),
    ],
)
def test_what_is_no_trace_is_refused(saved: Save, raw: bytes, said: str) -> None:
    assert said in line_of(lambda: llamacpp.read_trace(saved(raw), "x"))


def test_ids_beyond_the_model_and_odd_sums_are_refused(saved: Save) -> None:
    assert "found expert 3, expected below 3" in line_of(
        lambda: llamacpp.read_trace(saved(TRACE), "x", experts=3)
    )
    assert "a multiple of top-k 3" in line_of(
        lambda: llamacpp.read_trace(saved(TRACE), "x", top_k=3)
    )


@given(counts=tables())
def test_a_trace_that_is_written_is_counted_the_same(
    counts: Counts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("trace") / "x.csv"
    path.write_bytes(b"".join(llamacpp.write_trace(counts)))
    again = llamacpp.read_trace(path, "x", experts=counts.layout.experts[0])
    assert again.layout.layer_ids == counts.layout.layer_ids
    assert (again.decode == counts.decode).all()


def test_a_long_trace_is_thinned_but_keeps_every_expert_that_was_seen() -> None:
    counts = llamacpp_counts([[1000, 10, 1, 0]])
    lines = b"".join(llamacpp.write_trace(counts, most=100)).splitlines()
    kept = {key: len(list(group)) for key, group in groupby(lines)}
    assert kept == {b"7,0": 91, b"7,1": 1, b"7,2": 1}


def llamacpp_counts(table: list[list[int]]) -> Counts:
    from rowmap_jobs.exchange.base import Layout

    decode = np.array([table], dtype=np.int64)
    return Counts(Layout((7,), (len(table[0]),), None), decode, None, None, ("0",), False)


def test_a_pin_profile_with_counts_and_without(saved: Save) -> None:
    counts = llamacpp.read_pin(saved(b"2,1,9\n5,0,9\n2,0,4\n5,1,0\n"), "x")
    assert isinstance(counts, Counts)
    assert counts.decode.tolist() == [[[4, 9], [9, 0]]]
    ranking = llamacpp.read_pin(saved(b"layer,expert\n2,1\n5,0\n2,0\n"), "x")
    assert isinstance(ranking, Ranking) and not ranking.complete
    assert ranking.order == {2: (1, 0), 5: (0,)}
    assert llamacpp.read_pin(saved(b"2,1\n2,0\n"), "x").complete  # type: ignore[union-attr]
    assert not llamacpp.read_pin(saved(b"2,1\n2,0\n"), "x", experts=3).complete  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"2,1\n2,1\n", "an expert twice"),
        (b"2,1,4\n2,0,5\n", "row 2: found a count above the one before"),
        (b"2,1,-4\n", "row 1: found a negative number"),
        (b"2,-1\n", "row 1: found a negative number"),
        (b"2,1,4\n2,0\n", "line 2: found 2,0"),
        (b"2,1,0\n", "no selection in any layer"),
        (b"2,70000\n", "found expert 70000"),
        (b"2,1", "an end without a newline"),
    ],
)
def test_what_is_no_pin_profile_is_refused(saved: Save, raw: bytes, said: str) -> None:
    assert said in line_of(lambda: llamacpp.read_pin(saved(raw), "x"))


@given(counts=tables())
def test_a_pin_profile_comes_back(counts: Counts, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("pin") / "x.csv"
    path.write_bytes(llamacpp.write_pin_counts(counts))
    again = llamacpp.read_pin(path, "x", experts=counts.layout.experts[0])
    assert isinstance(again, Counts)
    assert again.layout.layer_ids == counts.layout.layer_ids
    assert (again.decode == counts.decode).all()
    order = llamacpp.read_pin_order(path, "x")
    assert len(order) == counts.decode[0].size and (np.diff(order[:, 2]) <= 0).all()


def test_a_map_is_pinned_hottest_first_over_its_layers() -> None:
    assert llamacpp.write_pin_map(row_map()) == b"0,3\n2,0\n0,1\n2,1\n"
    rows = {0: ([3, 1], [0, 2]), 2: ([0, 1], [3, 2])}
    order = [(0, 3), (0, 1), (2, 0), (2, 1), (2, 2), (2, 3), (0, 2), (0, 0)]
    with_order = rowmap.build(FINGERPRINT, geometry(), rows, order)
    assert llamacpp.write_pin_map(with_order) == b"0,3\n0,1\n2,0\n2,1\n"


def test_writers_refuse_what_no_reader_would_take() -> None:
    assert "twice" in line_of(lambda: llamacpp.write_pin([(0, 1), (0, 1)]))
    for counts in ([1, 2], [1]):
        assert "hottest first" in line_of(partial(llamacpp.write_pin, [(0, 1), (0, 2)], counts))


# Tensor overrides

LAYERS = (3, 4, 5, 12)
TENSORS = [
    f"blk.{n}.ffn_{m}_exps.weight" for n in LAYERS for m in ("up", "down", "gate", "gate_up")
]


def test_an_override_means_to_us_what_llama_cpp_does_with_it() -> None:
    text = llamacpp_args.write_overrides([3, 5])
    assert text == r"blk\.(3|5)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU"
    pattern = text.removesuffix("=CPU")
    for tensor in TENSORS:
        assert bool(re.search(pattern, tensor)) == (tensor.split(".")[1] in ("3", "5"))
    assert not re.search(pattern, "blk.3.ffn_up_shexp.weight")
    ranking = llamacpp_args.read_overrides(text, "x", LAYERS, 8)
    assert ranking.hot == {3: 0, 4: 8, 5: 0, 12: 8} and ranking.complete
    assert "whole layers only" in ranking.notes[-1]


@pytest.mark.parametrize(
    "pattern",
    [
        r"blk\.(3|5)\.ffn.*_exps",
        r"blk\.(3|5)\.ffn_.*_exps\.",
        r"blk.(3|5).ffn_.*_exps.weight",
        r"blk\.(3|5)\.ffn_(gate|up|down)_exps",
    ],
)
def test_other_spellings_of_whole_layers(pattern: str) -> None:
    ranking = llamacpp_args.read_overrides(f"{pattern}=CPU", "x", LAYERS, 8)
    assert llamacpp_args.cold_layers(ranking) == [3, 5]
    assert re.search(pattern, "blk.3.ffn_gate_exps.weight")


def test_the_first_pattern_wins_and_all_layers_can_be_named() -> None:
    text = r"blk\.4\.ffn_.*_exps=CUDA0,\.ffn_.*_exps=CPU"
    assert llamacpp_args.cold_layers(llamacpp_args.read_overrides(text, "x", LAYERS, 8)) == [
        3,
        5,
        12,
    ]
    every = llamacpp_args.read_overrides("exps=CPU", "x", LAYERS, 8)
    assert llamacpp_args.cold_layers(every) == list(LAYERS)


@pytest.mark.parametrize(
    "text",
    [
        r"blk\.3\.ffn_up_exps=CPU",
        r"blk\.3\.ffn_(up|down)_exps=CPU",
        r"blk\.3\.attn.*=CPU",
        r"blk\.3\.ffn_.*_exps",
        r"blk\.3\.ffn_.*_exps=",
        r"blk\.3\.ffn_.*_exps=CPU; rm -rf /",
        r"blk\.(3|)\.ffn_.*_exps=CPU",
        r"blk\.(1+)+\.ffn_.*_exps=CPU",
        r"(a+)+$=CPU",
        r"blk\.99999999\.ffn_.*_exps=CPU",
        r"blk\.6\.ffn_.*_exps=CPU",
        "",
        "=CPU",
        "x" * 70000,
    ],
)
def test_an_override_of_less_than_whole_experts_is_refused(text: str) -> None:
    assert "-ot" in line_of(lambda: llamacpp_args.read_overrides(text, "x", LAYERS, 8))


@given(st.sets(st.sampled_from(LAYERS), min_size=1))
def test_overrides_come_back(cold: set[int]) -> None:
    text = llamacpp_args.write_overrides(cold)
    ranking = llamacpp_args.read_overrides(text, "x", LAYERS, 8)
    assert llamacpp_args.cold_layers(ranking) == sorted(cold)


@given(st.text("blk.\\()|345ffn_exps=CPU,*+[]{}?$^", max_size=40))
def test_random_overrides_never_pass_and_never_hang(text: str) -> None:
    ranking = passes_or_refuses(lambda: llamacpp_args.read_overrides(text, "x", LAYERS, 8))
    assert ranking is None or "exps=" in text


def test_first_layers_are_a_number() -> None:
    assert llamacpp_args.write_n_cpu_moe([3, 4], LAYERS) == "--n-cpu-moe 5"
    assert llamacpp_args.write_n_cpu_moe([], LAYERS) == "--n-cpu-moe 0"
    line = line_of(lambda: llamacpp_args.write_n_cpu_moe([5], LAYERS))
    assert "layer 3 hot below layer 5" in line and "-ot" in line
    for text in ("5", "--n-cpu-moe 5", "-ncmoe 5", "--n-cpu-moe=5"):
        ranking = llamacpp_args.read_n_cpu_moe(text, "x", LAYERS, 8)
        assert llamacpp_args.cold_layers(ranking) == [3, 4]
    for text in ("", "-5", "five", "5 6"):
        assert "a number of layers" in line_of(
            partial(llamacpp_args.read_n_cpu_moe, text, "x", LAYERS, 8)
        )


def test_an_override_is_not_written_for_nothing_or_into_a_phrase() -> None:
    assert "layers" in line_of(lambda: llamacpp_args.write_overrides([]))
    assert "buffer" in line_of(lambda: llamacpp_args.write_overrides([1], "CPU,exps=CUDA0"))


def test_a_layer_that_is_split_is_no_override() -> None:
    split = Ranking({3: (0, 1), 4: (0, 1)}, complete=True, hot={3: 2, 4: 1})
    line = line_of(lambda: llamacpp_args.cold_layers(split))
    assert "layer 4: found 1 of 2 rows hot, expected none or all" in line
