"""The hook's reading of a row map: what the format accepts it accepts, the rest it names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expertmaps_hook_env as env
import expertmaps_hook_map as hook_map
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.base import canonical_json

DIGEST = "sha256:" + "a" * 64
PRINT = {"shape": DIGEST, "router": DIGEST, "quant": "bf16", "tokenizer": DIGEST}


def model(experts: int = 6, layers: tuple[int, ...] = (0, 2)) -> hook_map.ModelShape:
    return hook_map.ModelShape(dict.fromkeys(layers, experts), dict.fromkeys(layers, 100), 2)


def build(
    experts: int = 6, hot: int = 4, layers: tuple[int, ...] = (0, 2), order: list[int] | None = None
) -> rowmap.RowMap:
    rows = order or list(range(experts))
    geometry = rowmap.Geometry(
        experts=experts, top_k=2, hot_rows=hot, moe_layers=layers, row_bytes=100
    )
    return rowmap.build(
        rowmap.Fingerprint(**PRINT), geometry, dict.fromkeys(layers, (rows[:hot], rows[hot:]))
    )


@given(st.permutations(range(6)), st.integers(0, 6))
def test_a_map_of_the_format_is_read_alike(order: list[int], hot: int) -> None:
    made = build(hot=hot, order=list(order))
    found = hook_map.parse_map(made.to_bytes(), model(), PRINT)
    assert found.digest == made.digest
    assert found.row_set_digest == made.row_set_digest
    assert {str(k): v for k, v in found.hot.items()} == {k: v.hot for k, v in made.layers.items()}


def test_per_layer_numbers() -> None:
    geometry = rowmap.Geometry(
        experts={"0": 3, "1": 4}, top_k=2, hot_rows={"0": 1, "1": 2}, moe_layers=(0, 1),
        row_bytes={"0": 10, "1": 20}, whole_layers=(5,),
    )  # fmt: skip
    made = rowmap.build(
        rowmap.Fingerprint(**PRINT), geometry, {0: ([2], [0, 1]), 1: ([3, 0], [1, 2])}
    )
    shape = hook_map.ModelShape({0: 3, 1: 4}, {0: 10, 1: 20}, 2, (5,))
    assert hook_map.parse_map(made.to_bytes(), shape, PRINT).hot == {0: (2,), 1: (3, 0)}


def edited(change: Callable[[dict[str, Any]], object]) -> bytes:
    wire = json.loads(build().to_bytes())
    change(wire)
    return canonical_json(wire)


def test_canonical_form_is_demanded() -> None:
    raw = json.dumps(json.loads(build().to_bytes())).encode()
    assert "another spelling" in refused(raw)
    assert "JSON" in refused(b"\xff\xfe")
    assert "JSON" in refused(b"[" * 100_000)
    assert "another spelling" in refused(b'{"version":1,"version":1}\n')


def refused(raw: bytes, shape: hook_map.ModelShape | None = None) -> str:
    with pytest.raises(env.HookError) as caught:
        hook_map.parse_map(raw, shape or model(), PRINT)
    assert caught.value.reason == "MapInvalid"
    assert "found" in caught.value.message and "expected" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda w: w["layers"]["2"]["hot"].__setitem__(1, 0), "layers.2.hot[1]: found expert 0"),
        (lambda w: w["layers"]["2"]["cold"].__setitem__(0, 1), "layers.2.cold[0]: found expert 1"),
        (lambda w: w["layers"]["0"]["hot"].__setitem__(2, 6), "layers.0.hot[2]: found 6"),
        (lambda w: w["layers"]["0"]["hot"].__setitem__(2, True), "layers.0.hot[2]: found True"),
        (lambda w: w["layers"]["0"]["cold"].pop(), "no expert [5]"),
        (lambda w: w["layers"].pop("2"), "layers: found difference in ['2']"),
        (lambda w: w["layers"].update({"7": {"hot": [], "cold": []}}), "difference in ['7']"),
        (lambda w: w["layers"]["0"].pop("cold"), "layers.0: found keys"),
        (lambda w: w["layers"].update({"0": []}), "layers.0: found []"),
        (lambda w: w["geometry"].update(experts=7), "geometry.experts of layer 0: found 7"),
        (lambda w: w["geometry"].update(experts="x"), "geometry.experts: found x"),
        (lambda w: w["geometry"].update(topK=3), "geometry.topK: found 3, expected 2"),
        (lambda w: w["geometry"].update(rowBytes=99), "geometry.rowBytes of layer 0: found 99"),
        (lambda w: w["geometry"].update(moeLayers=[0, 1]), "geometry.moeLayers"),
        (lambda w: w["geometry"].update(wholeLayers=[9]), "geometry.wholeLayers: found [9]"),
        (lambda w: w["geometry"].update(expertParallel=8), "geometry.expertParallel: found 8"),
        (lambda w: w["geometry"].update(hotRows=3), "layers.0.hot: found 4 rows, expected 3 rows"),
        (lambda w: w["geometry"].update(hotRows=7), "geometry.hotRows of layer 0: found 7"),
        (lambda w: w["geometry"].update(hotRows={"0": 4, "2": -1}), "hotRows of layer 2: found -1"),
        (lambda w: w["geometry"].update(hotRows={"0": 4}), "geometry.hotRows"),
        (lambda w: w["geometry"].update(more=1), "geometry: found keys"),
        (lambda w: w.update(version=2), "version: found 2"),
        (lambda w: w.update(version=1.0), "version: found 1.0"),
        (lambda w: w.update(version=True), "version: found True"),
        (lambda w: w["geometry"].update(topK=2.0), "geometry.topK: found 2.0, expected 2"),
        (lambda w: w["geometry"].update(moeLayers=[False, 2]), "geometry.moeLayers: found [False"),
        (lambda w: w["geometry"].update(moeLayers=0), "geometry.moeLayers: found 0"),
        (lambda w: w.update(rowSetDigest=DIGEST), "rowSetDigest: found sha256:aaaa"),
        (lambda w: w.pop("rowSetDigest"), "top level: found keys"),
        (lambda w: w.update(layers=[]), "layers: found []"),
        (lambda w: w.update(geometry=None), "geometry: found None"),
    ],
)
def test_refusal_names_the_place(change: Callable[[dict[str, Any]], object], place: str) -> None:
    assert place in refused(edited(change))


@pytest.mark.parametrize("part", ["shape", "router", "quant", "tokenizer"])
def test_fingerprint_mismatch_names_the_part(part: str) -> None:
    with pytest.raises(env.HookError) as caught:
        hook_map.parse_map(build().to_bytes(), model(), {**PRINT, part: "other"})
    assert caught.value.reason == "FingerprintMismatch"
    assert caught.value.message.startswith(f"{part} differ")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A pipe would keep the engine from ever loading."""
    path = tmp_path / "rowmap.json"
    make(path)
    with pytest.raises(env.HookError, match=r"MapMissing: .*not a regular file"):
        hook_map.read_map(path)


def test_missing_and_oversized_files(tmp_path: Path) -> None:
    with pytest.raises(env.HookError) as caught:
        hook_map.read_map(tmp_path / "rowmap.json")
    assert caught.value.reason == "MapMissing"
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(hook_map.MAX_MAP_BYTES + 1)
    with pytest.raises(env.HookError) as caught:
        hook_map.read_map(big)
    assert caught.value.reason == "MapInvalid"
