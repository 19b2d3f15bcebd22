"""By config.json alone: which layers of each family have experts, how many, and their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.models import geometry
from rowmap_jobs.models.families import FAMILIES
from tests.models.cases import CASES, count, sizes
from tests.models.writers import write_model


@pytest.mark.parametrize("name", CASES)
def test_layers_experts_topk_and_bytes_of_a_family(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = geometry.read(write_model(tmp_path, {"model_type": name, **case.config}))
    assert list(model.layers) == case.layers
    assert set(model.experts.values()) == {case.experts}
    assert model.top_k == case.top_k
    assert set(model.row_bytes.values()) == {case.row_bytes}
    assert model.evidence == "config"
    built = geometry.to_geometry(model, case.experts // 2)
    assert built.moe_layers == tuple(case.layers)
    assert built.experts == case.experts
    assert built.row_bytes == case.row_bytes


def test_the_table_has_the_families_that_are_promised() -> None:
    assert len(CASES) >= 26
    assert set(CASES) <= set(FAMILIES)


UNUSED = {("longcat_flash", "num_hidden_layers"), ("kimi_k3", "hidden_size")}
"""Attention layers, and the width outside of the latent experts."""


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_size_is_assumed(name: str, tmp_path: Path) -> None:
    """Without the field of a size the reader refuses; it never fills in a class's default."""
    case = CASES[name]
    nested = next((key for key in ("text_config",) if key in case.config), None)
    inner = case.config[nested] if nested else case.config
    for field in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts",
                  "num_hidden_layers", "num_layers", "n_layers", "hidden_size", "d_model",
                  "moe_intermediate_size", "num_experts_per_tok", "moe_topk", "moe_k"):  # fmt: skip
        if field not in inner or (name, field) in UNUSED:
            continue
        rest = {key: value for key, value in inner.items() if key != field}
        config = {**case.config, nested: rest} if nested else rest
        with pytest.raises(FormatError) as refused:
            geometry.read(write_model(tmp_path, {"model_type": name, **config}))
        assert "dense" in str(refused.value) or field in str(refused.value)


def test_glm52_has_75_layers_with_experts_of_78_and_a_draft_layer(tmp_path: Path) -> None:
    case = CASES["glm_moe_dsa"]
    model = geometry.read(write_model(tmp_path, {"model_type": "glm_moe_dsa", **case.config}))
    assert len(model.layers) == 75
    assert 256 * len(model.layers) == 19_200
    assert model.whole_layers == (78,)
    assert geometry.to_geometry(model, 8).whole_layers == ()
    assert geometry.to_geometry(model, 8, drafting=True).whole_layers == (78,)
    assert {each.kind: each.layers for each in model.whole}["dense"] == (0, 1, 2)


def test_longcat_drops_identity_experts(tmp_path: Path) -> None:
    case = CASES["longcat_flash"]
    model = geometry.read(write_model(tmp_path, {"model_type": "longcat_flash", **case.config}))
    assert (model.experts[0], model.identity_experts) == (512, 256)
    assert any("256 identity experts" in note for note in model.notes)


def test_hash_layers_are_named(tmp_path: Path) -> None:
    case = CASES["deepseek_v4"]
    model = geometry.read(write_model(tmp_path, {"model_type": "deepseek_v4", **case.config}))
    assert any(note.startswith("Layers 0 to 2 (3 layers) choose") for note in model.notes)


def test_flash_has_the_recipes_bytes(tmp_path: Path) -> None:
    """40 x 384 rows of 18,800,640 bytes; 295 hot are 206.61 GiB, 89 cold 62.33 GiB."""
    case = CASES["deepseek_v41"]
    model = geometry.read(write_model(tmp_path, {"model_type": "deepseek_v41", **case.config}))
    row = model.row_bytes[0]
    assert round(40 * 295 * row / (1 << 30), 2) == 206.61
    assert round(40 * 89 * row / (1 << 30), 2) == 62.33
    assert model.total_bytes == 40 * 384 * 18_800_640


@pytest.mark.parametrize(
    ("quant", "row_bytes"),
    [
        ({"quant_method": "fp8", "expert_dtype": "fp8", "weight_block_size": [128, 128]},
         3 * 5120 * 2304 + 3 * 40 * 18 * 4),
        ({"quant_method": "fp8", "expert_dtype": "fp8", "scale_fmt": "ue8m0",
          "weight_block_size": [128, 128]}, 3 * 5120 * 2304 + 3 * 40 * 18),
        ({"quant_method": "fp8"}, 18_800_640),
    ],
)  # fmt: skip
def test_expert_type_decides(quant: dict[str, Any], row_bytes: int, tmp_path: Path) -> None:
    config = {**CASES["deepseek_v41"].config, "quantization_config": quant}
    model = geometry.read(write_model(tmp_path, {"model_type": "deepseek_v41", **config}))
    assert model.row_bytes[0] == row_bytes


WEIGHTS = 3 * 2048 * 768


@pytest.mark.parametrize(
    ("quant", "row_bytes"),
    [
        (None, 2 * WEIGHTS),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, WEIGHTS + 3 * 16 * 6 * 4),
        ({"quant_method": "fp8"}, WEIGHTS + 3 * 4),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, WEIGHTS * 9 // 16 + 3 * 8),
        ({"quantization": {"quant_algo": "NVFP4"}}, WEIGHTS * 9 // 16 + 3 * 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128},
         WEIGHTS // 2 + WEIGHTS // 128 * 5 // 2 + 4 * (2048 + 2048 + 768)),
        ({"quant_method": "awq", "bits": 4, "group_size": 128},
         WEIGHTS // 2 + WEIGHTS // 128 * 5 // 2),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}}},
         WEIGHTS // 2 + WEIGHTS // 32 * 2),
    ],
)  # fmt: skip
def test_bytes_of_a_quantisation(quant: Any, row_bytes: int, tmp_path: Path) -> None:
    extra = {} if quant is None else {"quantization_config": quant}
    config = {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, **extra}
    assert geometry.read(write_model(tmp_path, config)).row_bytes[0] == row_bytes


def test_width_is_shared_by_accelerators(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss", **CASES["gpt_oss"].config}
    whole = geometry.read(write_model(tmp_path, config)).row_bytes[0]
    half = geometry.read(tmp_path, tensor_parallel=2).row_bytes[0]
    # The bias of the down matrix is whole on each.
    assert 2 * half == whole + 2 * 2880
    with pytest.raises(FormatError, match="a width of 2880 on 7 accelerators"):
        geometry.read(tmp_path, tensor_parallel=7)


REFUSALS = {
    "dense by its name": (
        {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64},
        "llama: a dense model",
    ),
    "no experts in gemma4": (
        {"text_config": {**CASES["gemma4"].config["text_config"], "num_experts": None}},
        "gemma4_text: a dense model",
    ),
    "experts switched off": (
        {"text_config": {**CASES["gemma4"].config["text_config"], "enable_moe_block": False}},
        "gemma4_text: a dense model",
    ),
    "zero experts": (
        {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, "num_experts": 0},
        "qwen3_moe: a dense model",
    ),
    "no top-k": (
        {"model_type": "mixtral", **sizes(2, 64, intermediate_size=64), "num_local_experts": 8},
        "found nothing in the top level, expected one of num_experts_per_tok, "
        "num_experts_per_token, top_k_experts, moe_topk, moe_top_k, moe_k, "
        "experts_per_token, ffn_config.moe_top_k",
    ),
    "unknown family": (
        {"model_type": "brand_new", **sizes(2, 64, 64), **count(8, 2)},
        "brand_new, which is no known family, expected headers to read",
    ),
    "offset not below period": (
        {"model_type": "jamba", **CASES["jamba"].config, "expert_layer_offset": 2},
        "expert_layer_offset: found 2, expected less than expert_layer_period, 2",
    ),
    "a word that is no layer type": (
        {"model_type": "glm_moe_dsa", **CASES["glm_moe_dsa"].config}
        | {"mlp_layer_types": ["dense"] * 77 + ["spars"]},
        "mlp_layer_types: found spars, expected one of dense, hash_moe, mlp, moe, sparse",
    ),
    "a list that is too short": (
        {"model_type": "mimo_v2_flash", **CASES["mimo_v2_flash"].config, "moe_layer_freq": [0, 1]},
        "moe_layer_freq: found 2 entries, expected one for each of 48",
    ),
    "more chosen than there are": (
        {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, "num_experts_per_tok": 129},
        "found 129 of 128 experts in layer 0, expected at most 128",
    ),
    "a quantisation without known bytes": (
        {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config}
        | {"quantization_config": {"quant_method": "aqlm", "in_group_size": 8}},
        "quantization_config: found aqlm, in_group_size 8",
    ),
    "no type of weights": (
        {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, "dtype": None},
        "found nothing in the top level, expected one of dtype, torch_dtype",
    ),
    "a negative size": (
        {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, "num_hidden_layers": -1},
        "num_hidden_layers: found -1, expected an integer 1 to 4096",
    ),
    "a boolean for a number": (
        {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, "num_experts_per_tok": True},
        "num_experts_per_tok: found True",
    ),
    "layers without end": (
        {"model_type": "qwen3_moe", **CASES["qwen3_moe"].config, "num_hidden_layers": 10**9},
        "num_hidden_layers: found 1000000000, expected an integer 1 to 4096",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_say_what_was_looked_for(case: str, tmp_path: Path) -> None:
    config, message = REFUSALS[case]
    with pytest.raises(FormatError) as refused:
        geometry.read(write_model(tmp_path, config))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
