"""The arguments of pickle opcodes, read with bounds; for torch_zip alone."""

from __future__ import annotations

import struct
from typing import NamedTuple

MAX_OBJECTS = 1 << 21
"""Containers and memo entries of one pickle."""
MAX_TEXT = 1 << 20
MAX_LONG = 16


class BadError(Exception):
    """What was found and expected; the caller adds file and place."""

    def __init__(self, found: str, expected: str) -> None:
        self.found, self.expected = found, expected
        super().__init__(found)


class Word(NamedTuple):
    """A global's two names. Nothing is ever imported by them."""

    module: str
    name: str


class Cursor:
    """Reads forward through bytes; raises BadError at their end."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.at = 0

    def done(self) -> bool:
        return self.at == len(self._raw)

    def take(self, count: int) -> bytes:
        if count > len(self._raw) - self.at:
            raise BadError("the end of the pickle", "a complete pickle")
        part = self._raw[self.at : self.at + count]
        self.at += count
        return part

    def unsigned(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def signed(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little", signed=True)

    def long(self) -> int:
        count = self.unsigned(1)
        if count > MAX_LONG:
            raise BadError(f"an integer of {count} bytes", f"at most {MAX_LONG}")
        return self.signed(count)

    def double(self) -> float:
        value: float = struct.unpack(">d", self.take(8))[0]
        return value

    def text(self) -> str:
        count = self.unsigned(4)
        if count > MAX_TEXT:
            raise BadError(f"a text of {count} bytes", f"at most {MAX_TEXT}")
        try:
            return self.take(count).decode("utf-8")
        except UnicodeDecodeError:
            raise BadError("a text that is not UTF-8", "UTF-8") from None

    def line(self) -> str:
        """A global's name: up to the newline, at most 200 printable ASCII characters."""
        end = self._raw.find(b"\n", self.at, self.at + 201)
        if end < 0:
            raise BadError("a global without an end", "a complete pickle")
        word = self.take(end + 1 - self.at)[:-1]
        if not word.isascii() or not word.decode("latin-1").isprintable():
            raise BadError("a global that is not printable", "a name")
        return word.decode("ascii")
