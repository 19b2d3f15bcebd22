"""Small safetensors files whole: arrays and metadata (the header is checked by models)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError, canonical_json, load_json
from ..models.safetensors import read_header
from .files import read_file

MAX_FILE = 256 << 20
MAX_TENSORS = 1 << 18
_TYPES = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "F16": "<f2",
    "U32": "<u4",
    "I32": "<i4",
    "F32": "<f4",
    "U64": "<u8",
    "I64": "<i8",
    "F64": "<f8",
}
_NAMES = {np.dtype(code): name for name, code in _TYPES.items()}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class File:
    """Arrays by name (read-only) and the text of `__metadata__`."""

    arrays: dict[str, Array]
    metadata: dict[str, str]


def read(path: Path, source: str) -> File:
    """Raises FormatError: a header that lies, a type that numpy lacks, more than 256 MiB."""
    raw = read_file(path, source, MAX_FILE)
    try:
        tensors = read_header(path, MAX_TENSORS)
    except FormatError as error:
        raise FormatError(source, error.place, error.found, error.expected) from None
    length = struct.unpack("<Q", raw[:8])[0] if len(raw) >= 8 else 0
    if 8 + length + sum(tensor.nbytes for tensor in tensors) != len(raw):
        raise FormatError(source, "size", "a file that changes", "a whole file")
    at = 8 + length
    arrays: dict[str, Array] = {}
    for tensor in tensors:
        code = _TYPES.get(tensor.dtype)
        if code is None:
            raise FormatError(source, tensor.name, tensor.dtype, f"one of {', '.join(_TYPES)}")
        flat = np.frombuffer(raw, np.dtype(code), tensor.nbytes // np.dtype(code).itemsize, at)
        arrays[tensor.name] = flat.reshape(tensor.shape)
        at += tensor.nbytes
    header = load_json(raw[8 : 8 + length], source)
    metadata = header.get("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(source, "__metadata__", "a value that is no text", "texts")
    return File(arrays, metadata)


def to_bytes(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """A safetensors file; equal contents, equal bytes. The header is padded to 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    bodies: list[bytes] = []
    at = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        body = array.astype(array.dtype.newbyteorder("<")).tobytes()
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(body)],
        }
        bodies.append(body)
        at += len(body)
    text = canonical_json(header).rstrip(b"\n")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(bodies)
