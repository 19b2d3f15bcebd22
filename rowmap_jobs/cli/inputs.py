"""Files that commands read: told apart by what is in them, and refused whole, by their name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..exchange import registry, sniff
from ..exchange.base import Layout
from ..exchange.census_io import layout_of
from ..exchange.files import read_file
from ..formats import census as census_format
from ..formats import rowmap, status
from ..formats.base import FormatError, load_json, sha256_digest
from ..formats.census import Census
from ..formats.report import Report
from ..formats.rowmap import Fingerprint, Geometry, RowMap
from ..formats.status import HookStatus, ModelGeometry
from ..models import geometry as models
from ..models.model import Model

Kind = Literal["model", "census", "map", "report", "status", "other"]
MAX_REPORT_BYTES = 64 << 20
MAX_LIST_BYTES = 1 << 20


@dataclass(frozen=True)
class CensusFile:
    """A census and the sha256 of the file that it was read from."""

    census: Census
    digest: str
    size: int


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Refusals inside are of the file `path`, whatever they call what they refuse."""
    try:
        yield
    except FormatError as error:
        if error.source == str(path):
            raise
        known = error.source in (*_GENERAL, Path(path).name)
        place = error.place if known else f"{error.source}: {error.place}"
        raise FormatError(str(path), place, error.found, error.expected) from None


_GENERAL = ("census", "map", "merge", "window", "weights", "active map", "new map")


def kind_of(path: Path) -> tuple[Kind, str]:
    """What a file or folder is, and for `other` the name of its format.

    Raises FormatError for what is none of ours and no format that can be read.
    """
    with naming(path):
        return _kind_of(path)


def _kind_of(path: Path) -> tuple[Kind, str]:
    seen = sniff.look(path)
    if seen.is_folder:
        ours = ("config.json", "model.safetensors.index.json")
        if any(name in ours or name.endswith(".gguf") for name in seen.names):
            return "model", ""
        ranks = re.compile(r"rank\d+\.safetensors")
        tensors = [name for name in seen.names if name.endswith(".safetensors")]
        if tensors and not all(ranks.fullmatch(name) for name in tensors):
            return "model", ""
    elif seen.head[:4] == b"GGUF" and b"imatrix" not in seen.head:
        return "model", ""
    match registry.ours(seen):
        case "census" | "report" | "status" as kind:
            return kind, ""
        case "row map":
            return "map", ""
    return "other", registry.detect(path)


@contextmanager
def _wanted(path: Path, what: str) -> Iterator[None]:
    """A refusal inside says what the file is, where that is known and not `what`."""
    try:
        yield
    except FormatError:
        try:
            kind, form = kind_of(path)
        except FormatError:
            kind, form = "other", ""
        found = form or {"map": "row map", "other": what}.get(kind, kind)
        if found == what:
            raise
        hint = f"a file of {form} (rowmap import reads it)" if form else f"a {found}"
        raise FormatError(str(path), "file", hint, f"a {what}") from None


def census(path: Path) -> CensusFile:
    """Read a census whole. Raises FormatError."""
    with _wanted(path, "census"):
        raw = read_file(path, str(path), census_format.MAX_UNPACKED)
        return CensusFile(census_format.parse(raw, str(path)), sha256_digest(raw), len(raw))


def row_map(path: Path) -> RowMap:
    """Read a row map of ours whole. Raises FormatError."""
    with _wanted(path, "row map"):
        return rowmap.parse(read_file(path, str(path), rowmap.MAX_MAP_BYTES), str(path))


def report(path: Path) -> Report:
    """Read a report.json whole. Raises FormatError."""
    with _wanted(path, "report"):
        return Report.from_bytes(read_file(path, str(path), MAX_REPORT_BYTES), str(path))


def hook_status(path: Path) -> HookStatus:
    """Read a hook's status. Raises FormatError."""
    return status.parse(read_file(path, str(path), status.MAX_STATUS_BYTES), str(path))


def model(path: Path, tensor_parallel: int) -> Model:
    """Read a model's folder or GGUF file. Raises FormatError."""
    try:
        return models.read(path, tensor_parallel)
    except (OSError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        found = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise FormatError(str(path), "model", found, "a readable model") from None


Shape = Geometry | ModelGeometry


def shape_of(path: Path) -> tuple[Shape, Fingerprint | None]:
    """Layers, experts, top-k and row bytes that a map or a hook's status speaks of."""
    kind, form = kind_of(path)
    if kind == "map":
        rows = row_map(path)
        return rows.geometry, rows.fingerprint
    if kind != "status":
        raise FormatError(str(path), "file", form or kind, "a row map or a hook's status.json")
    found = hook_status(path)
    if found.geometry is None:
        expected = "the status of a hook that has seen the model"
        raise FormatError(str(path), "geometry", "none", expected)
    return found.geometry, found.fingerprint


def identity_of(path: Path) -> tuple[Fingerprint, Layout, Shape | None]:
    """Fingerprint, layout and (but of a census) geometry that a file of a lane speaks of."""
    if kind_of(path)[0] == "census":
        data = census(path).census
        layers, experts, top_k = (
            tuple(array.tolist()) for array in (data.layer_ids, data.experts, data.top_k)
        )
        return data.header.fingerprint, Layout(layers, experts, top_k), None
    shape, fingerprint = shape_of(path)
    if fingerprint is None:
        expected = "the status of a hook that has seen the model"
        raise FormatError(str(path), "fingerprint", "none", expected)
    return fingerprint, layout_of(shape), shape


def rows_by_layer(path: Path) -> list[object] | dict[str, object]:
    """Hot rows of each layer as JSON: a list in layer order or an object by layer id."""
    value = load_json(read_file(path, str(path), MAX_LIST_BYTES), str(path))
    if not isinstance(value, list | dict):
        expected = "a list in layer order or an object {layer: rows}"
        raise FormatError(str(path), "top level", type(value).__name__, expected)
    return value


def same_model(found: Fingerprint, expected: Fingerprint, path: Path | str, other: str) -> None:
    """Refuse a file of another model than `other`. Raises FormatError naming the first field."""
    for name in ("shape", "router", "quant", "tokenizer"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours != theirs:
            raise FormatError(str(path), f"fingerprint.{name}", ours, f"{theirs} as {other} has")
