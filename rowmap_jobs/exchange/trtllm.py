"""TensorRT-LLM: the load balancer's YAML and folders of expert statistics.

YAML (examples/wide_ep/ep_load_balancer/README.md): `num_slots`, `initial_global_assignments`
{absolute layer: [expert of each slot, ranks in a row]}, `layer_updates_per_iter` (0: static).

Statistics (tensorrt_llm/_torch/modules/fused_moe ExpertStatistic; the reader is
ep_load_balancer/utils.py): `meta_info.json` {num_experts, num_experts_per_token, ...} and for
each rank `rank<r>.safetensors` with `"<iteration>_<layer>"` -> int64[E]. Ranks add up;
`*_raw.safetensors` are other data; iterations follow each other and have all layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..formats.base import FormatError, canonical_json, load_json
from . import safe_yaml, safetensors_data
from .base import I64, Counts, Ranking
from .files import list_folder, read_file
from .slots import check_slots, to_ranking
from .streams import replacing
from .tables import MAX_CELLS, MAX_EXPERTS, MAX_LAYERS, make_counts, require_layers, widened

MAX_RANKS = 4096
MAX_META = 1 << 20
_KEYS = {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}


def read(
    raw: bytes, source: str, experts: int | None = None, layers: Collection[int] | None = None
) -> Ranking:
    """The placement of a YAML file; with `layers` it must cover exactly those.

    Raises FormatError: no assignments (an online configuration), another key, slots that differ
    from num_slots, an expert without a slot, a layer that is missing (named).
    """
    data = safe_yaml.load(raw, source)
    if not isinstance(data, dict) or not set(data) <= _KEYS:
        found = sorted(map(str, set(data) - _KEYS))[:3] if isinstance(data, dict) else "no mapping"
        raise FormatError(source, "top level", found, f"the keys {sorted(_KEYS)}")
    place = "initial_global_assignments"
    table = data.get(place)
    if not isinstance(table, dict) or not table:
        found = "none" if table is None else type(table).__name__
        expected = "slots of each layer (a configuration without them is for online balancing)"
        raise FormatError(source, place, found, expected)
    updates = data.get("layer_updates_per_iter", 0)
    if type(updates) is not int or updates < 0:
        raise FormatError(source, "layer_updates_per_iter", updates, "an integer from 0")
    slots: dict[int, list[int]] = {}
    for layer, row in table.items():
        if type(layer) is not int or not isinstance(row, list):
            raise FormatError(source, place, f"{layer!s:.40}", "{layer: [expert of each slot]}")
        wrong = [value for value in row if type(value) is not int]
        if wrong:
            raise FormatError(source, f"{place}.{layer}", f"{wrong[0]!s:.40}", "integers")
        slots[layer] = row
    count = data.get("num_slots")
    first = len(next(iter(slots.values())))
    if type(count) is not int or count != first:
        raise FormatError(source, "num_slots", count, f"{first}, the slots of the first layer")
    ranking = to_ranking(slots, source, place, experts)
    if layers is not None:
        require_layers(slots, layers, source)
    if not updates:
        return ranking
    note = f"layer_updates_per_iter is {updates}: the engine moves experts away from this"
    return Ranking(ranking.order, True, notes=(*ranking.notes, note))


def write(slots: Mapping[int, Sequence[int]], layers: Collection[int]) -> bytes:
    """The YAML of a placement that covers all MoE `layers`, draft (MTP) layers included.

    TensorRT-LLM looks every MoE layer up and stops with a KeyError at one that is missing.
    Raises FormatError for a table with a hole or a layer that is missing or one too many.
    """
    check_slots(slots, "map", "slots")
    require_layers(slots, layers, "map")
    lines = ["initial_global_assignments:"]
    lines += [f"  {layer}: {[int(e) for e in slots[layer]]}" for layer in sorted(slots)]
    lines += ["layer_updates_per_iter: 0", f"num_slots: {len(next(iter(slots.values())))}"]
    return ("\n".join(lines) + "\n").encode()


def read_statistics(folder: Path, source: str, skip: Collection[int] = ()) -> Counts:
    """Sums over ranks and iterations of a statistics folder, without the layers in `skip`.

    Raises FormatError: no meta_info.json, a rank that is missing or half-written, an iteration
    or layer that is missing, a layer with another number of rows than the others (a draft layer
    is one to skip), a file that is no file.
    """
    files = {path.name: path for path in list_folder(folder, source)}
    experts, top_k = _meta(files, source)
    ranks = _ranks(files, source)
    total: dict[tuple[int, int], I64] = {}
    for path in ranks:
        where = f"{source}/{path.name}"
        for key, array in safetensors_data.read(path, where).arrays.items():
            match = re.fullmatch(r"(\d{1,9})_(\d{1,4})", key)
            if match is None or array.shape != (experts,) or array.dtype.kind not in "iu":
                found = f"{array.dtype} {list(array.shape)}"
                expected = f'"<iteration>_<layer>" of int64[{experts}] (num_experts)'
                raise FormatError(where, key, found, expected)
            index = (int(match[1]), int(match[2]))
            counts = widened(array, where, key)
            if counts.min() < 0 or counts.max() > 1 << 40:
                raise FormatError(where, key, "a negative or huge count", "0 to 2^40")
            total[index] = total[index] + counts if index in total else counts
            if len(total) * experts > MAX_CELLS:
                raise FormatError(source, "statistics", "too many iterations", "fewer")
    return _sum(total, experts, top_k, len(ranks), source, skip)


def write_statistics(counts: Counts, folder: Path) -> None:
    """The decode sums of all sequences, as one iteration of one rank; the folder must be there.

    Raises FormatError for what `read_statistics` would refuse: layers that differ in experts,
    top-k or rows, counts without top-k or without decode, a placeholder.
    """
    experts = _only(counts.layout.experts, "experts")
    top_k = _only(counts.layout.top_k or (), "top-k")
    sums = counts.decode.sum(axis=0)[:, :experts]
    rows = dict(zip(counts.layout.layer_ids, sums, strict=True))
    _sum({(0, layer): row for layer, row in rows.items()}, experts, top_k, 1, "counts", ())
    meta = {"num_experts": experts, "num_experts_per_token": top_k}
    arrays = {f"0_{layer}": row for layer, row in rows.items()}
    with replacing(folder / "meta_info.json") as out:
        out.write(canonical_json(meta))
    with replacing(folder / "rank0.safetensors") as out:
        out.write(safetensors_data.to_bytes(arrays, {}))


def _only(values: Sequence[int], place: str) -> int:
    if len(set(values)) != 1:
        raise FormatError(
            "counts", place, sorted(set(values)) or "none", "one number for all layers"
        )
    return values[0]


def _meta(files: Mapping[str, Path], source: str) -> tuple[int, int]:
    path = files.get("meta_info.json")
    if path is None:
        raise FormatError(source, "meta_info.json", "no such file", "num_experts and top-k")
    where = f"{source}/meta_info.json"
    data = load_json(read_file(path, where, MAX_META), where)
    values = []
    for key, most in (("num_experts", MAX_EXPERTS), ("num_experts_per_token", 1024)):
        value = data.get(key) if isinstance(data, dict) else None
        if type(value) is not int or not 1 <= value <= most:
            raise FormatError(where, key, value, f"1 to {most}")
        values.append(value)
    return values[0], values[1]


def _ranks(files: Mapping[str, Path], source: str) -> list[Path]:
    found: dict[int, Path] = {}
    for name, path in files.items():
        match = re.fullmatch(r"rank(0|[1-9]\d{0,3})\.safetensors", name)
        if match:
            found[int(match[1])] = path
    if not found:
        raise FormatError(source, "rank*.safetensors", "no such file", "one for each rank")
    missing = sorted(set(range(max(found) + 1)) - set(found))
    if missing:
        expected = f"ranks 0 to {max(found)}"
        raise FormatError(source, "ranks", f"no rank{missing[0]}.safetensors", expected)
    return [found[rank] for rank in sorted(found)]


def _sum(
    total: Mapping[tuple[int, int], I64],
    experts: int,
    top_k: int,
    ranks: int,
    source: str,
    skip: Collection[int],
) -> Counts:
    iterations = sorted({iteration for iteration, _ in total})
    layers = sorted({layer for _, layer in total} - set(skip))
    if not layers or len(layers) > MAX_LAYERS:
        raise FormatError(source, "statistics", f"{len(layers)} layers", "counts of MoE layers")
    if iterations[-1] - iterations[0] + 1 != len(iterations):
        hole = min(set(range(iterations[0], iterations[-1])) - set(iterations))
        expected = f"{iterations[0]} to {iterations[-1]} without a gap"
        raise FormatError(source, "iterations", f"no iteration {hole}", expected)
    decode = np.zeros((1, len(layers), experts), dtype=np.int64)
    for at, layer in enumerate(layers):
        for iteration in iterations:
            if (iteration, layer) not in total:
                place, found = f"layer {layer}", f"no counts of iteration {iteration}"
                raise FormatError(source, place, found, "every layer in every iteration")
            decode[0, at] += total[iteration, layer]
    sums = decode[0].sum(axis=1)
    odd = np.flatnonzero(sums != sums[0])
    if odd.size or sums[0] % top_k:
        at = int(odd[0]) if odd.size else 0
        rows = int(sums[0]) / top_k
        expected = f"{int(sums[0])} of layer {layers[0]} ({rows:g} rows x top-k {top_k})"
        found = f"{int(sums[at])} selections"
        raise FormatError(source, f"layer {layers[at]}", found, expected)
    notes = [
        f"iterations {iterations[0]}-{iterations[-1]} of {ranks} ranks added up",
        "prefill and decode are not told apart in this file: all counts are given as decode",
    ]
    if skip:
        notes.append(f"layers {sorted(skip)} skipped as asked")
    rows_of = np.array([[0, int(sums[0]) // top_k]], dtype=np.int64)
    return make_counts(source, decode, layers, rows=rows_of, top_k=top_k, notes=notes)
