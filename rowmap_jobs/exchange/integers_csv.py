"""CSV files of integers alone, in blocks: `1,17` or `1,17,923` a line, checked before it is read.

The whole block is matched against the grammar with a few passes that run in C; only then are its
numbers taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..formats.base import FormatError
from .base import I64
from .streams import unpacked

BLOCK = 4 << 20
MAX_LINE = 64
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_ODD = (b"0-", b"--", b"-,", b"-\n", b",,", b",\n", b"\n,", b"\n\n", b"0" * 13)
"""What stands in no line once every digit is a 0: a sign within or alone, an empty field."""
_NUMBER = rb"-?[0-9]{1,12}"


def blocks(path: Path, source: str, header: tuple[str, ...]) -> Iterator[I64]:
    """int64[n,columns] of a file, plain or gzip; 2 or 3 columns as the first line has.

    A first line that is the front of `header` is passed over. Raises FormatError naming the
    line: what is no integer of up to 12 digits, another number of columns, an end without a
    newline (a file that is still being written, or half of one), no line at all.
    """
    columns = 0
    line = 1
    rest = b""
    with unpacked(path, source) as stream:
        while True:
            try:
                data = stream.read(BLOCK)
            except OSError as error:
                found = error.strerror or type(error).__name__
                raise FormatError(source, "file", found, "a readable file") from None
            if not data:
                break
            rest = (rest + data).replace(b"\r\n", b"\n")
            cut = rest.rfind(b"\n") + 1
            block, rest = rest[:cut], rest[cut:]
            if len(rest) > MAX_LINE:
                raise FormatError(source, "text", "a line without an end", f"{header} a line")
            if block and line == 1:
                block, skipped = _without_header(block, header)
                line += skipped
            if block and not columns:
                columns = block[: block.find(b"\n") + 1].count(b",") + 1
            if block:
                yield _numbers(block, columns, line, source, header)
                line += block.count(b"\n")
    if rest:
        found = "an end without a newline"
        raise FormatError(source, f"line {line}", found, "whole lines: the file is half-written")
    if not columns:
        raise FormatError(source, "text", "no line", f"lines of {','.join(header)}")


def _without_header(block: bytes, header: tuple[str, ...]) -> tuple[bytes, int]:
    first, _, rest = block.partition(b"\n")
    for count in (2, 3):
        if first == ",".join(header[:count]).encode():
            return rest, 1
    return block, 0


def _numbers(block: bytes, columns: int, line: int, source: str, header: tuple[str, ...]) -> I64:
    count = block.count(b"\n")
    shape = block.translate(_DIGITS)
    commas = shape.translate(None, b"0-") == (b"," * (columns - 1) + b"\n") * count
    odd = shape[:1] in b",\n" or any(pair in shape for pair in _ODD)
    if columns not in (2, 3) or not commas or odd:
        raise _bad_line(block, columns, line, source, header)
    flat = np.fromstring(block.replace(b"\n", b",").decode("ascii"), dtype=np.int64, sep=",")
    if flat.size != count * columns:
        raise _bad_line(block, columns, line, source, header)
    return flat.reshape(count, columns)


def _bad_line(
    block: bytes, columns: int, line: int, source: str, header: tuple[str, ...]
) -> FormatError:
    columns = columns if columns in (2, 3) else len(header)
    fits = re.compile(_NUMBER + (b"," + _NUMBER) * (columns - 1))
    for number, text in enumerate(block.split(b"\n"), line):
        if not fits.fullmatch(text):
            shown = text[:40].decode("latin-1")
            expected = f"{','.join(header[:columns])} in integers"
            return FormatError(source, f"line {number}", shown or "an empty line", expected)
    return FormatError(source, f"line {line}", "another text", ",".join(header))
