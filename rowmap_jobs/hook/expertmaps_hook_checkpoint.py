"""Hashes of the checkpoint on disk: gate weights and tokenizer. Standard library only.

Shapes are the same for a fine-tune and its base; the gate weights are not, and neither is a
tokenizer with other merges. Both are read from files, so no prepacking or sharding of the loaded
model changes them.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_files import open_regular
else:
    from expertmaps_hook_env import HookError
    from expertmaps_hook_files import open_regular

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt",
)  # fmt: skip
MAX_HEADER_BYTES = 256 << 20
CHUNK = 4 << 20

# `gate` and `router` modules of a layer, whatever wraps them; not gate_proj, not a shared
# expert's own gate.
_GATE = re.compile(
    r"(?:^|\.)layers\.([0-9]+)\.(?:[\w]+\.)*?(?:gate|router)(?:\.(?!experts\b)[\w]+)*"
    r"\.(?:weight|bias|e_score_correction_bias|tid2eid|scale)$"
)
_NOT_A_GATE = re.compile(r"\.(?:experts|shared_experts?|self_attn|attention|attn)\.")


class TensorPlace(NamedTuple):
    """Where the bytes of one tensor lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def gate_layer(name: str) -> int | None:
    """Layer of a gate tensor by its checkpoint name; None for any other tensor."""
    match = _GATE.search(name)
    if match is None or _NOT_A_GATE.search(name):
        return None
    return int(match.group(1))


def router_digest(folder: Path, layers: Iterable[int]) -> str:
    """sha256 over the gate tensors of the given layers, in layer order, then by name.

    Each tensor contributes a line with name, type and shape, then its bytes, read in pieces.
    Raises HookError (CheckpointUnreadable, RouterNotFound).
    """
    wanted = sorted(set(layers))
    gates: dict[int, list[tuple[str, Path]]] = {layer: [] for layer in wanted}
    for name, path in _tensor_files(folder):
        layer = gate_layer(name)
        if layer in gates:
            gates[layer].append((name, path))
    missing = [layer for layer in wanted if not gates[layer]]
    if missing:
        raise HookError("RouterNotFound", f"{folder}: no gate weights of layers {missing[:8]}")
    digest = hashlib.sha256()
    headers: dict[Path, dict[str, TensorPlace]] = {}
    for layer in wanted:
        for name, path in sorted(gates[layer]):
            if path not in headers:
                headers[path] = read_header(path)
            _feed(digest, path, headers[path], name)
    return "sha256:" + digest.hexdigest()


def _feed(digest: Any, path: Path, header: Mapping[str, TensorPlace], name: str) -> None:
    place = header.get(name)
    if place is None:
        raise HookError("CheckpointUnreadable", f"{path}: no tensor {name}, the index says so")
    digest.update(f"{place.name}\0{place.dtype}\0{list(place.shape)}\n".encode())
    try:
        with open_regular(path) as file:
            for piece in _pieces(file, place.begin, place.end):
                digest.update(piece)
    except OSError as error:
        raise HookError("CheckpointUnreadable", f"{path}: {error.strerror}") from None


def _pieces(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    file.seek(begin)
    left = end - begin
    while left:
        piece = file.read(min(CHUNK, left))
        if not piece:
            raise HookError("CheckpointUnreadable", f"{file.name}: ends {left} bytes early")
        left -= len(piece)
        yield piece


def _tensor_files(folder: Path) -> list[tuple[str, Path]]:
    """(tensor name, file) of a checkpoint, from its index or from the headers of its files."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _from_index(folder, index)
    single = folder / SINGLE_FILE
    paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise HookError("CheckpointUnreadable", f"{folder}: no .safetensors files")
    return [(name, path) for path in paths for name in read_header(path)]


def _from_index(folder: Path, index: Path) -> list[tuple[str, Path]]:
    try:
        with open_regular(index) as opened:
            weight_map = json.load(opened)["weight_map"]
        entries = [(str(name), str(file)) for name, file in weight_map.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HookError(
            "CheckpointUnreadable", f"{index}: {type(error).__name__}: {error}"
        ) from None
    for _, file in entries:
        if Path(file).name != file:
            raise HookError("CheckpointUnreadable", f"{index}: found {file!r}, expected a name")
    return [(name, folder / file) for name, file in entries]


def read_header(path: Path) -> dict[str, TensorPlace]:
    """Tensors of one safetensors file. Raises HookError (CheckpointUnreadable)."""
    try:
        size = path.stat().st_size
        with open_regular(path) as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        return {
            name: _place(name, entry, 8 + length, size)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise HookError(
            "CheckpointUnreadable", f"{path}: {type(error).__name__}: {error}"
        ) from None


def _place(name: str, entry: Mapping[str, Any], base: int, size: int) -> TensorPlace:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= size - base:
        raise ValueError(f"{name}: offsets {begin}..{end} outside of the file")
    shape = tuple(int(dim) for dim in entry["shape"])
    return TensorPlace(name, str(entry["dtype"]), shape, base + begin, base + end)


def tokenizer_digest(folder: Path) -> str:
    """sha256 of the tokenizer's main file. Raises HookError (TokenizerNotFound)."""
    for name in TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            with open_regular(path) as file:
                return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    raise HookError("TokenizerNotFound", f"{folder}: none of {', '.join(TOKENIZER_FILES)}")


def local_folder(name: str, revision: str | None, reason: str) -> Path:
    """Folder of a model or tokenizer: itself, or the snapshot that the engine downloaded."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    try:
        hub = importlib.import_module("huggingface_hub")  # part of every vLLM image
        return Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as error:
        raise HookError(
            reason, f"{name}: no local files: {type(error).__name__}: {error}"
        ) from None
