"""exllamav3's counts by prompt: `<name>.npz` with a sidecar `<name>.meta.json`.

Source: exllamav3 pull request 315, util/moe_profile_build.py. Arrays counts_decode and
counts_prefill int64[prompts,L,E], or `counts` alone where phases are not told apart. The sidecar
has layer_keys (module keys, `model.layers.3.mlp`), fingerprint, corpus, layers, experts, prompts,
decode_hits, prefill_hits, and figures of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..census.exact import exact_counts
from ..formats.base import FormatError, canonical_json
from ..formats.census import MAX_TRANSCRIPTS
from . import npz
from .base import I64, Counts
from .layers import MAX_LAYER, layer_ids
from .streams import json_file, replacing
from .tables import MAX_EXPERTS, make_counts

KEY = "model.layers.{}.mlp"
MAX_BYTES = 512 << 20
"""Unpacked: some 2,500 prompts of 42 layers x 288 experts."""
_MEMBERS = ({"counts_decode", "counts_prefill"}, {"counts_decode"}, {"counts"})


def read(path: Path, layers: Sequence[int] | None = None, top_k: int | None = None) -> Counts:
    """Counts of each prompt. `layers` are the model's MoE layers where no sidecar says them.

    Raises FormatError: damage, phases of different shapes, a sidecar that is another file's (its
    numbers of layers, experts, prompts or hits are not the arrays').
    """
    source = str(path)
    banks = _read_banks(path, source)
    first = next(iter(banks.values()))
    meta_path = path.with_name(f"{path.name.removesuffix('.npz')}.meta.json")
    meta = _read_meta(meta_path, banks) if meta_path.exists() else {}
    ids = _layers(meta, str(meta_path), first.shape[1], layers, source)
    return make_counts(
        source,
        banks["counts"] if "counts" in banks else banks["counts_decode"],
        ids,
        prefill=banks.get("counts_prefill"),
        top_k=top_k,
        names=[f"prompt {t}" for t in range(len(first))],
        per_sequence=True,
        notes=_notes(banks, meta),
    )


def _read_banks(path: Path, source: str) -> dict[str, I64]:
    with npz.archive(path, source, MAX_BYTES) as archive:
        there = archive.names
        if set(there) not in _MEMBERS:
            found = sorted(there)[:8]
            raise FormatError(
                source, "members", found, "counts_decode and counts_prefill, or counts"
            )
        banks = {
            name: exact_counts(archive.read(name, "iu", (2, 3)), source, name) for name in there
        }
    for name, table in banks.items():
        if table.ndim == 2:
            banks[name] = table[None]
    shapes = {table.shape for table in banks.values()}
    if len(shapes) != 1:
        raise FormatError(source, "counts_prefill", f"shapes {sorted(shapes)}", "that of decode")
    prompts, rows, experts = shapes.pop()
    if not (
        1 <= prompts <= MAX_TRANSCRIPTS
        and 1 <= rows <= MAX_LAYER + 1
        and 1 <= experts <= MAX_EXPERTS
    ):
        expected = f"[1 to {MAX_TRANSCRIPTS} prompts, layers, experts]"
        raise FormatError(source, next(iter(banks)), [prompts, rows, experts], expected)
    return banks


def _read_meta(path: Path, banks: Mapping[str, I64]) -> dict[str, Any]:
    """The sidecar, when it belongs to these arrays."""
    source = str(path)
    meta = json_file(path, source)
    if not isinstance(meta, dict):
        raise FormatError(source, "top level", type(meta).__name__, "a JSON object")
    shape = next(iter(banks.values())).shape
    facts = dict(zip(("prompts", "layers", "experts"), shape, strict=True))
    if "counts" not in banks:
        facts["decode_hits"] = int(banks["counts_decode"].sum())
        facts["prefill_hits"] = int(banks["counts_prefill"].sum()) if len(banks) > 1 else 0
    for name, expected in facts.items():
        found = meta.get(name, expected)
        if isinstance(found, list):
            found = len(found)
        if type(found) is not int or found != expected:
            raise FormatError(source, name, found, f"{expected}, as in the arrays beside it")
    return meta


def _layers(
    meta: Mapping[str, Any], source: str, rows: int, layers: Sequence[int] | None, arrays: str
) -> tuple[int, ...]:
    keys = meta.get("layer_keys")
    if keys is None:
        if layers is None or len(layers) != rows:
            told = "none given" if layers is None else f"{len(layers)} given"
            expected = f"the ids of its {rows} layers, in a sidecar or with it"
            raise FormatError(arrays, "layer_keys", told, expected)
        return tuple(layers)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FormatError(source, "layer_keys", type(keys).__name__, "a list of keys")
    if len(keys) != rows:
        found = f"{len(keys)} keys"
        raise FormatError(source, "layer_keys", found, f"{rows}, one for each row of the arrays")
    ids = layer_ids(keys, source, "layer_keys")
    if layers is not None and set(ids) != set(layers):
        expected = f"the model's {len(layers)} layers"
        raise FormatError(source, "layer_keys", f"layers {sorted(ids)}", expected)
    return ids


def _notes(banks: Mapping[str, I64], meta: Mapping[str, Any]) -> list[str]:
    notes = []
    if "counts" in banks:
        notes.append("prefill and decode are not told apart: all counts are given as decode")
    fingerprint = meta.get("fingerprint")
    if isinstance(fingerprint, dict):
        parts = (f"{key} {value}" for key, value in sorted(fingerprint.items()))
        notes.append(f"exllamav3's fingerprint: {', '.join(parts)}"[:300])
    else:
        notes.append("no fingerprint of the model beside the file")
    if isinstance(meta.get("corpus"), str):
        notes.append(f"corpus: {meta['corpus'][:80]}")
    return notes


def write(
    counts: Counts, path: Path, key: str = KEY, fingerprint: Mapping[str, Any] | None = None
) -> None:
    """The .npz and its sidecar; `key` is a module key with `{}` for the layer.

    Held are counts, phases, layers and experts. Raises FormatError where layers differ in experts.
    """
    layout = counts.layout
    if len(set(layout.experts)) != 1:
        found = sorted(set(layout.experts))
        raise FormatError(str(path), "experts", found, "one number of experts in all layers")
    prefill = np.zeros_like(counts.decode) if counts.prefill is None else counts.prefill
    npz.write(path, {"counts_decode": counts.decode, "counts_prefill": prefill})
    meta = {
        "layers": len(layout.layer_ids),
        "experts": layout.experts[0],
        "prompts": len(counts.decode),
        "layer_keys": [key.format(layer) for layer in layout.layer_ids],
        "decode_hits": int(counts.decode.sum()),
        "prefill_hits": int(prefill.sum()),
        **({} if fingerprint is None else {"fingerprint": dict(fingerprint)}),
    }
    with replacing(path.with_name(f"{path.name.removesuffix('.npz')}.meta.json")) as out:
        out.write(canonical_json(meta))
