"""Tiny checkpoints of the expert weight formats that vLLM serves on a CPU, and what runs them.

A script for the engine's Python: `cpu_formats.py PLAN` is `engine.py PLAN` with checkpoints made
where a run has a `format` (`base` gives configuration and tokenizer) and with `stand_in()` called
before. Weights are random, the experts' quantised by plain round-to-nearest.

vLLM's kernels for quantised experts on x86 need a CPU with AMX tiles. Where that is missing, the
operators are stand-ins for the hardware: written here in plain torch, they take the tensors of
vLLM's own loaders and expert classes as the kernels would, row by row.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

EXPERTS, LAYERS, HIDDEN, INNER = 32, 4, 256, 128
GROUP, MX_GROUP, BLOCK = 64, 32, 128
"""Inputs that share a scale: INT4, MXFP4, FP8 (inputs and outputs)."""

SKIP = ["lm_head", "re:.*self_attn.*", "re:.*gate$"]
PARTS = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
MXFP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])

Tensors = dict[str, torch.Tensor]


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": SKIP,
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


def _integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True,
        "dynamic": False, **more,
    }  # fmt: skip


def _per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 values and a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def _per_group(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values 0..15 around 8, and a scale for each output and group of inputs."""
    split = weight.view(weight.shape[0], -1, GROUP)
    scale = split.abs().amax(2, keepdim=True) / 7
    return ((split / scale).round() + 8).view_as(weight).to(torch.int32), scale.squeeze(2)


def _packed(values: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight values of the last dimension in an int32, the first one lowest."""
    split = values.view(*values.shape[:-1], -1, 8).to(torch.int64)
    word = sum(split[..., place] << (4 * index) for index, place in enumerate(order))
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def plain(weight: torch.Tensor) -> Tensors:
    return {"weight": weight.to(torch.bfloat16)}


def fp8(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape[0] // BLOCK, weight.shape[1] // BLOCK
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    values = (blocks / scale).view_as(weight).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale.view(rows, columns)}


def int8(weight: torch.Tensor) -> Tensors:
    values, scale = _per_channel(weight)
    return {"weight": values, "weight_scale": scale}


def mxfp4(weight: torch.Tensor) -> Tensors:
    split = weight.view(weight.shape[0], -1, MX_GROUP)
    exponent = (split.abs().amax(2, keepdim=True) / 6).log2().ceil()
    scaled = (split / exponent.exp2()).view(weight.shape[0], -1)
    codes = (scaled.unsqueeze(-1) - MXFP4_VALUES).abs().argmin(-1).to(torch.uint8)
    scale = (exponent.squeeze(2) + 127).to(torch.uint8)
    return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scale}


def awq(weight: torch.Tensor) -> Tensors:
    values, scale = _per_group(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    zeros = torch.full(scale.t().shape, 8)
    return {
        "qweight": _packed(values.t().contiguous(), order), "qzeros": _packed(zeros, order),
        "scales": scale.t().contiguous().to(torch.bfloat16),
    }  # fmt: skip


def gptq(weight: torch.Tensor) -> Tensors:
    values, scale = _per_group(weight)
    return {
        "qweight": _packed(values).t().contiguous(),
        "qzeros": _packed(torch.full(scale.t().shape, 7)),
        "scales": scale.t().contiguous().to(torch.bfloat16),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def int4(weight: torch.Tensor) -> Tensors:
    values, scale = _per_group(weight)
    return {
        "weight_packed": _packed(values), "weight_scale": scale.to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }  # fmt: skip


TOKENWISE = _integers(8, "token") | {"dynamic": True}
KINDS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any] | None]] = {
    "plain": (plain, None),
    "fp8": (
        fp8,
        {
            "quant_method": "fp8", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "ignored_layers": [
                f"model.layers.{layer}.self_attn.{name}"
                for layer in range(LAYERS)
                for name in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
            ]
            + [f"model.layers.{layer}.mlp.gate" for layer in range(LAYERS)],
        },
    ),
    "int8": (int8, _compressed(_integers(8, "channel"), TOKENWISE, "int-quantized")),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "awq": (
        awq,
        {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"],
        },
    ),
    "gptq": (
        gptq,
        {
            "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
            "lm_head": False, "dynamic": {"-:.*self_attn.*": {}},
        },
    ),
    "int4": (
        int4,
        _compressed(_integers(4, "group", group_size=GROUP), None, "pack-quantized"),
    ),
}  # fmt: skip


def write(kind: str, model: Path, folder: Path) -> None:
    """A checkpoint of a format below `folder`; `model` gives configuration and tokenizer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    config = json.loads((model / "config.json").read_text())
    # With tied embeddings and random weights a model repeats its last token.
    config |= {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "tie_word_embeddings": False}
    quantise, method = KINDS[kind]
    if method is not None:
        config["quantization_config"] = method
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(config, quantise), folder / "model.safetensors")


def _tensors(config: dict[str, Any], quantise: Callable[[torch.Tensor], Tensors]) -> Tensors:
    torch.manual_seed(7)
    heads = config["num_attention_heads"] * config["head_dim"]
    narrow = config["num_key_value_heads"] * config["head_dim"]
    found = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], HIDDEN),
        "lm_head.weight": torch.randn(config["vocab_size"], HIDDEN) * 3 * HIDDEN**-0.5,
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        for name, shape in (
            ("q_proj", (heads, HIDDEN)), ("k_proj", (narrow, HIDDEN)),
            ("v_proj", (narrow, HIDDEN)), ("o_proj", (HIDDEN, heads)),
        ):  # fmt: skip
            found[f"{place}.self_attn.{name}.weight"] = torch.randn(shape) * shape[1] ** -0.5
        for name in ("q_norm", "k_norm"):
            found[f"{place}.self_attn.{name}.weight"] = torch.ones(config["head_dim"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{place}.{name}.weight"] = torch.ones(HIDDEN)
        found[f"{place}.mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN) * HIDDEN**-0.5
    found = {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for part, shape in PARTS.items():
                place = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                for name, tensor in quantise(torch.randn(shape) * shape[1] ** -0.5).items():
                    found[f"{place}.{name}"] = tensor.contiguous()
    return found


def _nibbles(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """The inverse of `_packed`."""
    split = torch.stack([words >> (4 * index) & 15 for index in range(8)], -1)
    back = [order.index(place) for place in range(8)]
    return split[..., back].flatten(-2).to(torch.uint8)


def _unpack(
    weight: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, algorithm: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [E, N, K], zero points and scales [E, N, K / group], as bytes and as they are."""
    if algorithm == 0:  # AWQ
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        values, points = _nibbles(weight, order), _nibbles(zeros, order)
    else:  # GPTQ packs eight inputs, and its zero points are one less
        values = _nibbles(weight.transpose(1, 2).contiguous()).transpose(1, 2)
        points = _nibbles(zeros) + 1
    return tuple(  # type: ignore[return-value]
        tensor.transpose(1, 2).contiguous() for tensor in (values, points, scales)
    )


def _row(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """One expert's weight in float32, from any of the formats."""
    if zero is not None:
        wide = weight.shape[1] // scale.shape[1]
        values = weight.float() - zero.float().repeat_interleave(wide, 1)
        return values * scale.float().repeat_interleave(wide, 1)
    if weight.dtype == torch.uint8:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1).long()
        power = (scale.float() - 127).exp2()
        return MXFP4_VALUES[codes] * power.repeat_interleave(MX_GROUP, 1)
    if weight.dtype == torch.int8:
        return weight.float() * scale.float().view(-1, 1)
    grown = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * grown


def _experts(
    out: torch.Tensor, hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    weights: torch.Tensor, ids: torch.Tensor, method: int, s1: torch.Tensor, s2: torch.Tensor,
    z1: torch.Tensor | None, z2: torch.Tensor | None, *rest: Any,
) -> None:  # fmt: skip
    """What `fused_experts_cpu` gives, an expert at a time."""
    total = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in ids.unique().tolist():
        first = _row(w1[expert], s1[expert], None if z1 is None else z1[expert])
        second = _row(w2[expert], s2[expert], None if z2 is None else z2[expert])
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden[tokens].float() @ first.t()).chunk(2, -1)
        done = (torch.nn.functional.silu(gate) * up) @ second.t()
        total.index_add_(0, tokens, done * weights[tokens, places].float().unsqueeze(1))
    out.copy_(total.to(out.dtype))


SCHEMAS: dict[str, tuple[str, Callable[..., Any]]] = {
    "convert_weight_packed": ("(Tensor w) -> Tensor", torch.clone),
    "convert_scale_packed": ("(Tensor s) -> Tensor", torch.clone),
    "convert_weight_packed_scale_zp": (
        "(Tensor w, Tensor z, Tensor s, int m) -> (Tensor, Tensor, Tensor)",
        lambda w, z, s, m: _unpack(w, z, s, m),
    ),
    "fused_experts_cpu": (
        "(Tensor(a!) o, Tensor x, Tensor w1, Tensor w2, Tensor w, Tensor i, int m, Tensor? s1,"
        " Tensor? s2, Tensor? z1, Tensor? z2, Tensor? a, int[]? b, Tensor? b1, Tensor? b2,"
        " float? alpha, float? limit, bool v) -> ()",
        _experts,
    ),
}


def stand_in() -> bool:
    """Put stand-ins in place of the kernels this CPU does not have; whether it was needed."""
    if torch.cpu._is_amx_tile_supported():
        return False
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    library = torch.library.Library("_C", "FRAGMENT")
    for name, (schema, function) in SCHEMAS.items():
        library.define(name + schema)
        library.impl(name, function, "CompositeExplicitAutograd")
    stand_in.library = library  # type: ignore[attr-defined]
    for kernel in ("CPUExpertsFp8", "CPUExpertsMxfp4", "CPUExpertsInt4", "CPUExpertsInt8"):
        getattr(cpu_moe, kernel)._supports_current_device = staticmethod(lambda: True)
    return True


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import engine

    for run in json.loads(Path(sys.argv[1]).read_text())["runs"]:
        folder = Path(run["model"])
        if run.get("format") and not folder.exists():
            write(run["format"], Path(run["base"]), folder)
    stand_in()
    engine.main()
