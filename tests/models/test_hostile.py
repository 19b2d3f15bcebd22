"""Whatever the bytes: a reader refuses in one line, in bounded memory, and never crashes."""

from __future__ import annotations

import copy
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.models import geometry, gguf, safetensors
from rowmap_jobs.models.model import Model
from tests.models.cases import CASES
from tests.models.test_gguf import TOKEN, VALUES, experts
from tests.models.writers import expert_specs, gguf_bytes, text, write_header, write_model

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
CONFIG = {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, "num_hidden_layers": 2,
          "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4,
          "num_experts_per_tok": 2}  # fmt: skip


def attempt(read: Callable[[], Model]) -> Model | None:
    """The model, or None for a refusal in one line; anything else is a crash."""
    try:
        return read()
    except FormatError as error:
        assert "\n" not in str(error)
        return None


@same_folder
@given(st.binary(max_size=400))
def test_random_bytes_never_pass(tmp_path: Path, raw: bytes) -> None:
    write_model(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "m.gguf").write_bytes(raw)
    assert attempt(lambda: geometry.read(tmp_path)) is None
    assert attempt(lambda: geometry.read(tmp_path / "m.gguf")) is None


@same_folder
@given(st.binary(max_size=200), st.integers(0, 12), st.integers(0, 12))
def test_random_bytes_behind_a_true_start_never_pass(
    tmp_path: Path, raw: bytes, tensors: int, values: int
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + raw)
    assert attempt(lambda: geometry.read(tmp_path / "m.gguf")) is None
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw)
    write_model(tmp_path, CONFIG)
    assert attempt(lambda: geometry.read(tmp_path)) is None


MODEL_SPECS = expert_specs([0, 1], 4, 64, 32)
GGUF_RAW, GGUF_DATA = gguf_bytes(VALUES, {**TOKEN, **experts(0), **experts(1)})

edits = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3
)


def edited(raw: bytes, changes: list[tuple[float, int]]) -> bytes:
    out = bytearray(raw)
    for place, value in changes:
        out[int(place * len(out))] = value
    return bytes(out)


@same_folder
@given(edits)
def test_edited_safetensors_headers(tmp_path: Path, changes: list[tuple[float, int]]) -> None:
    """A changed name takes a tensor away; what is left is not whole, and refused."""
    folder = write_model(tmp_path, CONFIG, MODEL_SPECS)
    truth = geometry.read(folder)
    raw = (folder / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    (folder / "model.safetensors").write_bytes(edited(raw[:length], changes) + raw[length:])
    found = attempt(lambda: geometry.read(folder))
    assert found is None or found.to_wire() == truth.to_wire()


@same_folder
@given(edits)
def test_edited_gguf_headers(tmp_path: Path, changes: list[tuple[float, int]]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(edited(GGUF_RAW, changes))
    with path.open("r+b") as file:
        file.truncate(len(GGUF_RAW) + GGUF_DATA)
    attempt(lambda: geometry.read(path))


@same_folder
@given(st.integers(0, len(GGUF_RAW) + 1000))
def test_a_file_that_ends_early_never_passes(tmp_path: Path, length: int) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF_RAW[:length])
    assert attempt(lambda: geometry.read(tmp_path / "m.gguf")) is None
    folder = write_model(tmp_path, CONFIG, MODEL_SPECS)
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[: length * len(raw) // (len(GGUF_RAW) + 1001)])
    assert attempt(lambda: geometry.read(folder)) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False)
    | st.sampled_from(["", "moe", "fp8", "1,2,x", "E*M"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["a", "quant_method", "bits", "weight_block_size", "block_type"]), inner,
        max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELDS = sorted(
    {key for case in CASES.values() for part in (case.config, *case.config.values())
     if isinstance(part, dict) for key in part} | {"quantization_config", "block_configs",
     "expert_dtype", "num_nextn_predict_layers", "layers_block_type", "moe_layers"}
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder for a config.json alone, and one that has headers too."""
    with_headers = write_model(tmp_path_factory.mktemp("headers"), {}, MODEL_SPECS)
    return tmp_path_factory.mktemp("config"), with_headers


@settings(max_examples=120)
@given(st.data())
def test_no_value_of_a_field_crashes(folders: tuple[Path, Path], data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(CASES)))
    config = copy.deepcopy({"model_type": name, **CASES[name].config})
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for _ in range(data.draw(st.integers(1, 2))):
        part = data.draw(st.sampled_from(parts))
        part[data.draw(st.sampled_from(FIELDS))] = data.draw(values)
    parallel = data.draw(st.sampled_from([1, 2, 7]))
    for folder in folders:
        write_model(folder, config)
    attempt(lambda: geometry.read(folders[0], parallel))
    found = attempt(lambda: geometry.read(folders[1]))
    assert found is None or set(found.row_bytes.values()) == {3 * 64 * 32 * 2}


def deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


BOMBS: dict[str, tuple[str, bytes, int]] = {
    "a header as long as 2^63": ("model.safetensors", struct.pack("<Q", 1 << 63) + b"{}", 0),
    "a header as long as its hole": (
        "model.safetensors", struct.pack("<Q", 1 << 40) + b"{}", 1 << 41,
    ),
    "a deep header": (
        "model.safetensors", struct.pack("<Q", 1 << 20) + deep(1 << 19), 0,
    ),
    "a wide header": (
        "model.safetensors", struct.pack("<Q", 6 + (4 << 20)) + b'{"a":[' + b"1," * (2 << 20), 0,
    ),
    "a header of many lists": (
        "model.safetensors", struct.pack("<Q", 6 + (3 << 20)) + b'{"a":[' + b"[]," * (1 << 20), 0,
    ),
    "a deep config.json": ("config.json", deep(1 << 20), 0),
    "a config.json of a terabyte": ("config.json", b"{", 1 << 40),
    "an index of a terabyte": ("model.safetensors.index.json", b"{", 1 << 40),
    "a wide index": (
        "model.safetensors.index.json", b'{"weight_map":[' + b"[]," * (1 << 20), 0,
    ),
    "10^9 tensors": ("m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 10**9, 0), 0),
    "10^9 tensors in a file of a terabyte": (
        "m.gguf", b"GGUF" + struct.pack("<IQQ", 3, 10**9, 0), 1 << 40,
    ),
    "an array of 2^32 in a file of a terabyte": (
        "m.gguf",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 10, 1 << 32),
        1 << 40,
    ),
    "a string of 2^32 in a file of a terabyte": (
        "m.gguf",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IQ", 8, 1 << 32),
        1 << 40,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_refused_in_bounded_memory(case: str, tmp_path: Path) -> None:
    name, raw, hole = BOMBS[case]
    write_model(tmp_path, CONFIG)
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(raw)
        if hole:
            file.truncate(hole)
    target = path if name.endswith(".gguf") else tmp_path
    tracemalloc.start()
    try:
        assert attempt(lambda: geometry.read(target)) is None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (1 << 20) + 6 * len(raw)


def test_more_tensors_than_may_be_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    entry = '"{}":{{"dtype":"U8","shape":[],"data_offsets":[{},{}]}}'
    raw = "{" + ",".join(entry.format(i, i, i + 1) for i in range(3000)) + "}"
    path = tmp_path / "model.safetensors"
    write_header(path, raw.encode(), 3000)
    assert len(safetensors.read_header(path)) == 3000
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="found 3001 objects, expected at most 1000 tensors"):
            safetensors.read_header(path, 1000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(raw)


def test_deep_values_in_config_json_are_a_refusal(tmp_path: Path) -> None:
    """Deep enough to be decoded, and still no place to crash when it is shown."""
    for levels in (10, 400, 900, 990):
        nested = json.loads(deep(levels)) if levels < 400 else None
        raw = json.dumps({**CONFIG, "num_experts": "HERE"}).replace('"HERE"', deep(levels).decode())
        assert nested is None or json.loads(raw)["num_experts"] == nested
        write_model(tmp_path, {})
        (tmp_path / "config.json").write_text(raw)
        assert attempt(lambda: geometry.read(tmp_path)) is None


def test_the_reader_of_gguf_has_read_no_weight(tmp_path: Path) -> None:
    """The file is a terabyte of hole: only its header is touched."""
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF_RAW)
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    assert gguf.read(path).tensors
