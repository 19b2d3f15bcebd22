"""Router and tokenizer hashes from hand-made files."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import expertmaps_hook_checkpoint as checkpoint
import expertmaps_hook_env as env
import pytest

GATES = {f"model.layers.{layer}.mlp.gate.weight": bytes([layer]) * 16 for layer in range(3)}
OTHERS = {
    "model.layers.0.mlp.experts.0.gate_proj.weight": b"a" * 8,
    "model.layers.0.mlp.shared_expert_gate.weight": b"b" * 8,
    "model.embed_tokens.weight": b"c" * 8,
}


def save(path: Path, tensors: dict[str, bytes], dtype: str = "BF16") -> Path:
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": dtype, "shape": [len(data) // 2], "data_offsets": [offset, offset + len(data)],
        }  # fmt: skip
        offset += len(data)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors.values()))
    return path


def expected(gates: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, data in gates.items():
        digest.update(f"{name}\0BF16\0[{len(data) // 2}]\n".encode() + data)
    return "sha256:" + digest.hexdigest()


def test_router_hash_of_a_single_file(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {**OTHERS, **dict(reversed(GATES.items()))})
    assert checkpoint.router_digest(tmp_path, [2, 0, 1]) == expected(GATES)


def test_router_hash_is_the_same_for_a_sharded_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK", 5)
    names = list(GATES)
    shards = {"b.safetensors": names[:1], "a.safetensors": names[1:]}
    for file, members in shards.items():
        save(tmp_path / file, {name: GATES[name] for name in members})
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert checkpoint.router_digest(tmp_path, [0, 1, 2]) == expected(GATES)
    index.unlink()
    assert checkpoint.router_digest(tmp_path, [0, 1, 2]) == expected(GATES)


def test_router_hash_sees_one_changed_byte_and_only_its_layers(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {**GATES, **OTHERS})
    before = checkpoint.router_digest(tmp_path, [0, 1])
    changed = {**GATES, "model.layers.2.mlp.gate.weight": b"z" * 16}
    save(path, {**changed, **OTHERS})
    assert checkpoint.router_digest(tmp_path, [0, 1]) == before
    assert checkpoint.router_digest(tmp_path, [0, 1, 2]) != expected(GATES)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.7.mlp.gate.weight", 7),
        ("model.layers.7.block_sparse_moe.gate.weight", 7),
        ("model.language_model.layers.3.mlp.gate.e_score_correction_bias", 3),
        ("model.layers.3.mlp.router.weight", 3),
        ("model.layers.3.mlp.router.bias", 3),
        ("language_model.model.layers.0.feed_forward.router.weight", 0),
        ("layers.12.ffn.gate.weight", 12),
        ("model.layers.1.mlp.router.layer.weight", 1),
        ("model.layers.1.mlp.experts.3.gate_proj.weight", None),
        ("model.layers.1.mlp.experts.gate_up_proj", None),
        ("model.layers.1.mlp.shared_expert_gate.weight", None),
        ("model.layers.1.mlp.shared_experts.gate.weight", None),
        ("model.layers.1.self_attn.gate.weight", None),
        ("model.embed_tokens.weight", None),
    ],
)
def test_gate_names(name: str, layer: int | None) -> None:
    assert checkpoint.gate_layer(name) == layer


def test_a_layer_without_gate_is_named(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", GATES)
    with pytest.raises(env.HookError) as caught:
        checkpoint.router_digest(tmp_path, [0, 5])
    assert (caught.value.reason, "[5]" in caught.value.message) == ("RouterNotFound", True)


@pytest.mark.parametrize("broken", ["cut", "empty", "header", "offsets", "index", "escape", "none"])
def test_an_unreadable_checkpoint_is_named(tmp_path: Path, broken: str) -> None:
    path = save(tmp_path / "model.safetensors", GATES)
    raw = path.read_bytes()
    index = tmp_path / "model.safetensors.index.json"
    if broken == "cut":
        path.write_bytes(raw[:-10])
    elif broken == "empty":
        path.write_bytes(b"")
    elif broken == "header":
        path.write_bytes(struct.pack("<Q", 1 << 60) + raw[8:])
    elif broken == "offsets":
        path.write_bytes(raw.replace(b'"data_offsets": [0, 16]', b'"data_offsets": [9, 1] '))
    elif broken == "index":
        index.write_text("[]")
    elif broken == "escape":
        index.write_text(json.dumps({"weight_map": dict.fromkeys(GATES, "../x.safetensors")}))
    else:
        path.unlink()
    with pytest.raises(env.HookError) as caught:
        checkpoint.router_digest(tmp_path, [0, 1, 2])
    assert caught.value.reason == "CheckpointUnreadable"


def test_tokenizer_hash(tmp_path: Path) -> None:
    with pytest.raises(env.HookError) as caught:
        checkpoint.tokenizer_digest(tmp_path)
    assert caught.value.reason == "TokenizerNotFound"
    (tmp_path / "tokenizer.model").write_bytes(b"old")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert checkpoint.tokenizer_digest(tmp_path) == "sha256:" + hashlib.sha256(b"{}").hexdigest()


def test_a_name_that_is_no_folder_is_refused() -> None:
    with pytest.raises(env.HookError) as caught:
        checkpoint.local_folder("no/such-model", None, "CheckpointUnreadable")
    assert caught.value.reason == "CheckpointUnreadable"
