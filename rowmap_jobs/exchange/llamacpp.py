"""llama.cpp: traces of expert selections and profiles of experts to pin, both CSV.

Trace (examples/moe-trace, pull request 28544; `--moe-cache-profile` of a fork): a line
`layer,expert` for every selection; traces of several prompts may be appended to each other.
Pin profile (LLAMA_EXPERT_PIN_PROFILE, pull request 28545): `layer,expert[,count]` for every
expert once, hottest first over all layers. Layers are block numbers, so absolute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..formats.base import FormatError
from ..formats.rowmap import RowMap
from .base import I64, Counts, Ranking
from .integers_csv import blocks
from .tables import MAX_CELLS, MAX_EXPERTS, MAX_LAYERS, coverage, make_counts

_HEADER = ("layer", "expert", "count")
_BOTH = "prefill and decode are not told apart in this file: all counts are given as decode"
MAX_TRACE_LINES = 1_000_000


def read_trace(
    path: Path, source: str, experts: int | None = None, top_k: int | None = None
) -> Counts:
    """Counts of a trace, read in blocks; negative ids (no expert) are passed over and counted.

    `experts` is E of the model, else the highest id + 1; with `top_k` every layer must have a
    multiple of it. Raises FormatError, also for a pin profile (a third column).
    """
    table = np.zeros((1, 1), dtype=np.int64)
    negative = 0
    for block in blocks(path, source, _HEADER):
        if block.shape[1] != 2:
            found = "a column of counts"
            raise FormatError(source, "line 1", found, "layer,expert (a pin profile has counts)")
        layer, expert = block[:, 0], block[:, 1]
        _check_ids(layer, expert, experts, source)
        real = expert >= 0
        negative += int((~real).sum())
        if not real.all():
            layer, expert = layer[real], expert[real]
        if not layer.size:
            continue
        table = _wider(table, int(layer.max()) + 1, int(expert.max()) + 1, source)
        flat = np.bincount(layer * table.shape[1] + expert, minlength=table.size)
        table += flat.reshape(table.shape)
    notes = [_BOTH]
    if negative:
        notes.append(f"{negative} selections with a negative id (no expert) passed over")
    table = _wide_enough(table, experts, notes, source)
    return make_counts(source, table[None], range(len(table)), top_k=top_k, notes=notes)


def _check_ids(layer: I64, expert: I64, experts: int | None, source: str) -> None:
    most = MAX_EXPERTS if experts is None else experts
    if layer.min() < 0 or layer.max() >= MAX_LAYERS:
        found = f"layer {int(layer.min() if layer.min() < 0 else layer.max())}"
        raise FormatError(source, "layer", found, f"0 to {MAX_LAYERS - 1}")
    if expert.max() >= most:
        where = f"layer {int(layer[expert.argmax()])}"
        raise FormatError(source, where, f"expert {int(expert.max())}", f"below {most}")


def _wider(table: I64, layers: int, experts: int, source: str) -> I64:
    layers, experts = max(layers, len(table)), max(experts, table.shape[1])
    if (layers, experts) == table.shape:
        return table
    if layers * experts > MAX_CELLS:
        found = f"{layers} layers x {experts} experts"
        raise FormatError(source, "ids", found, f"at most {MAX_CELLS} cells")
    out = np.zeros((layers, experts), dtype=np.int64)
    out[: len(table), : table.shape[1]] = table
    return out


def _wide_enough(table: I64, experts: int | None, notes: list[str], source: str) -> I64:
    if experts is not None:
        return _wider(table, len(table), experts, source)
    notes.append(f"{table.shape[1]} experts, the highest id + 1: those above it were never seen")
    return table


def write_trace(counts: Counts, most: int = MAX_TRACE_LINES) -> Iterator[bytes]:
    """A trace with a line for every decode selection, in pieces; never more than about `most`.

    With more selections, counts are divided by one number and rounded up: an expert that was
    selected stays selected. The order of lines means nothing to a reader of frequencies.
    """
    summed = counts.decode.sum(axis=0)
    divisor = max(1, -(-int(summed.sum()) // most))
    for index, layer in enumerate(counts.layout.layer_ids):
        for expert in range(counts.layout.experts[index]):
            repeat = -(-int(summed[index, expert]) // divisor)
            if repeat:
                yield f"{layer},{expert}\n".encode() * repeat


def read_pin_order(path: Path, source: str) -> I64:
    """int64[n,2 or 3]: (layer, expert[, count]) in the order of the file, hottest first.

    Raises FormatError: an expert twice (then it is a trace), a negative id or count, counts that
    rise, more experts than a model can have.
    """
    parts: list[I64] = []
    total = 0
    for block in blocks(path, source, _HEADER):
        total += len(block)
        if total > MAX_CELLS // 4:
            raise FormatError(source, "lines", f"more than {MAX_CELLS // 4}", "each expert once")
        parts.append(block)
    if len({part.shape[1] for part in parts}) != 1:
        raise FormatError(source, "columns", "lines with and without a count", "one or the other")
    table = np.concatenate(parts)
    _check_ids(table[:, 0], table[:, 1], None, source)
    if table.min() < 0:
        at = int((table < 0).any(axis=1).argmax())
        raise FormatError(source, f"row {at + 1}", "a negative number", "ids and counts from 0")
    keys = table[:, 0] * MAX_EXPERTS + table[:, 1]
    if len(np.unique(keys)) != len(keys):
        found = "an expert twice"
        raise FormatError(source, "rows", found, "each expert once (a trace repeats them)")
    if table.shape[1] == 3 and (np.diff(table[:, 2]) > 0).any():
        at = int((np.diff(table[:, 2]) > 0).argmax())
        raise FormatError(source, f"row {at + 2}", "a count above the one before", "hottest first")
    return table


def read_pin(path: Path, source: str, experts: int | None = None) -> Counts | Ranking:
    """Counts where the profile has them, else the ranking of each layer. Raises FormatError."""
    table = read_pin_order(path, source)
    _check_ids(table[:, 0], table[:, 1], experts, source)
    if table.shape[1] == 3:
        counts = np.zeros((1, 1), dtype=np.int64)
        layers, width = int(table[:, 0].max()) + 1, int(table[:, 1].max()) + 1
        counts = _wider(counts, layers, width, source)
        counts[table[:, 0], table[:, 1]] = table[:, 2]
        notes = [_BOTH]
        counts = _wide_enough(counts, experts, notes, source)
        return make_counts(source, counts[None], range(len(counts)), notes=notes)
    order: dict[int, list[int]] = {}
    for layer, expert in table.tolist():
        order.setdefault(layer, []).append(expert)
    ranked = {layer: tuple(order[layer]) for layer in sorted(order)}
    width = experts if experts is not None else int(table[:, 1].max()) + 1
    whole = all(len(row) == width for row in ranked.values())
    notes = [coverage(ranked), "the file ranks over all layers; kept is each layer's own order"]
    return Ranking(ranked, complete=whole, notes=tuple(notes))


def write_pin(rows: Sequence[tuple[int, int]], counts: Sequence[int] | None = None) -> bytes:
    """The profile of rows (absolute layer, expert), hottest first, with counts where given.

    Raises FormatError for an expert twice, or counts that rise or are fewer than the rows.
    """
    if len(set(rows)) != len(rows):
        raise FormatError("map", "rows", "an expert twice", "each expert once")
    if counts is None:
        return "".join(f"{layer},{expert}\n" for layer, expert in rows).encode()
    if len(counts) != len(rows) or any(b > a for a, b in pairwise(counts)):
        raise FormatError("map", "counts", "other counts", "one a row, hottest first")
    pairs = zip(rows, counts, strict=True)
    return "".join(f"{layer},{expert},{n}\n" for (layer, expert), n in pairs).encode()


def write_pin_counts(counts: Counts) -> bytes:
    """All experts by decode count; ties by layer, then id; the never selected last, with 0."""
    summed = counts.decode.sum(axis=0)
    rows = [
        (-int(summed[index, expert]), layer, expert)
        for index, layer in enumerate(counts.layout.layer_ids)
        for expert in range(counts.layout.experts[index])
    ]
    rows.sort()
    return write_pin([row[1:] for row in rows], [-row[0] for row in rows])


def write_pin_map(rows: RowMap) -> bytes:
    """The hot rows of a map in its order over all layers, else rank by rank through the layers."""
    hot = {layer: rows.layers[str(layer)].hot for layer in rows.geometry.moe_layers}
    if rows.order is not None:
        return write_pin(rows.order[: sum(map(len, hot.values()))])
    longest = max(map(len, hot.values()))
    turns = [(n, layer) for n in range(longest) for layer in hot if n < len(hot[layer])]
    return write_pin([(layer, hot[layer][n]) for n, layer in turns])
