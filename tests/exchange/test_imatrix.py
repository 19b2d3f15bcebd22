"""Importance matrices of llama.cpp: counts by expert, unseen experts kept and said."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import imatrix
from tests.exchange.made import line_of, passes_or_refuses


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf(tensors: dict[str, np.ndarray], kind: str | None = "imatrix") -> bytes:
    """A GGUF file as imatrix.cpp writes it: F32 tensors, dimensions fastest first."""
    values = [string("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + string("wiki.txt")]
    if kind is not None:
        values.insert(0, string("general.type") + struct.pack("<I", 8) + string(kind))
    values += [
        string(f"imatrix.{key}") + struct.pack("<II", 4, value)
        for key, value in (("chunk_count", 3), ("chunk_size", 512))
    ]
    infos, data = b"", b""
    for name, array in tensors.items():
        shape = array.shape[::-1]
        kind_of = {"f": 0, "i": 26}[array.dtype.kind]
        infos += string(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, kind_of, len(data)
        )
        data += array.tobytes()
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + infos
    return head + bytes(-len(head) % 32) + data


def moe(counts: dict[int, list[float]], matrices: str = "down gate up") -> dict[str, np.ndarray]:
    """Tensors of the blocks' experts; in_sum2 is [experts, columns], counts [experts, 1]."""
    out = {"blk.0.attn_q.weight.counts": np.ones((1, 1), "<f4")}
    for block, row in counts.items():
        for matrix in matrices.split():
            name = f"blk.{block}.ffn_{matrix}_exps.weight"
            out[f"{name}.counts"] = np.array(row, "<f4")[:, None]
            out[f"{name}.in_sum2"] = np.ones((len(row), 4), "<f4")
    return out


GOOD = {1: [5.0, 0.0, 3.0, 2.0], 2: [4.0, 2.0, 2.0, 2.0], 4: [1.0, 4.0, 5.0, 0.0]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "imatrix.gguf"


def refused(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    return line_of(lambda: imatrix.read(path, "x.gguf"))


@pytest.mark.parametrize("matrices", ["down gate up", "down gate_up", "up"])
def test_counts_of_the_blocks_that_have_experts(path: Path, matrices: str) -> None:
    path.write_bytes(gguf(moe(GOOD, matrices)))
    counts = imatrix.read(path, "x", top_k=2)
    assert counts.layout.layer_ids == (1, 2, 4) and counts.layout.top_k == (2, 2, 2)
    assert counts.decode.tolist() == [[[int(v) for v in row] for row in GOOD.values()]]
    assert not counts.per_sequence and counts.rows is None


def test_experts_that_the_text_never_reached_are_kept_and_named(path: Path) -> None:
    path.write_bytes(gguf(moe(GOOD)))
    notes = imatrix.read(path, "x").notes
    assert "quantisation by this file lacks data for experts in layers 1, 4" in notes
    assert "2 experts were never selected (layers 1, 4): they rank last" in notes
    assert "covers 3 layers: 1-2, 4; nothing for 3" in notes
    assert "3 chunks of 512 tokens" in notes


def test_counts_that_an_f32_cannot_hold_exactly_are_said(path: Path) -> None:
    path.write_bytes(gguf(moe({1: [16777216.0, 3.0]})))
    counts = imatrix.read(path, "x")
    assert counts.decode[0, 0, 0] == 1 << 24
    assert any("rounded" in note for note in counts.notes)


def with_tensor(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    return {**moe(GOOD), name: array}


UP = "blk.1.ffn_up_exps.weight.counts"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"blk.0.ffn_up.weight.counts": np.ones((1, 1), "<f4")}, "found no counts of experts"),
        ({}, "found no counts of experts"),
        (with_tensor(UP, np.array([[5], [1], [2], [2]], "<f4")), f"{UP}: found other counts"),
        (with_tensor(UP, np.array([[5], [1]], "<f4")), f"{UP}: found other counts"),
        (moe({1: [5.5, 1.0]}), "found fractions"),
        (moe({1: [-5.0, 1.0]}), "a negative count"),
        (moe({1: [float("nan"), 1.0]}), "NaN, infinite or huge"),
        (moe({1: [float("inf"), 1.0]}), "NaN, infinite or huge"),
        (moe({1: [1e20, 1.0]}), "NaN, infinite or huge"),
        (moe({1: [7.0, 7.0], 2: [7.0, 7.0]}), "the same count for all experts"),
        (moe({1: [7.0, 0.0], 2: [7.0, 0.0]}), "all selections of every layer on one expert"),
        (moe({1: [7.0, 1.0], 2: [7.0, 1.0, 2.0]}), "blocks of [2, 3] experts"),
        (moe({1: [7.0]}), "1 counts"),
        (with_tensor(UP, np.array([[5, 1]], "<f4")), "F32 [2, 1]"),
        (with_tensor(UP, np.array([[5], [1]], "<i4")), "I32 [1, 2]"),
        (with_tensor(UP, np.ones((2, 2, 1), "<f4")), "F32 [1, 2, 2]"),
    ],
)
def test_what_has_no_counts_by_expert_is_refused(
    path: Path, tensors: dict[str, np.ndarray], said: str
) -> None:
    assert said in refused(path, gguf(tensors))


def test_a_model_and_the_format_before_gguf_are_refused_by_name(path: Path) -> None:
    assert "general.type: found model" in refused(path, gguf(moe(GOOD), "model"))
    assert "general.type: found None" in refused(path, gguf(moe(GOOD), None))
    legacy = struct.pack("<ii", 1, 21) + b"blk.0.ffn_up_exps.wei" + struct.pack("<ii", 3, 2)
    assert "the one before has no counts by expert" in refused(path, legacy)


def test_a_file_that_ends_early_is_refused(path: Path) -> None:
    raw = gguf(moe(GOOD))
    for cut in range(0, len(raw) - 16, 37):
        refused(path, raw[:cut])


def test_a_declared_size_is_held_against_the_file(path: Path) -> None:
    raw = gguf({UP: np.array([[1], [2]], "<f4")})
    at = raw.index(struct.pack("<IQQ", 2, 1, 2))
    assert refused(path, raw[:at] + struct.pack("<IQQ", 2, 1, 10**12) + raw[at + 20 :])


@given(data=st.data())
def test_changed_bytes_never_crash_the_reader(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(gguf(moe(GOOD)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("imatrix") / "x.gguf"
    path.write_bytes(raw)
    counts = passes_or_refuses(lambda: imatrix.read(path, "x"))
    # GGUF has no check sum, so a changed count may pass; what passes is a whole table.
    assert counts is None or ((counts.decode >= 0).all() and counts.decode.shape[2] == 4)


@given(raw=st.binary(max_size=80))
def test_random_bytes_never_pass(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("imatrix") / "x.gguf"
    for start in (b"", b"GGUF\x03\x00\x00\x00"):
        path.write_bytes(start + raw)
        line_of(lambda: imatrix.read(path, "x"))
