"""llama.cpp's tensor overrides: `-ot` and `--n-cpu-moe`, which place whole layers only.

All experts of a block are one tensor (`blk.N.ffn_up_exps.weight` and so on), and an override names
a tensor; so an expert can't be placed by itself. Patterns follow common/common.h:
`blk\\.N\\.ffn_(up|down|gate|gate_up)_(ch|)exps`, and `--n-cpu-moe N` is that for blocks 0 to N-1.
The first pattern that is found in a tensor's name wins. Which layers are slow matters through their
bytes alone: every layer reads top-k experts a token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ..formats.base import FormatError
from .base import Ranking
from .tables import MAX_LAYERS, check_layer_ids, coverage

MAX_TEXT = 1 << 16
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"

_DOT = r"(?:\\\.|\.)"
_TAIL = (
    rf"ffn(?:_\.\*_|\.\*_?|_\((?:up|down|gate|gate_up)(?:\|(?:up|down|gate|gate_up))+\)_)"
    rf"(?:\(ch\|\))?exps(?:{_DOT}(?:weight)?)?\$?"
)
_BLOCK = re.compile(
    rf"\^?blk{_DOT}(?:(\d+)|\((\d+(?:\|\d+)*)\)|(\\d\+|\[0-9\]\+|\.\*)){_DOT}{_TAIL}"
)
_EVERY = re.compile(rf"(?:{_DOT}{_TAIL}|exps)")
_WHOLE = ({"up", "down", "gate"}, {"up", "down", "gate", "gate_up"}, {"up", "down", "gate_up"})


def read_overrides(text: str, source: str, layers: Sequence[int], experts: int) -> Ranking:
    """Layers (absolute, of the model's MoE layers) hot unless an override puts them on the CPU.

    `text` is the argument of `-ot`: `pattern=buffer[,pattern=buffer...]`. Raises FormatError for
    a pattern that is not one of whole expert tensors; no regular expression of others is run.
    """
    check_layer_ids(layers, source, "layers")
    if len(text) > MAX_TEXT or not text.strip():
        raise FormatError(source, "-ot", f"{len(text)} characters", f"1 to {MAX_TEXT}")
    placed: dict[int, str] = {}
    for part in text.strip().split(","):
        pattern, equals, buffer = part.rpartition("=")
        if not equals or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_:]{0,31}", buffer):
            raise FormatError(source, "-ot", part, "pattern=buffer, as ...exps=CPU")
        for layer in _named(pattern, source, layers):
            placed.setdefault(layer, buffer)
    cold = {layer for layer, buffer in placed.items() if buffer == "CPU"}
    return _whole_layers(cold, layers, experts, source)


def _named(pattern: str, source: str, layers: Sequence[int]) -> list[int]:
    match = _BLOCK.fullmatch(pattern)
    if (match or _EVERY.fullmatch(pattern)) and _is_whole(pattern):
        if match is None or match[3]:
            return list(layers)
        ids = [int(number) for number in (match[1] or match[2]).split("|") if len(number) < 6]
        if ids and max(ids) < MAX_LAYERS:
            return ids
    expected = rf"blk\.(N|N)\.ffn_.*_exps or blk\.N{EXPERTS}: all experts of whole layers"
    raise FormatError(source, "-ot", pattern, expected)


def _is_whole(pattern: str) -> bool:
    """False where the alternatives leave a matrix of the expert out."""
    match = re.search(r"ffn_\(([a-z_|]+)\)", pattern)
    return match is None or set(match[1].split("|")) in _WHOLE


def read_n_cpu_moe(text: str, source: str, layers: Sequence[int], experts: int) -> Ranking:
    """`N` or `--n-cpu-moe N`: the MoE layers below N cold, the others hot. Raises FormatError."""
    match = re.fullmatch(r"\s*(?:(?:--n-cpu-moe|-ncmoe)[ =])?\s*(\d{1,5})\s*", text)
    if match is None:
        raise FormatError(source, "--n-cpu-moe", text[:40], "a number of layers")
    check_layer_ids(layers, source, "layers")
    cold = {layer for layer in layers if layer < int(match[1])}
    return _whole_layers(cold, layers, experts, source)


def _whole_layers(cold: set[int], layers: Sequence[int], experts: int, source: str) -> Ranking:
    extra = sorted(cold - set(layers))
    if extra:
        raise FormatError(source, "-ot", f"layer {extra[0]}", f"MoE layers: {coverage(layers)}")
    order = {layer: tuple(range(experts)) for layer in sorted(layers)}
    hot = {layer: 0 if layer in cold else experts for layer in sorted(layers)}
    note = "whole layers only: the order inside a layer is that of the ids and says nothing"
    return Ranking(order, complete=True, hot=hot, notes=(coverage(layers), note))


def cold_layers(ranking: Ranking, source: str = "map") -> list[int]:
    """Layers without a hot row. Raises FormatError for a layer that is split: -ot can't split."""
    if ranking.hot is None:
        raise FormatError(source, "hot", "an order without hot rows", "hot rows of each layer")
    cold = []
    for layer, order in sorted(ranking.order.items()):
        hot = ranking.hot[layer]
        if hot not in (0, len(order)) or not ranking.complete:
            found = f"{hot} of {len(order)} rows hot"
            expected = "none or all: tensor overrides place whole layers only"
            raise FormatError(source, f"layer {layer}", found, expected)
        if hot == 0:
            cold.append(layer)
    return cold


def write_overrides(layers: Collection[int], buffer: str = "CPU") -> str:
    """The `-ot` argument that puts the experts of whole layers into a buffer; at least one layer.

    Raises FormatError for no layer, one out of range, or a buffer that is no plain word.
    """
    ids = sorted(set(layers))
    if not ids or ids[0] < 0 or ids[-1] >= MAX_LAYERS:
        raise FormatError("map", "layers", ids[:4], f"layers from 0 to {MAX_LAYERS - 1}")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_:]{0,31}", buffer):
        raise FormatError("map", "buffer", buffer, "a word, as CPU or CUDA0")
    return rf"blk\.({'|'.join(map(str, ids))}){EXPERTS}={buffer}"


def write_n_cpu_moe(cold: Collection[int], layers: Collection[int]) -> str:
    """`--n-cpu-moe N`, where the cold layers are the first MoE layers of the model.

    Raises FormatError when another layer is among them: then it takes `-ot`.
    """
    last = max(cold, default=-1)
    hot = sorted(layer for layer in layers if layer <= last and layer not in cold)
    if hot or not set(cold) <= set(layers):
        found = f"layer {hot[0]} hot below layer {last}" if hot else "a layer without experts"
        raise FormatError("map", "layers", found, "the first MoE layers cold (or use -ot)")
    return f"--n-cpu-moe {last + 1}"
