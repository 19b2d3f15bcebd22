"""The cold share of each class's held-out traffic: own map, other class's map, by position.

Exits 1 when the model is not selective enough for the tests.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeForCausalLM

from tests.model.fixture import CLASSES, MODEL, records

Counts = NDArray[np.int64]
MOST_OF_OTHER = 0.6
MOST_OF_POSITIONAL = 0.5


@dataclass(frozen=True)
class Traffic:
    counts: Counts  # layer, expert: selections while decoding
    sessions: int
    tokens: int


def count(model: Qwen3MoeForCausalLM, cls: str, part: str) -> Traffic:
    """Selections of the generated tokens: prompt and answer fed at once, all but the last token."""
    config = model.config
    experts, top_k = config.num_experts, config.num_experts_per_tok
    total = np.zeros((config.num_hidden_layers, experts), dtype=np.int64)
    sessions: set[str] = set()
    tokens = 0
    for record in records(cls, part):
        if not record.get("token_ids"):
            continue
        prompt, answer = record["prompt_token_ids"], record["token_ids"]
        ids = torch.tensor([prompt + answer[:-1]])
        with torch.no_grad():
            out = model(input_ids=ids, output_router_logits=True, use_cache=False)
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.reshape(-1, experts).topk(top_k, -1).indices[len(prompt) :]
            total[layer] += np.bincount(chosen.reshape(-1).numpy(), minlength=experts)
        sessions.add(record["session"])
        tokens += len(answer) - 1
    return Traffic(total, len(sessions), tokens)


def hottest(counts: Counts, hot: int) -> NDArray[np.intp]:
    return np.argsort(-counts, axis=1, kind="stable")[:, :hot]


def cold_share(counts: Counts, rows: NDArray[np.intp]) -> float:
    """Percent of the selections that are not in `rows`."""
    return float(100 * (1 - np.take_along_axis(counts, rows, axis=1).sum() / counts.sum()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--hot", type=int, default=24, help="hot experts a layer")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = Qwen3MoeForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    model.set_experts_implementation("grouped_mm")
    built = {cls: count(model, cls, "transcripts") for cls in CLASSES}
    asked = {cls: count(model, cls, "heldout") for cls in CLASSES}
    for name, traffic in (("transcripts", built), ("heldout", asked)):
        for cls, found in traffic.items():
            print(f"{name} {cls}: {found.sessions} sessions, {found.tokens} decode tokens")
    layers = model.config.num_hidden_layers
    positional = np.tile(np.arange(args.hot), (layers, 1))
    title = f"cold %, {args.hot} hot of {model.config.num_experts}"
    print(f"\n| {title} | own map | other map | by position |")
    print("| --- | --- | --- | --- |")
    good = True
    for cls, other in zip(CLASSES, reversed(CLASSES), strict=True):
        counts = asked[cls].counts
        own = cold_share(counts, hottest(built[cls].counts, args.hot))
        others = cold_share(counts, hottest(built[other].counts, args.hot))
        first = cold_share(counts, positional)
        print(f"| {cls} | {own:.2f} | {others:.2f} | {first:.2f} |")
        good &= own <= MOST_OF_OTHER * others and own <= MOST_OF_POSITIONAL * first
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
