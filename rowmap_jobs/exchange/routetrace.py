"""BigMoeOnEdge: the route trace CSV (docs, `--route-trace`; written by route_trace.cpp).

`# route_trace v1`, `# model=... n_layer= n_expert= n_expert_used=`, a line of column names, then a
row for every selection: turn, phase (0 prefill, 1 decode), step (context position), layer, slot,
expert, weight, residency, expert_bytes[, dropped]. Columns go by their names, and a reader may not
count on those behind `expert`. A turn is one generation and becomes one sequence. The last layer
routes only the last token of a prompt, so its prefill rows are fewer than those of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..formats.base import FormatError
from .base import I64, Counts, Layout
from .streams import replacing, unpacked
from .synthetic import deal, rows_and_top_k
from .tables import MAX_CELLS, MAX_EXPERTS, make_counts

MAGIC = b"# route_trace v"
MAX_ROWS = 1 << 23
"""Selections of one file: 20 times the longest published trace."""
MAX_TURNS = 1 << 12
MAX_LINE = 4096
_NEEDED = ("turn", "phase", "step", "layer", "slot", "expert")
_MADE_UP = "made from counts: which experts share a step, their slots and the order are made up"
_INTEGER = re.compile(rb"-?[0-9]{1,10}")


def read(path: Path, source: str) -> Counts:
    """Counts of each turn; prefill is left out where its layers have unequal rows (see above).

    Raises FormatError: another version, a column missing, a value that is no integer, ids beyond
    n_expert, a cell (turn, phase, step, layer) without n_expert_used distinct experts, layers
    with unequal decode rows, a file that ends inside a line.
    """
    rows = _lines(path, source)
    experts, top_k, columns = _preamble(rows, source)
    table = _table(rows, columns, source)
    if table[:, 0].min() < 0 or table[:, 3].min() < 0 or table[:, 3].max() > 4095:
        raise FormatError(source, "turn or layer", "a number out of range", "turns and layers")
    if table[:, 2].min() < 0 or not np.isin(table[:, 1], (0, 1)).all():
        raise FormatError(source, "phase or step", "a number out of range", "0 or 1; from 0")
    if table[:, 5].min() < 0 or table[:, 5].max() >= experts:
        found = f"{int(table[:, 5].min())} to {int(table[:, 5].max())}"
        raise FormatError(source, "expert", found, f"0 to {experts - 1} (n_expert)")
    _check_cells(table, top_k, source)
    return _counts(table, experts, top_k, source)


def _lines(path: Path, source: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    with unpacked(path, source) as stream:
        while True:
            line = stream.readline(MAX_LINE + 1)
            if not line:
                return
            number += 1
            if not line.endswith(b"\n"):
                what = "too long a line" if len(line) > MAX_LINE else "an end without a newline"
                raise FormatError(source, f"line {number}", what, "whole lines: half-written?")
            yield number, line.rstrip(b"\r\n")


def _preamble(rows: Iterator[tuple[int, bytes]], source: str) -> tuple[int, int, list[int]]:
    """n_expert, n_expert_used, and the places of the needed columns."""
    facts: dict[str, int] = {}
    for number, line in rows:
        if number == 1 and line != MAGIC + b"1":
            shown = line[:40].decode("latin-1")
            raise FormatError(source, "line 1", shown, "# route_trace v1")
        if not line.startswith(b"#"):
            names = line.decode("latin-1").split(",")
            lacking = [name for name in _NEEDED if names.count(name) != 1]
            if lacking or len(names) > 64:
                raise FormatError(source, f"line {number}", f"no column {lacking}", str(_NEEDED))
            if set(facts) != {"n_expert", "n_expert_used"}:
                raise FormatError(source, "preamble", sorted(facts), "n_expert and n_expert_used")
            if not 1 <= facts["n_expert_used"] <= facts["n_expert"] <= MAX_EXPERTS:
                raise FormatError(source, "preamble", f"{facts}", "a top-k within the experts")
            return facts["n_expert"], facts["n_expert_used"], [names.index(n) for n in _NEEDED]
        for key, value in re.findall(
            r"\b(n_expert|n_expert_used)=(\d{1,6})\b", line.decode("latin-1")
        ):
            facts[key] = int(value)
        if number > MAX_EXPERTS:
            break
    raise FormatError(source, "text", "no line of column names", f"{_NEEDED}")


def _table(rows: Iterator[tuple[int, bytes]], columns: list[int], source: str) -> I64:
    flat: list[int] = []
    parts: list[I64] = []
    for count, (number, line) in enumerate(rows, 1):
        if count > MAX_ROWS:
            raise FormatError(source, f"line {number}", f"more than {MAX_ROWS} rows", "fewer")
        fields = line.split(b",")
        try:
            values = [fields[at] for at in columns]
        except IndexError:
            values = [b""]
        if not all(map(_INTEGER.fullmatch, values)):
            shown = line[:40].decode("latin-1")
            raise FormatError(source, f"line {number}", shown, f"integers for {_NEEDED}")
        flat.extend(map(int, values))
        if len(flat) >= 6 << 16:
            parts.append(np.array(flat, dtype=np.int64).reshape(-1, 6))
            flat = []
    parts.append(np.array(flat, dtype=np.int64).reshape(-1, 6))
    table = np.concatenate(parts)
    if not len(table):
        raise FormatError(source, "text", "no row", "rows of selections")
    return table


def _check_cells(table: I64, top_k: int, source: str) -> None:
    """Every (turn, phase, step, layer) has n_expert_used rows of distinct experts."""
    table = table[np.lexsort((table[:, 5], table[:, 3], table[:, 2], table[:, 1], table[:, 0]))]
    same = (table[1:, :4] == table[:-1, :4]).all(axis=1)
    twice = same & (table[1:, 5] == table[:-1, 5])
    starts = np.flatnonzero(np.concatenate(([True], ~same)))
    sizes = np.diff(np.append(starts, len(table)))
    if twice.any() or (sizes != top_k).any():
        at = int(twice.argmax()) if twice.any() else int(starts[(sizes != top_k).argmax()])
        turn, phase, step, layer = table[at, :4].tolist()
        found = "an expert twice" if twice.any() else f"{int(sizes[sizes != top_k][0])} experts"
        place = f"turn {turn} phase {phase} step {step} layer {layer}"
        raise FormatError(source, place, found, f"{top_k} distinct experts (n_expert_used)")


def _counts(table: I64, experts: int, top_k: int, source: str) -> Counts:
    turns, turn_at = np.unique(table[:, 0], return_inverse=True)
    layers, layer_at = np.unique(table[:, 3], return_inverse=True)
    shape = (len(turns), len(layers), experts)
    if len(turns) > MAX_TURNS or shape[0] * shape[1] * shape[2] > MAX_CELLS:
        found = f"{shape[0]} turns x {shape[1]} layers x {shape[2]} experts"
        raise FormatError(source, "turns", found, f"at most {MAX_TURNS} turns, {MAX_CELLS} cells")
    both = np.zeros((2, *shape), dtype=np.int64)
    np.add.at(both, (table[:, 1], turn_at, layer_at, table[:, 5]), 1)
    sums = both.sum(axis=3) // top_k
    uneven = np.argwhere(sums[1] != sums[1][:, :1])
    if uneven.size:
        turn, at = (int(v) for v in uneven[0])
        place = f"turn {int(turns[turn])} layer {int(layers[at])}"
        found = f"{int(sums[1][turn, at])} decode rows"
        expected = f"{int(sums[1][turn, 0])} as layer {int(layers[0])}"
        raise FormatError(source, place, found, expected)
    whole = bool((sums[0] == sums[0][:, :1]).all())
    notes = [] if whole else ["prefill left out: its last layer routed the last token alone"]
    rows = np.stack([sums[0][:, 0] if whole else np.zeros_like(turns), sums[1][:, 0]], axis=1)
    return make_counts(
        source,
        both[1],
        layers.tolist(),
        prefill=both[0] if whole else None,
        rows=rows,
        top_k=top_k,
        names=[f"turn {turn}" for turn in turns.tolist()],
        per_sequence=True,
        notes=[*notes, "selections that cache-aware dropping discarded are counted as chosen"],
    )


def write(counts: Counts, path: Path, hidden_layers: int) -> None:
    """A trace with these counts, a turn for each sequence; which experts share a step is made up.

    Counts, rows and phases are held, names are not. weight, residency and expert_bytes were never
    measured and are left out: a reader by column names (so the format wants it) gets the counts,
    and scripts that size a cache by the order of steps pass such rows over. Raises FormatError:
    no rows or top-k, layers that differ in either or in experts, more than `read` takes.
    """
    source = str(path)
    rows, each = rows_and_top_k(counts, source)
    layout = counts.layout
    for place, values in (("experts", layout.experts), ("top-k", each)):
        if len(set(values)) != 1:
            raise FormatError(source, place, sorted(set(values)), "one number for all layers")
    _check_size(counts, rows, each[0], source)
    facts = f"n_layer={hidden_layers} n_expert={layout.experts[0]} n_expert_used={each[0]}"
    with replacing(path) as out:
        out.write(MAGIC + f"1\n# model=? arch=? {facts}\n# {_MADE_UP}\n".encode())
        out.write(",".join(_NEEDED).encode() + b"\n")
        for turn, (before, after) in enumerate(rows.tolist()):
            if counts.prefill is not None:
                out.writelines(_steps(counts.layout, counts.prefill[turn], turn, 0, 0, before))
            out.writelines(_steps(counts.layout, counts.decode[turn], turn, 1, before, after))


def _check_size(counts: Counts, rows: I64, top_k: int, source: str) -> None:
    empty = np.flatnonzero(rows.sum(axis=1) == 0)
    if empty.size:
        raise FormatError(source, f"sequence {int(empty[0])}", "no rows", "one row at least")
    selections = int(rows.sum()) * top_k * len(counts.layout.layer_ids)
    turns = len(rows)
    if selections > MAX_ROWS or turns > MAX_TURNS or counts.decode.size > MAX_CELLS:
        found = f"{selections} selections in {turns} sequences"
        raise FormatError(source, "rows", found, f"at most {MAX_ROWS} in {MAX_TURNS}: a line each")


def _steps(
    layout: Layout, table: I64, turn: int, phase: int, first: int, rows: int
) -> Iterator[bytes]:
    """The lines of one turn and phase, step by step, from context position `first`."""
    k = (layout.top_k or (1,))[0]
    layers = layout.layer_ids
    dealt = [deal(table[at], rows, k, layer) for at, layer in enumerate(layers)]
    places = [f",{layer},{slot}," for layer in layers for slot in range(k)]
    for step, ids in enumerate(np.concatenate(dealt, axis=1), first):
        cells = zip(places, ids.tolist(), strict=True)
        yield "".join(f"{turn},{phase},{step}{place}{expert}\n" for place, expert in cells).encode()
