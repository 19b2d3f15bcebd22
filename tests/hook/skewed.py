"""A checkpoint that is larger than a memory limit, with a router that prefers some experts.

`skewed.py MODEL FOLDER`; a script for the engine's Python. Random weights; `MODEL` gives
configuration and tokenizer. The gate's rows have different lengths, so some experts win often:
which ones has nothing to do with their position.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from skewed_size import EXPERTS, HIDDEN, INNER, LAYERS


def main() -> None:
    from safetensors.torch import save_file

    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
        "num_hidden_layers": LAYERS, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    dtype = torch.bfloat16

    def random(*shape: int, scale: float | None = None) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype) * (shape[-1] ** -0.5 if scale is None else scale)

    heads = config["num_attention_heads"] * config["head_dim"]
    narrow = config["num_key_value_heads"] * config["head_dim"]
    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], HIDDEN, scale=1.0),
        "lm_head.weight": random(config["vocab_size"], HIDDEN) * 3,
        "model.norm.weight": torch.ones(HIDDEN, dtype=dtype),
    }
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        for name, shape in (("q_proj", (heads, HIDDEN)), ("k_proj", (narrow, HIDDEN)),
                            ("v_proj", (narrow, HIDDEN)), ("o_proj", (HIDDEN, heads))):  # fmt: skip
            tensors[f"{place}.self_attn.{name}.weight"] = random(*shape)
        for name in ("q_norm", "k_norm"):
            tensors[f"{place}.self_attn.{name}.weight"] = torch.ones(
                config["head_dim"], dtype=dtype
            )
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{place}.{name}.weight"] = torch.ones(HIDDEN, dtype=dtype)
        length = 4.0 / (1 + torch.randperm(EXPERTS)).float() ** 0.7
        gate = random(EXPERTS, HIDDEN).float() * length.unsqueeze(1)
        tensors[f"{place}.mlp.gate.weight"] = gate.to(dtype)
        for expert in range(EXPERTS):
            for part, shape in (("gate_proj", (INNER, HIDDEN)), ("up_proj", (INNER, HIDDEN)),
                                ("down_proj", (HIDDEN, INNER))):  # fmt: skip
                tensors[f"{place}.mlp.experts.{expert}.{part}.weight"] = random(*shape)
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    main()
