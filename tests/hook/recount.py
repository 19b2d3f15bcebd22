"""Independent recount with transformers; a script for the engine's Python.

`recount.py MODEL PLAN OUT DTYPE`: PLAN is a JSON list of [ids, prompt length]; OUT gets int64
[sequence, 2, layers, experts].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    path, plan, out = sys.argv[1:4]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, sys.argv[4])).eval()
    config = model.config
    top_k, chosen = config.num_experts_per_tok, {}

    def note(layer: int) -> Any:
        def hook(_: Any, __: Any, result: Any) -> None:
            logits = result[0] if isinstance(result, tuple) else result
            chosen[layer] = torch.topk(logits.float(), top_k, -1).indices.reshape(-1, top_k)

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(note(number))
    sequences = json.loads(Path(plan).read_text())
    shape = (len(sequences), 2, config.num_hidden_layers, config.num_experts)
    counts = np.zeros(shape, np.int64)
    for index, (ids, prompt) in enumerate(sequences):
        with torch.no_grad():
            model(torch.tensor([ids]))
        for layer, rows in chosen.items():
            for phase, part in enumerate((rows[:prompt], rows[prompt:])):
                found = np.bincount(part.numpy().ravel(), minlength=config.num_experts)
                counts[index, phase, layer] += found
    np.save(out, counts)


if __name__ == "__main__":
    main()
