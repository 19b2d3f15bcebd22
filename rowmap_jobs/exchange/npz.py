"""Reading .npy and .npz files of others in bounded memory, and writing them the same each time.

Format: numpy's own (numpy.lib.format, versions 1.0 to 3.0). A header is matched against the few
forms that arrays of numbers and names have, not evaluated; object arrays (pickles) are refused.
Sizes are checked as declared before anything is allocated, and again as read.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from .streams import opened, replacing

MAGIC = b"\x93NUMPY"
MAX_HEADER = 8192
MAX_MEMBERS = 20000
MAX_DIRECTORY = 4 << 20
"""Bytes of a zip file's directory: what zipfile reads whole before it knows anything."""
MAX_UNPACKED = 2 << 30
MAX_ROW = 4 << 20
CHUNK = 1 << 20
"""Bytes of an array that are held at a time, where the caller does not say."""

_ITEM = re.compile(
    r"\s*(?:'(descr)'\s*:\s*'([<>=|]?[A-Za-z]\d*)'"
    r"|'(fortran_order)'\s*:\s*(True|False)"
    r"|'(shape)'\s*:\s*\(([\d\s,]*)\))\s*(?:,|(?=\s*\}))"
)
_DTYPE = re.compile(r"[<>=|]?(?:b1|i[1248]|u[1248]|f[248]|U\d{1,4})")
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")


@dataclass(frozen=True)
class Header:
    """Type and shape that a .npy file declares; C order."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def fill(stream: BinaryIO, view: memoryview, source: str, place: str) -> int:
    """Read until `view` is full or the stream ends; the number of bytes read."""
    got = 0
    try:
        while got < len(view):
            count = stream.readinto(view[got:])  # type: ignore[attr-defined]
            if not count:
                break
            got += count
    except FormatError:
        raise
    except Exception as error:  # zipfile and zlib raise many kinds on damaged bytes
        raise FormatError(source, place, type(error).__name__, "undamaged data") from None
    return got


def exactly(stream: BinaryIO, size: int, source: str, place: str) -> bytes:
    """`size` bytes. Raises FormatError when the stream ends before."""
    out = bytearray(size)
    got = fill(stream, memoryview(out), source, place)
    if got < size:
        raise FormatError(source, place, f"an end after {got} bytes", f"{size} bytes")
    return bytes(out)


def read_header(stream: BinaryIO, source: str, place: str) -> Header | None:
    """The header of the .npy array that starts here; None at the end of the stream.

    Raises FormatError: no .npy, another version, an object array, Fortran order.
    """
    magic = bytearray(8)
    got = fill(stream, memoryview(magic), source, place)
    if got == 0:
        return None
    if got < 8 or magic[:6] != MAGIC:
        raise FormatError(source, place, bytes(magic[: min(got, 6)]), "a .npy array")
    version = (magic[6], magic[7])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise FormatError(source, place, f"version {version}", ".npy version 1.0, 2.0 or 3.0")
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(exactly(stream, width, source, place), "little")
    if length > MAX_HEADER:
        raise FormatError(source, place, f"a header of {length} bytes", f"at most {MAX_HEADER}")
    return _parse_header(exactly(stream, length, source, place), source, place)


def _parse_header(raw: bytes, source: str, place: str) -> Header:
    text = raw.decode("latin-1").strip()
    fields: dict[str, str] = {}
    at = 1
    while text.startswith("{") and (item := _ITEM.match(text, at)):
        key, value = (part for part in item.groups() if part is not None)
        if key in fields:
            raise FormatError(source, place, f"{key} twice in the header", "each key once")
        fields[key] = value
        at = item.end()
    if len(fields) != 3 or text[at:].strip() != "}":
        found = f"a header {text[:60]}"
        raise FormatError(source, place, found, "a .npy header of numbers or names, no objects")
    if not _DTYPE.fullmatch(fields["descr"]):
        raise FormatError(source, place, f"type {fields['descr']}", "numbers or names, no objects")
    parts = fields["shape"].replace(" ", "").split(",")
    # Python writes (), (3,) and (3, 4): a last comma is a must for one size.
    if parts[-1] == "":
        parts.pop()
    elif len(parts) == 1:
        parts = ["?"]
    if len(parts) > 8 or not all(re.fullmatch(r"[0-9]{1,18}", part) for part in parts):
        raise FormatError(source, place, f"shape ({fields['shape'][:40]})", "up to 8 sizes")
    shape = tuple(int(part) for part in parts)
    if fields["fortran_order"] == "True" and len(shape) > 1:
        raise FormatError(source, place, "Fortran order", "C order")
    return Header(np.dtype(fields["descr"]), shape)


def rows(
    stream: BinaryIO, header: Header, count: int, source: str, place: str, chunk: int = CHUNK
) -> Iterator[npt.NDArray[Any]]:
    """The next `count` rows (along the first axis) of an array, some `chunk` bytes at a time.

    The array given is used again for the next rows: count or copy it before going on.
    Raises FormatError when the data ends before.
    """
    row = math.prod(header.shape[1:]) * header.dtype.itemsize
    if row == 0:
        return
    if row > MAX_ROW:
        raise FormatError(source, place, f"rows of {row} bytes", f"at most {MAX_ROW}")
    step = max(1, chunk // row)
    buffer = np.empty((min(step, count), *header.shape[1:]), dtype=header.dtype)
    done = 0
    while done < count:
        part = buffer[: min(step, count - done)]
        got = fill(stream, part.reshape(-1).view(np.uint8).data, source, place)
        if got < part.nbytes:
            found = f"an end after {done + got // row} of {count} rows"
            raise FormatError(source, place, found, "all the rows that the header declares")
        done += len(part)
        yield part if part.dtype.isnative else part.astype(part.dtype.newbyteorder("="))


def skip(stream: BinaryIO, size: int, source: str, place: str) -> None:
    """Read over `size` bytes. Raises FormatError when the stream ends before."""
    buffer = memoryview(bytearray(min(size, CHUNK)))
    while size:
        got = fill(stream, buffer[: min(size, CHUNK)], source, place)
        if not got:
            raise FormatError(source, place, f"an end {size} bytes too early", "whole data")
        size -= got


def ended(stream: BinaryIO, source: str, place: str) -> None:
    """Refuse bytes behind an array; at the end of a zip member this checks its CRC, too."""
    if fill(stream, memoryview(bytearray(1)), source, place):
        raise FormatError(source, place, "more bytes than the header declares", "one array")


class Archive:
    """An open .npz file whose directory has been checked; `names` are without `.npy`."""

    def __init__(self, archive: zipfile.ZipFile, source: str) -> None:
        self._archive, self.source = archive, source
        self.names = tuple(name.removesuffix(".npy") for name in archive.namelist())

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """The unpacked bytes of a member."""
        try:
            member: IO[bytes] = self._archive.open(f"{name}.npy")
        except Exception as error:  # zipfile raises many kinds on damaged bytes
            raise FormatError(self.source, name, type(error).__name__, "a zip member") from None
        with member:
            yield member  # type: ignore[misc]  # ZipExtFile has readinto

    def read(
        self, name: str, kinds: str, ndim: Sequence[int], limit: int = MAX_UNPACKED
    ) -> npt.NDArray[Any]:
        """A member as a whole array of a dtype kind in `kinds` ("iu", "U") and so many axes.

        Raises FormatError: no such member, another type or shape, more than `limit` bytes.
        """
        if name not in self.names:
            raise FormatError(self.source, "members", sorted(self.names)[:8], f"one named {name}")
        with self.open(name) as stream:
            header = read_header(stream, self.source, name)
            if header is None:
                raise FormatError(self.source, name, "no bytes", "a .npy array")
            if header.dtype.kind not in kinds or len(header.shape) not in ndim:
                found = f"{header.dtype} with {len(header.shape)} dimensions"
                words = {"iu": "integers", "U": "text"}
                axes = " or ".join(str(number) for number in ndim)
                expected = f"{words.get(kinds, kinds)} with {axes} dimensions"
                raise FormatError(self.source, name, found, expected)
            if header.nbytes > limit:
                found = f"{header.nbytes} bytes"
                raise FormatError(self.source, name, found, f"at most {limit}")
            body = np.empty(header.nbytes, dtype=np.uint8)
            got = fill(stream, body.data, self.source, name)
            if got < header.nbytes:
                found = f"an end after {got} bytes"
                raise FormatError(self.source, name, found, f"{header.nbytes} bytes")
            ended(stream, self.source, name)
        # A zero-sized dtype (an empty name) has no bytes to view.
        if header.dtype.itemsize == 0:
            return np.zeros(header.shape, dtype=header.dtype)
        array = body.view(header.dtype).reshape(header.shape)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@contextmanager
def archive(path: Path, source: str, limit: int = MAX_UNPACKED) -> Iterator[Archive]:
    """Open a .npz file: only .npy members of plain names, each once, `limit` bytes in all.

    Raises FormatError.
    """
    with opened(path, source) as handle:
        check_directory(handle, source)
        try:
            opened_zip = zipfile.ZipFile(handle)
        except Exception as error:  # zipfile raises many kinds on damaged bytes
            raise FormatError(source, "archive", type(error).__name__, "a .npz file") from None
        with opened_zip:
            _check_members(opened_zip.infolist(), source, limit)
            yield Archive(opened_zip, source)


def _check_members(infos: Sequence[zipfile.ZipInfo], source: str, limit: int) -> None:
    seen: set[str] = set()
    for info in infos:
        name = info.filename
        if not re.fullmatch(r"[^/\\\0]{1,255}\.npy", name) or name.startswith("."):
            raise FormatError(source, "members", name, "plain names that end in .npy")
        if name in seen:
            raise FormatError(source, "members", f"{name} twice", "each member once")
        seen.add(name)
        if info.flag_bits & 1 or info.compress_type not in (
            zipfile.ZIP_STORED,
            zipfile.ZIP_DEFLATED,
        ):
            found = "an encrypted member" if info.flag_bits & 1 else "another compression"
            raise FormatError(source, name, found, "a stored or deflated member")
    total = sum(info.file_size for info in infos)
    if total > limit:
        raise FormatError(source, "unpacked size", f"{total} bytes", f"at most {limit}")


def check_directory(handle: BinaryIO, source: str) -> None:
    """Refuse a zip file whose directory declares more members or bytes than anything real has.

    zipfile reads the directory whole before it can be asked (APPNOTE.TXT 4.3.14 to 4.3.16).
    """
    size = handle.seek(0, 2)
    start = max(0, size - _END.size - 0xFFFF - _END64_LOCATOR.size)
    handle.seek(start)
    tail = handle.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _END.size > len(tail):
        raise FormatError(source, "archive", "no end of a zip file", "a whole .npz file")
    end = _END.unpack_from(tail, at)
    members, directory = end[4], end[5]
    before = at - _END64_LOCATOR.size
    if before >= 0 and tail[before : before + 4] == b"PK\x06\x07":
        where = _END64_LOCATOR.unpack_from(tail, before)[2]
        handle.seek(min(where, size))
        record = handle.read(_END64.size)
        if len(record) < _END64.size or record[:4] != b"PK\x06\x06":
            raise FormatError(source, "archive", "a damaged zip64 end", "a whole .npz file")
        members, directory = _END64.unpack(record)[7:9]
    if members > MAX_MEMBERS or directory > MAX_DIRECTORY:
        found = f"{members} members, a directory of {directory} bytes"
        raise FormatError(source, "archive", found, f"{MAX_MEMBERS} and {MAX_DIRECTORY} at most")
    handle.seek(0)


def write(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """A deflated .npz file with fixed times: equal arrays give equal bytes."""
    with replacing(path) as out, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            with packed.open(info, "w", force_zip64=array.nbytes > 1 << 30) as member:
                # asarray: ascontiguousarray would give a number one axis.
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)
