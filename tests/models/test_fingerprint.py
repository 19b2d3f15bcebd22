"""The fingerprint by files equals the one that the hook found inside vLLM, or is refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.models import fingerprint, geometry
from tests.models.writers import expert_specs, write_gguf, write_model, write_safetensors

MODEL = Path(__file__).parents[1] / "model" / "moe"

RECORDED = {
    "quant": "bf16",
    "router": "sha256:641851daac3b3891df6fd6c470573e6cf5c7dbde9b66a7b11587136bfba67126",
    "shape": "sha256:898d7045441a5e4c335e2ed89e050c7497eb83fee1ab7d7d4d275b15db91d827",
    "tokenizer": "sha256:48e126b3c57fb6786711cb24e7025a2df4a8a99d5d2ddf6ffb5bc7ed07d2de1f",
}
"""Reported by the hook inside vLLM 0.32.0 for the same model (report.json of the demo)."""


def test_all_four_parts_equal_those_of_the_hook_inside_the_engine() -> None:
    assert fingerprint.of_folder(MODEL).to_wire() == RECORDED


def test_so_does_the_geometry() -> None:
    assert geometry.to_geometry(geometry.read(MODEL), 24).to_wire() == {
        "experts": 32, "hotRows": 24, "moeLayers": [0, 1, 2, 3], "rowBytes": 110592, "topK": 4,
        "wholeLayers": [], "expertParallel": None,
    }  # fmt: skip


CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
}
GATES = {f"model.layers.{i}.mlp.gate.weight": ("BF16", [4, 64]) for i in (0, 1)}


def folder(tmp_path: Path, specs: Any = None, tokenizer: bool = True, **over: Any) -> Path:
    config = {key: value for key, value in {**CONFIG, **over}.items() if value is not None}
    write_model(tmp_path, config, {**(specs or expert_specs([0, 1], 4, 64, 32)), **GATES})
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("up", "down"), [([4, 64, 64], [4, 64, 32]), ([4, 64, 64], [4, 32, 64])], ids=["rows", "turned"]
)
def test_storage_of_the_checkpoint_does_not_change_the_shape(
    up: list[int], down: list[int], tmp_path: Path
) -> None:
    """The engine fuses gate and up itself: one tensor for all experts gives the same digest."""
    fused = {
        f"model.layers.{i}.mlp.experts.{name}": ("BF16", shape)
        for i in (0, 1)
        for name, shape in (("gate_up_proj", up), ("down_proj", down))
    }
    single = fingerprint.of_folder(folder(tmp_path / "a"))
    both = fingerprint.of_folder(folder(tmp_path / "b", fused))
    assert both.shape == single.shape
    assert both.router == single.router


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"specs": expert_specs([0, 1], 4, 64, 48)}, "shape"),
        ({"dtype": "float16"}, "shape"),
        ({"dtype": "float16"}, "quant"),
    ],
)
def test_another_model_has_another_fingerprint(change: Any, part: str, tmp_path: Path) -> None:
    one = fingerprint.of_folder(folder(tmp_path / "a"))
    other = fingerprint.of_folder(folder(tmp_path / "b", **change))
    assert getattr(one, part) != getattr(other, part)


def test_other_gate_weights_have_another_router_and_the_same_shape(tmp_path: Path) -> None:
    one = fingerprint.of_folder(folder(tmp_path))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    other = fingerprint.of_folder(tmp_path)
    assert (one.shape, one.tokenizer) == (other.shape, other.tokenizer)
    assert one.router != other.router


def test_the_lanes_type_can_be_said(tmp_path: Path) -> None:
    plain = folder(tmp_path, dtype="float32")
    with pytest.raises(FormatError, match="found float32, expected the lane's --dtype"):
        fingerprint.of_folder(plain)
    assert fingerprint.of_folder(plain, "bfloat16").quant == "bf16"
    assert fingerprint.of_folder(plain, "float32").quant == "fp32"
    with pytest.raises(FormatError, match="dtype: found int8"):
        fingerprint.of_folder(plain, "int8")


def test_the_type_of_the_weights_where_config_json_says_none(tmp_path: Path) -> None:
    assert fingerprint.of_folder(folder(tmp_path, dtype=None)).quant == "bf16"


LANE = "expected plain weights; otherwise take it from a lane (--fingerprint"


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as refused:
        fingerprint.of_folder(folder(tmp_path, quantization_config={"quant_method": "gptq_marlin"}))
    assert f"quantization_config: found gptq_marlin, {LANE}" in str(refused.value)


def test_scales_without_a_word_in_config_json_are_refused(tmp_path: Path) -> None:
    specs: dict[str, Any] = dict(expert_specs([0, 1], 4, 64, 32, dtype="F8_E4M3"))
    with pytest.raises(FormatError) as refused:
        fingerprint.of_folder(folder(tmp_path, specs))
    assert f"found F8_E4M3 weight, {LANE}" in str(refused.value)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "brand_new"])
def test_a_family_that_cannot_be_told_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=f"model_type: found {name}, expected .*qwen3_moe.*lane"):
        fingerprint.of_folder(folder(tmp_path, model_type=name))


def test_matrices_that_are_not_gated_are_refused(tmp_path: Path) -> None:
    specs = expert_specs([0, 1], 4, 64, 32, names=("up_proj", "down_proj"))
    with pytest.raises(FormatError, match="found down, up, expected gate, up and down matrices"):
        fingerprint.of_folder(folder(tmp_path, specs))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"TokenizerNotFound: .*tokenizer\.json"):
        fingerprint.of_folder(folder(tmp_path, tokenizer=False))


def test_no_gate_weights(tmp_path: Path) -> None:
    folder(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", expert_specs([0, 1], 4, 64, 32))
    with pytest.raises(FormatError, match=r"RouterNotFound: .*layers \[0, 1\]"):
        fingerprint.of_folder(tmp_path)


def test_without_weights_or_by_gguf_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="found a model by config"):
        fingerprint.of_folder(write_model(tmp_path / "a", CONFIG))
    values = {"general.architecture": "x", "x.expert_count": 4, "x.expert_used_count": 2}
    tensors = {f"blk.0.ffn_{role}_exps.weight": ("F16", [8, 8, 4]) for role in ("up", "down")}
    path = write_gguf(tmp_path / "m.gguf", values, tensors)
    with pytest.raises(FormatError, match="found a model by gguf"):
        fingerprint.of_folder(path)


def test_the_hooks_flat_names_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "expertmaps_hook" in name]:
        monkeypatch.delitem(sys.modules, name)
    assert fingerprint.hook_checkpoint().tokenizer_digest(MODEL) == RECORDED["tokenizer"]
    assert "expertmaps_hook_env" not in sys.modules


def test_a_copy_in_shards_has_the_same_fingerprint(tmp_path: Path) -> None:
    """Where a tensor lies does not matter: only its name, type, shape and bytes do."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(MODEL / name, tmp_path)
    shard = "model-00001-of-00001.safetensors"
    shutil.copy(MODEL / "model.safetensors", tmp_path / shard)
    raw = (MODEL / "model.safetensors").read_bytes()
    names = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    weight_map = {name: shard for name in names if name != "__metadata__"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert fingerprint.of_folder(tmp_path).to_wire() == RECORDED
