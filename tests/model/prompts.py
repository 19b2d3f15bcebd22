"""The greedy answers to prompts.json. Exits 1 when two are equal or one repeats a single token."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from tests.model.fixture import HERE, MODEL

MOST_OF_ONE_TOKEN = 0.5


def load(path: Path = HERE / "prompts.json") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.json")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = Qwen3MoeForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    seen: dict[tuple[int, ...], str] = {}
    good = True
    for item in load(args.prompts):
        text = item.get("prompt") or tokenizer.apply_chat_template(
            item["messages"], add_generation_prompt=True, tokenize=False
        )
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            out = model.generate(
                ids,
                do_sample=False,
                repetition_penalty=item["repetition_penalty"],
                max_new_tokens=item["max_tokens"],
            )
        answer = out[0, ids.shape[1] :].tolist()
        top = Counter(answer).most_common(1)[0][1] / len(answer)
        trigrams = len(set(zip(answer, answer[1:], answer[2:], strict=False)))
        variety = trigrams / max(1, len(answer) - 2)
        twin = seen.setdefault(tuple(answer), item["name"])
        good &= twin == item["name"] and top <= MOST_OF_ONE_TOKEN
        print(
            f"{item['name']} {len(answer)} tokens, most common {top:.2f}, trigrams {variety:.2f}"
            f"{'' if twin == item['name'] else ' SAME AS ' + twin}: {tokenizer.decode(answer)!r}"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
