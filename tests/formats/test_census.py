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


def measured() -> census.Census:
    """A census with distinct experts of steps of 1 and 3 rows."""
    steps = np.array([10, 0, 4], np.int64)
    return replace(sample(), steps=steps, touched=np.array([[20, 20], [0, 0], [19, 16]], np.int64))


def test_touched_experts_are_kept() -> None:
    raw = census.to_bytes(measured())
    again = census.parse(raw, "census.npz")
    assert again.steps is not None and again.steps.tolist() == [10, 0, 4]
    assert again.touched is not None and again.touched.tolist() == [[20, 20], [0, 0], [19, 16]]
    assert census.to_bytes(again) == raw
    assert census.parse(census.to_bytes(sample()), "census.npz").steps is None


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"steps": None}, "steps: found none, expected steps and touched, or neither"),
        ({"touched": None}, "touched: found none, expected steps and touched, or neither"),
        ({"steps": np.zeros(0, np.int64)}, "steps: found [0], expected [1 to 4096 rows a step]"),
        ({"touched": np.zeros((3, 1), np.int64)}, "touched: found [3, 1], expected shape [3, 2]"),
        ({"steps": np.array([10, -1, 4])}, "steps: found -1, expected 0 to 4294967296"),
        ({"steps": np.array([10, 1 << 33, 4])}, "steps: found 8589934592, expected 0 to"),
        # One row reads its 2 experts, three rows 2 to 5 (and no more than a layer has: 4).
        (
            {"touched": np.array([[20, 21], [0, 0], [19, 16]])},
            "touched[1 rows,layer 7]: found 21 experts, expected 20 to 20 (10 steps)",
        ),
        (
            {"touched": np.array([[20, 20], [0, 0], [7, 16]])},
            "touched[3 rows,layer 3]: found 7 experts, expected 8 to 20 (4 steps)",
        ),
        (
            {"touched": np.array([[20, 20], [0, 0], [19, 17]])},
            "touched[3 rows,layer 7]: found 17 experts, expected 8 to 16 (4 steps)",
        ),
        (
            {"touched": np.array([[20, 20], [1, 0], [19, 16]])},
            "touched[2 rows,layer 3]: found 1 experts, expected 0 to 0 (0 steps)",
        ),
    ],
)
def test_touched_experts_fit_their_steps(over: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        census.check(replace(measured(), **over), "census.npz")
    assert str(refused.value).startswith(f"census.npz: {message}")


@pytest.mark.parametrize("name", ["steps.npy", "touched.npy"])
def test_steps_without_touched_are_half_a_file(name: str) -> None:
    with zipfile.ZipFile(io.BytesIO(census.to_bytes(measured()))) as archive:
        members = {m: archive.read(m) for m in archive.namelist() if m != name}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    with pytest.raises(FormatError) as refused:
        census.parse(out.getvalue(), "census.npz")
    assert str(refused.value).startswith(f"census.npz: members: found ['{name}'], expected")


def captured(**over: Any) -> dict[str, Any]:
    wire = sample().header.capture.to_wire()
    return {**{k: v for k, v in wire.items() if k != "hookDigest"}, **over}


@pytest.mark.parametrize("method", ["live", "native"])
def test_counts_of_an_engine_itself_have_no_hook(method: str) -> None:
    capture = census.Capture.from_wire(captured(method=method), "header")
    assert capture.hook_digest is None and "hookDigest" not in capture.to_wire()
    header = sample().header.model_copy(update={"capture": capture})
    raw = census.to_bytes(replace(sample(), header=header))
    assert census.parse(raw, "census.npz").header.capture == capture


def test_forced_counts_name_their_hook() -> None:
    with pytest.raises(FormatError) as refused:
        census.Capture.from_wire(captured(), "header")
    assert str(refused.value) == (
        "header: hookDigest: found none, expected the digest of the hook (method forced)"
    )


@pytest.mark.parametrize("shape", [(0, 2, 1, 1 << 40), (0, 2, 1 << 20, 1 << 16)])
def test_arrays_without_bytes_cannot_declare_a_world(shape: tuple[int, ...]) -> None:
    layers = shape[2]

    def declare(members: dict[str, bytes]) -> None:
        members["counts.npy"] = npy(np.zeros(shape, np.int64))
        members["layer_ids.npy"] = npy(np.arange(layers, dtype=np.int32))
        for name in ("experts", "top_k"):
            members[f"{name}.npy"] = npy(np.ones(layers, np.int32))
        for name, width in (("rows", 2), ("transcript_id", 32)):
            kind = np.uint8 if width == 32 else np.int64
            members[f"{name}.npy"] = npy(np.zeros((0, width), kind))
        for name in ("session", "prompt_len", "fidelity", "created"):
            members[f"{name}.npy"] = npy(np.zeros(0, getattr(sample(), name).dtype))

    with pytest.raises(FormatError, match=r"census.npz: counts: found \[0, 2, "):
        census.parse(rewrite(declare), "census.npz")


def test_a_bomb_is_refused_by_its_declared_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "MAX_UNPACKED", 1000)
    with pytest.raises(FormatError, match=r"unpacked size: found \d+ bytes, expected at most 1000"):
        census.parse(census.to_bytes(sample()), "census.npz")


def test_decode_sums_over_transcripts() -> None:
    data = sample()
    assert (data.decode() == data.counts[:, 1].sum(axis=0)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_len": -5}, "prompt_len: found -5, expected 0 or more"),
        ({"transcript_id": 7}, "transcript_id: found 0707070707070707... "),
    ],
)
def test_what_no_transcript_can_be_is_refused(change: dict[str, int], message: str) -> None:
    wrong = sample()
    for name, value in change.items():
        getattr(wrong, name)[:] = value
    assert len(wrong.created) > 1
    with pytest.raises(FormatError) as refused:
        census.check(wrong, "census.npz")
    assert str(refused.value).startswith(f"census.npz: {message}")


def test_zeros_are_no_id_and_a_window_runs_forward() -> None:
    nameless = sample()
    nameless.transcript_id[:] = 0
    census.check(nameless, "census.npz")
    header = nameless.header.model_copy(update={"window": (9, 1)})
    with pytest.raises(FormatError, match=r"header window: found \[9, 1\]"):
        census.check(replace(nameless, header=header), "census.npz")
