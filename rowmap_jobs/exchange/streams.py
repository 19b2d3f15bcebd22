"""Files from outside: regular files only, gzip by its magic, in bounded steps; whole new files."""

from __future__ import annotations

import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from isal import isal_zlib

from ..formats.base import FormatError, load_json
from ..formats.transcript import MAX_LINE_BYTES
from ..lines import GZIP_MAGIC, DamagedError, split

MAX_JSON = 16 << 20
_STEP = 1 << 16
# Its stubs give an instance where the class is.
_DAMAGED = cast(type[Exception], isal_zlib.error)


class Gunzip(io.RawIOBase):
    """The unpacked bytes of a gzip file of one or more members, some _STEP of them at a time.

    Raises FormatError naming `source` for damaged data and data that ends too early.
    """

    def __init__(self, raw: BinaryIO, source: str) -> None:
        self._raw, self._source = raw, source
        self._stream = isal_zlib.decompressobj(wbits=31)
        self._packed = b""
        self._started = False
        self._out = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]  # the protocol of RawIOBase
        if not self._out:
            self._out = memoryview(self._more())
        count = min(len(view), len(self._out))
        view[:count] = self._out[:count]
        self._out = self._out[count:]
        return count

    def _more(self) -> bytes:
        """The next unpacked bytes; none at the end."""
        while True:
            if self._stream.eof:
                self._packed = self._stream.unused_data
                self._stream, self._started = isal_zlib.decompressobj(wbits=31), False
            if not self._packed:
                self._packed = self._raw.read(_STEP)
            if not self._packed and not self._started:
                return b""
            ending = not self._packed
            try:
                # With no data left the last output may still wait inside the stream.
                out = self._stream.decompress(self._packed, 4 * _STEP)
            except _DAMAGED:
                raise FormatError(self._source, "gzip", "damaged data", "gzip data") from None
            self._started = True
            self._packed = self._stream.unconsumed_tail
            if out:
                return out
            if ending and not self._stream.eof:
                found = "data that ends too early"
                raise FormatError(self._source, "gzip", found, "whole gzip data")


@contextmanager
def opened(path: Path, source: str) -> Iterator[BinaryIO]:
    """A regular file for reading, as it is. Raises FormatError for anything else."""
    try:
        # Asked before it is opened: opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(source, "file", "no regular file", "a regular file")
        handle = path.open("rb")
    except FormatError:
        raise
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise FormatError(source, "file", found, "a readable file") from None
    except ValueError:
        raise FormatError(source, "file", "a name with a NUL", "a file's name") from None
    with handle:
        yield handle


@contextmanager
def unpacked(path: Path, source: str) -> Iterator[BinaryIO]:
    """A file's bytes; those of a gzip file (told by its magic, not its name) unpacked."""
    with opened(path, source) as handle:
        magic = handle.read(len(GZIP_MAGIC))
        handle.seek(0)
        yield cast(BinaryIO, Gunzip(handle, source)) if magic == GZIP_MAGIC else handle


def lines(path: Path, source: str) -> Iterator[tuple[int, bytes]]:
    """Number (from 1, empty lines left out) and bytes of each line of a JSONL file, plain or gzip.

    Raises FormatError for damaged gzip and a line of more than MAX_LINE_BYTES.
    """
    with opened(path, source) as handle:
        try:
            for number, line in enumerate(split(iter(lambda: handle.read(1 << 20), b"")), 1):
                if len(line) > MAX_LINE_BYTES:
                    found = f"more than {MAX_LINE_BYTES} bytes"
                    raise FormatError(source, f"line {number}", found, "a shorter line")
                yield number, line
        except DamagedError as error:
            raise FormatError(source, "gzip", str(error), "whole gzip data") from None


def json_file(path: Path, source: str, limit: int = MAX_JSON) -> object:
    """A JSON file of at most `limit` bytes, decoded strictly. Raises FormatError."""
    with opened(path, source) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > limit:
            raise FormatError(source, "size", f"{size} bytes", f"at most {limit}")
        raw = handle.read(size)
    return load_json(raw, source)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes its name only when it is whole; on an error there is none."""
    handle = tempfile.NamedTemporaryFile(  # noqa: SIM115  # renamed or removed below
        dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False
    )
    part = Path(handle.name)
    try:
        with handle:
            yield cast(BinaryIO, handle)
            handle.flush()
            os.fsync(handle.fileno())
        part.chmod(0o644)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
