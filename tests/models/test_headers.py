"""Headers against configuration: what the tensors are holds, and both numbers are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.models import geometry
from rowmap_jobs.models.model import Model
from tests.models.writers import Specs, expert_specs, write_model, write_safetensors

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "dtype": "bfloat16",
}
ROW = 3 * 64 * 32 * 2
W13 = ("w1", "w3", "w2")


def read(tmp_path: Path, specs: Specs, tensor_parallel: int = 1, **over: Any) -> Model:
    config = {key: value for key, value in {**CONFIG, **over}.items() if value is not None}
    return geometry.read(write_model(tmp_path, config, specs), tensor_parallel)


def scaled(specs: Specs, suffix: str, dtype: str, block: tuple[int, int]) -> Specs:
    """The weights with a scale for each block of outputs and inputs beside each."""
    out: dict[str, Any] = {}
    for name, (kind, shape) in specs.items():
        out[name] = (kind, shape)
        scale = [-(-size // each) for size, each in zip(shape, block, strict=True)]
        out[name.removesuffix("weight") + suffix] = (dtype, scale)
    return out


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("model.layers.{}.mlp.experts.{}", ("gate_proj", "up_proj", "down_proj")),
        ("model.layers.{}.block_sparse_moe.experts.{}", W13),
        ("model.layers.{}.feed_forward.experts.{}", W13),
        ("layers.{}.ffn.experts.{}", W13),
        ("backbone.layers.{}.mixer.experts.{}", ("gate_proj", "up_proj", "down_proj")),
        ("model.language_model.layers.{}.mlp.experts.{}", ("gate_proj", "up_proj", "down_proj")),
        ("transformer.blocks.{}.ffn.experts.{}", ("w1", "v1", "w2")),
    ],
)
def test_experts_by_any_name(prefix: str, names: tuple[str, ...], tmp_path: Path) -> None:
    model = read(tmp_path, expert_specs([0, 1], 4, 64, 32, prefix, names))
    assert model.layers == (0, 1)
    assert set(model.experts.values()) == {4}
    assert set(model.row_bytes.values()) == {ROW}
    assert (model.evidence, model.disagreements, model.notes) == ("headers", (), ())


FUSED: dict[str, tuple[Specs, int]] = {
    "gate_up and down": (
        {"mlp.experts.gate_up_proj": ("BF16", [4, 64, 64]),
         "mlp.experts.down_proj": ("BF16", [4, 32, 64])}, ROW,
    ),
    "mxfp4 with biases": (
        {"mlp.experts.gate_up_proj_blocks": ("U8", [4, 64, 2, 16]),
         "mlp.experts.gate_up_proj_scales": ("U8", [4, 64, 2]),
         "mlp.experts.gate_up_proj_bias": ("BF16", [4, 64]),
         "mlp.experts.down_proj_blocks": ("U8", [4, 64, 1, 16]),
         "mlp.experts.down_proj_scales": ("U8", [4, 64, 1]),
         "mlp.experts.down_proj_bias": ("BF16", [4, 64])},
        3 * 64 * 32 // 2 + 3 * 64 + 64 * 2 + 64 * 2,
    ),
    "beside the router": (
        {"moe.gate_proj.weight": ("BF16", [4, 32, 64]), "moe.up_proj.weight": ("BF16", [4, 32, 64]),
         "moe.down_proj.weight": ("BF16", [4, 64, 32]), "moe.gate.weight": ("F32", [4, 64]),
         "moe.router_bias": ("F32", [4]), "share_expert.up_proj.weight": ("BF16", [32, 64])}, ROW,
    ),
    "granite": (
        {"block_sparse_moe.input_linear.weight": ("BF16", [4, 64, 64]),
         "block_sparse_moe.output_linear.weight": ("BF16", [4, 64, 32]),
         "block_sparse_moe.router.layer.weight": ("BF16", [4, 64])}, ROW,
    ),
    "stacked along the first dimension": (
        {"ffn.experts.mlp.w1": ("BF16", [128, 64]), "ffn.experts.mlp.v1": ("BF16", [128, 64]),
         "ffn.experts.mlp.w2": ("BF16", [128, 64])}, ROW,
    ),
    # One scale for all experts is in no row; one for each is.
    "scalar and per-expert scales": (
        {"mlp.experts.gate_up_proj": ("F8_E4M3", [4, 64, 64]),
         "mlp.experts.gate_up_proj_scale": ("F32", [4]),
         "mlp.experts.gate_up_proj_input_scale": ("F32", []),
         "mlp.experts.down_proj": ("F8_E4M3", [4, 32, 64]),
         "mlp.experts.down_proj_scale": ("F32", [4]),
         "mlp.experts.down_proj_input_scale": ("F32", [1])}, ROW // 2 + 2 * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FUSED)
def test_fused_tensors_are_divided_by_their_experts(case: str, tmp_path: Path) -> None:
    tensors, row_bytes = FUSED[case]
    specs = {f"model.layers.{i}.{name}": spec for i in (0, 1) for name, spec in tensors.items()}
    model = read(tmp_path, specs)
    assert set(model.experts.values()) == {4}
    assert set(model.row_bytes.values()) == {row_bytes}


def test_scales_of_each_expert_are_in_its_row(tmp_path: Path) -> None:
    plain = expert_specs([0, 1], 4, 64, 32, names=W13, dtype="F8_E4M3")
    model = read(tmp_path, scaled(plain, "weight_scale_inv", "F32", (16, 16)))
    assert set(model.row_bytes.values()) == {ROW // 2 + 3 * 8 * 4}
    assert [row.kind for row in model.tensors[0]].count("scale") == 3


def test_deepseek_fp4_rows_by_headers_and_by_formula_agree(tmp_path: Path) -> None:
    """A weight is half a byte, with a scale of one byte for 32."""
    specs: dict[str, Any] = {}
    for expert in range(4):
        for name, shape in (("w1", [32, 64]), ("w3", [32, 64]), ("w2", [64, 32])):
            base = f"layers.0.ffn.experts.{expert}.{name}"
            specs[f"{base}.weight"] = ("I8", [shape[0], shape[1] // 2])
            specs[f"{base}.scale"] = ("F8_E8M0", [shape[0], shape[1] // 32])
    over = {"model_type": "deepseek_v4", "num_experts": None, "n_routed_experts": 4}
    model = read(tmp_path, specs, num_hidden_layers=1, expert_dtype="fp4", **over)
    assert model.row_bytes == {0: 3 * 64 * 32 * 17 // 32}
    assert model.disagreements == ()


def test_packed_weights_count_and_their_shape_notes_do_not(tmp_path: Path) -> None:
    specs: dict[str, Any] = {}
    for expert in range(4):
        for name, shape in (
            ("gate_proj", [32, 64]),
            ("up_proj", [32, 64]),
            ("down_proj", [64, 32]),
        ):
            base = f"model.layers.0.mlp.experts.{expert}.{name}"
            specs[f"{base}.weight_packed"] = ("I32", [shape[0], shape[1] // 8])
            specs[f"{base}.weight_scale"] = ("BF16", [shape[0], shape[1] // 32])
            specs[f"{base}.weight_shape"] = ("I64", [2])
    model = read(tmp_path, specs, num_hidden_layers=1)
    assert model.row_bytes == {0: 3 * 64 * 32 // 2 + 3 * 64 * 2}


def test_layers_keep_their_absolute_ids(tmp_path: Path) -> None:
    """Dense layers in front do not shift the others."""
    specs = {
        **expert_specs([3, 5], 4, 64, 32),
        **{f"model.layers.{i}.mlp.gate_proj.weight": ("BF16", [8, 64]) for i in (0, 1, 2, 4)},
    }
    model = read(tmp_path, specs, num_hidden_layers=6, mlp_only_layers=[0, 1, 2, 4])
    assert model.layers == (3, 5)
    assert {each.kind: each.layers for each in model.whole} == {"dense": (0, 1, 2, 4)}
    assert model.disagreements == ()


@pytest.mark.parametrize(
    "prefix",
    ["model.layers.2.mlp.experts.{}", "mtp.layers.0.mlp.experts.{}", "mtp.0.ffn.experts.{}",
     "model.mtp.layers.0.mlp.experts.{}"],
)  # fmt: skip
def test_a_draft_layer_is_whole_and_never_layer_0(prefix: str, tmp_path: Path) -> None:
    """It is counted behind the model's layers, whatever number the checkpoint gives it."""
    draft = {f"{prefix.format(expert)}.down_proj.weight": ("BF16", [64, 32]) for expert in range(8)}
    model = read(tmp_path, {**expert_specs([0, 1], 4, 64, 32), **draft})
    assert model.layers == (0, 1)
    assert model.experts == {0: 4, 1: 4}
    assert model.whole_layers == (2,)


def test_shared_experts_are_listed_and_in_no_row(tmp_path: Path) -> None:
    shared = {f"model.layers.1.mlp.{name}.up_proj.weight": ("BF16", [32, 64])
              for name in ("shared_experts", "shared_expert")}  # fmt: skip
    model = read(tmp_path, {**expert_specs([0, 1], 4, 64, 32), **shared})
    assert set(model.row_bytes.values()) == {ROW}
    assert {each.kind: each.layers for each in model.whole} == {"shared": (1,)}


def test_experts_for_images_are_whole(tmp_path: Path) -> None:
    """Four for text, four narrower ones for images behind them (Ernie VL)."""
    text = expert_specs([0], 4, 64, 32)
    images = expert_specs([0], 8, 64, 16)
    specs = {**images, **text}
    model = read(tmp_path, specs, model_type="ernie4_5_moe_vl", num_hidden_layers=1,
                 num_experts=None, moe_num_experts=[4, 4], moe_layer_start_index=0,
                 moe_intermediate_size=[32, 16])  # fmt: skip
    assert (model.experts, model.row_bytes) == ({0: 4}, {0: ROW})
    assert {each.kind: each.layers for each in model.whole} == {"vision": (0,)}
    assert model.disagreements == ()


def test_identity_experts_have_no_tensors_and_no_rows(tmp_path: Path) -> None:
    over = {"model_type": "longcat_flash", "num_layers": 2, "num_experts": None,
            "n_routed_experts": 4, "zero_expert_num": 2, "num_hidden_layers": 4}  # fmt: skip
    model = read(tmp_path, expert_specs([0, 1], 4, 64, 32), **over)
    assert (model.layers, set(model.experts.values())) == ((0, 1), {4})
    assert model.identity_experts == 2
    assert model.disagreements == ()


DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "experts": (
        {"num_experts": 8},
        "experts of layer 0: config.json says 8, the headers 4 (holds)",
    ),
    "layers": (
        {"mlp_only_layers": [0]},
        "layers with experts: config.json says 1 (1 layers), the headers 0 to 1 (2 layers) (holds)",
    ),
    "bytes": (
        {"quantization_config": {"quant_method": "fp8"}},
        "row bytes of layer 0: config.json says 6156, the headers 12288 (holds)",
    ),
    "dense": (
        {"num_experts": None},
        "experts: config.json says none (a dense model), the headers 2 layers (holds)",
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_a_disagreement_keeps_both_numbers_and_the_headers_hold(case: str, tmp_path: Path) -> None:
    over, message = DISAGREEMENTS[case]
    model = read(tmp_path, expert_specs([0, 1], 4, 64, 32), **over)
    assert (model.layers, set(model.experts.values())) == ((0, 1), {4})
    assert set(model.row_bytes.values()) == {ROW}
    assert [str(each) for each in model.disagreements] == [message]


def test_an_unknown_family_is_read_from_headers_and_says_so(tmp_path: Path) -> None:
    model = read(tmp_path, expert_specs([0, 1], 4, 64, 32), model_type="brand_new")
    assert (model.layers, model.top_k) == ((0, 1), 2)
    assert model.notes == (
        "brand_new: no known family, so everything but top-k is by the headers alone.",
    )


def test_a_field_that_only_config_json_could_have_is_a_note_beside_headers(tmp_path: Path) -> None:
    model = read(tmp_path, expert_specs([0, 1], 4, 64, 32), moe_intermediate_size=None)
    assert set(model.row_bytes.values()) == {ROW}
    assert "expected one of moe_intermediate_size" in model.notes[0]


@pytest.mark.parametrize("parts", [2, 4])
def test_rows_of_one_of_several_accelerators(parts: int, tmp_path: Path) -> None:
    """Matrices and block scales are divided; scales of the down matrix's outputs are not."""
    specs = scaled(expert_specs([0], 4, 64, 32), "weight_scale", "F32", (1, 10**6))
    model = read(tmp_path, specs, parts, num_hidden_layers=1)
    assert model.row_bytes == {0: (ROW + 2 * 32 * 4) // parts + 64 * 4}


REFUSALS: dict[str, tuple[Specs, dict[str, Any], str]] = {
    "no experts": (
        {"model.layers.0.mlp.gate_proj.weight": ("BF16", [8, 8])}, {"model_type": "llama"},
        "llama: a dense model (its headers have no experts, config.json says 4)",
    ),
    "no top-k anywhere": (
        expert_specs([0], 4, 64, 32), {"num_experts_per_tok": None},
        "found nothing in the top level, expected one of num_experts_per_tok, num",
    ),
    "a gap between experts": (
        {name: spec for name, spec in expert_specs([0], 4, 64, 32).items() if ".2." not in name},
        {}, "layer 0: found no expert 2, but expert 3",
    ),
    "an expert without its down matrix": (
        {name: spec for name, spec in expert_specs([0], 4, 64, 32).items()
         if "experts.3.down" not in name},
        {}, "layer 0, expert 3: found no down_proj.weight",
    ),
    "experts of two shapes": (
        {**expert_specs([0], 4, 64, 32),
         "model.layers.0.mlp.experts.1.up_proj.weight": ("BF16", [16, 64])},
        {}, "layer 0, expert 1: found up_proj.weight BF16 [16, 64], expected BF16 [32, 64]",
    ),
    "an expert number without end": (
        {**expert_specs([0], 4, 64, 32),
         "model.layers.0.mlp.experts.9999999.up_proj.weight": ("BF16", [32, 64])},
        {}, "layer 0: found no expert 4, but expert 9999999",
    ),
    "two stacks": (
        {**expert_specs([0], 4, 64, 32, "thinker.layers.{}.mlp.experts.{}"),
         **expert_specs([0], 4, 64, 32, "talker.layers.{}.mlp.experts.{}")},
        {}, "found below talker, thinker, expected one stack",
    ),
    "a scale for more experts than there are": (
        {"model.layers.0.mlp.experts.gate_up_proj": ("F8_E4M3", [4, 64, 64]),
         "model.layers.0.mlp.experts.gate_up_proj_scale": ("F32", [6]),
         "model.layers.0.mlp.experts.down_proj": ("F8_E4M3", [4, 32, 64])},
        {}, "gate_up_proj_scale: found [6], expected 4 experts along its first dimension",
    ),
    "tensors of two numbers of experts": (
        {"model.layers.0.mlp.experts.gate_up_proj": ("BF16", [4, 64, 64]),
         "model.layers.0.mlp.experts.down_proj": ("BF16", [6, 32, 64])},
        {}, "layer 0: found 4 experts in",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path) -> None:
    specs, over, message = REFUSALS[case]
    with pytest.raises(FormatError) as refused:
        read(tmp_path, specs, **over)
    assert message in str(refused.value)


def test_without_config_json_the_refusal_names_the_spellings_of_topk(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", expert_specs([0], 4, 64, 32))
    with pytest.raises(FormatError, match=r"config\.json: experts of a token: .* one of num_"):
        geometry.read(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "file"])
def test_no_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError, match=r"expected a model's folder or a \.gguf file"):
        geometry.read(tmp_path / name)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"found 0 \.gguf files, no config\.json"):
        geometry.read(tmp_path)


def test_hot_rows_for_each_layer_and_too_many(tmp_path: Path) -> None:
    model = read(tmp_path, expert_specs([0, 1], 4, 64, 32))
    assert geometry.to_geometry(model, {0: 1, 1: 3}).hot_rows == {"0": 1, "1": 3}
    assert geometry.to_geometry(model, {0: 2, 1: 2}).hot_rows == 2
    with pytest.raises(FormatError, match="hotRows: found 5 in layer 0, expected 0 to 4"):
        geometry.to_geometry(model, 5)


def test_layers_of_different_sizes(tmp_path: Path) -> None:
    specs = {**expert_specs([0], 4, 64, 32), **expert_specs([1], 8, 64, 16)}
    model = read(tmp_path, specs, model_type="brand_new")
    built = geometry.to_geometry(model, 2)
    assert built.experts == {"0": 4, "1": 8}
    assert built.row_bytes == {"0": ROW, "1": ROW // 2}
    assert model.to_wire()["experts"] == {"0": 4, "1": 8}
    assert [each["layers"] for each in model.to_wire()["tensors"]] == [[0], [1]]
