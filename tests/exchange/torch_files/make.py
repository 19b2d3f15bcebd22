"""Makes the .pt files beside it; run with a Python that has torch (they are of torch 2.13).

The tests read the files and never torch. Their contents have the form that SGLang's expert
distribution recorder and its placement files have (python/sglang/srt/eplb).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
L, E, K = 4, 8, 2


def counts(rows: int) -> Any:
    """[L,E] with layer 0 dense: `rows` rows of K experts in the others."""
    out = torch.zeros(L, E, dtype=torch.int32)
    for layer in range(1, L):
        for _ in range(rows):
            out[layer, torch.randperm(E)[:K]] += 1
    return out


def record(number: int, mode: int, tokens: int) -> dict[str, Any]:
    """A forward pass of mode per_token: 8 columns of ids, -1 beyond the top-k."""
    ids = torch.full((L, tokens, 8), -1, dtype=torch.int32)
    for layer in range(1, L):
        for token in range(tokens):
            ids[layer, token, :K] = torch.randperm(E)[:K].to(torch.int32)
    physical = torch.zeros(L, E, dtype=torch.int32)
    for layer in range(L):
        for value in ids[layer].flatten().tolist():
            if value >= 0:
                physical[layer, value] += 1
    return {
        "forward_pass_id": number,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": list(range(tokens)),
        "positions": list(range(tokens)),
        "extend_seq_lens": [tokens] if mode == 1 else None,
        "forward_mode": mode,
        "topk_ids_of_layer": ids,
        "misc_objects": [],
        "global_physical_count": physical,
    }


def main() -> None:
    torch.manual_seed(0)
    steps = torch.stack([counts(3) for _ in range(3)])
    identity = torch.arange(E).repeat(L, 1)
    per_pass = ("forward_pass_id", "rank", "gatherer_key", "global_physical_count")
    turned = steps.transpose(1, 2).contiguous().transpose(1, 2)[1:]
    rate = "average_utilization_rate_over_window"
    save = {
        "sglang_stat": {"rank": 0, "logical_count": steps, rate: None},
        "sglang_stat_view": {"rank": 0, "logical_count": turned, rate: 0.75},
        "sglang_map": {
            "physical_to_logical_map": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 7, 2]] * L)
        },
        "sglang_per_token": {
            "records": [record(1, 1, 5), record(2, 2, 1), record(3, 2, 1)],
            "last_physical_to_logical_map": identity,
        },
        "sglang_per_pass": {
            "records": [{k: record(n, 2, 2)[k] for k in per_pass} for n in (1, 2)],
            "last_physical_to_logical_map": identity,
        },
        "module": {"logical_count": torch.nn.Linear(2, 2)},
    }
    for name, data in save.items():
        torch.save(data, HERE / f"{name}.pt")
    legacy = {"logical_count": steps.sum(0)}
    torch.save(legacy, HERE / "legacy.pt", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main()
