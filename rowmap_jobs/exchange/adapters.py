"""One reader and one writer for each format, in one form each; modules are loaded when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from ..formats.base import FormatError
from ..formats.rowmap import RowMap
from .base import Counts, Layout, Ranking
from .files import read_file
from .streams import replacing

T = TypeVar("T")


@dataclass(frozen=True)
class Known:
    """What the caller knows of the model and the recording, beyond the file."""

    layout: Layout | None = None
    """The model's MoE layers, experts and top-k."""
    baseline: Path | None = None
    """A dump of the same process before any traffic (reference recipe)."""
    prompt_tokens: int | None = None
    """Prompt length of routed-experts arrays without a sidecar."""
    decode_only: bool = False
    skip: tuple[int, ...] = ()
    """Layers to leave out (draft layers of TensorRT-LLM's statistics)."""

    @property
    def layers(self) -> tuple[int, ...] | None:
        return None if self.layout is None else self.layout.layer_ids

    @property
    def experts(self) -> int | None:
        """E where all layers have as many."""
        return None if self.layout is None else _one(self.layout.experts)

    @property
    def top_k(self) -> int | None:
        return None if self.layout is None or not self.layout.top_k else _one(self.layout.top_k)

    def need_layout(self, source: str) -> Layout:
        if self.layout is None:
            expected = "the model's layout with this format (its geometry)"
            raise FormatError(source, "layout", "none", expected)
        return self.layout

    def need_experts(self, source: str) -> int:
        self.need_layout(source)
        if self.experts is None:
            raise FormatError(source, "experts", "layers that differ", "one number for all layers")
        return self.experts


@dataclass(frozen=True)
class Export:
    """What there is to write. A format takes of it what it can say, and refuses when it lacks."""

    counts: Counts | None = None
    ranking: Ranking | None = None
    rows: RowMap | None = None
    """The map that the ranking is of, for an order over all layers."""
    slots: Mapping[int, Sequence[int]] | None = None
    """Experts of each physical slot by absolute layer, ranks in a row."""
    ranks: int | None = None
    """Devices over which the slots lie."""
    hidden_layers: int | None = None
    """num_hidden_layers, dense layers included."""
    layers: tuple[int, ...] | None = None
    """The model's MoE layers, draft layers included where they are placed, too."""


def _one(values: Sequence[int]) -> int | None:
    return values[0] if len(set(values)) == 1 else None


def _need(value: T | None, path: Path, place: str, expected: str) -> T:
    if value is None:
        raise FormatError(path.name, place, "none", expected)
    return value


def _save(path: Path, raw: bytes) -> None:
    with replacing(path) as out:
        out.write(raw)


def _counts(path: Path, data: Export) -> Counts:
    return _need(data.counts, path, "counts", "counts of a census: this format holds no map")


def _ranking(path: Path, data: Export) -> Ranking:
    return _need(data.ranking, path, "map", "a row map or ranking")


def _slots(path: Path, data: Export) -> Mapping[int, Sequence[int]]:
    expected = "experts of each slot (a placement over ranks: this format has no hot rows)"
    return _need(data.slots, path, "slots", expected)


def _hidden(path: Path, data: Export) -> int:
    return _need(data.hidden_layers, path, "layers", "num_hidden_layers of the model")


def _ranks(path: Path, data: Export) -> int:
    return _need(data.ranks, path, "ranks", "the number of devices")


def _moe(path: Path, data: Export) -> tuple[int, ...]:
    return _need(data.layers, path, "layers", "the model's MoE layers")


# The reference recipe


def read_recipe(path: Path, known: Known) -> Counts:
    from . import recipe

    return recipe.read(path, known.layers, known.baseline, known.top_k)


def write_recipe(path: Path, data: Export) -> None:
    from . import recipe

    recipe.write(_counts(path, data), path)


def read_recipe_map(path: Path, known: Known) -> Ranking:
    from . import recipe

    return recipe.read_map(path, known.need_layout(path.name))


def write_recipe_map(path: Path, data: Export) -> None:
    from . import recipe

    recipe.write_map(_ranking(path, data), path)


# vLLM


def read_routed(path: Path, known: Known) -> Counts:
    from . import routed

    layout, prompt = known.layout, known.prompt_tokens
    options = routed.Options(layout, prompt_tokens=prompt, decode_only=known.decode_only)
    return routed.read(path, options)


def write_routed(path: Path, data: Export) -> None:
    from . import routed

    routed.write(_counts(path, data), path)


def write_ep_rank(path: Path, data: Export) -> None:
    from . import proposals

    slots, ranks = _slots(path, data), _ranks(path, data)
    _save(path, proposals.write_expert_to_ep_rank(slots, ranks))


def write_expert_map(path: Path, data: Export) -> None:
    from . import proposals

    _save(path, proposals.write_initial_expert_map(_slots(path, data), _moe(path, data)))


def read_ascend(path: Path, known: Known) -> Ranking:
    from . import ascend

    raw = read_file(path, path.name, ascend.MAX_BYTES)
    return ascend.read(raw, path.name, known.layers, known.experts)


def write_ascend(path: Path, data: Export) -> None:
    from . import ascend

    slots = _slots(path, data)
    _save(path, ascend.write(slots, _ranks(path, data), _moe(path, data)))


# JSON lines


def read_records(path: Path, known: Known) -> Counts:
    from . import records

    layout = known.need_layout(path.name)
    geometry = dict(zip(layout.layer_ids, layout.experts, strict=True))
    return records.read(path, geometry, known.top_k)


def write_records(path: Path, data: Export) -> None:
    from . import records

    records.write(_counts(path, data), path, "plain")


def write_b12x(path: Path, data: Export) -> None:
    from . import records

    records.write(_counts(path, data), path, "b12x")


# exllamav3


def read_exllama_npz(path: Path, known: Known) -> Counts:
    from . import exllama_npz

    return exllama_npz.read(path, known.layers, known.top_k)


def write_exllama_npz(path: Path, data: Export) -> None:
    from . import exllama_npz

    exllama_npz.write(_counts(path, data), path)


def read_exllama(path: Path, known: Known) -> Counts | Ranking:
    from . import exllama_safetensors

    return exllama_safetensors.read(path, path.name, known.layers)


def write_exllama(path: Path, data: Export) -> None:
    from . import exllama_safetensors

    _save(path, exllama_safetensors.write(_counts(path, data)))


def read_exllama_json(path: Path, known: Known) -> Counts:
    from . import exllama_safetensors as exllama

    return exllama.read_json(read_file(path, path.name, exllama.MAX_JSON), path.name)


def write_exllama_json(path: Path, data: Export) -> None:
    from . import exllama_safetensors

    _save(path, exllama_safetensors.write_json(_counts(path, data)))


# SGLang


def read_sglang(path: Path, known: Known) -> Counts | Ranking:
    from . import sglang

    return sglang.read(read_file(path, path.name, sglang.MAX_BYTES), path.name, known.experts)


def write_sglang_counts(path: Path, data: Export) -> None:
    from . import sglang

    _save(path, sglang.write_counts(_counts(path, data), _hidden(path, data)))


def write_sglang_map(path: Path, data: Export) -> None:
    from . import sglang

    _save(path, sglang.write_map(_slots(path, data), _hidden(path, data)))


# TensorRT-LLM


def read_trtllm(path: Path, known: Known) -> Ranking:
    from . import safe_yaml, trtllm

    raw = read_file(path, path.name, safe_yaml.MAX_BYTES)
    return trtllm.read(raw, path.name, known.experts, known.layers)


def write_trtllm(path: Path, data: Export) -> None:
    from . import trtllm

    _save(path, trtllm.write(_slots(path, data), _moe(path, data)))


def read_trtllm_statistics(path: Path, known: Known) -> Counts:
    from . import trtllm

    return trtllm.read_statistics(path, path.name, known.skip)


def write_trtllm_statistics(path: Path, data: Export) -> None:
    from . import trtllm

    trtllm.write_statistics(_counts(path, data), path)


# llama.cpp and BigMoeOnEdge


def _as_known(counts: Counts, layout: Layout | None) -> Counts:
    """The counts of a file without numbers of experts, with the model's own for each layer.

    A selection beyond them is left for the comparison with the model to refuse.
    """
    found = counts.layout
    if layout is None or found.layer_ids != layout.layer_ids:
        return counts
    missing = max(0, max(layout.experts) - counts.decode.shape[2])
    decode = np.pad(counts.decode, ((0, 0), (0, 0), (0, missing)))
    beyond = np.arange(decode.shape[2]) >= np.array(layout.experts)[:, None]
    if decode[:, beyond].any():
        return counts
    return replace(counts, decode=decode, layout=replace(found, experts=layout.experts))


def read_trace(path: Path, known: Known) -> Counts:
    from . import llamacpp

    counts = llamacpp.read_trace(path, path.name, known.experts, known.top_k)
    return _as_known(counts, known.layout)


def write_trace(path: Path, data: Export) -> None:
    from . import llamacpp

    with replacing(path) as out:
        out.writelines(llamacpp.write_trace(_counts(path, data)))


def read_pin(path: Path, known: Known) -> Counts | Ranking:
    from . import llamacpp

    found = llamacpp.read_pin(path, path.name, known.experts)
    return _as_known(found, known.layout) if isinstance(found, Counts) else found


def write_pin(path: Path, data: Export) -> None:
    from . import llamacpp

    if data.rows is not None:
        _save(path, llamacpp.write_pin_map(data.rows))
    else:
        _save(path, llamacpp.write_pin_counts(_counts(path, data)))


def read_overrides(path: Path, known: Known) -> Ranking:
    from . import llamacpp_args as args

    text = read_file(path, path.name, args.MAX_TEXT).decode("utf-8", "replace")
    experts = known.need_experts(path.name)
    layers = known.need_layout(path.name).layer_ids
    if "=" in text.replace("--n-cpu-moe=", ""):
        return args.read_overrides(text, path.name, layers, experts)
    return args.read_n_cpu_moe(text, path.name, layers, experts)


def write_overrides(path: Path, data: Export) -> None:
    from . import llamacpp_args as args

    _save(path, args.write_overrides(args.cold_layers(_ranking(path, data))).encode() + b"\n")


def write_n_cpu_moe(path: Path, data: Export) -> None:
    from . import llamacpp_args as args

    ranking = _ranking(path, data)
    text = args.write_n_cpu_moe(args.cold_layers(ranking), ranking.order)
    _save(path, text.encode() + b"\n")


def read_imatrix(path: Path, known: Known) -> Counts:
    from . import imatrix

    return imatrix.read(path, path.name, known.top_k)


def read_route_trace(path: Path, known: Known) -> Counts:
    from . import routetrace

    return routetrace.read(path, path.name)


def write_route_trace(path: Path, data: Export) -> None:
    from . import routetrace

    routetrace.write(_counts(path, data), path, _hidden(path, data))
