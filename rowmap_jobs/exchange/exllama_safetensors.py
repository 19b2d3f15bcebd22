"""exllamav3 placement profiles: `.exl3moe` and `.safetensors`, and the JSON by layer key.

Pull request 315 (util/moe_profile_pack.py, modules' moe_profile): tensors `ranking` int32[L,E]
(hottest first), `counts` int64[L,E] and `census` int32[prompts,L,E]; metadata `layer_keys` (a JSON
list of module keys, `model.layers.3.mlp`), `source_bank`, `fingerprint`, `prompts`. JSON
(EXL3_MOE_CPU_SPLIT_STATS): `{"<layer key>": [count of each expert]}`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..formats.base import FormatError, canonical_json, load_json
from . import safetensors_data
from .base import I64, Counts, Ranking
from .layers import layer_ids
from .tables import MAX_CELLS, coverage, integers, make_counts, widened

MAX_JSON = 64 << 20
KEY = "model.layers.{}.mlp"
"""The module key of a MoE block in most of exllamav3's architectures."""
_TENSORS = {"ranking": 2, "counts": 2, "census": 3, "perm": 2}
_BANKS = {"counts_decode": "decode", "counts": "both", "counts_prefill": "prefill"}


def read(path: Path, source: str, layers: Sequence[int] | None = None) -> Counts | Ranking:
    """Counts of each prompt (census) or their sums, or the ranking where that is all.

    `layers` are the model's MoE layers for a file without layer keys. Raises FormatError: no such
    tensors, parts that do not belong together (another shape, counts that are not the census'
    sum, a ranking that is not the counts'), keys that are fewer than rows or name no layer.
    """
    file = safetensors_data.read(path, source)
    tables = {name: array for name, array in file.arrays.items() if name in _TENSORS}
    if not {"ranking", "counts", "census"} & set(tables):
        found = sorted(file.arrays)[:4]
        raise FormatError(source, "tensors", found, "one of ranking, counts, census")
    wide: dict[str, I64] = {}
    for name, array in tables.items():
        if array.ndim != _TENSORS[name] or not array.size or array.size > MAX_CELLS:
            expected = f"{_TENSORS[name]} dimensions, at most {MAX_CELLS} cells"
            raise FormatError(source, name, list(array.shape), expected)
        wide[name] = widened(array, source, name)
    shapes = {table.shape[-2:] for table in wide.values()}
    if len(shapes) != 1:
        raise FormatError(source, "tensors", f"shapes {sorted(shapes)}", "one [layers, experts]")
    ids = _layers(file.metadata, shapes.pop()[0], source, layers)
    counts = _check_parts(wide, source)
    if counts is None:
        order = {layer: tuple(wide["ranking"][i].tolist()) for i, layer in enumerate(ids)}
        order = dict(sorted(order.items()))
        return Ranking(order, complete=True, notes=(coverage(ids), "a ranking without counts"))
    return _counts(counts, ids, file.metadata, source, "census" in wide)


def _layers(
    metadata: dict[str, str], rows: int, source: str, layers: Sequence[int] | None
) -> Sequence[int]:
    text = metadata.get("layer_keys")
    if text is None:
        if layers is None or len(layers) != rows:
            told = "none was given" if layers is None else f"{len(layers)} were given"
            expected = f"the ids of the model's {rows} MoE layers with it ({told})"
            raise FormatError(source, "layer_keys", "none in the metadata", expected)
        return layers
    keys = load_json(text.encode("utf-8", "surrogatepass"), f"{source} layer_keys")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FormatError(source, "layer_keys", type(keys).__name__, "a list of keys")
    if len(keys) != rows:
        raise FormatError(source, "layer_keys", f"{len(keys)} keys", f"{rows}, one for each row")
    return layer_ids(keys, source, "layer_keys")


def _check_parts(wide: dict[str, I64], source: str) -> I64 | None:
    """int64[T,L,E], or None without counts; parts of other files are refused."""
    census, counts, ranking = wide.get("census"), wide.get("counts"), wide.get("ranking")
    for name, table in (("census", census), ("counts", counts)):
        if table is not None and table.min() < 0:
            raise FormatError(source, name, "a negative count", "counts from 0")
    if census is not None and counts is not None and (census.sum(axis=0) != counts).any():
        raise FormatError(source, "counts", "other sums", "the sums of the census")
    if ranking is not None:
        experts = np.arange(ranking.shape[1])
        if (np.sort(ranking, axis=1) != experts).any():
            expected = f"each of 0..{len(experts) - 1} once a layer"
            raise FormatError(source, "ranking", "an expert twice or out of range", expected)
        total = counts if counts is not None else None if census is None else census.sum(axis=0)
        if total is not None and (np.argsort(-total, axis=1, kind="stable") != ranking).any():
            raise FormatError(source, "ranking", "another order", "that of the counts")
    if census is not None:
        return census
    return None if counts is None else counts[None]


def _counts(
    counts: I64, ids: Sequence[int], metadata: dict[str, str], source: str, each: bool
) -> Counts:
    bank = metadata.get("source_bank", "counts")
    phase = _BANKS.get(bank)
    if phase is None:
        raise FormatError(source, "source_bank", bank, f"one of {sorted(_BANKS)}")
    notes = [] if "fingerprint" in metadata else ["no fingerprint of the model in the file"]
    if phase == "both":
        notes.append("prefill and decode are not told apart: all counts are given as decode")
    names = [f"prompt {t}" for t in range(len(counts))] if each else []
    zero = np.zeros_like(counts)
    return make_counts(
        source,
        zero if phase == "prefill" else counts,
        ids,
        prefill=counts if phase == "prefill" else None,
        names=names,
        per_sequence=each,
        notes=notes,
    )


def read_json(raw: bytes, source: str) -> Counts:
    """Counts (sums, given as decode) of `{"<layer key>": [...]}`. Raises FormatError."""
    if len(raw) > MAX_JSON:
        raise FormatError(source, "size", f"{len(raw)} bytes", f"at most {MAX_JSON}")
    data: Any = load_json(raw, source)
    if not isinstance(data, dict) or not data:
        raise FormatError(source, "top level", type(data).__name__, "counts by layer key")
    ids = layer_ids(list(data), source, "top level")
    table = integers(list(data.values()), source, "counts", 2)
    note = "prefill and decode are not told apart: all counts are given as decode"
    return make_counts(source, table[None], ids, notes=[note])


def write(counts: Counts, key: str = KEY, fingerprint: str | None = None) -> bytes:
    """An `.exl3moe` of the decode counts: ranking, counts, and the census where sequences are.

    `fingerprint` is the JSON text that exllamav3 made for its checkpoint. Raises FormatError
    when layers differ in experts, `key` has no place for the layer, or a count is beyond int32.
    """
    table = _table(counts)
    if key.count("{}") != 1:
        raise FormatError("counts", "key", key, f"a module key, as {KEY}")
    keys = [key.format(layer) for layer in counts.layout.layer_ids]
    summed = table.sum(axis=0)
    arrays: dict[str, Any] = {
        "ranking": np.argsort(-summed, axis=1, kind="stable").astype(np.int32),
        "counts": summed,
    }
    metadata = {
        "source_bank": "counts_decode",
        "layers": str(len(keys)),
        "experts": str(table.shape[2]),
        "prompts": str(len(table)),
        "has_ranking": "1",
        "layer_keys": canonical_json(keys).decode().rstrip("\n"),
    }
    if fingerprint is not None:
        metadata["fingerprint"] = fingerprint
    if counts.per_sequence:
        if table.max(initial=0) > np.iinfo(np.int32).max:
            raise FormatError("counts", "census", "a count beyond int32", "smaller counts")
        arrays["census"] = table.astype(np.int32)
        metadata["census_shape"] = canonical_json(list(table.shape)).decode().rstrip("\n")
    return safetensors_data.to_bytes(arrays, metadata)


def write_json(counts: Counts, key: str = KEY) -> bytes:
    """`{"<layer key>": [decode count of each expert]}`. Raises FormatError (see write)."""
    table = _table(counts).sum(axis=0)
    if key.count("{}") != 1 or re.search(r"\d", key):
        raise FormatError("counts", "key", key, f"a module key, as {KEY}")
    rows = zip(counts.layout.layer_ids, table, strict=True)
    return canonical_json({key.format(layer): row.tolist() for layer, row in rows})


def _table(counts: Counts) -> I64:
    width = set(counts.layout.experts)
    if len(width) != 1:
        raise FormatError("counts", "experts", sorted(width), "one number for all layers")
    return counts.decode[:, :, : width.pop()]
