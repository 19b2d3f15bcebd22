"""Small files and folders of somebody else's, read whole within a limit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from ..formats.base import FormatError
from .streams import opened

HEAD_BYTES = 1 << 16
"""What a sniffer is shown of a file."""


def read_file(path: Path, source: str, limit: int) -> bytes:
    """The whole of a regular file of at most `limit` bytes. Raises FormatError."""
    with opened(path, source) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise FormatError(source, "size", f"{size} bytes", f"at most {limit}")
        # Not up to the limit: a read makes room for all that it is asked for.
        raw = _read(stream, source, size + 1)
    if len(raw) > size:
        expected = f"{size} as it had (a file that nobody writes)"
        raise FormatError(source, "size", f"more than {size} bytes", expected)
    return raw


def read_head(path: Path, source: str) -> bytes:
    """The first 64 KiB of a regular file. Raises FormatError."""
    with opened(path, source) as stream:
        return _read(stream, source, HEAD_BYTES)


def _read(stream: BinaryIO, source: str, count: int) -> bytes:
    try:
        return stream.read(count)
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise FormatError(source, "file", found, "a readable file") from None


def list_folder(path: Path, source: str) -> list[Path]:
    """Regular files of a folder by name; links are left out. Raises FormatError."""
    try:
        entries = sorted(path.iterdir())
        return [entry for entry in entries if entry.is_file() and not entry.is_symlink()]
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else None
        expected = "a readable folder"
        raise FormatError(source, "folder", found or type(error).__name__, expected) from None
