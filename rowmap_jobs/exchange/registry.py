"""All formats by name: which file is which, and one reader and writer for each.

A file is never guessed: where its first bytes fit two formats, both are named and nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..formats.base import FormatError
from . import adapters, recognise, sniff
from .adapters import Export, Known
from .base import Counts, Ranking
from .sniff import Look

Reader = Callable[[Path, Known], Counts | Ranking]
Writer = Callable[[Path, Export], None]
Holds = Literal["counts", "map", "counts or map", "slots"]
"""Counts of a census, hot rows of a row map, or experts in the slots of devices."""


@dataclass(frozen=True)
class Format:
    """A format: what it is in a line, what a file of it looks like, and what can be done."""

    name: str
    line: str
    example: str
    sniff: Callable[[Look], bool] | None = None
    """None where nothing is read."""
    read: Reader | None = None
    write: Writer | None = None
    holds: Holds = "counts"
    loses: tuple[str, ...] = ()
    """What of a census a file of it has no place for."""
    made_up: str = ""
    """What a written file says beyond the counts that nobody recorded."""
    only_read: str = ""
    """Why none is written, and what to write instead."""


_DEALT = "which experts share a row, and the order of the rows, are made up"


FORMATS: dict[str, Format] = {
    entry.name: entry
    for entry in (
        Format(
            "recipe",
            "counts that the public reference hook dumps",
            "counts-20260917.npz: cnt_dec, cnt_pre int64[L,E], names[L]",
            recognise.is_recipe,
            adapters.read_recipe,
            adapters.write_recipe,
            loses=("transcripts",),
        ),
        Format(
            "recipe-map",
            "row map of the public reference hook",
            '{"layers": {"0": {"hot": [3, 1], "cold": [0, 2]}}}',
            recognise.is_recipe_map,
            adapters.read_recipe_map,
            adapters.write_recipe_map,
            holds="map",
        ),
        Format(
            "vllm-routed-experts",
            "arrays of vLLM's --enable-return-routed-experts, a folder or lines of responses",
            "x.npy uint8[tokens - 1, layers, k] beside x.json with prompt_tokens",
            recognise.is_routed,
            adapters.read_routed,
            adapters.write_routed,
            loses=("sessions",),
            made_up=_DEALT,
        ),
        Format(
            "vllm-expert-to-ep-rank",
            "placement file of vLLM's pull request 34811",
            '{"expert_to_ep_rank": [0, 0, 1, 1]}',
            write=adapters.write_ep_rank,
            holds="slots",
        ),
        Format(
            "vllm-expert-map",
            "initial_expert_map_path of vLLM's pull request 49572",
            "[[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]",
            write=adapters.write_expert_map,
            holds="slots",
        ),
        Format(
            "vllm-ascend",
            "expert map of vllm-ascend",
            '{"moe_layer_count": 1, "layer_list": [{"layer_id": 0, "device_count": 2, ...}]}',
            recognise.with_keys("moe_layer_count", "layer_list"),
            adapters.read_ascend,
            adapters.write_ascend,
            holds="slots",
        ),
        Format(
            "sglang-counts",
            "logical_count of SGLang or a dump of its recorder, .pt or .json",
            '{"logical_count": [[5, 0, 3], [1, 4, 3]]}',
            recognise.of_sglang("logical_count", "records"),
            adapters.read_sglang,
            adapters.write_sglang_counts,
            loses=("prefill", "transcripts"),
        ),
        Format(
            "sglang-map",
            "physical_to_logical_map of SGLang, .pt or .json",
            '{"physical_to_logical_map": [[0, 1, 2, 3, 1, 0]]}',
            recognise.of_sglang("physical_to_logical_map"),
            adapters.read_sglang,
            adapters.write_sglang_map,
            holds="slots",
        ),
        Format(
            "trtllm",
            "load balancer configuration of TensorRT-LLM",
            "num_slots: 4, initial_global_assignments: {3: [1, 0, 2, 1]} in YAML",
            recognise.is_trtllm,
            adapters.read_trtllm,
            adapters.write_trtllm,
            holds="slots",
        ),
        Format(
            "trtllm-statistics",
            "folder of TensorRT-LLM's expert statistics",
            'meta_info.json and rank0.safetensors with "100_3": int64[E]',
            recognise.is_trtllm_folder,
            adapters.read_trtllm_statistics,
            adapters.write_trtllm_statistics,
            loses=("prefill", "transcripts"),
        ),
        Format(
            "llamacpp-trace",
            "selections of llama.cpp's moe-trace, one a line",
            "3,17",
            recognise.is_trace,
            adapters.read_trace,
            adapters.write_trace,
            loses=("prefill", "transcripts"),
        ),
        Format(
            "llamacpp-pin",
            "pin profile of llama.cpp, hottest first over all layers",
            "3,17,923",
            recognise.is_pin,
            adapters.read_pin,
            adapters.write_pin,
            holds="counts or map",
            loses=("prefill", "transcripts"),
        ),
        Format(
            "llamacpp-overrides",
            "-ot or --n-cpu-moe of llama.cpp: whole layers only",
            r"blk\.(3|4)\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU",
            recognise.is_overrides,
            adapters.read_overrides,
            adapters.write_overrides,
            holds="map",
        ),
        Format(
            "llamacpp-n-cpu-moe",
            "--n-cpu-moe of llama.cpp: the first layers",
            "--n-cpu-moe 5",
            write=adapters.write_n_cpu_moe,
            holds="map",
        ),
        Format(
            "imatrix",
            "importance matrix of llama.cpp in GGUF: counts of prompt processing",
            "imatrix.gguf: blk.3.ffn_up_exps.weight.counts",
            recognise.is_imatrix,
            adapters.read_imatrix,
            only_read="a census has no squared activations (in_sum2), and llama-quantize would "
            "take made-up ones for a calibration; write llamacpp-pin for llama.cpp",
        ),
        Format(
            "exllamav3-npz",
            "counts by prompt of exllamav3, with a .meta.json beside it",
            "wiki.npz: counts_decode int64[prompts,L,E]",
            recognise.is_exllama_npz,
            adapters.read_exllama_npz,
            adapters.write_exllama_npz,
            loses=("sessions",),
        ),
        Format(
            "exllamav3",
            "placement profile of exllamav3, .exl3moe or .safetensors",
            "wiki.exl3moe: ranking int32[L,E], counts int64[L,E], census",
            recognise.is_exllama,
            adapters.read_exllama,
            adapters.write_exllama,
            loses=("prefill", "sessions"),
        ),
        Format(
            "exllamav3-json",
            "counts of exllamav3 by layer key",
            '{"model.layers.3.mlp": [5, 0, 3]}',
            sniff.layer_lists,
            adapters.read_exllama_json,
            adapters.write_exllama_json,
            loses=("prefill", "transcripts"),
        ),
        Format(
            "b12x",
            "trace of b12x, one call a line",
            '{"layer": "layer.7", "phase": "decode", "expert_ids": [17, 3, 17, -1]}',
            recognise.is_b12x,
            adapters.read_records,
            adapters.write_b12x,
            loses=("transcripts",),
            made_up=_DEALT,
        ),
        Format(
            "jsonl",
            "plain routing, one row or several of one layer a line",
            '{"layer": 3, "experts": [17, 3]}',
            recognise.is_plain,
            adapters.read_records,
            adapters.write_records,
            loses=("sessions",),
            made_up=_DEALT,
        ),
        Format(
            "route-trace",
            "route trace of BigMoeOnEdge",
            "# route_trace v1",
            recognise.is_route_trace,
            adapters.read_route_trace,
            adapters.write_route_trace,
            loses=("sessions",),
            made_up="which experts share a step, and the order of the steps, are made up; "
            "weight, residency and bytes are left out, so no cache can be sized by it",
        ),
    )
}


def detect(path: Path) -> str:
    """The one format that a file or folder looks like. Raises FormatError for none or several."""
    seen = sniff.look(path)
    names = [entry.name for entry in FORMATS.values() if entry.sniff and entry.sniff(seen)]
    if len(names) > 1:
        found = f"what could be {' or '.join(names)}"
        raise FormatError(seen.source, "format", found, "the name of its format with it")
    if not names:
        if mine := ours(seen):
            found, expected = f"a {mine} of ours", "a file of another system"
        else:
            text = repr(seen.head[:24]) if seen.head else "an empty file"
            found = "a folder" if seen.is_folder else text
            expected = f"one of {', '.join(readable())}"
        raise FormatError(seen.source, "format", found, expected)
    return names[0]


def ours(seen: Look) -> str:
    """`census`, `row map`, `report` or `status`, when a file is one of ours, else empty.

    By keys that stand early in the file, however large it is.
    """
    keys = set(seen.keys)
    if not seen.is_folder and {"header.npy", "counts.npy"} <= set(seen.names):
        return "census"
    if {"accepted", "censusDigest"} <= keys:
        return "report"
    if {"hookVersion", "phase"} <= keys:
        return "status"
    return "row map" if {"fingerprint", "geometry", "layers"} <= keys else ""


def readable() -> list[str]:
    """Names of the formats that can be read."""
    return [entry.name for entry in FORMATS.values() if entry.read]


def writable() -> list[str]:
    """Names of the formats that can be written."""
    return [entry.name for entry in FORMATS.values() if entry.write]


def read(path: Path, name: str | None = None, known: Known | None = None) -> Counts | Ranking:
    """Read a file whose format is named or detected. Raises FormatError.

    With a layout in `known`, ids and numbers of experts are held against it by the reader where
    the format lets it; a caller that makes a census or a map compares the whole.
    """
    chosen = detect(path) if name is None else name
    reader = _entry(chosen, path).read
    if reader is None:
        raise FormatError(path.name, "format", f"{chosen}, which is only written", str(readable()))
    return reader(path, known or Known())


def write(path: Path, name: str, data: Export) -> None:
    """Write what a format can hold; the file is whole or not there, a folder must be there.

    Raises FormatError.
    """
    entry = _entry(name, path)
    if entry.write is None:
        expected = f"a format that is written: {entry.only_read}"
        raise FormatError(path.name, "format", f"{name}, which is only read", expected)
    entry.write(path, data)


def _entry(name: str, path: Path) -> Format:
    entry = FORMATS.get(name)
    if entry is None:
        raise FormatError(path.name, "format", name, f"one of {', '.join(FORMATS)}")
    return entry
