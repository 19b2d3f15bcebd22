"""Tiny model files: headers as the formats have them, and holes where the weights would be."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

Specs = Mapping[str, tuple[str, Sequence[int]]]

SIZES = {
    "BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4,
    "I64": 8,
}  # fmt: skip


def entries(specs: Specs) -> dict[str, Any]:
    """Entries of a header, back to back."""
    out: dict[str, Any] = {}
    position = 0
    for name, (dtype, shape) in specs.items():
        end = position + prod(shape) * SIZES[dtype]
        out[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return out


def write_header(path: Path, header: Mapping[str, Any] | bytes, data: int) -> None:
    """Any header, truthful or not, and `data` bytes of a hole behind it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + data)


def write_safetensors(path: Path, specs: Specs) -> None:
    """A truthful file."""
    data = sum(prod(shape) * SIZES[dtype] for dtype, shape in specs.values())
    write_header(path, {"__metadata__": {"format": "pt"}, **entries(specs)}, data)


def write_model(folder: Path, config: Mapping[str, Any] | None, specs: Specs | None = None) -> Path:
    """A model's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if specs is not None:
        write_safetensors(folder / "model.safetensors", specs)
    return folder


def expert_specs(
    layers: Sequence[int],
    experts: int,
    hidden: int,
    width: int,
    prefix: str = "model.layers.{}.mlp.experts.{}",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    dtype: str = "BF16",
) -> dict[str, tuple[str, list[int]]]:
    """Tensors of gated experts, one for each expert; the last of `names` is the down matrix."""
    out: dict[str, tuple[str, list[int]]] = {}
    for layer in layers:
        for expert in range(experts):
            for name in names:
                shape = [hidden, width] if name == names[-1] else [width, hidden]
                out[f"{prefix.format(layer, expert)}.{name}.weight"] = (dtype, shape)
    return out


# GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

STRING, ARRAY, UINT32, UINT64, FLOAT32 = 8, 9, 4, 10, 6
GGML = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144),
        "Q6_K": (14, 256, 210), "MXFP4": (39, 32, 17)}  # fmt: skip


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(item, str):
        return struct.pack("<I", STRING) + text(item)
    if isinstance(item, float):
        return struct.pack("<If", FLOAT32, item)
    if isinstance(item, list):
        if item and isinstance(item[0], str):
            return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(text, item))
        return struct.pack(f"<IIQ{len(item)}I", ARRAY, UINT32, len(item), *item)
    return struct.pack("<II", UINT32, item)


def gguf_bytes(
    values: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    alignment: int = 32,
    version: int = 3,
) -> tuple[bytes, int]:
    """A header, and the bytes of the tensors behind it."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    for key, item in values.items():
        out += text(key) + value(item)
    offset = 0
    for name, (kind, dimensions) in tensors.items():
        number, elements, nbytes = GGML[kind]
        out += text(name) + struct.pack("<I", len(dimensions))
        out += struct.pack(f"<{len(dimensions)}Q", *dimensions) + struct.pack("<IQ", number, offset)
        size = prod(dimensions) // elements * nbytes
        offset += -(-size // alignment) * alignment
    out += b"\0" * (-len(out) % alignment)
    return out, offset


def write_gguf(
    path: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    **over: int,
) -> Path:
    raw, data = gguf_bytes(values, tensors, **over)
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(len(raw) + data)
    return path
