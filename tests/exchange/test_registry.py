"""Every format by name: files are told apart by what is in them, and never guessed."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.cli.commands.export import FOLDERS
from rowmap_jobs.exchange import convert, registry, slots
from rowmap_jobs.exchange.adapters import Export, Known
from rowmap_jobs.exchange.base import Counts, Layout, Ranking
from rowmap_jobs.exchange.files import HEAD_BYTES
from rowmap_jobs.formats import census
from rowmap_jobs.formats.rowmap import Geometry, build
from tests.exchange.made import line_of, passes_or_refuses
from tests.exchange.test_imatrix import GOOD, gguf, moe
from tests.exchange.torch_bytes import genuine
from tests.formats import samples

LAYOUT = Layout((0, 2), (4, 4), (2, 2))


def sample() -> Counts:
    """Two sequences of 12 decode rows, top-2: every expert often enough to repeat in a trace."""
    rng = np.random.default_rng(1)
    decode = np.zeros((2, 2, 4), dtype=np.int64)
    for t, layer in np.ndindex(2, 2):
        for _ in range(12):
            decode[t, layer, rng.choice(4, 2, replace=False)] += 1
    rows = np.array([[0, 12], [0, 12]], dtype=np.int64)
    zero = np.zeros_like(decode)
    return Counts(LAYOUT, decode, zero, rows, ("a", "b"), per_sequence=True)


def export(hot: tuple[int, int] = (2, 2)) -> Export:
    counts = sample()
    whole = Ranking({0: (3, 1, 2, 0), 2: (0, 1, 2, 3)}, True, dict(zip((0, 2), hot, strict=True)))
    placed = slots.balanced(counts, ranks=2)
    return Export(counts, whole, None, placed, ranks=2, hidden_layers=3, layers=(0, 2))


WHOLE_LAYERS = {"llamacpp-overrides", "llamacpp-n-cpu-moe"}


def written(name: str, folder: Path) -> Path:
    path = folder / "file"
    if name in FOLDERS:
        path.mkdir()
    if name == "vllm-expert-to-ep-rank":
        data = Export(slots={0: [0, 1, 2, 3], 2: [1, 0, 3, 2]}, ranks=2)
    else:
        data = export((0, 4) if name in WHOLE_LAYERS else (2, 2))
    registry.write(path, name, data)
    return path


BOTH = [name for name in registry.writable() if name in registry.readable()]


@pytest.mark.parametrize("name", BOTH)
def test_what_is_written_is_told_apart_and_read_again(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    assert registry.detect(path) == name
    got = registry.read(path, None, Known(layout=LAYOUT))
    if isinstance(got, Counts):
        assert got.layout.layer_ids == (0, 2) and got.layout.experts == (4, 4)
        wanted = sample().decode
        assert (got.decode.sum(axis=0) == wanted.sum(axis=0)).all()
        if got.per_sequence:
            assert (got.decode == wanted).all()
    else:
        assert sorted(got.order) in ([0, 2], [0, 1, 2])
        assert all(sorted(order) == [0, 1, 2, 3] for order in got.order.values())


@pytest.mark.parametrize("name", sorted(set(registry.writable()) - set(BOTH)))
def test_formats_that_are_only_written(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    assert path.stat().st_size and passes_or_refuses(lambda: registry.detect(path)) != name
    assert "only written" in line_of(lambda: registry.read(path, name))


def imatrix(folder: Path) -> Path:
    path = folder / "file"
    path.write_bytes(gguf(moe(GOOD)))
    return path


READ_ONLY = {"imatrix": imatrix}


def test_every_format_is_tested() -> None:
    assert set(READ_ONLY) | set(BOTH) == set(registry.readable())


@pytest.mark.parametrize("name", sorted(READ_ONLY))
def test_formats_that_are_only_read(name: str, tmp_path: Path) -> None:
    path = READ_ONLY[name](tmp_path)
    assert registry.detect(path) == name
    assert isinstance(registry.read(path), Counts)
    line = line_of(lambda: registry.write(tmp_path / "new", name, export()))
    assert "only read" in line and registry.FORMATS[name].only_read in line


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("sglang_stat", "sglang-counts"),
        ("sglang_per_token", "sglang-counts"),
        ("sglang_per_pass", "sglang-counts"),
        ("sglang_map", "sglang-map"),
    ],
)
def test_torch_files_are_told_apart_without_unpickling(
    file: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(genuine(file))
    assert registry.detect(path) == name
    assert registry.read(path)


def detected(raw: bytes, folder: Path, name: str = "x") -> str:
    path = folder / name
    path.write_bytes(raw)
    return registry.detect(path)


def test_a_short_csv_that_could_be_two_things_is_not_guessed(tmp_path: Path) -> None:
    line = line_of(lambda: detected(b"3,1\n3,2\n", tmp_path, "trace.csv"))
    assert "found what could be llamacpp-trace or llamacpp-pin" in line
    assert detected(b"3,1\n3,2\n3,1\n", tmp_path) == "llamacpp-trace"
    assert detected(gzip.compress(b"3,1\n3,1\n"), tmp_path) == "llamacpp-trace"
    assert detected(b"3,1,9\n3,2,4\n", tmp_path) == "llamacpp-pin"
    path = tmp_path / "trace.csv"
    assert isinstance(registry.read(path, "llamacpp-pin"), Ranking)


def test_an_object_with_keys_of_two_formats_is_not_guessed(tmp_path: Path) -> None:
    both = json.dumps({"logical_count": [[1]], "physical_to_logical_map": [[0]]}).encode()
    line = line_of(lambda: detected(both, tmp_path))
    assert "found what could be sglang-counts or sglang-map" in line


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n",
        b"{}",
        b"[]",
        b"[[0, 1]]",
        b'{"records_of": 1}',
        b'"logical_count"',
        b'{"a": {"logical_count": 1}}',
        b'{"0": [1, 2]}',
        b"GGUF" + bytes(40),
        b"\x7fELF",
        b"layer,expert,weight\n1,2,0.5\n",
        b"num_slots: 3\n",
    ],
)
def test_other_files_are_refused_with_the_list_of_formats(raw: bytes, tmp_path: Path) -> None:
    line = line_of(lambda: detected(raw, tmp_path, "sglang_counts.json"))
    assert "x: " not in line and "expected one of recipe, " in line


def test_our_own_artifacts_and_no_files_are_said(tmp_path: Path) -> None:
    own = census.to_bytes(samples.census())
    assert "found a census of ours" in line_of(lambda: detected(own, tmp_path))
    own = samples.row_map().to_bytes()
    assert "found a row map of ours" in line_of(lambda: detected(own, tmp_path))
    assert "a folder" in line_of(lambda: registry.detect(tmp_path))


def test_a_map_of_ours_is_known_however_long_it_is(tmp_path: Path) -> None:
    layers, experts = 61, 384
    geometry = Geometry(
        experts=experts,
        top_k=6,
        hot_rows=24,
        moe_layers=tuple(range(layers)),
        row_bytes={str(layer): 18_800_640 for layer in range(layers)},
    )
    fingerprint = samples.row_map().fingerprint
    order = list(range(experts))
    rows = dict.fromkeys(range(layers), (order[:24], order[24:]))
    whole = build(fingerprint, geometry, rows)
    own = whole.to_bytes()
    assert own.index(b"rowSetDigest") > HEAD_BYTES
    assert "found a row map of ours" in line_of(lambda: detected(own, tmp_path))


def test_nothing_that_is_not_there_is_detected(tmp_path: Path) -> None:
    assert "No such file" in line_of(lambda: registry.detect(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in line_of(lambda: registry.detect(tmp_path / "pipe"))
    assert "archive" in line_of(lambda: detected(genuine("sglang_map")[:-30], tmp_path))
    assert "gzip" in line_of(lambda: detected(gzip.compress(b"3,1\n" * 9)[:-9], tmp_path))


def test_a_name_that_is_no_format_is_refused(tmp_path: Path) -> None:
    assert "found tensorrt, expected one of" in line_of(lambda: registry.read(tmp_path, "tensorrt"))
    assert "found x, expected one of" in line_of(
        lambda: registry.write(tmp_path / "y", "x", export())
    )


@pytest.mark.parametrize("name", registry.writable())
def test_what_a_writer_lacks_is_refused_and_leaves_no_file(name: str, tmp_path: Path) -> None:
    line = line_of(lambda: registry.write(tmp_path / "new", name, Export()))
    assert "found none" in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", registry.readable())
def test_a_reader_without_the_model_reads_or_refuses(name: str, tmp_path: Path) -> None:
    path = READ_ONLY[name](tmp_path) if name in READ_ONLY else written(name, tmp_path)
    passes_or_refuses(lambda: registry.read(path, name))


def test_a_split_layer_is_not_written_as_an_override(tmp_path: Path) -> None:
    line = line_of(lambda: registry.write(tmp_path / "x", "llamacpp-overrides", export((2, 4))))
    assert "whole layers only" in line


def test_a_map_of_ours_is_written_in_its_order(tmp_path: Path) -> None:
    rows = samples.row_map()
    data = Export(ranking=convert.from_map(rows), rows=rows)
    registry.write(tmp_path / "pin", "llamacpp-pin", data)
    assert (tmp_path / "pin").read_bytes() == b"0,3\n2,0\n0,1\n2,1\n"


def test_every_format_says_what_it_is() -> None:
    assert len({entry.line for entry in registry.FORMATS.values()}) == len(registry.FORMATS)
    for name, entry in registry.FORMATS.items():
        assert entry.name == name and entry.line and entry.example and "\n" not in entry.example
        assert (entry.read is None) == (entry.sniff is None)
        assert entry.read or entry.write
        assert (entry.write is None) == bool(entry.only_read)


HEADS = (b"", b"PK\x03\x04", b"\x1f\x8b", b"GGUF", b"\x93NUMPY", b'{"', b"\x80\x02", b"3,1\n")


@given(raw=st.binary(max_size=60), head=st.sampled_from(HEADS))
def test_random_bytes_never_crash_and_never_pass(
    raw: bytes, head: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(head + raw)
    name: Any = passes_or_refuses(lambda: registry.detect(path))
    if name is not None:
        passes_or_refuses(lambda: registry.read(path, name, Known(layout=LAYOUT)))


@given(data=st.data())
def test_a_changed_file_of_any_format_never_crashes_its_reader(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name = data.draw(st.sampled_from(sorted(set(registry.readable()) - {"vllm-routed-experts"})))
    folder = tmp_path_factory.mktemp("any")
    path = READ_ONLY[name](folder) if name in READ_ONLY else written(name, folder)
    file = path / "rank0.safetensors" if path.is_dir() else path
    raw = bytearray(file.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    passes_or_refuses(lambda: registry.read(path, name, Known(layout=LAYOUT)))
    passes_or_refuses(lambda: registry.detect(path))
