"""Reading a row map: the whole file is checked before any of it is used. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_files import open_regular
else:
    from expertmaps_hook_env import HookError
    from expertmaps_hook_files import open_regular

MAX_MAP_BYTES = 1 << 20
FINGERPRINT_PARTS = ("shape", "router", "quant", "tokenizer")
TOP_KEYS = {"version", "fingerprint", "geometry", "rowSetDigest", "layers"}
GEOMETRY_KEYS = {
    "experts", "topK", "hotRows", "moeLayers", "wholeLayers", "expertParallel", "rowBytes",
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """What a map must fit: the loaded model, by absolute layer id."""

    experts: Mapping[int, int]
    row_bytes: Mapping[int, int]
    top_k: int
    whole_layers: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.experts))


@dataclass(frozen=True)
class RowMap:
    """A checked map: hot rows of each layer, hottest first."""

    digest: str
    row_set_digest: str
    hot: Mapping[int, tuple[int, ...]]


def read_map(path: Path) -> bytes:
    """Bytes of the map's file. Raises HookError (MapMissing, MapInvalid)."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_MAP_BYTES + 1)
    except FileNotFoundError:
        raise HookError("MapMissing", f"{path}: no such file; is the ConfigMap gone?") from None
    except OSError as error:
        raise HookError("MapMissing", f"{path}: {error.strerror}") from None
    if len(raw) > MAX_MAP_BYTES:
        raise _invalid("size", f"more than {MAX_MAP_BYTES} bytes", "a smaller file")
    return raw


def parse_map(raw: bytes, model: ModelShape, fingerprint: Mapping[str, str]) -> RowMap:
    """Check a map against itself and against the loaded model.

    Raises HookError: MapInvalid names the place, what was found and what was expected;
    FingerprintMismatch names which parts differ.
    """
    data = _decode(raw)
    _keys(data, TOP_KEYS, "top level")
    if not _same(data["version"], 1):
        raise _invalid("version", data["version"], "1")
    _keys(_object(data["geometry"], "geometry"), GEOMETRY_KEYS, "geometry")
    _check_fingerprint(_object(data["fingerprint"], "fingerprint"), fingerprint)
    hot_rows = _check_geometry(data["geometry"], model)
    hot = _check_layers(_object(data["layers"], "layers"), model, hot_rows)
    expected = row_set_digest(data["geometry"], hot)
    if data["rowSetDigest"] != expected:
        raise _invalid("rowSetDigest", data["rowSetDigest"], expected)
    return RowMap("sha256:" + hashlib.sha256(raw).hexdigest(), expected, hot)


def row_set_digest(geometry: Mapping[str, Any], hot: Mapping[int, tuple[int, ...]]) -> str:
    """Hash over the sorted hot sets; equal between maps that need no move."""
    sets = {str(layer): {"hot": sorted(rows)} for layer, rows in hot.items()}
    text = _canonical({"geometry": geometry, "layers": sets})
    return "sha256:" + hashlib.sha256(text).hexdigest()


def _canonical(value: object) -> bytes:
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode() + b"\n"


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw.decode("utf-8"))
        canonical = _canonical(data)
    except (ValueError, RecursionError) as error:
        raise _invalid("file", f"{type(error).__name__}: {error}", "canonical JSON") from None
    if canonical != raw:
        # Also catches keys that appear twice: they are lost in the decoded value.
        raise _invalid("file", "another spelling", "canonical JSON (sorted keys, one newline)")
    return _object(data, "top level")


def _check_fingerprint(found: Mapping[str, Any], model: Mapping[str, str]) -> None:
    _keys(found, set(FINGERPRINT_PARTS), "fingerprint")
    differ = [part for part in FINGERPRINT_PARTS if found[part] != model[part]]
    if differ:
        detail = "; ".join(
            f"{part}: map has {str(found[part])[:80]}, model has {model[part]}" for part in differ
        )
        raise HookError("FingerprintMismatch", f"{', '.join(differ)} differ: {detail}")


def _check_geometry(geometry: Mapping[str, Any], model: ModelShape) -> dict[int, int]:
    layers = model.layers
    if not _same(geometry["moeLayers"], list(layers)):
        raise _invalid("geometry.moeLayers", geometry["moeLayers"], str(list(layers)))
    if not _same(geometry["wholeLayers"], list(model.whole_layers)):
        raise _invalid(
            "geometry.wholeLayers", geometry["wholeLayers"], str(list(model.whole_layers))
        )
    if not _same(geometry["topK"], model.top_k):
        raise _invalid("geometry.topK", geometry["topK"], str(model.top_k))
    if geometry["expertParallel"] is not None:
        raise _invalid("geometry.expertParallel", geometry["expertParallel"], "null")
    experts = _per_layer(geometry["experts"], layers, "experts")
    row_bytes = _per_layer(geometry["rowBytes"], layers, "rowBytes")
    hot_rows = _per_layer(geometry["hotRows"], layers, "hotRows")
    for layer in layers:
        for name, found, expected in (
            ("experts", experts, model.experts),
            ("rowBytes", row_bytes, model.row_bytes),
        ):
            if found[layer] != expected[layer]:
                raise _invalid(
                    f"geometry.{name} of layer {layer}", found[layer], str(expected[layer])
                )
        if hot_rows[layer] > experts[layer]:
            raise _invalid(
                f"geometry.hotRows of layer {layer}", hot_rows[layer], f"0 to {experts[layer]}"
            )
    return hot_rows


def _per_layer(value: object, layers: tuple[int, ...], name: str) -> dict[int, int]:
    if isinstance(value, int) and _is_count(value):
        return dict.fromkeys(layers, value)
    if not isinstance(value, dict) or set(value) != {str(layer) for layer in layers}:
        raise _invalid(f"geometry.{name}", value, "an integer, or one for each of moeLayers")
    for layer, item in value.items():
        if not _is_count(item):
            raise _invalid(f"geometry.{name} of layer {layer}", item, "an integer from 0")
    return {layer: value[str(layer)] for layer in layers}


def _check_layers(
    layers: Mapping[str, Any], model: ModelShape, hot_rows: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    expected = {str(layer) for layer in model.layers}
    if set(layers) != expected:
        wrong = sorted(set(layers) ^ expected)[:8]
        raise _invalid("layers", f"difference in {wrong}", "exactly geometry.moeLayers")
    hot: dict[int, tuple[int, ...]] = {}
    for layer in model.layers:
        place = f"layers.{layer}"
        rows = _object(layers[str(layer)], place)
        _keys(rows, {"hot", "cold"}, place)
        _check_rows(rows, place, model.experts[layer])
        if len(rows["hot"]) != hot_rows[layer]:
            raise _invalid(f"{place}.hot", f"{len(rows['hot'])} rows", f"{hot_rows[layer]} rows")
        hot[layer] = tuple(rows["hot"])
    return hot


def _check_rows(rows: Mapping[str, Any], place: str, experts: int) -> None:
    seen: dict[int, str] = {}
    for side in ("hot", "cold"):
        if not isinstance(rows[side], list):
            raise _invalid(f"{place}.{side}", rows[side], "a list of experts")
        for index, expert in enumerate(rows[side]):
            where = f"{place}.{side}[{index}]"
            if not _is_count(expert) or expert >= experts:
                raise _invalid(where, expert, f"an expert from 0 to {experts - 1}")
            if expert in seen:
                raise _invalid(where, f"expert {expert}, already at {seen[expert]}", "each once")
            seen[expert] = where
    if len(seen) != experts:
        missing = [expert for expert in range(experts) if expert not in seen][:8]
        raise _invalid(place, f"no expert {missing} in hot or cold", f"all of 0 to {experts - 1}")


def _same(found: Any, expected: int | list[int]) -> bool:
    """Equal and of one type: to Python, 1.0 and true are 1."""
    if isinstance(expected, list):
        return found == expected and all(type(item) is int for item in found)
    return type(found) is int and found == expected


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _object(value: object, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(place, value, "a JSON object")
    return value


def _keys(value: Mapping[str, Any], expected: set[str], place: str) -> None:
    if set(value) != expected:
        raise _invalid(place, f"keys {sorted(value)}", f"keys {sorted(expected)}")


def _invalid(place: str, found: object, expected: str) -> HookError:
    text = found if isinstance(found, str) else repr(found)
    shown = text if len(text) <= 160 else text[:157] + "..."
    return HookError(
        "MapInvalid", f"rowmap.json: {place}: found {shown}, expected {expected[:320]}"
    )
