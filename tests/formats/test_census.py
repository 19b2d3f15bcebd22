"""The census: arrays with invariants, deterministic bytes, damage refused."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats import census
from rowmap_jobs.formats.base import FormatError
from tests.formats.samples import census as sample


@given(st.integers(0, 4), st.integers(0, 99))
def test_round_trip(transcripts: int, seed: int) -> None:
    data = sample(transcripts, seed)
    raw = census.to_bytes(data)
    again = census.parse(raw, "census.npz")
    assert census.to_bytes(again) == raw
    assert (again.counts == data.counts).all() and again.header == data.header


@given(st.binary(max_size=200))
def test_random_bytes_never_pass(raw: bytes) -> None:
    with pytest.raises(FormatError):
        census.parse(raw, "census.npz")


@given(st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_changed_byte_never_gives_other_counts(at: int, change: int) -> None:
    raw = bytearray(census.to_bytes(sample()))
    raw[at % len(raw)] ^= change
    try:
        again = census.parse(bytes(raw), "census.npz")
    except FormatError as error:
        assert "\n" not in str(error)
    else:
        # Some bytes of the archive mean nothing (times, attributes): the contents stay.
        assert census.to_bytes(again) == census.to_bytes(sample())


def counts(change: Callable[[np.ndarray], object]) -> dict[str, Any]:
    out = sample().counts.copy()
    change(out)
    return {"counts": out}


def moved(out: np.ndarray) -> None:
    out[1, 1, 0] = 0
    out[1, 1, 0, 0] = int(sample().rows[1, 1]) * 2


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (counts(lambda c: c.__setitem__((0, 0, 0, 0), -1)), "counts: found a negative count"),
        (
            counts(lambda c: c.__setitem__((0, 1, 0), 0)),
            "counts[0,decode,layer 3]: found 0 selections, expected rows x top-k = ",
        ),
        (
            counts(lambda c: c.__setitem__((0, 0, 1, 4), 1)),
            "counts: found a count beyond experts, expected zero beyond experts",
        ),
        (counts(moved), "counts[1,decode,layer 3]: found an expert "),
        ({"rows": sample().rows + (1 << 41)}, "rows: found more than 1099511627776, expected"),
        ({"layer_ids": np.array([7, 3], np.int32)}, "layer_ids: found [7, 3], expected ascending"),
        ({"experts": np.array([6, 4], np.int32)}, "experts: found [6, 4], expected 1 to 5 a layer"),
        ({"top_k": np.array([0, 2], np.int32)}, "top_k: found [0, 2], expected 1 to experts"),
        ({"fidelity": np.array([0, 9, 0], np.uint8)}, "fidelity: found 9, expected 0 to 3"),
        ({"session": np.zeros(2, np.int32)}, "session: found [2], expected shape [3]"),
        ({"transcript_id": np.zeros((3, 31), np.uint8)}, "transcript_id: found [3, 31], expected"),
    ],
)
def test_invariants(over: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        census.check(replace(sample(), **over), "census.npz")
    assert str(refused.value).startswith(f"census.npz: {message}")


def rewrite(change: Callable[[dict[str, bytes]], object]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(census.to_bytes(sample()))) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop("rows.npy"), "census.npz: members: found ['rows.npy'], expected exactly"),
        (
            lambda m: m.update({"x.npy": b""}),
            "census.npz: members: found ['x.npy'], expected exactly",
        ),
        (
            lambda m: m.update({"rows.npy": npy(np.array([{}]))}),
            "census.npz: rows: found ValueError, expected a .npy array",
        ),
        (
            lambda m: m.update({"counts.npy": npy(np.zeros((3, 2, 2, 5), np.uint16))}),
            "census.npz: counts: found uint16 with 4 dimensions, expected int64 with 4 dimensions",
        ),
        (
            lambda m: m.update({"rows.npy": m["rows.npy"][:-3]}),
            "census.npz: rows: found ValueError, expected a .npy array",
        ),
        (lambda m: m.update({"header.npy": npy(np.zeros(3, np.uint8))}), "census.npz header: "),
    ],
)
def test_damaged_archives(change: Callable[[dict[str, bytes]], object], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        census.parse(rewrite(change), "census.npz")
    assert str(refused.value).startswith(message)


def test_a_bomb_is_refused_by_its_declared_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "MAX_UNPACKED", 1000)
    with pytest.raises(FormatError, match=r"unpacked size: found \d+ bytes, expected at most 1000"):
        census.parse(census.to_bytes(sample()), "census.npz")


def test_decode_sums_over_transcripts() -> None:
    data = sample()
    assert (data.decode() == data.counts[:, 1].sum(axis=0)).all()
