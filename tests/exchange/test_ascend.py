"""vllm-ascend's expert map: positions of MoE layers, which the caller makes absolute."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import ascend
from tests.exchange.made import line_of, passes_or_refuses, placements

# The structure of vllm-ascend's own test file (tests/ut/eplb/core/a2/expert_map.json).
GOOD: dict[str, Any] = {
    "moe_layer_count": 1,
    "layer_list": [
        {
            "layer_id": 0,
            "device_count": 2,
            "device_list": [
                {"device_id": 0, "device_expert": [7, 2, 0, 3, 5]},
                {"device_id": 1, "device_expert": [6, 1, 4, 7, 2]},
            ],
        }
    ],
}


def read(data: Any, **options: Any) -> Any:
    return ascend.read(json.dumps(data).encode(), "map.json", **options)


def test_replicated_experts_come_first() -> None:
    ranking = read(GOOD, layers=[3])
    assert ranking.order == {3: (7, 2, 0, 3, 5, 6, 1, 4)}
    assert any("2 slots a layer are replicas" in note for note in ranking.notes)


def test_positions_are_not_taken_for_absolute_layers() -> None:
    assert "1 layers numbered as MoE layers, no absolute ids" in line_of(lambda: read(GOOD))
    assert "(2 were given)" in line_of(lambda: read(GOOD, layers=[3, 4]))


def changed(path: str, value: Any) -> Any:
    data = copy.deepcopy(GOOD)
    *parts, last = [int(p) if p.isdigit() else p for p in path.split(".")]
    target: Any = data
    for part in parts:
        target = target[part]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return data


DEVICE = "layer_list.0.device_list.1"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("moe_layer_count", 2, "moe_layer_count: found 2 and 1 layers"),
        ("moe_layer_count", True, "moe_layer_count"),
        ("moe_layer_count", None, "exactly ['layer_list', 'moe_layer_count']"),
        ("more", 1, "exactly"),
        ("layer_list", [], "layer_list"),
        ("layer_list.0.layer_id", 1, "layer_list[0].layer_id: found 1, expected 0"),
        ("layer_list.0.device_count", 3, "device_count: found 3, expected 2"),
        (f"{DEVICE}.device_id", 0, "device_list[1].device_id: found 0, expected 1"),
        (f"{DEVICE}.device_expert", [6, 1, 4, 7], "found 4 experts, expected 5"),
        (f"{DEVICE}.device_expert", [6, 1, 4, 7, 7], "an expert twice on one device"),
        (f"{DEVICE}.device_expert", [6, 1, 4, 7, "2"], "integers"),
        (f"{DEVICE}.device_expert", [6, 1, 3, 7, 2], "no slot for expert 4"),
        (f"{DEVICE}.device_expert", [6, 1, 4, 7, -2], "found expert -2"),
        (DEVICE, 5, "device_list[1]: found int"),
    ],
)
def test_a_map_that_lies_is_refused(path: str, value: Any, said: str) -> None:
    assert said in line_of(lambda: read(changed(path, value), layers=[3]))


def test_experts_of_the_model_are_held_against_the_map() -> None:
    assert "no slot for expert 8" in line_of(lambda: read(GOOD, layers=[3], experts=9))


@given(placements(), st.integers(1, 4))
def test_round_trip(slots: dict[int, list[int]], devices: int) -> None:
    layers = sorted(slots)
    raw = passes_or_refuses(lambda: ascend.write(slots, devices, layers))
    count = len(slots[layers[0]])
    size = count // devices
    parts = [row[d * size : (d + 1) * size] for row in slots.values() for d in range(devices)]
    fits = count % devices == 0 and all(len(set(part)) == len(part) for part in parts)
    assert (raw is not None) == fits
    if raw is not None:
        table = json.loads(raw)["layer_list"]
        back = [[e for d in layer["device_list"] for e in d["device_expert"]] for layer in table]
        assert back == [slots[layer] for layer in layers]
        assert list(ascend.read(raw, "x", layers=layers).order) == layers


def test_a_layer_that_is_missing_is_not_written() -> None:
    assert "layers" in line_of(lambda: ascend.write({3: [0, 1]}, 1, [3, 4]))


@given(st.binary(max_size=80))
def test_random_bytes_never_pass(raw: bytes) -> None:
    assert passes_or_refuses(lambda: ascend.read(raw, "x", layers=[0])) is None
