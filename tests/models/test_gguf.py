"""GGUF headers: layers with experts, bytes of a row, places in the file, and lies."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.models import geometry, gguf
from rowmap_jobs.models.model import Model
from tests.models.writers import GGML, gguf_bytes, text, write_gguf

VALUES: dict[str, Any] = {
    "general.architecture": "qwen3moe",
    "qwen3moe.block_count": 2,
    "qwen3moe.expert_count": 4,
    "qwen3moe.expert_used_count": 2,
    "qwen3moe.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "b"],
}
TOKEN = {"token_embd.weight": ("F32", [64, 3])}


def experts(layer: int, kinds: tuple[str, str, str] = ("F16", "F16", "F16"), count: int = 4) -> Any:
    gate, up, down = kinds
    return {
        f"blk.{layer}.ffn_gate_inp.weight": ("F32", [256, count]),
        f"blk.{layer}.ffn_gate_exps.weight": (gate, [256, 512, count]),
        f"blk.{layer}.ffn_up_exps.weight": (up, [256, 512, count]),
        f"blk.{layer}.ffn_down_exps.weight": (down, [512, 256, count]),
    }


def read(tmp_path: Path, tensors: Any, **over: Any) -> Model:
    values = {key: item for key, item in {**VALUES, **over}.items() if item is not None}
    return geometry.read(write_gguf(tmp_path / "model.gguf", values, {**TOKEN, **tensors}))


MATRIX = 256 * 512


def test_rows_have_the_bytes_of_their_tensor_types(tmp_path: Path) -> None:
    """Layers may be quantised differently: bytes are the sum of nbytes / experts of each."""
    model = read(tmp_path, {**experts(0), **experts(1, ("Q4_K", "Q4_K", "Q6_K"))})
    assert (model.layers, model.top_k, model.model_type) == ((0, 1), 2, "qwen3moe")
    mixed = 2 * MATRIX // 256 * 144 + MATRIX // 256 * 210
    assert model.row_bytes == {0: 3 * MATRIX * 2, 1: mixed}
    assert geometry.to_geometry(model, 3).row_bytes == {"0": 3 * MATRIX * 2, "1": mixed}
    assert [row.shape for row in model.tensors[0]] == [(256, 512), (512, 256), (512, 256)]


def test_fused_gate_and_up_biases_and_global_scales(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_gate_up_exps.weight": ("MXFP4", [256, 1024, 4]),
        "blk.0.ffn_gate_up_exps.bias": ("F32", [1024, 4]),
        "blk.0.ffn_down_exps.weight": ("MXFP4", [512, 256, 4]),
        "blk.0.ffn_down_exps.bias": ("F32", [256, 4]),
        "blk.0.ffn_down_exps.scale": ("F32", [1]),
    }
    model = read(tmp_path, tensors)
    assert model.row_bytes == {0: 3 * MATRIX // 32 * 17 + 4 * 1024 + 4 * 256}


def test_dense_draft_and_shared_layers(tmp_path: Path) -> None:
    dense = {"blk.0.ffn_up.weight": ("F16", [256, 512])}
    shared = {"blk.1.ffn_up_shexp.weight": ("F16", [256, 512])}
    model = read(
        tmp_path, {**dense, **experts(1), **shared, **experts(2)},
        **{"qwen3moe.block_count": 3, "qwen3moe.nextn_predict_layers": 1,
           "qwen3moe.leading_dense_block_count": 1},
    )  # fmt: skip
    assert (model.layers, model.whole_layers, model.disagreements) == ((1,), (2,), ())
    assert {each.kind: each.layers for each in model.whole} == {
        "draft": (2,), "dense": (0,), "shared": (1,),
    }  # fmt: skip


def test_metadata_against_tensors_keeps_both_numbers(tmp_path: Path) -> None:
    over = {"qwen3moe.expert_count": 8, "qwen3moe.leading_dense_block_count": 1}
    model = read(tmp_path, {**experts(0), **experts(1)}, **over)
    assert model.experts == {0: 4, 1: 4}
    assert [(each.what, each.config, each.headers) for each in model.disagreements] == [
        ("experts of layer 0", "8", "4"),
        ("first layer with experts", "1", "0"),
    ]


def test_places_in_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", VALUES | {"general.alignment": 4096},
                      {**TOKEN, **experts(0)}, alignment=4096)  # fmt: skip
    header = gguf.read(path)
    places = [(tensor.offset, tensor.nbytes) for tensor in header.tensors]
    assert all(offset % 4096 == 0 for offset, _ in places)
    assert places[0][0] >= 4096 and places[0][1] == 64 * 3 * 4
    ends = [offset + -(-nbytes // 4096) * 4096 for offset, nbytes in places]
    assert [offset for offset, _ in places[1:]] == ends[:-1]
    assert ends[-1] == path.stat().st_size


def test_a_folder_with_one_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", VALUES, experts(0))
    assert geometry.read(tmp_path).evidence == "gguf"
    write_gguf(tmp_path / "n.gguf", VALUES, experts(0))
    with pytest.raises(FormatError, match=r"found 2 \.gguf files"):
        geometry.read(tmp_path)


def split(folder: Path, **second: Any) -> Path:
    part = {"split.count": 2, "split.tensors.count": 8}
    first = write_gguf(
        folder / "m-00001-of-00002.gguf", {**VALUES, **part, "split.no": 0}, experts(0)
    )
    write_gguf(folder / "m-00002-of-00002.gguf", {**part, "split.no": 1, **second}, experts(1))
    return first


def test_a_split_model_is_read_by_its_names(tmp_path: Path) -> None:
    first = split(tmp_path)
    assert geometry.read(first).layers == (0, 1)
    assert geometry.read(tmp_path).layers == (0, 1)
    assert {tensor.file for tensor in gguf.read(first).tensors} == {
        "m-00001-of-00002.gguf", "m-00002-of-00002.gguf",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (None, "m-00002-of-00002.gguf: file: found No such file"),
        ({"split.no": 0}, "split.no: found 0, expected 1 of 2"),
        ({"split.count": 3}, "split.no: found 1, expected 1 of 2"),
        ({"split.no": None}, "split.no: found none"),
    ],
)
def test_a_part_that_is_missing_or_another_models(
    second: Any, message: str, tmp_path: Path
) -> None:
    if second is not None and second.get("split.no", 1) is None:
        first = split(tmp_path)
        write_gguf(tmp_path / "m-00002-of-00002.gguf", {"split.count": 2}, experts(1))
    else:
        first = split(tmp_path, **(second or {}))
    if second is None:
        (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(FormatError) as refused:
        geometry.read(first)
    assert message in str(refused.value)


def test_a_part_under_another_name(tmp_path: Path) -> None:
    path = split(tmp_path).rename(tmp_path / "renamed.gguf")
    with pytest.raises(FormatError, match=r"a part of 2, named renamed\.gguf"):
        geometry.read(path)


MODELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "dense": (TOKEN, {"general.architecture": "llama"}, "llama: a dense model"),
    "no architecture": (experts(0), {"general.architecture": None}, "general.architecture"),
    "no top-k": (experts(0), {"qwen3moe.expert_used_count": None}, "expert_used_count: found none"),
    "top-k 0": (experts(0), {"qwen3moe.expert_used_count": 0}, "expert_used_count: found 0"),
    "top-k above the experts": (
        experts(0),
        {"qwen3moe.expert_used_count": 5},
        "found 5 of 4 experts in layer 0",
    ),
    "a count that is a word": (
        experts(0),
        {"qwen3moe.expert_count": "four"},
        "expert_count: found four",
    ),
    "an unknown tensor of experts": (
        {**experts(0), "blk.0.ffn_extra_exps.weight": ("F16", [256, 512, 4])},
        {},
        "blk.0.ffn_extra_exps.weight: found an unknown tensor of experts",
    ),
    "two numbers of experts": (
        {**experts(0), "blk.0.ffn_up_exps.weight": ("F16", [256, 512, 6])},
        {},
        "layer 0: found experts [4, 6]",
    ),
    "no down matrix": (
        {name: spec for name, spec in experts(0).items() if "down" not in name},
        {},
        "expected up and down matrices",
    ),
    "a bias of other experts": (
        {**experts(0), "blk.0.ffn_up_exps.bias": ("F32", [512, 6])},
        {},
        "ffn_up_exps.bias: found dimensions [512, 6]",
    ),
    "draft layers alone": (experts(2), {}, "found experts in layers [2] alone"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_are_refused(case: str, tmp_path: Path) -> None:
    tensors, over, message = MODELS[case]
    with pytest.raises(FormatError) as refused:
        read(tmp_path, tensors, **over)
    assert message in str(refused.value)


def header(values: int = 0, tensors: int = 0, version: int = 3, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, values) + rest


def info(name: str, dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


BROKEN: dict[str, tuple[bytes, str]] = {
    "another format": (b"PK\x03\x04" + bytes(40), "magic: found b'PK"),
    "empty": (b"", "magic: found 4 bytes at byte 0, expected at most 0"),
    "the first version": (header(version=1), "version: found 1, expected 2 or 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "(big endian)"),
    "a billion tensors": (
        header(tensors=10**9),
        "tensor count: found 1000000000, expected at most",
    ),
    "more tensors than can be": (header(tensors=2**64 - 1), "tensor count: found 184467440737"),
    "a billion values": (header(values=10**9), "metadata count: found 1000000000"),
    "a key without end": (
        header(1, rest=struct.pack("<Q", 2**63) + bytes(64)),
        "key 0: found a str",
    ),
    "a key twice": (
        header(2, rest=2 * (text("a") + struct.pack("<II", 4, 1))),
        "a: found the key twice",
    ),
    "an empty key": (header(1, rest=text("") + struct.pack("<IQ", 10, 1)), "an empty key"),
    "a type that is not": (header(1, rest=text("a") + struct.pack("<IQ", 99, 0)), "type 99"),
    "an array of arrays": (
        header(1, rest=text("a") + struct.pack("<IIQ", 9, 9, 1)),
        "an array of type 9",
    ),
    "an array without end": (
        header(1, rest=text("a") + struct.pack("<IIQ", 9, 10, 2**61)),
        "a: found 184467440737",
    ),
    "strings without end": (
        header(1, rest=text("a") + struct.pack("<IIQ", 9, 8, 2**60)),
        "a: found 92233720368",
    ),
    "an alignment of 3": (
        header(1, rest=text("general.alignment") + struct.pack("<II", 4, 3)),
        "a power of two",
    ),
    "five dimensions": (header(0, 1, rest=info("t", [1] * 5)), "t: found 5 dimensions"),
    "no elements": (header(0, 1, rest=info("t", [0, 4])), "t: found dimensions (0, 4)"),
    "elements without end": (header(0, 1, rest=info("t", [2**63, 2**63])), "t: found dimensions"),
    "a removed type": (header(0, 1, rest=info("t", [32], kind=31)), "t: found type 31"),
    "half a block": (
        header(0, 1, rest=info("t", [48], kind=GGML["Q8_0"][0])),
        "48 elements in a row of Q8_0",
    ),
    "a gap": (header(0, 1, rest=info("t", [32], offset=32)), "t: found offset 32, expected 0"),
    "an overlap": (
        header(0, 2, rest=info("t", [32]) + info("u", [32], offset=64)),
        "u: found offset 64, expected 128",
    ),
    "a name twice": (
        header(0, 2, rest=info("t", [32]) + info("t", [32], offset=128)),
        "t: found the name twice",
    ),
    "a long name": (header(0, 1, rest=info("t" * 64, [32])), "a string of 64 bytes"),
    "a name that is no text": (
        header(0, 1, rest=info("tt", [32]).replace(b"tt", b"\xff\xfe")),
        "not UTF-8",
    ),
    "tensors beyond the file": (header(0, 1, rest=info("t", [10**6])), "found bytes up to 40000"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_headers_that_lie(case: str, tmp_path: Path) -> None:
    raw, message = BROKEN[case]
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(FormatError) as refused:
        gguf.read(tmp_path / "m.gguf")
    assert message in str(refused.value)


def test_a_row_is_never_split(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", VALUES, experts(0))
    with pytest.raises(FormatError, match="tensor parallel size: found 2, expected 1"):
        geometry.read(path, tensor_parallel=2)


def test_large_vocabularies_are_passed_over(tmp_path: Path) -> None:
    tokens = [f"token {i}" for i in range(gguf.KEPT_ELEMENTS + 1)]
    raw, data = gguf_bytes({**VALUES, "tokenizer.ggml.tokens": tokens}, experts(0))
    (tmp_path / "m.gguf").write_bytes(raw + bytes(data))
    header = gguf.read(tmp_path / "m.gguf")
    assert "tokenizer.ggml.tokens" not in header.values
    assert header.values["qwen3moe.expert_count"] == 4
    assert len(header.tensors) == 4


def test_every_tensor_type_has_whole_blocks() -> None:
    """Bits a weight of each type, as llama.cpp's table of types has them."""
    bits = {name: 8 * nbytes / elements for name, elements, nbytes in gguf.BLOCKS.values()}
    assert len(bits) == len(gguf.BLOCKS)
    expected = {"F16": 16, "Q4_0": 4.5, "Q8_0": 8.5, "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5,
                "Q5_K": 5.5, "Q6_K": 6.5625, "IQ2_XXS": 2.0625, "IQ2_XS": 2.3125, "IQ2_S": 2.5625,
                "IQ3_XXS": 3.0625, "IQ3_S": 3.4375, "IQ1_S": 1.5625, "IQ1_M": 1.75, "IQ4_NL": 4.5,
                "IQ4_XS": 4.25, "TQ1_0": 1.6875, "TQ2_0": 2.0625, "MXFP4": 4.25,
                "NVFP4": 4.5}  # fmt: skip
    assert {name: bits[name] for name in expected} == expected
