"""What config.json of each family says, and the layers, experts and bytes to be read from it."""

from __future__ import annotations

from typing import Any, NamedTuple

MIB = 1 << 20
BF16 = {"dtype": "bfloat16"}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


class Case(NamedTuple):
    config: dict[str, Any]
    layers: list[int]
    experts: int
    top_k: int
    row_bytes: int


def sizes(layers: int, hidden: int, width: int | None = None, **more: Any) -> dict[str, Any]:
    out = {"num_hidden_layers": layers, "hidden_size": hidden, **BF16, **more}
    return out if width is None else {**out, "moe_intermediate_size": width}


def count(experts: int, top_k: int, name: str = "num_experts") -> dict[str, Any]:
    return {name: experts, "num_experts_per_tok": top_k}


def upto(end: int, start: int = 0) -> list[int]:
    return list(range(start, end))


PATTERN = "MEMEM*EMEMEM*E-E"
"""Nemotron-H: M mamba, E experts, * attention, - dense."""

CASES = {
    "mixtral": Case(
        sizes(32, 4096, intermediate_size=14336) | count(8, 2, "num_local_experts"),
        upto(32), 8, 2, 336 * MIB,
    ),
    "qwen2_moe": Case(
        sizes(24, 2048, 1408, decoder_sparse_step=2, mlp_only_layers=[3]) | count(60, 4),
        [1, *range(5, 24, 2)], 60, 4, 3 * 2048 * 1408 * 2,
    ),
    "qwen3_moe": Case(
        sizes(48, 2048, 768, decoder_sparse_step=1, mlp_only_layers=[]) | count(128, 8),
        upto(48), 128, 8, 9 * MIB,
    ),
    "qwen3_next": Case(sizes(48, 2048, 512) | count(512, 10), upto(48), 512, 10, 6 * MIB),
    "qwen3_5_moe": Case(
        {"text_config": sizes(40, 2048, 512, model_type="qwen3_5_moe_text") | count(256, 8)},
        upto(40), 256, 8, 6 * MIB,
    ),
    "qwen4_exp": Case(
        {"text_config": sizes(40, 2048, 512, model_type="qwen4_exp_text") | count(512, 10)},
        upto(40), 512, 10, 6 * MIB,
    ),
    "deepseek_v2": Case(
        sizes(27, 2048, 1408, first_k_dense_replace=1, moe_layer_freq=2)
        | count(64, 6, "n_routed_experts"),
        upto(27, 2)[::2], 64, 6, 3 * 2048 * 1408 * 2,
    ),
    # 42.0 MiB of fp8, and an fp32 scale for 128 x 128 weights.
    "deepseek_v3": Case(
        sizes(61, 7168, 2048, first_k_dense_replace=3, moe_layer_freq=1, **FP8)
        | count(256, 8, "n_routed_experts"),
        upto(61, 3), 256, 8, 42 * MIB + 3 * 56 * 16 * 4,
    ),
    "deepseek_v4": Case(
        sizes(43, 4096, 2048, num_hash_layers=3, **FP8) | count(256, 6, "n_routed_experts"),
        upto(43), 256, 6, 13_369_344,
    ),
    "deepseek_v41": Case(
        {
            "text_config": sizes(40, 5120, 2304, dspark_n_routed_experts=128)
            | count(384, 6, "n_routed_experts"),
            "quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"},
        },
        upto(40), 384, 6, 18_800_640,
    ),
    "glm4_moe": Case(
        sizes(46, 4096, 1408, first_k_dense_replace=1) | count(128, 8, "n_routed_experts"),
        upto(46, 1), 128, 8, 33 * MIB,
    ),
    "glm_moe_dsa": Case(
        sizes(78, 6144, 2048, num_nextn_predict_layers=1, **FP8)
        | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75}
        | count(256, 8, "n_routed_experts"),
        upto(78, 3), 256, 8, 36 * MIB + 3 * 48 * 16 * 4,
    ),
    "gpt_oss": Case(
        sizes(36, 2880, intermediate_size=2880, quantization_config={"quant_method": "mxfp4"})
        | count(128, 4, "num_local_experts"),
        upto(36), 128, 4, 13_219_200 + 17_280,
    ),
    "llama4": Case(
        {
            "text_config": sizes(48, 5120, intermediate_size=8192, model_type="llama4_text")
            | count(16, 1, "num_local_experts")
            | {"interleave_moe_layer_step": 2}
        },
        upto(48, 1)[::2], 16, 1, 240 * MIB,
    ),
    "jamba": Case(
        sizes(32, 4096, intermediate_size=14336, expert_layer_period=2, expert_layer_offset=1)
        | count(16, 2),
        upto(32, 1)[::2], 16, 2, 336 * MIB,
    ),
    "ernie4_5_moe": Case(
        sizes(28, 2560, 1536, moe_layer_start_index=1, moe_layer_end_index=-1)
        | {"moe_num_experts": 64, "moe_k": 6, "moe_layer_interval": 1},
        upto(28, 1), 64, 6, 3 * 2560 * 1536 * 2,
    ),
    # Experts for text, then for images: only those of text are rows.
    "ernie4_5_moe_vl": Case(
        sizes(28, 2560) | {"moe_intermediate_size": [1536, 512], "moe_num_experts": [64, 64]}
        | {"moe_k": 6, "moe_layer_start_index": [1, 1], "moe_layer_end_index": [27, 26]},
        upto(28, 1), 64, 6, 3 * 2560 * 1536 * 2,
    ),
    "minimax_m2": Case(
        sizes(62, 3072, intermediate_size=1536, **FP8) | count(256, 8, "num_local_experts"),
        upto(62), 256, 8, 14_155_776 + 3 * 24 * 12 * 4,
    ),
    "minimax_m3_vl": Case(
        {
            "text_config": sizes(60, 6144, intermediate_size=3072)
            | {"moe_layer_freq": [0] * 3 + [1] * 57} | count(128, 4, "num_local_experts")
        },
        upto(60, 3), 128, 4, 108 * MIB,
    ),
    "longcat_flash": Case(
        {"num_layers": 28, "num_hidden_layers": 56, "hidden_size": 6144, **BF16}
        | {"expert_ffn_hidden_size": 2048, "n_routed_experts": 512, "zero_expert_num": 256}
        | {"moe_topk": 12, "zero_expert_type": "identity"},
        upto(28), 512, 12, 72 * MIB,
    ),
    "lfm2_moe": Case(
        sizes(32, 2048, 1792, num_dense_layers=2) | count(32, 4),
        upto(32, 2), 32, 4, 21 * MIB,
    ),
    "afmoe": Case(
        sizes(32, 2048, 1408, num_dense_layers=1) | count(64, 6),
        upto(32, 1), 64, 6, 3 * 2048 * 1408 * 2,
    ),
    "mimo_v2_flash": Case(
        sizes(48, 4096, 2048, moe_layer_freq=[0] + [1] * 47) | count(256, 8, "n_routed_experts"),
        upto(48, 1), 256, 8, 48 * MIB,
    ),
    "step3p5": Case(
        sizes(45, 4096, 1280, moe_layers_enum=",".join(map(str, range(3, 45))))
        | {"moe_num_experts": 288, "moe_top_k": 8, "num_nextn_predict_layers": 3},
        upto(45, 3), 288, 8, 30 * MIB,
    ),
    "step3p7": Case(
        {"text_config": sizes(45, 4096, 1280, num_nextn_predict_layers=3, model_type="step3p5")
         | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 45}
         | {"moe_num_experts": 288, "moe_top_k": 8}},
        upto(45, 3), 288, 8, 30 * MIB,
    ),
    # Two matrices, not three: relu squared has no gate.
    "nemotron_h": Case(
        {"hidden_size": 4096, **BF16, "hybrid_override_pattern": PATTERN}
        | {"time_step_limit": [0.0, float("inf")], "note": "NaN and \"Infinity\" in a string"}
        | {"moe_intermediate_size": 1024} | count(8, 2, "n_routed_experts"),
        [i for i, letter in enumerate(PATTERN) if letter == "E"], 8, 2, 2 * 4096 * 1024 * 2,
    ),
    "kimi_linear": Case(
        sizes(27, 2304, 1024, first_k_dense_replace=1, moe_layer_freq=1)
        | {"num_experts": 256, "num_experts_per_token": 8},
        upto(27, 1), 256, 8, 3 * 2304 * 1024 * 2,
    ),
    # Experts work on a narrower latent vector.
    "kimi_k3": Case(
        {"text_config": sizes(60, 7168, 2048, first_k_dense_replace=1, model_type="kimi_linear")
         | {"num_experts": 896, "num_experts_per_token": 16, "routed_expert_hidden_size": 3584}},
        upto(60, 1), 896, 16, 3 * 3584 * 2048 * 2,
    ),
    "gemma4": Case(
        {"text_config": sizes(30, 2304, 704, model_type="gemma4_text", enable_moe_block=True)
         | {"num_experts": 128, "top_k_experts": 8}},
        upto(30), 128, 8, 3 * 2304 * 704 * 2,
    ),
    "dbrx": Case(
        {"n_layers": 40, "d_model": 6144, "torch_dtype": "bfloat16"}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        upto(40), 16, 4, 3 * 6144 * 10752 * 2,
    ),
}  # fmt: skip
