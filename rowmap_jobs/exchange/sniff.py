"""What a file looks like, from its first 64 KiB and the names inside: no format is read here."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..formats.base import FormatError
from .files import list_folder, read_head
from .layers import layer_id
from .npz import check_directory
from .streams import Gunzip, opened

GZIP = b"\x1f\x8b"
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Look:
    """A file or folder as a sniffer sees it; gzip is looked into."""

    path: Path
    source: str
    head: bytes
    names: tuple[str, ...]
    """Of a folder's files, or of a zip file's members."""
    is_folder: bool

    @cached_property
    def text(self) -> str:
        """The head as text without a half line at its end."""
        head = self.head
        if len(head) >= 1 << 15 and b"\n" in head:
            head = head[: head.rfind(b"\n") + 1]
        return head.decode("utf-8", "replace")

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of the JSON object that the file (or its first line) is, as far as the head has."""
        return _keys(self.text)

    @cached_property
    def first_line(self) -> str:
        return self.text.lstrip("\ufeff").split("\n", 1)[0].strip()

    @cached_property
    def is_lines(self) -> bool:
        """JSON lines: the first line is a whole object, by its brackets."""
        return self.first_line.startswith("{") and self.first_line.endswith("}")

    @cached_property
    def pickled(self) -> str:
        """The head of a torch file's data.pkl, for the words in it; nothing is unpickled."""
        name = next((n for n in self.names if n.endswith("/data.pkl")), None)
        if name is None or self.is_folder:
            return ""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(name) as member:
                return member.read(1 << 16).decode("latin-1")
        except Exception:  # zipfile raises many kinds; the reader says what is wrong
            return ""

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names in a safetensors header, as far as the head has them."""
        length = struct.unpack("<Q", self.head[:8])[0] if len(self.head) > 9 else 0
        if not 2 <= length <= 100_000_000 or self.head[8:9] != b"{":
            return ()
        return _keys(self.head[8 : 8 + length].decode("utf-8", "replace"))


def look(path: Path) -> Look:
    """Raises FormatError for what cannot be opened, and for a zip file that is not whole."""
    source = path.name
    if path.is_dir():
        return Look(path, source, b"", tuple(p.name for p in list_folder(path, source)), True)
    head = read_head(path, source)
    if head[:2] == GZIP:
        with opened(path, source) as stream:
            head = io.BufferedReader(Gunzip(stream, source)).read(1 << 16)
    return Look(path, source, head, _members(path, source) if head[:2] == b"PK" else (), False)


def _members(path: Path, source: str) -> tuple[str, ...]:
    with opened(path, source) as stream:
        check_directory(stream, source)
        try:
            with zipfile.ZipFile(stream) as archive:
                return tuple(archive.namelist())
        except Exception as error:  # zipfile raises many kinds on damaged bytes
            found = type(error).__name__
            raise FormatError(source, "archive", found, "a whole zip file") from None


def _keys(text: str) -> tuple[str, ...]:
    """Keys at depth one of a JSON object that may be cut off."""
    out: list[str] = []
    depth, at, size = 0, 0, len(text)
    while at < size:
        letter = text[at]
        if letter == '"':
            match = _STRING.match(text, at)
            if match is None:
                break
            at = match.end()
            if depth == 1 and text[at : at + 8].lstrip().startswith(":"):
                out.append(match[1])
            continue
        if letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
            if depth <= 0:
                break
        elif depth == 0 and not letter.isspace():
            break
        at += 1
    return tuple(out) if text.lstrip()[:1] == "{" else ()


def has_pickled(seen: Look, *words: str) -> bool:
    return any(f"X{chr(len(word))}\0\0\0{word}" in seen.pickled for word in words)


def layer_lists(seen: Look) -> bool:
    """A JSON object whose keys are layer keys of modules, each with a list."""
    keys = seen.keys
    named = all(layer_id(key) is not None and not key.isdigit() for key in keys)
    return bool(keys) and named and re.match(r'\s*\{\s*"[^"]*"\s*:\s*\[', seen.text) is not None


def integer_rows(seen: Look) -> int:
    """Columns of a CSV of integers alone (2 or 3), else 0."""
    lines = [line for line in seen.text.splitlines()[:1000] if line]
    if lines and lines[0] in ("layer,expert", "layer,expert,count"):
        lines = lines[1:]
    for columns in (2, 3):
        form = re.compile(r"-?\d+" + r",-?\d+" * (columns - 1))
        if lines and all(map(form.fullmatch, lines)):
            return columns
    return 0


def repeats(seen: Look) -> bool:
    """A line stands more than once."""
    lines = seen.text.splitlines()
    return len(set(lines)) < len(lines)
