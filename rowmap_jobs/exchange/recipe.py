"""The public reference recipe: the counts that its hook dumps, and the row map that it reads.

Source: J-M-Recipes/recipes, `pin_hot_experts_hook.py`. A dump `counts-<time>.npz` has cnt_dec,
cnt_pre, cnt_all int64[L,E]; n_dec, n_pre int64[L] (calls, not rows); names[L]; decode_T, E, L;
reason; ts. What a reader must know of that hook:

- it numbers layers as it meets them: the draft model's (3 of 43 in the published dumps) follow the
  model's own, and most names are `id=<address>`; so the model's layer ids must be given unless
  the names say them;
- it counts from the start of the process: warm-up is in, and a dump before any traffic has to be
  subtracted;
- it dumps within a layer's call: prefill counts of some layers may be a step ahead;
- it counts an id beyond the experts for the last expert, which no reader can undo.

A row map is `{"layers": {"<id>": {"hot": [hottest first], "cold": [coldest first]}}}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..census.baseline import subtract
from ..census.exact import exact_counts
from ..formats.base import FormatError, canonical_json
from ..formats.rowmap import MAX_MAP_BYTES
from . import npz
from .base import I64, Counts, Layout, Ranking
from .layers import MAX_LAYER, is_draft, layer_id
from .streams import json_file, replacing
from .tables import require_layers, spans

MAX_EXPERTS = 1 << 16
_LIMIT = 64 << 20
"""Three tables of 60 layers x 512 experts have 0.7 MB; a file that unpacks to more is no dump."""


@dataclass(frozen=True)
class _Dump:
    """A file as it stands: tables int64[L,E], calls int64[L], a name for each row of them."""

    decode: I64
    prefill: I64
    names: tuple[str, ...]
    ts: str


def read(
    path: Path,
    layers: Sequence[int] | None = None,
    baseline: Path | None = None,
    top_k: int | None = None,
) -> Counts:
    """Counts of the model's own layers, one sum over all traffic (T is 1).

    `layers` are the absolute ids of the model's MoE layers in their order; needed where the names
    do not say them. `baseline` is a dump of the same process before any traffic. Prefill is None
    where its layers do not agree (a dump in the middle of a step). Raises FormatError: damage,
    sums that do not fit, decode counts that differ between layers, a baseline of another process.
    """
    source = str(path)
    dump = _read(path, source)
    kept, draft = _own_rows(dump.names, layers, source)
    counts = _counts(dump, kept, top_k, source)
    if draft:
        note = f"rows {spans(draft)} are a draft model's: left out"
        counts = replace(counts, notes=(*counts.notes, note))
    if baseline is None:
        note = "no baseline: warm-up of the engine is counted, too"
        counts = replace(counts, notes=(*counts.notes, note))
    else:
        before = _read(baseline, str(baseline))
        if before.names != dump.names:
            found = "rows of other names"
            raise FormatError(str(baseline), "names", found, f"those of {source} (one process)")
        if before.ts and dump.ts and before.ts > dump.ts:
            expected = f"a dump from before {dump.ts}, that of {source}"
            raise FormatError(str(baseline), "ts", before.ts, expected)
        counts = subtract(counts, _counts(before, kept, top_k, str(baseline)), source)
    return _even(counts, source)


def _read(path: Path, source: str) -> _Dump:
    with npz.archive(path, source, _LIMIT) as archive:
        names = tuple(str(name) for name in archive.read("names", "U", (1,), 16 << 20))
        tables = {
            name: exact_counts(archive.read(name, "iu", (2,), _LIMIT), source, name)
            for name in ("cnt_dec", "cnt_pre", "cnt_all")
        }
        calls = {
            name: exact_counts(archive.read(name, "iu", (1,), 1 << 20), source, name)
            for name in ("n_dec", "n_pre")
        }
        layers, experts = (int(archive.read(name, "iu", (0,), 64)) for name in ("L", "E"))
        ts = str(archive.read("ts", "U", (0,), 4096)) if "ts" in archive.names else ""
    if not 1 <= layers <= MAX_LAYER + 1 or not 1 <= experts <= MAX_EXPERTS:
        found = f"{layers} layers, {experts} experts"
        raise FormatError(source, "L and E", found, f"up to {MAX_LAYER + 1} and {MAX_EXPERTS}")
    shapes = {name: array.shape for name, array in {**tables, **calls}.items()}
    for name, shape in {**shapes, "names": (len(names),)}.items():
        expected = (layers, experts) if name in tables else (layers,)
        if shape != expected:
            raise FormatError(source, name, list(shape), f"shape {list(expected)} (L and E)")
    bad = np.argwhere(tables["cnt_dec"] + tables["cnt_pre"] != tables["cnt_all"])
    if bad.size:
        place = f"cnt_all[{bad[0][0]},{bad[0][1]}]"
        raise FormatError(source, place, "another sum", "cnt_dec + cnt_pre")
    for name, table in (("n_dec", "cnt_dec"), ("n_pre", "cnt_pre")):
        (silent,) = np.nonzero((calls[name] == 0) & tables[table].any(axis=1))
        if silent.size:
            found = f"0 calls with counts in {table}"
            raise FormatError(source, f"{name}[{int(silent[0])}]", found, "1 call or more")
    return _Dump(tables["cnt_dec"], tables["cnt_pre"], names, ts)


def _own_rows(
    names: tuple[str, ...], layers: Sequence[int] | None, source: str
) -> tuple[dict[int, int], list[int]]:
    """`{layer id: row}` of the model's own layers, ascending, and the rows of a draft model."""
    ids = [None if is_draft(name) else layer_id(name) for name in names]
    drafts = [row for row, name in enumerate(names) if is_draft(name)]
    told = [row for row, number in enumerate(ids) if number is not None]
    if not told:
        return _by_place(names, drafts, layers, source)
    if len(told) + len(drafts) != len(names):
        row = next(r for r in range(len(names)) if ids[r] is None and r not in drafts)
        expected = "a layer's number, as in the other names"
        raise FormatError(source, f"names[{row}]", names[row], expected)
    if layers is not None and ids[: len(layers)] == list(layers):
        # Draft layers are often numbered from 0 again, but they come after all of the model's.
        own = {layer: row for row, layer in enumerate(layers)}
        return own, list(range(len(layers), len(names)))
    own = {}
    for row in told:
        number = ids[row]
        if number in own:
            found = f"layer {number} twice"
            raise FormatError(source, f"names[{row}]", found, "each layer once (a draft model's?)")
        if number is not None:
            own[number] = row
    if layers is not None:
        drafts += [row for number, row in own.items() if number > max(layers)]
        own = {number: row for number, row in own.items() if number <= max(layers)}
        require_layers(own, layers, source)
    return dict(sorted(own.items())), sorted(drafts)


def _by_place(
    names: tuple[str, ...], drafts: list[int], layers: Sequence[int] | None, source: str
) -> tuple[dict[int, int], list[int]]:
    if layers is None:
        expected = "names with the layer's number, or the model's layer ids given"
        raise FormatError(source, "names", names[0] if names else "none", expected)
    if len(names) - len(drafts) < len(layers):
        found = f"{len(names) - len(drafts)} rows"
        raise FormatError(source, "names", found, f"{len(layers)}, one for each layer of the model")
    if any(row < len(layers) for row in drafts):
        expected = "the model's own layers before those of a draft model"
        raise FormatError(source, f"names[{drafts[0]}]", names[drafts[0]], expected)
    return {layer: row for row, layer in enumerate(layers)}, list(range(len(layers), len(names)))


def _counts(dump: _Dump, kept: dict[int, int], top_k: int | None, source: str) -> Counts:
    rows = list(kept.values())
    experts = dump.decode.shape[1]
    if top_k is not None and not 1 <= top_k <= experts:
        raise FormatError(source, "top-k", top_k, f"1 to {experts}")
    return Counts(
        layout=Layout(
            tuple(kept), (experts,) * len(kept), None if top_k is None else (top_k,) * len(kept)
        ),
        decode=dump.decode[rows][None],
        prefill=dump.prefill[rows][None],
        rows=None,
        names=("all",),
        per_sequence=False,
    )


def _even(counts: Counts, source: str) -> Counts:
    """Every token passes every layer, so sums of layers are equal; decode must be."""
    sums = counts.decode[0].sum(axis=1)
    if not sums.any():
        raise FormatError(source, "cnt_dec", "no selection", "counts of real traffic")
    odd = np.flatnonzero(sums != np.median(sums))
    if odd.size:
        place = f"cnt_dec[layer {counts.layout.layer_ids[int(odd[0])]}]"
        expected = f"{int(np.median(sums))} as in the other layers (a dump between two steps)"
        raise FormatError(source, place, f"{int(sums[odd[0]])} selections", expected)
    if counts.prefill is not None and len(set(counts.prefill[0].sum(axis=1).tolist())) > 1:
        note = "prefill counts differ between layers (dumped in the middle of a step): left out"
        return replace(counts, prefill=None, notes=(*counts.notes, note))
    return counts


def write(counts: Counts, path: Path) -> None:
    """A dump of the sums over all sequences, rows named `layer_idx=<id>`.

    Held are decode and prefill sums, layers and experts. Raises FormatError where layers differ in
    experts, as the format has one number.
    """
    layout = counts.layout
    if len(set(layout.experts)) != 1:
        raise FormatError(str(path), "experts", sorted(set(layout.experts)), "one number of them")
    decode = counts.decode.sum(axis=0)
    prefill = np.zeros_like(decode) if counts.prefill is None else counts.prefill.sum(axis=0)
    # Calls are not known; there are at least so many rows.
    arrays: dict[str, Any] = {
        "cnt_dec": decode,
        "cnt_pre": prefill,
        "cnt_all": decode + prefill,
        "n_dec": decode.max(axis=1),
        "n_pre": prefill.max(axis=1),
        "names": np.array([f"layer_idx={layer}" for layer in layout.layer_ids]),
        "decode_T": np.int64(0),
        "E": np.int64(layout.experts[0]),
        "L": np.int64(len(layout.layer_ids)),
        "reason": np.array("export"),
        "ts": np.array(""),
    }
    npz.write(path, arrays)


def read_map(path: Path, layout: Layout) -> Ranking:
    """A row map: order and hot rows of each layer of the model's `layout`.

    With or without the key `layers`, as the hook reads it; keys beside it are those of other
    readers. Raises FormatError: a layer missing or beyond the model's, an expert in both lists,
    twice, out of range or in none.
    """
    source = str(path)
    data = json_file(path, source, MAX_MAP_BYTES)
    found = data.get("layers", data) if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise FormatError(source, "layers", type(found).__name__, "an object of layers")
    keys = {str(layer): layer for layer in layout.layer_ids}
    for key in found:
        if key not in keys:
            expected = f"the model's layers {spans(layout.layer_ids)}"
            raise FormatError(source, "layers", f"layer {key}", expected)
    require_layers([keys[key] for key in found], layout.layer_ids, source)
    order: dict[int, tuple[int, ...]] = {}
    hot: dict[int, int] = {}
    for layer, experts in zip(layout.layer_ids, layout.experts, strict=True):
        rows = found[str(layer)]
        lists = [_ids(rows, name, source, f"layers.{layer}") for name in ("hot", "cold")]
        order[layer] = _partition(lists[0], lists[1], experts, source, f"layers.{layer}")
        hot[layer] = len(lists[0])
    return Ranking(order, complete=True, hot=hot)


def _ids(rows: object, name: str, source: str, place: str) -> list[int]:
    ids = rows.get(name) if isinstance(rows, dict) else None
    if not isinstance(ids, list) or not all(type(expert) is int for expert in ids):
        raise FormatError(source, f"{place}.{name}", type(ids).__name__, "a list of expert ids")
    return ids


def _partition(
    hot: list[int], cold: list[int], experts: int, source: str, place: str
) -> tuple[int, ...]:
    for name, ids in (("hot", hot), ("cold", cold)):
        if len(set(ids)) != len(ids):
            twice = next(expert for expert in ids if ids.count(expert) > 1)
            raise FormatError(source, f"{place}.{name}", f"expert {twice} twice", "each once")
    both = set(hot) & set(cold)
    if both:
        raise FormatError(source, place, f"expert {min(both)} hot and cold", "one of them")
    every = set(hot) | set(cold)
    wrong = every ^ set(range(experts))
    if wrong:
        one = min(wrong)
        found = f"expert {one} {'out of range' if one in every else 'in no list'}"
        raise FormatError(source, place, found, f"each of 0..{experts - 1} once")
    return (*hot, *reversed(cold))


def write_map(ranking: Ranking, path: Path) -> None:
    """A row map for the reference hook. Raises FormatError where that hook could not read it.

    The ranking must be complete and say how many rows are hot; the hook wants the same number of
    experts and of hot rows in every layer.
    """
    source = str(path)
    if not ranking.complete or ranking.hot is None:
        raise FormatError(source, "ranking", "an incomplete one", "all experts, and how many hot")
    layers: dict[str, dict[str, list[int]]] = {}
    for layer, order in sorted(ranking.order.items()):
        hot, cold = list(order[: ranking.hot[layer]]), list(order[ranking.hot[layer] :])
        _partition(hot, cold, len(order), source, f"layers.{layer}")
        layers[str(layer)] = {"cold": cold[::-1], "hot": hot}
    sizes = {(len(rows["hot"]), len(rows["cold"])) for rows in layers.values()}
    if len(sizes) != 1:
        raise FormatError(source, "layers", f"hot and cold {sorted(sizes)[:4]}", "one size of each")
    with replacing(path) as out:
        out.write(canonical_json({"layers": layers}))
