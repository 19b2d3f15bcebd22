"""Files of arrays from outside: bounded, whole, no pickle, and the same numbers as numpy reads."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rowmap_jobs.exchange import npz, streams
from tests.exchange.made import line_of, passes_or_refuses
from tests.exchange.routings import npy

KINDS = ["u1", "<u2", ">u2", "<i4", ">i8", "<f4", "<U3", "?"]
arrays = st.sampled_from(KINDS).flatmap(
    lambda kind: hnp.arrays(
        np.dtype(kind),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
        elements=st.just("ab") if kind == "<U3" else None,
    )
)


def read_all(raw: bytes, tmp: Path) -> dict[str, np.ndarray]:
    path = tmp / "x.npz"
    path.write_bytes(raw)
    with npz.archive(path, "x.npz", limit=1 << 24) as archive:
        return {name: archive.read(name, "biufU", range(9), 1 << 20) for name in archive.names}


def savez(**members: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **members)
    return out.getvalue()


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, body in members.items():
            archive.writestr(name, body)
    return out.getvalue()


@given(st.dictionaries(st.sampled_from("abc"), arrays, min_size=1))
def test_an_npz_gives_what_numpy_gives(
    tmp_path_factory: pytest.TempPathFactory, members: dict[str, np.ndarray]
) -> None:
    tmp = tmp_path_factory.mktemp("npz")
    found = read_all(savez(**members), tmp)
    assert set(found) == set(members)
    for name, array in members.items():
        assert found[name].shape == array.shape
        assert found[name].dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(found[name], array, equal_nan=array.dtype.kind == "f")


@given(st.dictionaries(st.sampled_from("abc"), arrays, min_size=1))
def test_what_is_written_is_read_again_and_always_the_same(
    tmp_path_factory: pytest.TempPathFactory, members: dict[str, np.ndarray]
) -> None:
    tmp = tmp_path_factory.mktemp("npz")
    npz.write(tmp / "a.npz", members)
    npz.write(tmp / "b.npz", members)
    raw = (tmp / "a.npz").read_bytes()
    assert raw == (tmp / "b.npz").read_bytes()
    found = read_all(raw, tmp)
    for name, array in members.items():
        assert np.array_equal(found[name], array, equal_nan=array.dtype.kind == "f")


@given(hnp.arrays(np.dtype(">u2"), st.tuples(st.integers(1, 40), st.just(3))), st.integers(1, 99))
def test_rows_in_pieces_are_the_rows(array: np.ndarray, chunk: int) -> None:
    stream = io.BytesIO(npy(array))
    header = npz.read_header(stream, "x.npy", "array")
    assert header is not None and header.shape == array.shape
    first = len(array) // 3
    pieces = [
        piece.copy()
        for count in (first, len(array) - first)
        for piece in npz.rows(stream, header, count, "x.npy", "array", chunk)
    ]
    assert all(piece.nbytes <= max(chunk, 6) for piece in pieces)
    assert np.array_equal(np.concatenate(pieces), array)
    npz.ended(stream, "x.npy", "array")


@given(st.binary(max_size=300))
def test_random_bytes_are_no_array(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    assert "x.npz: archive: " in line_of(lambda: read_all(raw, tmp_path_factory.mktemp("npz")))
    if raw:
        line_of(lambda: npz.read_header(io.BytesIO(raw), "x.npy", "array"))


@given(st.integers(0, 1 << 30), st.integers(1, 255), st.booleans())
def test_a_changed_byte_never_gives_other_numbers(
    tmp_path_factory: pytest.TempPathFactory, at: int, change: int, end: bool
) -> None:
    array = np.arange(60, dtype=np.int64).reshape(3, 20)
    raw = bytearray(savez(a=array, names=np.array(["layer_idx=1"])))
    at = len(raw) - 1 - at % 150 if end else at % len(raw)
    raw[at] ^= change
    found = passes_or_refuses(lambda: read_all(bytes(raw), tmp_path_factory.mktemp("npz")))
    # A changed name of a member is another member; the numbers under its own name stay.
    if found is not None and "a" in found:
        assert np.array_equal(found["a"], array)


@given(st.integers(0, 1 << 30))
def test_half_a_file_is_refused(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    raw = savez(a=np.arange(60))
    cut = raw[: at % len(raw)]
    line_of(lambda: read_all(cut, tmp_path_factory.mktemp("npz")))


class Ran:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (os.mkdir, ("/tmp/expertmaps-npz-pickle-ran",))


def header(text: str, version: tuple[int, int] = (1, 0)) -> bytes:
    body = text.encode("latin-1") + b"\n"
    width = "<H" if version == (1, 0) else "<I"
    return b"\x93NUMPY" + bytes(version) + struct.pack(width, len(body)) + body


GOOD = "{'descr': '<u2', 'fortran_order': False, 'shape': (2, 3), }"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (npy(np.array([Ran()], dtype=object)), "a: found type |O, expected numbers or names"),
        (npy(np.zeros(2, dtype=[("a", "u1")])), "a: found a header {'descr': [('a', '|u1')]"),
        (npy(np.zeros((2, 3), order="F")), "a: found Fortran order, expected C order"),
        (header(GOOD, (9, 0)), "a: found version (9, 0), expected .npy version 1.0, 2.0 or 3.0"),
        (header(GOOD) + bytes(11), "a: found an end after 11 bytes, expected 12 bytes"),
        (header(GOOD) + bytes(13), "a: found more bytes than the header declares"),
        (header(GOOD)[:40], "a: found an end after 30 bytes, expected 60 bytes"),
        (header("{" + " " * 9000 + "}"), "a: found a header of 9003 bytes, expected at most 8192"),
        (
            header(GOOD.replace("(2, 3)", "(99999999999, 3)")),
            "a: found 599999999994 bytes, expected at most 1048576",
        ),
        (header(GOOD.replace("(2, 3)", "(-2, 3)")), "a: found a header {'descr'"),
        (header(GOOD.replace("(2, 3)", "(2)")), "a: found shape (2), expected up to 8 sizes"),
        (header(GOOD.replace("(2, 3)", "(2,,3)")), "a: found shape (2,,3), expected up to 8"),
        (header(GOOD.replace("False", "exit()")), "a: found a header {'descr'"),
        (header(GOOD[:-1] + "'descr': '<u4', }"), "a: found descr twice in the header"),
        (header(GOOD.replace("<u2", "<u3")), "a: found type <u3, expected numbers or names"),
        (b"", "a: found no bytes, expected a .npy array"),
        (b"\x93NUMP", "a: found b'\\x93NUMP', expected a .npy array"),
    ],
)
def test_members_that_are_no_plain_array(tmp_path: Path, raw: bytes, message: str) -> None:
    line = line_of(lambda: read_all(zipped({"a.npy": raw}), tmp_path))
    assert line.startswith(f"x.npz: {message}"), line
    assert not Path("/tmp/expertmaps-npz-pickle-ran").exists()


def test_the_trap_of_the_pickle_works() -> None:
    assert b"expertmaps-npz-pickle-ran" in pickle.dumps(Ran())


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_of_numpys_format(version: tuple[int, int]) -> None:
    stream = io.BytesIO(header(GOOD, version) + bytes(range(12)))
    found = npz.read_header(stream, "x.npy", "array")
    assert found == npz.Header(np.dtype("<u2"), (2, 3))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"../a.npy": b""}, "members: found ../a.npy, expected plain names"),
        ({"/etc/a.npy": b""}, "members: found /etc/a.npy, expected plain names"),
        ({"a\\b.npy": b""}, "members: found "),
        ({"a.pkl": b""}, "members: found a.pkl, expected plain names that end in .npy"),
        ({".a.npy": b""}, "members: found .a.npy, expected plain names"),
    ],
)
def test_names_that_are_not_plain(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    line = line_of(lambda: read_all(zipped(members), tmp_path))
    assert line.startswith(f"x.npz: {message}"), line


def test_a_member_twice(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, pytest.warns(UserWarning):
        archive.writestr("a.npy", npy(np.zeros(2)))
        archive.writestr("a.npy", npy(np.ones(2)))
    line = line_of(lambda: read_all(out.getvalue(), tmp_path))
    assert line == "x.npz: members: found a.npy twice, expected each member once"


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    raw = zipped({"a.npy": npy(np.zeros(2))}, zipfile.ZIP_LZMA)
    line = line_of(lambda: read_all(raw, tmp_path))
    assert line == "x.npz: a.npy: found another compression, expected a stored or deflated member"


def peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_is_refused_by_its_declared_size(tmp_path: Path) -> None:
    raw = zipped({f"a{i}.npy": bytes(1 << 22) for i in range(8)})
    assert len(raw) < 1 << 17
    used = peak(lambda: line_of(lambda: read_all(raw, tmp_path)))
    assert used < 1 << 20
    assert "unpacked size" in line_of(lambda: read_all(raw, tmp_path))


def test_a_bomb_that_declares_less_than_it_has(tmp_path: Path) -> None:
    body = header(GOOD.replace("(2, 3)", "(8, 3)")) + bytes(1 << 23)
    raw = bytearray(zipped({"a.npy": body}))
    small = struct.pack("<I", len(header(GOOD)) + 48)
    for start, place in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = raw.rindex(start) + place
        raw[at : at + 4] = small
    used = peak(lambda: line_of(lambda: read_all(bytes(raw), tmp_path)))
    assert used < 1 << 20


@pytest.mark.parametrize("change", ["members", "directory", "zip64"])
def test_a_directory_too_large_is_refused_before_it_is_read(tmp_path: Path, change: str) -> None:
    raw = savez(a=np.zeros(2))
    end = raw.rindex(b"PK\x05\x06")
    tail = bytearray(raw[end:])
    between = b""
    if change == "members":
        tail[10:12] = struct.pack("<H", 0xFFFF)
    elif change == "directory":
        tail[12:16] = struct.pack("<I", 1 << 30)
    else:
        record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 1 << 40, 0)
        between = record + struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    line = line_of(lambda: read_all(raw[:end] + between + bytes(tail), tmp_path))
    assert line.startswith("x.npz: archive: found ") and "20000 and 4194304 at most" in line


def gunzip(raw: bytes, step: int = 7) -> bytes:
    stream = streams.Gunzip(io.BytesIO(raw), "x.gz")
    out = b""
    while piece := stream.read(step):
        out += piece
    return out


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=3), st.integers(1, 500))
def test_gzip_of_several_members(parts: list[bytes], step: int) -> None:
    assert gunzip(b"".join(gzip.compress(part) for part in parts), step) == b"".join(parts)


@given(st.binary(max_size=200), st.integers(0, 1 << 30), st.integers(0, 255))
def test_damaged_gzip_is_refused_or_the_same(body: bytes, at: int, change: int) -> None:
    raw = bytearray(gzip.compress(body, mtime=0))
    at %= len(raw)
    if change:
        raw[at] ^= change
    else:
        del raw[at:]
    if raw:
        assert passes_or_refuses(lambda: gunzip(bytes(raw))) in (None, body)


def test_a_gzip_bomb_is_unpacked_in_steps() -> None:
    stream = zlib.compressobj(9, wbits=31)
    raw = b"".join(stream.compress(bytes(1 << 20)) for _ in range(24)) + stream.flush()
    packed = streams.Gunzip(io.BytesIO(raw), "x.gz")
    buffer = bytearray(1 << 16)

    def run() -> None:
        while packed.readinto(buffer):
            pass

    assert peak(run) < 8 << 20


@pytest.mark.parametrize("make", ["folder", "pipe", "nothing", "nul"])
def test_only_regular_files_are_opened(tmp_path: Path, make: str) -> None:
    path = tmp_path / ("x\0" if make == "nul" else "x")
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    found = {"folder": "no regular file", "pipe": "no regular file", "nul": "a name with a NUL"}

    def run() -> None:
        with streams.opened(path, "x"):
            pass

    assert f"x: file: found {found.get(make, 'No such file')}" in line_of(run)


def test_a_file_that_is_not_finished_gets_no_name(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"before")

    def run() -> None:
        with streams.replacing(path) as out:
            out.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run()
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.bin"]


def test_lines_have_numbers_and_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(gzip.compress(b"{}\n\n[]\n1"))
    assert list(streams.lines(path, "x")) == [(1, b"{}"), (2, b"[]"), (3, b"1")]
    path.write_bytes(gzip.compress(b"{}\n" * 99)[:-9])
    assert line_of(lambda: list(streams.lines(path, "x"))).startswith("x: gzip: found ")
    monkeypatch.setattr("rowmap_jobs.lines.MAX_LINE_BYTES", 10)
    monkeypatch.setattr(streams, "MAX_LINE_BYTES", 10)
    path.write_bytes(b"{}\n" + b"x" * 20)
    line = line_of(lambda: list(streams.lines(path, "x")))
    assert line == "x: line 2: found more than 10 bytes, expected a shorter line"
