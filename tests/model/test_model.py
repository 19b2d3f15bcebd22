"""The committed model, its recorded traffic and its prompts are what the other tests rely on."""

from __future__ import annotations

import hashlib
import itertools
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.model import fixture

MEGABYTE = 1_000_000
NOW = datetime(2030, 5, 1, 12, 30, 15, 123456, tzinfo=UTC)


def with_ids(cls: str, part: str) -> list[dict[str, Any]]:
    return [r for r in fixture.records(cls, part) if r.get("token_ids")]


def test_size() -> None:
    files = [p for p in fixture.MODEL.rglob("*") if p.is_file()]
    assert {p.name for p in files} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert sum(p.stat().st_size for p in files) <= 20 * MEGABYTE


def test_config() -> None:
    config = json.loads((fixture.MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["dtype"] == "bfloat16"
    facts = ("num_hidden_layers", "num_experts", "num_experts_per_tok", "max_position_embeddings")
    assert [config[f] for f in facts] == [4, 32, 4, 4096]
    for width in ("hidden_size", "moe_intermediate_size", "head_dim", "vocab_size"):
        assert config[width] % 32 == 0
    assert config["tie_word_embeddings"] is True


def test_router_is_not_quantized_and_complete() -> None:
    with (fixture.MODEL / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    for layer in range(4):
        gate = header[f"model.layers.{layer}.mlp.gate.weight"]
        assert (gate["dtype"], gate["shape"]) == ("BF16", [32, 192])
        for expert in range(32):
            for name in ("gate_proj", "up_proj", "down_proj"):
                assert f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight" in header


def test_made_from_these_files() -> None:
    report = json.loads((fixture.HERE / "training.json").read_text(encoding="utf-8"))
    for name, digest in report["files"].items():
        content = (fixture.MODEL / name).read_bytes()
        assert digest == "sha256:" + hashlib.sha256(content).hexdigest(), name


@pytest.mark.parametrize("cls", fixture.CLASSES)
@pytest.mark.parametrize(
    ("part", "sessions", "tokens"), [("transcripts", 20, 12_000), ("heldout", 8, 3_000)]
)
def test_enough_traffic(cls: str, part: str, sessions: int, tokens: int) -> None:
    found = with_ids(cls, part)
    assert len({r["session"] for r in found}) >= sessions
    # The last generated token of a record is never fed in real decode.
    assert sum(len(r["token_ids"]) - 1 for r in found) >= tokens


@pytest.mark.parametrize("cls", fixture.CLASSES)
@pytest.mark.parametrize("part", ["transcripts", "heldout"])
def test_records(cls: str, part: str) -> None:
    content = (fixture.MODEL / "tokenizer.json").read_bytes()
    tokenizer = "sha256:" + hashlib.sha256(content).hexdigest()
    ids = set()
    for record in fixture.records(cls, part):
        if "v" not in record:
            assert set(record) == {"request", "response"}
            continue
        assert record["v"] == 1
        assert record["id"] not in ids
        ids.add(record["id"])
        assert record["endpoint"] in {"/v1/chat/completions", "/v1/completions"}
        if "prompt_token_ids" in record:
            assert record["tokenizer"] == tokenizer
        if record.get("token_ids"):
            assert record["finish_reason"] in {"stop", "length"}
            assert (record["token_ids"][-1] == 2) == (record["finish_reason"] == "stop")
            assert 2 not in record["token_ids"][:-1]
            assert len(record["prompt_token_ids"] + record["token_ids"]) <= 4096
    assert len(list(fixture.records(cls, part))) >= len(ids)


@pytest.mark.parametrize("cls", fixture.CLASSES)
def test_every_kind_of_record_is_there(cls: str) -> None:
    found = list(fixture.records(cls))
    enveloped = [r for r in found if "v" in r]
    assert {p.suffix for p in fixture.files(cls)} == {".jsonl", ".gz"}
    assert len(found) - len(enveloped) in {1, 2}
    assert sum(r["response"] is None for r in enveloped) >= 3
    assert sum(r["response"] is not None and "token_ids" not in r for r in enveloped) >= 4
    assert {r["finish_reason"] for r in with_ids(cls, "transcripts")} == {"stop", "length"}
    assert {r["endpoint"] for r in with_ids(cls, "transcripts")} == {
        "/v1/chat/completions",
        "/v1/completions",
    }


@pytest.mark.parametrize("cls", fixture.CLASSES)
def test_some_turns_extend_the_one_before_and_some_do_not(cls: str) -> None:
    sessions: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(with_ids(cls, "transcripts"), key=lambda r: str(r["created"])):
        sessions.setdefault(record["session"], []).append(record)
    extends = []
    for turns in sessions.values():
        for before, after in itertools.pairwise(turns):
            fed = before["prompt_token_ids"] + before["token_ids"]
            extends.append(after["prompt_token_ids"][: len(fed)] == fed)
    assert extends.count(True) >= 3
    assert extends.count(False) >= 3


@pytest.mark.parametrize("cls", fixture.CLASSES)
def test_heldout_is_disjoint(cls: str) -> None:
    prompts = {tuple(r["prompt_token_ids"]) for r in with_ids(cls, "transcripts")}
    sessions = {r["session"] for r in with_ids(cls, "transcripts")}
    for record in with_ids(cls, "heldout"):
        assert tuple(record["prompt_token_ids"]) not in prompts
        assert record["session"] not in sessions


@pytest.mark.parametrize("cls", fixture.CLASSES)
@pytest.mark.parametrize("part", ["transcripts", "heldout"])
def test_lines_move_the_dates(cls: str, part: str) -> None:
    objects = fixture.lines(cls, NOW, part)
    assert objects == fixture.lines(cls, NOW, part)
    assert [k for k, _ in objects] == [f"{cls}/{p.name}" for p in fixture.files(cls, part)]
    moved = [r for key, content in objects for r in fixture.parse(key, content)]
    dates = [d for r in moved if (d := fixture.created(r)) is not None]
    assert len(dates) >= len(moved) - 3
    assert max(dates) == NOW.replace(microsecond=0) - timedelta(hours=1)
    assert min(dates) > NOW - timedelta(hours=72)
    changing = {"created", "response"}
    for old, new in zip(fixture.records(cls, part), moved, strict=True):
        assert {k: v for k, v in old.items() if k not in changing} == {
            k: v for k, v in new.items() if k not in changing
        }


def test_prompts() -> None:
    prompts = json.loads((fixture.HERE / "prompts.json").read_text(encoding="utf-8"))
    assert len(prompts) == 20
    assert len({p["name"] for p in prompts}) == 20
    assert sum(p["name"].startswith("code-") for p in prompts) == 10
    asked = {json.dumps(p.get("prompt") or p["messages"]) for p in prompts}
    assert len(asked) == 20
    assert {p["max_tokens"] for p in prompts} == {48}
    assert {"prompt" in p for p in prompts} == {True, False}


def test_no_addresses_of_people() -> None:
    for part in ("transcripts", "heldout"):
        for cls in fixture.CLASSES:
            for path in fixture.files(cls, part):
                text = json.dumps(fixture.parse(path.name, path.read_bytes()), ensure_ascii=False)
                assert "@gmail" not in text
