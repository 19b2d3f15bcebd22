"""Count files: everything that can be wrong with them is noticed before a number is used."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs.counts import Counts, Shape, fault, read, skip_reason, take
from rowmap_jobs.formats.base import FormatError

SHAPE = Shape(layers=(1, 2), experts=(4, 3), top_k=2)


def good() -> dict[str, Any]:
    """3 prefill and 2 decode rows."""
    counts = np.array([[[3, 2, 1, 0], [3, 2, 1, 0]], [[2, 1, 1, 0], [2, 1, 1, 0]]], dtype=np.int64)
    return {
        "counts": counts,
        "rows": np.array([3, 2], dtype=np.int64),
        "bad": np.array(0, dtype=np.int64),
        "recomputed": np.array(4, dtype=np.int64),
    }


def npz(members: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    np.savez(out, **members)
    return out.getvalue()


def test_a_good_file() -> None:
    counts = read(npz(good()), "x.npz", SHAPE)
    assert (counts.rows.tolist(), counts.bad, counts.recomputed) == ([3, 2], 0, 4)
    assert fault(counts, 5, 2, SHAPE) is None


def cell(t: int, layer: int, expert: int, value: int) -> Callable[[dict[str, Any]], None]:
    def change(members: dict[str, Any]) -> None:
        members["counts"][t, layer, expert] = value

    return change


@pytest.mark.parametrize(
    ("change", "fed", "decode", "expected"),
    [
        (lambda m: m.update(bad=np.array(1)), 5, 2, "BadRows"),
        (lambda m: None, 6, 2, "RowsLost"),
        (lambda m: None, 6, 3, "RowsLost"),
        (lambda m: None, 5, 3, "RowsLost"),
        (lambda m: None, 4, 2, "RowsExtra"),
        (lambda m: None, 5, 1, "RowsExtra"),
        # A dense layer, or one that was not captured, is all zero.
        (lambda m: m["counts"].__setitem__((1, 0), 0), 5, 2, "SelectionsWrong"),
        # Padding rows, or counts of several data-parallel ranks added up.
        (lambda m: m["counts"].__setitem__((1,), m["counts"][1] * 4), 5, 2, "SelectionsWrong"),
        (cell(0, 0, 3, 1), 5, 2, "SelectionsWrong"),
        # Layer 2 has three experts: an id of a physical slot, or of a wider layer.
        (cell(0, 1, 3, 1), 5, 2, "ExpertsOutOfRange"),
        # All-zero routing: every row says expert 0, twice.
        (
            lambda m: m["counts"].__setitem__((1, 0), np.array([4, 0, 0, 0])),
            5,
            2,
            "ExpertsRepeated",
        ),
    ],
)
def test_faults(
    change: Callable[[dict[str, Any]], Any], fed: int, decode: int, expected: str
) -> None:
    members = good()
    change(members)
    assert fault(read(npz(members), "x.npz", SHAPE), fed, decode, SHAPE) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("rows"), "members: found 3 members of "),
        (lambda m: m.update(extra=np.zeros(1)), "members: found 5 members of "),
        (lambda m: m.update(counts=np.zeros((2, 2, 3), np.int64)), "counts: found [2, 2, 3], "),
        (lambda m: m.update(counts=m["counts"].astype(np.uint16)), "counts: found uint16 with 3 "),
        (lambda m: m.update(rows=np.zeros(3, np.int64)), "counts: found [2, 2, 4], expected"),
        (lambda m: m.update(bad=np.zeros(1, np.int64)), "bad: found int64 with 1 dimensions, "),
        (lambda m: m["rows"].__setitem__(0, -1), "rows: found a negative number, expected"),
        (lambda m: m.update(rows=np.array([{}])), "archive: found ValueError, expected an npz"),
        (lambda m: m.update(counts=np.zeros((2, 200, 200), np.int64)), "members: found 4 members"),
    ],
)
def test_files_of_another_form(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    members = good()
    change(members)
    with pytest.raises(FormatError) as refused:
        read(npz(members), "x.npz", SHAPE)
    assert str(refused.value).startswith(f"x.npz: {message}")


@given(st.binary(max_size=300), st.integers(0, 1 << 20), st.integers(1, 255))
@settings(deadline=None, max_examples=60)
def test_damage_never_crashes(noise: bytes, at: int, change: int) -> None:
    damaged = bytearray(npz(good()))
    damaged[at % len(damaged)] ^= change
    for raw in (noise, bytes(damaged)):
        try:
            read(raw, "x.npz", SHAPE)
        except FormatError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("raw", "word"),
    [
        (b"NoSlot\n", "NoSlot"),
        (b'{"reason": "Aborted"}', "Aborted"),
        (b'{"reason": 3}', "HookSkipped"),
        (b"{", "HookSkipped"),
        (b"", "HookSkipped"),
        (b"two words", "HookSkipped"),
        (b"\xff" * 9000, "HookSkipped"),
    ],
)
def test_skip_words(raw: bytes, word: str) -> None:
    assert skip_reason(raw) == word


def test_files_are_taken_once_and_temporary_ones_left(tmp_path: Path) -> None:
    (tmp_path / ".a.npz.tmp").write_bytes(b"half")
    assert take(tmp_path, "a", SHAPE) is None
    (tmp_path / "a.npz").write_bytes(npz(good()))
    assert isinstance(take(tmp_path, "a", SHAPE), Counts)
    assert [p.name for p in tmp_path.iterdir()] == [".a.npz.tmp"]
    (tmp_path / "b.skip").write_bytes(b"NoSlot\n")
    assert take(tmp_path, "b", SHAPE) == "NoSlot"
    (tmp_path / "c.npz").write_bytes(b"PK\x03\x04")
    assert take(tmp_path, "c", SHAPE) == "CountsDamaged"
    assert [p.name for p in tmp_path.iterdir()] == [".a.npz.tmp"]
