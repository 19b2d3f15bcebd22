"""Train the tiny mixture-of-experts model of the tests: tokenizer, chat form, weights in bf16."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.model.corpus import CLASSES, Corpus, load, messages, turns

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT_SHARE = 0.65
PEAK_RATE = 3e-3
WARM_UP = 60


def build_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


class Rows:
    """Training rows: conversations and plain passages of one class, packed to one length."""

    def __init__(
        self, corpora: dict[str, Corpus], tokenizer: PreTrainedTokenizerFast, length: int, seed: int
    ) -> None:
        self.corpora = corpora
        self.tokenizer = tokenizer
        self.length = length
        self.rng = random.Random(seed)
        self.weights = {c: [len(d) ** 0.7 for d in k.train] for c, k in corpora.items()}

    def _example(self, cls: str) -> str:
        document = self.rng.choices(self.corpora[cls].train, self.weights[cls])[0]
        if self.rng.random() < CHAT_SHARE:
            parts = messages(turns(document, self.rng))
            return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in parts)
        at = document.rfind("\n", 0, self.rng.randrange(len(document))) + 1
        return document[at : at + self.rng.randint(300, 2000)] + END_OF_TEXT

    def row(self, cls: str) -> list[int]:
        ids: list[int] = []
        while len(ids) < self.length:
            ids += self.tokenizer(self._example(cls))["input_ids"]
        return ids[: self.length]

    def batch(self, size: int) -> torch.Tensor:
        return torch.tensor([self.row(CLASSES[i % len(CLASSES)]) for i in range(size)])


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> torch.Tensor:
    """Switch-style load balancing, per layer and over the whole batch of all classes.

    Over a batch that mixes the classes every expert is used, while each class may prefer its own.
    """
    losses = []
    for logits in router_logits:
        experts = logits.shape[-1]
        probabilities = logits.reshape(-1, experts).float().softmax(-1)
        chosen = probabilities.topk(top_k, -1).indices
        share = torch.zeros(experts).scatter_add_(
            0, chosen.reshape(-1), torch.full((chosen.numel(),), 1.0 / chosen.numel())
        )
        losses.append(experts * (share * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def learning_rate(step: int, steps: int) -> float:
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * (0.97 * cosine + 0.03)


def train(model: Qwen3MoeForCausalLM, rows: Rows, args: argparse.Namespace) -> float:
    """Returns the mean loss of the last 50 steps."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    recent: list[float] = []
    started = time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        ids = rows.batch(args.batch)
        out = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False)
        # The model adds its own balance term; its coefficient is 0, ours is per layer.
        loss = out.loss + args.balance * balance_loss(out.router_logits, 4)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-49:], out.loss.item()]
        if step % 50 == 49:
            seconds = time.monotonic() - started
            rate = (step + 1) * ids.numel() / seconds
            mean = sum(recent) / len(recent)
            print(f"{step + 1} loss {mean:.3f} {seconds:.0f} s {rate:.0f} tokens/s", flush=True)
    return sum(recent) / len(recent)


def file_hash(path: Path) -> str:
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def edit_json(path: Path, add: dict[str, Any], remove: str) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | add
    content.pop(remove, None)
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    model.config.output_router_logits = False
    model.config.router_aux_loss_coef = 0.001
    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    # The names that published checkpoints of this architecture use.
    edit_json(out / "config.json", {"num_experts": model.config.num_experts}, "num_local_experts")
    edit_json(
        out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}, "backend"
    )
    for path in out.iterdir():
        path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder of the model")
    parser.add_argument("--report", type=Path, help="JSON file for how it was made")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=4, help="rows a step, some of each class")
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--balance", type=float, default=0.005, help="load balancing coefficient")
    parser.add_argument("--vocabulary", type=int, default=3072)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    started = time.monotonic()
    corpora = {cls: load(cls, args.seed) for cls in CLASSES}
    sample = [d[:60_000] for c in corpora.values() for d in c.train[:150]]
    tokenizer = build_tokenizer(sample, args.vocabulary)
    model = build_model(tokenizer)
    model.config.router_aux_loss_coef = 0.0
    model.router_aux_loss_coef = 0.0
    model.train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters", flush=True)
    loss = train(model, Rows(corpora, tokenizer, args.length, args.seed), args)
    save(model, tokenizer, args.out)
    report: dict[str, Any] = {
        "parameters": parameters,
        "loss": round(loss, 3),
        "seconds": round(time.monotonic() - started),
        "tokens": args.steps * args.batch * args.length,
        "arguments": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "corpus": {c: k.sha256 for c, k in corpora.items()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "files": {p.name: file_hash(p) for p in sorted(args.out.iterdir())},
    }
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
