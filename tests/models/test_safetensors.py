"""Headers of safetensors files: the truth is read, and every lie is refused by its place."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.models import safetensors
from tests.models.writers import entries, write_header, write_safetensors

SPECS: dict[str, tuple[str, list[int]]] = {
    "a": ("BF16", [4, 2]),
    "b": ("F32", []),
    "c": ("U8", [0, 3]),
    "d": ("F8_E4M3", [5]),
}
DATA = 16 + 4 + 0 + 5


def test_names_types_shapes_and_sizes(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", SPECS)
    found = {tensor.name: tensor for tensor in safetensors.read_folder(tmp_path)}
    assert {name: (t.dtype, list(t.shape)) for name, t in found.items()} == SPECS
    assert [found[name].nbytes for name in "abcd"] == [16, 4, 0, 5]


def test_no_file_is_no_tensor(tmp_path: Path) -> None:
    assert safetensors.read_folder(tmp_path) == []


def test_half_bytes_add_up(tmp_path: Path) -> None:
    entry = {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]}
    write_header(tmp_path / "model.safetensors", {"a": entry}, 3)
    assert safetensors.read_folder(tmp_path)[0].nbytes == 3
    write_header(tmp_path / "model.safetensors", {"a": {**entry, "shape": [3]}}, 3)
    with pytest.raises(FormatError, match=r"found 0 to 3, expected 1\.5 bytes for F4"):
        safetensors.read_folder(tmp_path)


Header = dict[str, Any]


def change(name: str, **over: Any) -> Callable[[Header], Header]:
    return lambda header: {**header, name: {**header[name], **over}}


LIES: dict[str, tuple[Callable[[Header], Header], int, str]] = {
    "beyond the file": (change("d", data_offsets=[20, 26], shape=[6]), 25,
                        "size: found 25 bytes after the header, expected 26"),
    "bytes that no tensor has": (lambda header: header, 26, "found 26 bytes after the header"),
    "an overlap": (change("b", data_offsets=[12, 16]), 25, "found bytes 12 to 16, an overlap"),
    "a gap": (change("d", data_offsets=[21, 26]), 26, "found bytes 21 to 26, a gap"),
    "fewer bytes than the shape": (change("a", shape=[4, 3]), 25, "found 0 to 16, expected 24"),
    "the end before the start": (change("d", data_offsets=[25, 20]), 25, "found 25 to 20"),
    "negative": (change("a", data_offsets=[-1, 15]), 25, "a.data_offsets: found a list of 2"),
    "a fraction": (change("a", data_offsets=[0.0, 16.0]), 25, "a.data_offsets: found"),
    "a boolean": (change("b", shape=[True]), 25, "b.shape: found a list of 1"),
    "a type that is not": (change("a", dtype="F17"), 25, "a.dtype: found F17, expected one of"),
    "a type that is a list": (change("a", dtype=["F16"]), 25, "a.dtype: found a list of 1"),
    "nine dimensions": (change("b", shape=[1] * 9), 25, "b.shape: found a list of 9"),
    "a dimension without end": (change("a", shape=[10**30, 2]), 25, "a.shape: found"),
    "a shape whose size has no end": (change("a", shape=[1 << 61, 1 << 61]), 25, "expected less"),
    "a member too many": (change("a", more=1), 25, "a: found an object of 4"),
    "no object": (lambda header: {**header, "a": 3}, 25, "a: found 3, expected dtype, shape"),
    "no name": (lambda header: {**header, "": header["c"]}, 25, "found a name of 0 characters"),
    "metadata that is a list": (lambda header: {**header, "__metadata__": [1]}, 25,
                                "__metadata__: found list"),
}  # fmt: skip


@pytest.mark.parametrize("case", LIES)
def test_a_lie_is_refused(case: str, tmp_path: Path) -> None:
    lie, data, message = LIES[case]
    write_header(tmp_path / "model.safetensors", lie(entries(SPECS)), data)
    with pytest.raises(FormatError) as refused:
        safetensors.read_folder(tmp_path)
    assert message in str(refused.value)


BROKEN = {
    "empty": (b"", "header length: found 0 bytes in a file of 0"),
    "seven bytes": (b"1234567", "header length: found 0 bytes in a file of 7"),
    "a length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", "found 1099511627776 bytes"),
    "the largest length": (b"\xff" * 8 + b"{}", "found 18446744073709551615 bytes in a file of 10"),
    "no JSON": (struct.pack("<Q", 2) + b"{]", "line 1 column 2"),
    "no UTF-8": (struct.pack("<Q", 2) + b"\xff\xfe", "byte 0: found not UTF-8"),
    "a list": (struct.pack("<Q", 2) + b"[]", "header: found list, expected a JSON object"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(case: str, tmp_path: Path) -> None:
    raw, message = BROKEN[case]
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(FormatError) as refused:
        safetensors.read_folder(tmp_path)
    assert message in str(refused.value)


def test_a_name_twice(tmp_path: Path) -> None:
    entry = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_header(tmp_path / "model.safetensors", b"{" + entry + b"," + entry + b"}", 1)
    with pytest.raises(FormatError, match="a: found the key twice"):
        safetensors.read_folder(tmp_path)


def sharded(folder: Path, weight_map: dict[str, Any] | None = None) -> None:
    write_safetensors(folder / "model-00001-of-00002.safetensors", {"a": ("U8", [1])})
    write_safetensors(folder / "model-00002-of-00002.safetensors", {"b": ("U8", [2])})
    if weight_map is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


TRUE = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize("weight_map", [None, TRUE])
def test_shards(weight_map: dict[str, str] | None, tmp_path: Path) -> None:
    sharded(tmp_path, weight_map)
    assert [(t.name, t.file) for t in safetensors.read_folder(tmp_path)] == list(TRUE.items())


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({**TRUE, "b": "../b.safetensors"}, "weight_map.b: found ../b.safetensors"),
        ({**TRUE, "b": "/etc/b.safetensors"}, "expected a plain name"),
        ({**TRUE, "b": "..safetensors"}, "expected a plain name"),
        ({**TRUE, "b": "a\\b.safetensors"}, "expected a plain name"),
        ({**TRUE, "b": "a.safetensors\x00"}, "expected a plain name"),
        ({**TRUE, "b": "b.bin"}, "expected a plain name of a .safetensors file"),
        ({**TRUE, "b": 3}, "weight_map.b: found 3"),
        ({**TRUE, "b": ["x"]}, "weight_map.b: found a list of 1"),
        ({**TRUE, "c": "model-00003-of-00003.safetensors"}, "no file model-00003-of-00003"),
        ({**TRUE, "c": TRUE["a"]}, "weight_map.c: found not in the header of model-00001"),
        ({**TRUE, "b": TRUE["a"]}, "weight_map.b: found not in the header of model-00001"),
        ({}, "weight_map: found none"),
    ],
)
def test_an_index_that_lies(weight_map: dict[str, Any], message: str, tmp_path: Path) -> None:
    sharded(tmp_path, weight_map)
    with pytest.raises(FormatError) as refused:
        safetensors.read_folder(tmp_path)
    assert message in str(refused.value)


def test_a_shard_that_was_not_downloaded(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / TRUE["b"]).unlink()
    with pytest.raises(FormatError, match=r"model-00002-of-00002\.safetensors: found no such file"):
        safetensors.read_folder(tmp_path)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    write_safetensors(tmp_path / TRUE["b"], {"a": ("U8", [1])})
    with pytest.raises(FormatError, match="a: found also in model-00001"):
        safetensors.read_folder(tmp_path)


def test_links_of_a_download_cache_are_followed(tmp_path: Path) -> None:
    """The hub's cache has the files as links to blobs beside the snapshot."""
    write_safetensors(tmp_path / "blob", {"a": ("U8", [1])})
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("../blob")
    assert [tensor.name for tensor in safetensors.read_folder(folder)] == ["a"]
