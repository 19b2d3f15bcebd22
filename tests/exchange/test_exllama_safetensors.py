"""exllamav3 profiles: .exl3moe and .safetensors with their parts, and JSON by layer key."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import exllama_safetensors, safetensors_data
from rowmap_jobs.exchange.base import Counts, Ranking
from tests.exchange.made import line_of, passes_or_refuses, tables

Read = Callable[..., Any]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def reader(raw: bytes, **options: Any) -> Any:
        path = tmp_path / "x.exl3moe"
        path.write_bytes(raw)
        return exllama_safetensors.read(path, "x", **options)

    return reader


CENSUS = np.array([[[1, 2, 0], [3, 0, 1]], [[0, 4, 1], [2, 1, 0]]], "<i4")
COUNTS = CENSUS.sum(axis=0).astype("<i8")
RANKING = np.array([[1, 0, 2], [0, 1, 2]], "<i4")
KEYS = {"layer_keys": json.dumps(["model.layers.3.mlp", "model.layers.5.mlp"])}
WHOLE = {"census": CENSUS, "counts": COUNTS, "ranking": RANKING}


def made(arrays: dict[str, np.ndarray] | None = None, **metadata: str) -> bytes:
    return safetensors_data.to_bytes(WHOLE if arrays is None else arrays, {**KEYS, **metadata})


def test_the_census_gives_each_prompt(read: Read) -> None:
    counts = read(made(source_bank="counts_decode", fingerprint="{}"))
    assert isinstance(counts, Counts) and counts.per_sequence
    assert counts.layout.layer_ids == (3, 5) and counts.names == ("prompt 0", "prompt 1")
    assert (counts.decode == CENSUS).all() and counts.prefill is None


def test_sums_alone_and_a_ranking_alone(read: Read) -> None:
    counts = read(made({"counts": COUNTS}))
    assert not counts.per_sequence and (counts.decode[0] == COUNTS).all()
    assert "no fingerprint of the model in the file" in counts.notes
    ranking = read(made({"ranking": RANKING}))
    assert isinstance(ranking, Ranking) and ranking.complete
    assert ranking.order == {3: (1, 0, 2), 5: (0, 1, 2)}


def test_prefill_counts_are_not_taken_for_decode(read: Read) -> None:
    counts = read(made(source_bank="counts_prefill"))
    assert not counts.decode.any() and (counts.prefill == CENSUS).all()


def test_layers_without_keys_are_asked_for(read: Read) -> None:
    raw = safetensors_data.to_bytes(WHOLE, {})
    assert "the ids of the model's 2 MoE layers" in line_of(lambda: read(raw))
    assert "(3 were given)" in line_of(lambda: read(raw, layers=[1, 2, 3]))
    assert read(raw, layers=[3, 5]).layout.layer_ids == (3, 5)


@pytest.mark.parametrize(
    ("arrays", "metadata", "said"),
    [
        ({"perm": RANKING}, {}, "one of ranking, counts, census"),
        ({"counts": COUNTS[0]}, {}, "counts: found [3]"),
        ({"counts": COUNTS.astype("<f4") + 0.5}, {}, "found fractions"),
        ({"counts": COUNTS - 2}, {}, "counts: found a negative count"),
        ({**WHOLE, "counts": COUNTS + 1}, {}, "counts: found other sums"),
        ({**WHOLE, "ranking": RANKING[:, ::-1]}, {}, "ranking: found another order"),
        ({**WHOLE, "ranking": RANKING[::-1]}, {}, "ranking: found another order"),
        ({"ranking": RANKING * 2}, {}, "an expert twice or out of range"),
        ({"ranking": RANKING - 1}, {}, "an expert twice or out of range"),
        ({"ranking": RANKING, "counts": COUNTS[:, :2]}, {}, "shapes [(2, 2), (2, 3)]"),
        ({"counts": COUNTS * 0}, {}, "no selection in any layer"),
        ({"counts": np.zeros((0, 3), "<i8")}, {}, "counts: found [0, 3]"),
        (None, {"layer_keys": "[]"}, "found 0 keys, expected 2"),
        (None, {"layer_keys": "{}"}, "layer_keys: found dict"),
        (None, {"layer_keys": '["a", 1]'}, "a list of keys"),
        (None, {"layer_keys": '["mlp", "layers.5.mlp"]'}, "layer_keys: found mlp"),
        (None, {"layer_keys": '["layers.5.mlp", "layers.5.mlp"]'}, "layer 5 twice"),
        (None, {"layer_keys": "["}, "layer_keys"),
        (None, {"source_bank": "other"}, "source_bank: found other"),
    ],
)
def test_parts_of_another_file_and_lies_are_refused(
    read: Read, arrays: dict[str, np.ndarray] | None, metadata: dict[str, str], said: str
) -> None:
    assert said in line_of(lambda: read(made(arrays, **metadata)))


def test_a_cut_or_lying_file_is_refused(read: Read) -> None:
    raw = made()
    for cut in (0, 4, 9, len(raw) // 2, len(raw) - 1):
        assert line_of(partial(read, raw[:cut]))
    huge = json.dumps({"counts": {"dtype": "I64", "shape": [10**6] * 2, "data_offsets": [0, 8]}})
    assert line_of(lambda: read(struct.pack("<Q", len(huge)) + huge.encode() + bytes(8)))
    assert line_of(lambda: read(struct.pack("<Q", 1 << 60) + b"{}"))
    odd = b'{"counts":{"dtype":"F8_E4M3","shape":[1,1],"data_offsets":[0,1]}}'
    raw = struct.pack("<Q", len(odd)) + odd + b"1"
    assert "counts: found F8_E4M3" in line_of(lambda: read(raw))


@given(tables(sequences=2))
def test_what_is_written_describes_itself_and_is_always_the_same(counts: Counts) -> None:
    raw = exllama_safetensors.write(counts, fingerprint='{"bits": 4}')
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    assert set(header) - {"__metadata__", "census"} == {"counts", "ranking"}
    assert exllama_safetensors.write(counts, fingerprint='{"bits": 4}') == raw
    keys = json.loads(header["__metadata__"]["layer_keys"])
    assert keys == [f"model.layers.{layer}.mlp" for layer in counts.layout.layer_ids]


@given(counts=tables(sequences=2))
def test_round_trip(counts: Counts, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("exl") / "x.exl3moe"
    path.write_bytes(exllama_safetensors.write(counts))
    again = exllama_safetensors.read(path, "x")
    assert isinstance(again, Counts) and again.per_sequence == counts.per_sequence
    wanted = counts.decode if counts.per_sequence else counts.decode.sum(axis=0)[None]
    assert again.layout.layer_ids == counts.layout.layer_ids and (again.decode == wanted).all()


@given(tables())
def test_json_comes_back(counts: Counts) -> None:
    raw = exllama_safetensors.write_json(counts, "model.layers.{}.block_sparse_moe")
    again = exllama_safetensors.read_json(raw, "x")
    order = [again.layout.layer_ids.index(layer) for layer in counts.layout.layer_ids]
    assert (again.decode[:, order] == counts.decode).all()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "counts by layer key"),
        ([], "counts by layer key"),
        ({"mlp": [1, 2]}, "found mlp"),
        ({"layers.1.mlp": [1, 2], "layers.2.mlp": [1]}, "found 1 values"),
        ({"layers.1.mlp": 1}, "found int"),
        ({"layers.1.mlp": [1, -2]}, "a negative count"),
        ({"layers.1.mlp": [1, None]}, "found NoneType"),
        ({"layers.1.mlp": [0, 0]}, "no selection"),
        ({"model.layers.1.mlp": [1, 2], "mtp.layers.1.mlp": [1, 2]}, "layer 1 twice"),
    ],
)
def test_json_that_is_no_counts_is_refused(data: Any, said: str) -> None:
    raw = json.dumps(data).encode()
    assert said in line_of(lambda: exllama_safetensors.read_json(raw, "x"))


def test_a_key_without_a_place_for_the_layer_is_not_written() -> None:
    counts = exllama_safetensors.read_json(b'{"layers.1.mlp": [1, 2]}', "x")
    for write in (exllama_safetensors.write, exllama_safetensors.write_json):
        for key in ("model.mlp", "{}.{}"):
            assert "key" in line_of(partial(write, counts, key))


@given(data=st.data())
def test_changed_bytes_never_crash_the_reader(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(made())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("exl") / "x.exl3moe"
    path.write_bytes(raw)
    got = passes_or_refuses(lambda: exllama_safetensors.read(path, "x", layers=[3, 5]))
    # The parts vouch for each other: a count that changed alone does not pass.
    if isinstance(got, Counts) and got.per_sequence and got.decode.shape == CENSUS.shape:
        assert (got.decode == CENSUS).all() or (got.decode == 0).all()


@given(raw=st.binary(max_size=80))
def test_random_bytes_never_pass(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("exl") / "x.exl3moe"
    path.write_bytes(raw)
    line_of(lambda: exllama_safetensors.read(path, "x", layers=[0]))
    assert passes_or_refuses(lambda: exllama_safetensors.read_json(raw, "x")) is None
