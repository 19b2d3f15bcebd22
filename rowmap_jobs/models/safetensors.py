"""Headers of safetensors files: name, type, shape and place of each tensor, and every lie refused.

Format: eight bytes of length (little endian), that many bytes of JSON, then the tensors' bytes
without a gap (https://github.com/huggingface/safetensors, README "Format"). Its own reader has the
same limit of 100 MB a header and refuses gaps and overlaps too.
"""

from __future__ import annotations

import os
import re
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..formats.base import FormatError, load_json
from .values import MAX_COUNT, is_count, read_bounded, shown

MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 128 << 20
MAX_TENSORS = 1 << 20
"""Of a whole checkpoint; the largest known (896 experts in 60 layers, quantised) has half of it."""
MAX_DIMENSIONS = 8
MAX_NAME = 1024
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SUFFIX = ".safetensors"

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element of each type of the format."""

_SHARD = re.compile(r"^(.+)-([0-9]{5})-of-([0-9]{5})\.safetensors$")


class Tensor(NamedTuple):
    """One tensor of a checkpoint; `nbytes` agrees with `dtype` and `shape`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


def read_folder(folder: Path) -> list[Tensor]:
    """Tensors of a checkpoint: the files of its index, or every .safetensors file of the folder.

    An empty list means that the folder has no such file. Raises FormatError: a header that lies,
    a name twice, a shard that is missing or lies outside of the folder, an index that disagrees.
    """
    index = folder / INDEX_FILE
    listed = _read_index(index) if index.is_file() else None
    if listed is not None:
        paths = [folder / name for name in sorted(set(listed.values()))]
        for path in paths:
            if not path.is_file():
                raise FormatError(str(index), "weight_map", f"no file {path.name}", "every shard")
    else:
        single = folder / SINGLE_FILE
        paths = [single] if single.is_file() else sorted(folder.glob(f"*{SUFFIX}"))
        _check_shards(folder, paths)
    tensors: list[Tensor] = []
    seen: dict[str, str] = {}
    for path in paths:
        for tensor in read_header(path, MAX_TENSORS - len(tensors)):
            if tensor.name in seen:
                found = f"also in {seen[tensor.name]}"
                raise FormatError(str(path), tensor.name, found, "each tensor in one file")
            seen[tensor.name] = path.name
            tensors.append(tensor)
    for name, file in (listed or {}).items():
        if seen.get(name) != file:
            found = f"not in the header of {file}"
            raise FormatError(str(index), f"weight_map.{name}", found, "the file that has it")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    source = str(path)
    raw = read_bounded(path, MAX_INDEX_BYTES)
    if raw.count(b",") > MAX_TENSORS + 4096 or raw.count(b"[") > 4096:
        raise FormatError(source, "weight_map", "too many values", f"{MAX_TENSORS} at most")
    data = load_json(raw, source)
    listed = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise FormatError(source, "weight_map", "none", "a file name for each tensor")
    for name, file in listed.items():
        plain = isinstance(file, str) and re.fullmatch(r"[\w.+-]+\.safetensors", file, re.ASCII)
        if not plain or file.startswith("."):
            raise FormatError(
                source, f"weight_map.{name}", shown(file), "a plain name of a .safetensors file"
            )
    return listed


def _check_shards(folder: Path, paths: list[Path]) -> None:
    """Without an index, `-00001-of-00005` says how many files there must be."""
    names = {path.name for path in paths}
    sets: set[tuple[str, int]] = set()
    for name in sorted(names):
        match = _SHARD.match(name)
        if match is not None:
            number, count = int(match.group(2)), int(match.group(3))
            if not 1 <= number <= count:
                found = f"{number} of {count}"
                raise FormatError(str(folder / name), "name", found, "1 up to the count")
            sets.add((match.group(1), count))
    for stem, count in sorted(sets):
        # What is not there refuses at once, so this ends after as many steps as there are files.
        for number in range(1, count + 1):
            shard = f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"
            if shard not in names:
                raise FormatError(str(folder), shard, "no such file", f"all {count} shards")


def read_header(path: Path, limit: int = MAX_TENSORS) -> list[Tensor]:
    """Tensors of one file in the order of their bytes; at most `limit`. Raises FormatError."""
    source = str(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            most = min(MAX_HEADER_BYTES, size - 8)
            if not 2 <= length <= most:
                found = f"{length} bytes in a file of {size}"
                raise FormatError(source, "header length", found, f"2 to {max(most, 2)}")
            raw = file.read(length)
    except OSError as error:
        raise FormatError(source, "file", error.strerror or "unreadable", "a file") from None
    if len(raw) != length:
        raise FormatError(source, "header", f"{len(raw)} bytes", f"{length}")
    _check_density(raw, source, limit)
    header = load_json(raw, source)
    if not isinstance(header, dict):
        raise FormatError(source, "header", type(header).__name__, "a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FormatError(source, "__metadata__", type(metadata).__name__, "a JSON object")
    return _laid_out(header, path, size - 8 - length)


def _check_density(raw: bytes, source: str, limit: int) -> None:
    """Refuse what would grow in memory far beyond its bytes, before it is decoded."""
    objects = raw.count(b"{")
    if objects > limit + 2:
        raise FormatError(source, "header", f"{objects} objects", f"at most {limit} tensors")
    # A tensor's entry has 4 commas and 7 brackets beside its dimensions.
    commas, brackets = raw.count(b","), raw.count(b"[")
    if commas > (MAX_DIMENSIONS + 6) * objects + 4096 or brackets > 2 * objects + 4096:
        raise FormatError(
            source, "header", f"{commas} commas, {brackets} lists in {objects} objects",
            "one object with three members for each tensor",
        )  # fmt: skip


def _laid_out(header: dict[str, Any], path: Path, available: int) -> list[Tensor]:
    """Check that the tensors fill the rest of the file, one after the other."""
    places = []
    for name, entry in header.items():
        tensor, begin = _entry(name, entry, path)
        places.append((begin, begin + tensor.nbytes, tensor))
    places.sort(key=lambda place: place[:2])
    position = 0
    for begin, end, tensor in places:
        if begin != position:
            what = "an overlap" if begin < position else "a gap"
            found = f"bytes {begin} to {end}, {what}"
            raise FormatError(str(path), f"{tensor.name}.data_offsets", found, f"from {position}")
        position = end
    if position != available:
        found = f"{available} bytes after the header"
        raise FormatError(str(path), "size", found, f"{position}, the end of the last tensor")
    return [tensor for _, _, tensor in places]


def _entry(name: str, entry: object, path: Path) -> tuple[Tensor, int]:
    source = str(path)
    if not 0 < len(name) <= MAX_NAME:
        found = f"a name of {len(name)} characters"
        raise FormatError(source, "header", found, f"1 to {MAX_NAME}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(source, name, shown(entry), "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise FormatError(source, f"{name}.dtype", shown(dtype), f"one of {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(is_count, shape)):
        expected = f"at most {MAX_DIMENSIONS} integers from 0"
        raise FormatError(source, f"{name}.shape", shown(shape), expected)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise FormatError(source, f"{name}.data_offsets", shown(offsets), "two integers")
    begin, end = offsets
    size = prod(shape) * bits
    if size % 8 or end - begin != size // 8:
        found = f"{begin} to {end}"
        expected = f"{size / 8:.15g} bytes for {dtype} {shape}" if size < MAX_COUNT else "less"
        raise FormatError(source, f"{name}.data_offsets", found, expected)
    return Tensor(name, dtype, tuple(shape), end - begin, path.name), begin
