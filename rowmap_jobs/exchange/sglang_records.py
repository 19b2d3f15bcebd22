"""Records of SGLang's expert distribution recorder, modes per_token and per_pass.

A record is one forward pass on one rank: `topk_ids_of_layer` int32[L, tokens, 8] of physical ids
(-1: no expert; 8 columns whatever top-k is) or `global_physical_count` [L, slots], with
`forward_mode`, the value of the enum ForwardMode (forward_batch_info.py): 1 extend, 2 decode,
3 mixed, 4 idle, 5 target verify, 6 draft extend.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..formats.base import FormatError
from .base import I64, Counts
from .tables import MAX_CELLS, MAX_EXPERTS, integers, make_counts, widened

MAX_RECORDS = 1 << 20
MAX_WORK = 1 << 31
"""Ids of all records together; a file that names one tensor many times ends here."""
_MODES = {1: "prefill", 2: "decode", 3: "prefill", 4: "idle", 5: "decode", 6: "draft"}
_SAID = {
    3: "passes that mix prefill and decode were counted as prefill",
    5: "verify passes were counted as decode, rejected drafts included",
    6: "draft passes were left out",
}


def _tensor(value: object, source: str, place: str, dims: int) -> I64:
    if isinstance(value, list):
        return integers(value, source, place, dims)
    if not isinstance(value, np.ndarray) or value.ndim != dims:
        shape = list(value.shape) if isinstance(value, np.ndarray) else type(value).__name__
        raise FormatError(source, place, shape, f"a tensor of {dims} dimensions")
    if value.size > 8 * MAX_CELLS:
        raise FormatError(source, place, f"{value.size} cells", f"at most {8 * MAX_CELLS}")
    return widened(value, source, place)


class _Sums:
    """Counts of all records, and what the first ones fixed for the others."""

    def __init__(self, slots: I64, experts: int) -> None:
        self.slots = slots
        self.prefill = np.zeros((len(slots), experts), dtype=np.int64)
        self.decode = np.zeros((len(slots), experts), dtype=np.int64)
        self.rows = {"prefill": 0, "decode": 0}
        self.top_k: int | None = None
        self.by_row = 0
        self.alike = True
        self.first_row: I64 | None = None
        self.modes: set[int] = set()


def read_records(data: Mapping[object, object], source: str, experts: int | None = None) -> Counts:
    """Counts of all passes of a dump, prefill apart from decode where the mode says it.

    Raises FormatError, among others for ids beyond the slots, a row with an id twice or with
    fewer ids than others, layers with unequal rows, rows that are all alike, a pass twice.
    """
    place = "last_physical_to_logical_map"
    slots = _tensor(data.get(place), source, place, 2)
    wide = int(slots.max(initial=0)) + 1 if experts is None else experts
    if not slots.size or slots.min() < 0 or slots.max() >= min(wide, MAX_EXPERTS):
        found = f"ids to {slots.max(initial=0)}"
        raise FormatError(source, place, found, f"0 to {min(wide, MAX_EXPERTS) - 1}")
    if max(slots.size, len(slots) * wide) > MAX_CELLS:
        found = f"{slots.shape[1]} slots, {wide} experts in {len(slots)} layers"
        raise FormatError(source, place, found, f"at most {MAX_CELLS} cells")
    extra = sorted(str(key) for key in data if key not in ("records", place))
    if extra:
        raise FormatError(source, "top level", f"the key {extra[0]}", f"records and {place}")
    records = data["records"]
    if not isinstance(records, list) or not 1 <= len(records) <= MAX_RECORDS:
        found = f"{len(records)} records" if isinstance(records, list) else "no list"
        raise FormatError(source, "records", found, f"1 to {MAX_RECORDS} records")
    sums = _Sums(slots, wide)
    seen: set[tuple[object, object]] = set()
    work = 0
    for index, record in enumerate(records):
        where = f"records[{index}]"
        if not isinstance(record, dict):
            raise FormatError(source, where, type(record).__name__, "a record")
        key = (record.get("forward_pass_id"), record.get("gatherer_key"))
        if type(key[0]) is not int or not isinstance(key[1], str | None) or key in seen:
            found = "the same pass twice" if type(key[0]) is int else "no forward_pass_id"
            raise FormatError(source, where, found, "each forward pass once")
        seen.add(key)
        work += _add(sums, record, source, where)
        if work > MAX_WORK:
            raise FormatError(source, where, f"more than {MAX_WORK} ids", "a smaller dump")
    return _finish(sums, source)


def _add(sums: _Sums, record: Mapping[object, object], source: str, where: str) -> int:
    mode = record.get("forward_mode")
    if mode is not None and (type(mode) is not int or mode not in _MODES):
        raise FormatError(source, f"{where}.forward_mode", mode, f"one of {sorted(_MODES)}")
    phase = "decode" if mode is None else _MODES[mode]
    sums.modes.add(mode or 0)
    if phase in ("idle", "draft"):
        return 1
    target = sums.prefill if phase == "prefill" else sums.decode
    if "topk_ids_of_layer" not in record:
        place = f"{where}.global_physical_count"
        passed = _tensor(record.get("global_physical_count"), source, place, 2)
        if passed.shape != sums.slots.shape or passed.min(initial=0) < 0:
            expected = f"counts of 0 or more, shape {list(sums.slots.shape)}"
            raise FormatError(source, place, list(passed.shape), expected)
        layers = np.arange(len(sums.slots))[:, None]
        np.add.at(target, (np.broadcast_to(layers, sums.slots.shape), sums.slots), passed)
        return passed.size
    place = f"{where}.topk_ids_of_layer"
    ids = _tensor(record["topk_ids_of_layer"], source, place, 3)
    tokens = record.get("input_ids")
    if isinstance(tokens, list) and len(tokens) != ids.shape[1]:
        found = f"{ids.shape[1]} rows"
        raise FormatError(source, place, found, f"{len(tokens)} as input_ids")
    if len(ids) != len(sums.slots) or ids.max(initial=-1) >= sums.slots.shape[1]:
        found = f"{len(ids)} layers, ids to {ids.max(initial=-1)}"
        expected = f"{len(sums.slots)} layers, ids below {sums.slots.shape[1]}"
        raise FormatError(source, place, found, expected)
    sums.rows[phase] += _count(sums, target, ids, source, place)
    return ids.size


def _count(sums: _Sums, target: I64, ids: I64, source: str, place: str) -> int:
    """Adds ids[L,tokens,k] to target[L,E]; returns rows of a layer."""
    chosen = np.sort(np.where(ids < 0, -1, ids), axis=2)
    used = (chosen >= 0).sum(axis=2)
    top_k = int(used.max(initial=0))
    if not top_k:
        return 0
    if sums.top_k not in (None, top_k) or not np.isin(used, (0, top_k)).all():
        found = f"rows of {sorted(set(np.unique(used).tolist()) - {0})} experts"
        raise FormatError(source, place, found, f"{sums.top_k or top_k} experts in every row")
    sums.top_k = top_k
    if ((chosen[:, :, 1:] == chosen[:, :, :-1]) & (chosen[:, :, 1:] >= 0)).any():
        raise FormatError(source, place, "an id twice in a row", f"{top_k} distinct ids a row")
    rows = (used > 0).sum(axis=1)
    if len(set(rows[rows > 0].tolist())) != 1:
        found = f"{rows.tolist()} rows of the layers"
        raise FormatError(source, place, found, "as many rows in every MoE layer")
    moe = np.flatnonzero(rows)
    for layer in moe:
        real = chosen[layer][used[layer] > 0][:, -top_k:]
        logical = sums.slots[layer][real]
        target[layer] += np.bincount(logical.ravel(), minlength=target.shape[1])
    sample = chosen[moe]
    first = sample[:, :1] if sums.first_row is None else sums.first_row
    sums.first_row = first
    sums.by_row += int(rows.max())
    sums.alike &= first.shape[0] == sample.shape[0] and bool((sample == first).all())
    return int(rows.max())


def _finish(sums: _Sums, source: str) -> Counts:
    if sums.alike and sums.by_row >= 8:
        found = f"{sums.by_row} rows that choose the same experts"
        raise FormatError(source, "records", found, "routing of real tokens: a placeholder")
    notes = [text for mode, text in _SAID.items() if mode in sums.modes]
    if 0 in sums.modes:
        notes.append("records without forward_mode: all counts are given as decode")
    notes.append("physical ids were mapped by the last placement of the dump")
    prefill = sums.prefill if sums.prefill.any() else None
    rows = np.array([[sums.rows["prefill"], sums.rows["decode"]]], dtype=np.int64)
    return make_counts(
        source,
        sums.decode[None],
        range(len(sums.slots)),
        prefill=None if prefill is None else prefill[None],
        rows=rows if sums.by_row and 0 not in sums.modes else None,
        top_k=sums.top_k,
        notes=notes,
    )
