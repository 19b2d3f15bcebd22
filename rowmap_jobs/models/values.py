"""Small checks that the readers share: bounded files, counts, and values fit for a message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeGuard

from ..formats.base import FormatError

MAX_COUNT = 1 << 62


def read_bounded(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes. Raises FormatError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise FormatError(str(path), "size", f"{size} bytes", f"at most {limit}")
            raw = file.read(size + 1)  # no more than the file has: read() allocates what it is told
    except OSError as error:
        raise FormatError(str(path), "file", error.strerror or "unreadable", "a file") from None
    if len(raw) > size:
        raise FormatError(str(path), "size", "a file that grows", f"{size} bytes")
    return raw


def is_count(value: object, least: int = 0, most: int = MAX_COUNT - 1) -> TypeGuard[int]:
    """An integer (a bool is none) from `least` to `most`, by default what an offset can be."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def shown(value: object) -> str:
    """A decoded JSON value for a message; of a long or nested list or an object its size only."""
    if isinstance(value, list) and len(value) <= 8 and all(is_count(item) for item in value):
        return str(value)
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return str(value) if value is not None else "null"
