"""Headers of GGUF files: metadata, and the type, shape and place of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the checks are those of
llama.cpp's own reader (ggml/src/gguf.cpp): block sizes, alignment, tensors back to back.
Everything is read through a window of the file; a declared count is held against the bytes that
are left before anything is allocated for it.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..formats.base import FormatError

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 256 << 20
MAX_VALUES = 1 << 16
MAX_TENSORS = 1 << 20
MAX_PARTS = 1 << 10
MAX_STRING = 1 << 20
MAX_NAME = 63
"""llama.cpp's GGML_MAX_NAME without its end."""
MAX_DIMENSIONS = 4
KEPT_ELEMENTS = 1 << 12
"""Longer arrays (vocabularies) are checked and passed over."""
MAX_ALIGNMENT = 1 << 20

BLOCKS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
"""Tensor type: name, elements of a block, bytes of a block (gguf-py's GGML_QUANT_SIZES)."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_PART = re.compile(r"^(.+)-([0-9]{5})-of-([0-9]{5})\.gguf$")

Value = int | float | bool | str | tuple[int | float | bool | str, ...]


class GgufTensor(NamedTuple):
    """One tensor: dimensions fastest first, as GGUF has them; `offset` counts from the file."""

    name: str
    type: str
    dimensions: tuple[int, ...]
    nbytes: int
    file: str
    offset: int


@dataclass(frozen=True)
class Gguf:
    """The header of a model: one file, or all parts of a split one."""

    source: str
    values: dict[str, Value]
    """Metadata, without arrays of more than KEPT_ELEMENTS elements."""
    tensors: tuple[GgufTensor, ...]


def read(path: Path) -> Gguf:
    """Header of a GGUF file; of a split model all parts, which are found by their names.

    Raises FormatError naming the file, the place, what was found and what was expected.
    """
    first = _read_file(path)
    count = first.values.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return first
    match = _PART.match(path.name)
    if match is None or int(match.group(3)) != count or count > MAX_PARTS:
        found = f"a part of {count}, named {path.name}"
        raise FormatError(str(path), "split.count", found, "a name ending in -00001-of-0000N.gguf")
    tensors: list[GgufTensor] = []
    seen: set[str] = set()
    values: dict[str, Value] = {}
    for number in range(1, count + 1):
        part = path.with_name(f"{match.group(1)}-{number:05d}-of-{count:05d}.gguf")
        header = first if part == path else _read_file(part)
        values = header.values if number == 1 else values
        if header.values.get("split.no") != number - 1 or header.values.get("split.count") != count:
            number_found = header.values.get("split.no", "none")
            raise FormatError(str(part), "split.no", number_found, f"{number - 1} of {count}")
        for tensor in header.tensors:
            if tensor.name in seen or len(seen) >= MAX_TENSORS:
                raise FormatError(str(part), tensor.name, "once more", "each tensor in one part")
            seen.add(tensor.name)
            tensors.append(tensor)
    return Gguf(str(path), values, tuple(tensors))


def _read_file(path: Path) -> Gguf:
    try:
        with path.open("rb") as file:
            return _header(_Window(file, str(path), os.fstat(file.fileno()).st_size), path.name)
    except OSError as error:
        raise FormatError(str(path), "file", error.strerror or "unreadable", "a file") from None


class _Window:
    """The bytes of a header: each read is held against what is left of it."""

    def __init__(self, file: BinaryIO, source: str, size: int) -> None:
        self.file, self.source, self.size = file, source, size
        self.position = 0

    @property
    def left(self) -> int:
        return min(self.size, MAX_HEADER_BYTES) - self.position

    def need(self, count: int, place: str) -> None:
        if count > self.left:
            found = f"{count} bytes at byte {self.position}"
            raise FormatError(self.source, place, found, f"at most {self.left}")

    def take(self, count: int, place: str) -> bytes:
        self.need(count, place)
        raw = self.file.read(count)
        if len(raw) != count:
            raise FormatError(self.source, place, f"{len(raw)} bytes", f"{count}")
        self.position += count
        return raw

    def skip(self, count: int, place: str) -> None:
        self.need(count, place)
        self.file.seek(count, os.SEEK_CUR)
        self.position += count

    def number(self, form: str, place: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), place))[0])

    def text(self, place: str, limit: int = MAX_STRING) -> str:
        length = self.number("<Q", place)
        if length > limit:
            raise FormatError(self.source, place, f"a string of {length} bytes", f"at most {limit}")
        try:
            return self.take(length, place).decode("utf-8")
        except UnicodeDecodeError:
            raise FormatError(self.source, place, "not UTF-8", "UTF-8 text") from None


def _header(window: _Window, file: str) -> Gguf:
    magic = window.take(4, "magic")
    if magic != MAGIC:
        raise FormatError(window.source, "magic", repr(magic), repr(MAGIC))
    version = window.number("<I", "version")
    if version not in (2, 3):
        order = " (big endian)" if version and not version & 0xFFFF else ""
        raise FormatError(window.source, "version", f"{version}{order}", "2 or 3, little endian")
    tensors = window.number("<Q", "tensor count")
    values = window.number("<Q", "metadata count")
    # The least that an entry takes: a name of one byte and the fixed fields.
    for name, count, limit, least in (
        ("tensor count", tensors, MAX_TENSORS, 25),
        ("metadata count", values, MAX_VALUES, 14),
    ):
        most = min(limit, window.left // least)
        if count > most:
            raise FormatError(window.source, name, count, f"at most {most}")
    metadata = _metadata(window, values)
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise FormatError(window.source, "general.alignment", alignment, "a power of two")
    return Gguf(window.source, metadata, _tensors(window, tensors, alignment, file))


def _metadata(window: _Window, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    seen: set[str] = set()
    for index in range(count):
        key = window.text(f"key {index}", 1 << 16)
        if not key or key in seen:
            found = "the key twice" if key else "an empty key"
            raise FormatError(window.source, key or f"key {index}", found, "each key once")
        seen.add(key)
        kind = window.number("<I", key)
        value = _array(window, key) if kind == _ARRAY else _scalar(window, key, kind)
        if value is not None:
            metadata[key] = value
    return metadata


def _scalar(window: _Window, key: str, kind: int) -> int | float | bool | str:
    if kind == _STRING:
        return window.text(key)
    form = _SCALARS.get(kind)
    if form is None:
        raise FormatError(window.source, key, f"a value of type {kind}", "a type of the format")
    value: int | float = struct.unpack(form, window.take(struct.calcsize(form), key))[0]
    return bool(value) if kind == _BOOL else value


def _array(window: _Window, key: str) -> Value | None:
    """The elements, or None for an array that is only checked."""
    kind = window.number("<I", key)
    count = window.number("<Q", key)
    if kind == _STRING:
        window.need(8 * count, key)
        keep: list[int | float | bool | str] = []
        for _ in range(count):
            if count <= KEPT_ELEMENTS:
                keep.append(window.text(key))
            else:
                window.skip(window.number("<Q", key), key)
        return tuple(keep) if count <= KEPT_ELEMENTS else None
    form = _SCALARS.get(kind)
    if form is None:
        raise FormatError(window.source, key, f"an array of type {kind}", "numbers or strings")
    if count > KEPT_ELEMENTS:
        window.skip(count * struct.calcsize(form), key)
        return None
    return tuple(_scalar(window, key, kind) for _ in range(count))


def _tensors(window: _Window, count: int, alignment: int, file: str) -> tuple[GgufTensor, ...]:
    tensors: list[GgufTensor] = []
    seen: set[str] = set()
    expected = 0
    for index in range(count):
        name = window.text(f"name of tensor {index}", MAX_NAME)
        if not name or name in seen:
            found = "the name twice" if name else "an empty name"
            raise FormatError(window.source, name or f"tensor {index}", found, "each name once")
        seen.add(name)
        tensor = _tensor(window, name, file)
        if tensor.offset != expected:
            found = f"offset {tensor.offset}"
            raise FormatError(window.source, name, found, f"{expected}, the end of the one before")
        expected += _padded(tensor.nbytes, alignment)
        tensors.append(tensor)
    base = _padded(window.position, alignment)
    if tensors and base + tensors[-1].offset + tensors[-1].nbytes > window.size:
        end = base + tensors[-1].offset + tensors[-1].nbytes
        raise FormatError(
            window.source, tensors[-1].name, f"bytes up to {end}", f"{window.size}, the file's end"
        )
    return tuple(tensor._replace(offset=base + tensor.offset) for tensor in tensors)


def _tensor(window: _Window, name: str, file: str) -> GgufTensor:
    rank = window.number("<I", name)
    if rank > MAX_DIMENSIONS:
        raise FormatError(window.source, name, f"{rank} dimensions", f"at most {MAX_DIMENSIONS}")
    dimensions = tuple(window.number("<Q", name) for _ in range(rank))
    kind = window.number("<I", name)
    offset = window.number("<Q", name)
    if kind not in BLOCKS:
        raise FormatError(window.source, name, f"type {kind}", "a tensor type of ggml")
    label, elements, nbytes = BLOCKS[kind]
    total = prod(dimensions)
    if total >= 1 << 62 or any(size == 0 for size in dimensions):
        raise FormatError(
            window.source, name, f"dimensions {dimensions}", "from 1, and a real size"
        )
    if (dimensions or (1,))[0] % elements:
        found = f"{dimensions[0]} elements in a row of {label}"
        raise FormatError(window.source, name, found, f"a multiple of {elements}")
    return GgufTensor(name, label, dimensions, total // elements * nbytes, file, offset)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
