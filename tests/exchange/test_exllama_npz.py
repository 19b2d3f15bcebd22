"""exllamav3's counts by prompt with their sidecar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import exllama_npz
from rowmap_jobs.exchange.base import Counts
from tests.exchange.made import line_of, passes_or_refuses
from tests.exchange.routings import counted, ids, routings, same

KEYS = ["model.layers.3.mlp", "model.layers.4.mlp"]
DECODE = np.stack([counted(ids(9, 2, 6, 2, seed), 6) for seed in range(3)])
PREFILL = np.stack([counted(ids(20, 2, 6, 2, seed + 9), 6) for seed in range(3)])
META = {
    "corpus": "code",
    "layers": 2,
    "experts": 6,
    "prompts": 3,
    "fingerprint": {"architecture": "Glm", "checkpoint_sha": "aaaabbbbccccdddd"},
    "layer_keys": KEYS,
    "decode_hits": int(DECODE.sum()),
    "prefill_hits": int(PREFILL.sum()),
}


def save(folder: Path, meta: Any = META, **arrays: np.ndarray) -> Path:
    path = folder / "code.npz"
    arrays = arrays or {"counts_decode": DECODE, "counts_prefill": PREFILL}
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # numpy has a keyword of its own
    if meta is not None:
        (folder / "code.meta.json").write_text(json.dumps(meta))
    return path


def test_prompts_stay_apart_and_layer_ids_are_absolute(tmp_path: Path) -> None:
    counts = exllama_npz.read(save(tmp_path))
    assert counts.layout.layer_ids == (3, 4) and counts.layout.experts == (6, 6)
    assert np.array_equal(counts.decode, DECODE)
    assert counts.prefill is not None and np.array_equal(counts.prefill, PREFILL)
    assert counts.per_sequence and len(counts.names) == 3
    assert any("checkpoint_sha aaaabbbbccccdddd" in note for note in counts.notes)


def test_a_file_without_a_sidecar_needs_the_models_layers(tmp_path: Path) -> None:
    path = save(tmp_path, meta=None)
    counts = exllama_npz.read(path, layers=(3, 4))
    assert counts.layout.layer_ids == (3, 4)
    assert any("no fingerprint" in note for note in counts.notes)
    assert "layer_keys: found none given" in line_of(lambda: exllama_npz.read(path))
    line = line_of(lambda: exllama_npz.read(path, layers=(3, 4, 5)))
    assert "layer_keys: found 3 given, expected the ids of its 2 layers" in line


@pytest.mark.parametrize("table", [DECODE, DECODE[0], DECODE.astype(np.uint16)])
def test_counts_that_do_not_tell_phases_apart(tmp_path: Path, table: np.ndarray) -> None:
    counts = exllama_npz.read(save(tmp_path, meta=None, counts=table), layers=(0, 1))
    assert np.array_equal(counts.decode, table.reshape(-1, 2, 6)) and counts.prefill is None
    assert any("not told apart" in note for note in counts.notes)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"prompts": 4}, "prompts: found 4, expected 3, as in the arrays beside it"),
        ({"prompts": ["a", "b"]}, "prompts: found 2, expected 3, as in the arrays beside it"),
        ({"layers": 3}, "layers: found 3, expected 2, as in the arrays beside it"),
        ({"experts": 8}, "experts: found 8, expected 6, as in the arrays beside it"),
        ({"decode_hits": 1}, "decode_hits: found 1, expected 108, as in the arrays beside it"),
        ({"prefill_hits": True}, "prefill_hits: found True, expected 240"),
        ({"layer_keys": KEYS[:1]}, "layer_keys: found 1 keys, expected 2, one for each row"),
        ({"layer_keys": ["a", "b"]}, "layer_keys: found a, expected names with the layer's number"),
        ({"layer_keys": KEYS[:1] * 2}, "layer_keys: found layer 3 twice, expected each layer once"),
        ({"layer_keys": [3, 4]}, "layer_keys: found list, expected a list of keys"),
    ],
)
def test_a_sidecar_of_another_file(tmp_path: Path, over: Any, message: str) -> None:
    path = save(tmp_path, {**META, **over})
    assert f"code.meta.json: {message}" in line_of(lambda: exllama_npz.read(path))


def test_a_sidecar_of_another_run_with_the_same_shape(tmp_path: Path) -> None:
    """All numbers of the shape agree; the hits tell."""
    other = DECODE.copy()
    other[0, :, 0] += 1
    path = save(tmp_path, META, counts_decode=other, counts_prefill=PREFILL)
    assert "decode_hits: found 108, expected 110" in line_of(lambda: exllama_npz.read(path))


def test_a_phase_that_the_sidecar_counts_and_the_file_lacks(tmp_path: Path) -> None:
    path = save(tmp_path, META, counts_decode=DECODE)
    assert "prefill_hits: found 240, expected 0" in line_of(lambda: exllama_npz.read(path))


def test_layers_that_are_not_the_models(tmp_path: Path) -> None:
    line = line_of(lambda: exllama_npz.read(save(tmp_path), layers=(3, 5)))
    assert "layer_keys: found layers [3, 4], expected the model's 2 layers" in line


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": DECODE}, "members: found ['other'], expected counts_decode and counts_prefill"),
        (
            {"counts": DECODE, "counts_decode": DECODE},
            "members: found ['counts', 'counts_decode'], expected counts_decode and",
        ),
        ({"counts_prefill": DECODE}, "members: found ['counts_prefill'], expected counts_decode"),
        (
            {"counts_decode": DECODE, "more": DECODE},
            "members: found ['counts_decode', 'more'], expected counts_decode and",
        ),
        (
            {"counts_decode": DECODE, "counts_prefill": PREFILL[:2]},
            "counts_prefill: found shapes [(2, 2, 6), (3, 2, 6)], expected that of decode",
        ),
        ({"counts_decode": DECODE - 9}, "counts_decode[1,0,5]: found -9, expected counts of 0"),
        ({"counts_decode": DECODE.astype("f8")}, "counts_decode: found float64 with 3 dimensions"),
        ({"counts_decode": DECODE[0, 0]}, "counts_decode: found int64 with 1 dimensions"),
        ({"counts_decode": DECODE[:0]}, "counts_decode: found [0, 2, 6], expected [1 to"),
        ({"counts_decode": DECODE * 0}, "counts: found no selection in any layer"),
    ],
)
def test_arrays_that_are_no_counts(tmp_path: Path, arrays: Any, message: str) -> None:
    path = save(tmp_path, None, **arrays)
    assert f"code.npz: {message}" in line_of(lambda: exllama_npz.read(path, layers=(0, 1)))


def test_sums_that_top_k_cannot_give(tmp_path: Path) -> None:
    assert exllama_npz.read(save(tmp_path), top_k=2).layout.top_k == (2, 2)
    assert "a multiple of top-k 5" in line_of(lambda: exllama_npz.read(save(tmp_path), top_k=5))


@given(routings())
def test_counts_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, made: Counts
) -> None:
    path = tmp_path_factory.mktemp("exllama") / "x.npz"
    exllama_npz.write(made, path)
    found = passes_or_refuses(lambda: exllama_npz.read(path, top_k=(made.layout.top_k or (0,))[0]))
    if found is None:
        # One expert a layer has it all: that is what a placeholder looks like.
        both = made.decode.sum(axis=0) + (0 if made.prefill is None else made.prefill.sum(axis=0))
        assert (both.max(axis=1) == both.sum(axis=1)).all()
    else:
        assert same(found, made, but=["rows", "names"])


@given(st.integers(0, 1 << 30), st.integers(0, 255), st.sampled_from(["npz", "meta.json"]))
def test_damage_never_gives_other_counts(
    tmp_path_factory: pytest.TempPathFactory, at: int, change: int, name: str
) -> None:
    path = save(tmp_path_factory.mktemp("exllama"))
    damaged = path.with_name(f"code.{name}")
    raw = bytearray(damaged.read_bytes())
    at %= len(raw)
    if change:
        raw[at] ^= change
    else:
        del raw[at:]
    damaged.write_bytes(bytes(raw))
    found = passes_or_refuses(lambda: exllama_npz.read(path))
    if found is not None:
        assert np.array_equal(found.decode.sum(axis=1), DECODE.sum(axis=1))


def test_a_file_that_unpacks_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exllama_npz, "MAX_BYTES", 500)
    assert "unpacked size: found" in line_of(lambda: exllama_npz.read(save(tmp_path)))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("exllama") / "x.npz"
    path.write_bytes(raw)
    line_of(lambda: exllama_npz.read(path, layers=(0,)))
