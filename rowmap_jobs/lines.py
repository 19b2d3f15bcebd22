"""Lines of a transcript object: plain or gzip, whatever its name says, without loading it whole."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from .formats.transcript import MAX_LINE_BYTES

SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
GZIP_MAGIC = b"\x1f\x8b"
_STEP = 1 << 20


class DamagedError(Exception):
    """The object ends or breaks within its compressed data; lines before that were given."""


def is_transcript(key: str) -> bool:
    """True for object keys that hold transcripts by their name."""
    return key.endswith(SUFFIXES)


def split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The lines of an object's chunks, without their ends; empty lines are left out.

    A line longer than MAX_LINE_BYTES, spaces around it included, is given as MAX_LINE_BYTES + 1 of
    its bytes, so that its reader refuses it by size. Raises DamagedError for broken gzip.
    """
    pending = bytearray()
    overlong = False
    for chunk in _plain(chunks):
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            if not overlong:
                pending += piece
            if line := _line(pending):
                yield line
            pending.clear()
            overlong = False
        if not overlong:
            pending += rest
        if len(pending) > MAX_LINE_BYTES:
            # At once: who refuses it need not read to its end, which may be far.
            yield _line(pending)
            pending.clear()
            overlong = True
    if line := _line(pending):
        yield line


def _line(pending: bytearray) -> bytes:
    # What is overlong keeps its spaces: without them its first bytes may be few enough.
    overlong = len(pending) > MAX_LINE_BYTES
    return bytes(pending[: MAX_LINE_BYTES + 1]) if overlong else bytes(pending).strip()


def _plain(chunks: Iterator[bytes]) -> Iterator[bytes]:
    first = next(chunks, b"")
    while len(first) < len(GZIP_MAGIC) and (more := next(chunks, b"")):
        first += more
    if not first.startswith(GZIP_MAGIC):
        yield first
        yield from chunks
        return
    yield from _gunzip(first, chunks)


def _gunzip(first: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """All members of a gzip file, at most _STEP bytes at a time."""
    stream = zlib.decompressobj(wbits=31)
    data = first
    while True:
        if not data and not (data := next(chunks, b"")):
            break
        if stream.eof:
            stream = zlib.decompressobj(wbits=31)
        try:
            out = stream.decompress(data, _STEP)
        except zlib.error:
            raise DamagedError("damaged gzip data") from None
        data = stream.unused_data if stream.eof else stream.unconsumed_tail
        if out:
            yield out
    while not stream.eof and (rest := stream.decompress(b"", _STEP)):
        yield rest
    if not stream.eof:
        raise DamagedError("gzip data that ends too early")
