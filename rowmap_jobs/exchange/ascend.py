"""vllm-ascend: `expert_map_path` JSON (vllm_ascend/eplb/core/eplb_utils.py).

`{"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id",
"device_expert": [logical experts in slot order]}]}]}`. `layer_id` counts the model's MoE layers
(the engine numbers its MoE modules as it makes them), so it is no absolute id: a reader has to be
told which layers they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..formats.base import FormatError, canonical_json, load_json
from .base import Ranking
from .slots import check_slots, to_ranking

MAX_BYTES = 64 << 20
_TOP = {"moe_layer_count", "layer_list"}
_LAYER = {"layer_id", "device_count", "device_list"}
_DEVICE = {"device_id", "device_expert"}


def read(
    raw: bytes, source: str, layers: Sequence[int] | None = None, experts: int | None = None
) -> Ranking:
    """The placement of a file; `layers` are the model's MoE layers (absolute) in their order.

    Raises FormatError: no `layers`, another number of them, a count that lies, ids that do not
    run from 0, devices with unequally many experts, an expert on no device.
    """
    if len(raw) > MAX_BYTES:
        raise FormatError(source, "size", f"{len(raw)} bytes", f"at most {MAX_BYTES}")
    data = _object(load_json(raw, source), _TOP, source, "top level")
    table = _list(data["layer_list"], source, "layer_list")
    if data["moe_layer_count"] != len(table) or type(data["moe_layer_count"]) is not int:
        found = f"{data['moe_layer_count']!s:.20} and {len(table)} layers"
        raise FormatError(source, "moe_layer_count", found, "the length of layer_list")
    if layers is None or len(layers) != len(table):
        found = f"{len(table)} layers numbered as MoE layers, no absolute ids"
        told = "none was given" if layers is None else f"{len(layers)} were given"
        expected = f"the ids of the model's MoE layers with it ({told})"
        raise FormatError(source, "layer_list", found, expected)
    slots: dict[int, list[int]] = {}
    for index, entry in enumerate(table):
        place = f"layer_list[{index}]"
        layer = _object(entry, _LAYER, source, place)
        devices = _list(layer["device_list"], source, f"{place}.device_list")
        _number(layer["layer_id"], index, source, f"{place}.layer_id")
        _number(layer["device_count"], len(devices), source, f"{place}.device_count")
        slots[layers[index]] = _row(devices, source, place)
    return to_ranking(slots, source, "layer_list", experts)


def _row(devices: list[Any], source: str, place: str) -> list[int]:
    row: list[int] = []
    size: int | None = None
    for number, entry in enumerate(devices):
        where = f"{place}.device_list[{number}]"
        device = _object(entry, _DEVICE, source, where)
        _number(device["device_id"], number, source, f"{where}.device_id")
        ids = _list(device["device_expert"], source, f"{where}.device_expert")
        wrong = [value for value in ids if type(value) is not int]
        if wrong or size not in (None, len(ids)):
            found = f"{wrong[0]!s:.20}" if wrong else f"{len(ids)} experts"
            expected = "integers" if wrong else f"{size} as on the first device"
            raise FormatError(source, f"{where}.device_expert", found, expected)
        if len(set(ids)) != len(ids):
            found = "an expert twice on one device"
            raise FormatError(source, f"{where}.device_expert", found, "each once a device")
        size = len(ids)
        row += ids
    return row


def write(slots: Mapping[int, Sequence[int]], devices: int, layers: Sequence[int]) -> bytes:
    """The JSON of a placement for all MoE `layers` (absolute, ascending) over `devices`.

    Raises FormatError for a table with a hole, a layer that is missing, slots that do not divide
    over the devices, and an expert twice on one device (the engine would lose a slot).
    """
    check_slots(slots, "map", "slots")
    if sorted(slots) != list(layers):
        raise FormatError("map", "layers", sorted(slots)[:8], f"{list(layers)[:8]} ...")
    count = len(next(iter(slots.values())))
    if devices < 1 or count % devices:
        raise FormatError("map", "devices", f"{count} slots on {devices}", "equal parts")
    size = count // devices
    table = []
    for index, layer in enumerate(layers):
        parts = [[int(e) for e in slots[layer][d * size : (d + 1) * size]] for d in range(devices)]
        if any(len(set(part)) != size for part in parts):
            found = f"an expert twice on a device of layer {layer}"
            raise FormatError("map", "slots", found, "each expert once a device")
        table.append(
            {
                "layer_id": index,
                "device_count": devices,
                "device_list": [
                    {"device_id": d, "device_expert": part} for d, part in enumerate(parts)
                ],
            }
        )
    return canonical_json({"moe_layer_count": len(table), "layer_list": table})


def _object(value: object, keys: set[str], source: str, place: str) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != keys:
        found = sorted(value)[:6] if isinstance(value, dict) else type(value).__name__
        raise FormatError(source, place, found, f"exactly {sorted(keys)}")
    return value


def _list(value: object, source: str, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise FormatError(source, place, type(value).__name__, "a list that is not empty")
    return value


def _number(value: object, wanted: int, source: str, place: str) -> None:
    if type(value) is not int or value != wanted:
        raise FormatError(source, place, f"{value!s:.20}", f"{wanted}")
