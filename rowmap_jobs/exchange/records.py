"""Routing as JSON lines (plain or gzip): b12x's trace, and a plain form for everyone else.

b12x (docs/expert-residency.md, b12x/moe/fused_moe/residency.py `profiles_from_trace`): a line is
`{"layer": "layer.7", "phase": "decode", "expert_ids": [17, 3, 17, -1]}`, the ids of one call one
after the other; -1 is an unused place. A JSON file beside it maps layer names to numbers of
experts. Rows and top-k are not in it: with top-k given, each k ids are a row of distinct ids or
of -1 alone, and rows are counted.

Plain: a line is `{"layer": 3, "experts": [17, 3]}`, one row (token) of one layer, or
`"experts": [[17, 3], [5, 9]]`, several. `layer` is the absolute id, a row has k distinct ids.
Optional: `"phase"`, "decode" unless it is "prefill"; `"sequence"`, text or a number that names the
sequence (a request, say): lines of one sequence need not stand together, lines without one belong
together. In each sequence and phase every layer must have the same number of rows.

In both forms other keys are not read. The numbers of experts are those of the geometry.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from ..formats.base import FormatError, canonical_json, load_json
from ..formats.census import MAX_TRANSCRIPTS, MAX_UNPACKED
from .base import I64, Counts, Layout
from .layers import MAX_LAYER, layer_id
from .streams import json_file, lines, replacing
from .synthetic import deal, rows_and_top_k
from .tables import MAX_EXPERTS, make_counts

PHASES = ("prefill", "decode")
MAX_NAME = 256
_PENDING = 1 << 18
"""Ids that wait to be counted together: some 10 MB as Python integers."""
_ROWS_A_LINE = 256
_MOST_IDS = 1 << 28


def read_geometry(path: Path) -> dict[int, int]:
    """`{absolute layer id: experts}` of a JSON file `{"layer.7": 384, ...}`. Raises FormatError."""
    source = str(path)
    data = json_file(path, source)
    if not isinstance(data, dict) or not data:
        raise FormatError(source, "top level", type(data).__name__, "experts by layer name")
    out: dict[int, int] = {}
    for name, experts in data.items():
        layer = layer_id(name)
        if layer is None or layer in out:
            found = name if layer is None else f"layer {layer} twice"
            raise FormatError(source, "top level", found, "each layer by its number, as layer.7")
        if type(experts) is not int or not 1 <= experts <= MAX_EXPERTS:
            raise FormatError(source, name, experts, f"1 to {MAX_EXPERTS} experts")
        out[layer] = experts
    return dict(sorted(out.items()))


def write_geometry(layout: Layout, path: Path) -> None:
    """The geometry file of a layout, in b12x's names."""
    each = zip(layout.layer_ids, layout.experts, strict=True)
    with replacing(path) as out:
        out.write(canonical_json({f"layer.{layer}": experts for layer, experts in each}))


def read(path: Path, geometry: Mapping[int, int], top_k: int | None = None) -> Counts:
    """Counts of a file of either form (its first line says which).

    `geometry` is `{absolute layer id: experts}`. Raises FormatError naming the line.
    """
    source = str(path)
    if not geometry or len(geometry) > MAX_LAYER + 1:
        raise FormatError(source, "geometry", f"{len(geometry)} layers", "a layer at least")
    if top_k is not None and not 1 <= top_k <= min(geometry.values()):
        raise FormatError(source, "top-k", top_k, f"1 to {min(geometry.values())}")
    taken = _Taken(source, geometry)
    b12x: bool | None = None
    for number, line in lines(path, source):
        place = f"line {number}"
        data = load_json(line, f"{source} {place}")
        if not isinstance(data, dict):
            raise FormatError(source, place, type(data).__name__, "a JSON object")
        here = "expert_ids" in data
        if here == ("experts" in data) or b12x not in (None, here):
            expected = "expert_ids or experts, the same one in every line"
            raise FormatError(source, place, sorted(data)[:6], expected)
        b12x = here
        if b12x:
            _b12x_line(data, top_k, taken, place)
        else:
            _plain_line(data, top_k, taken, place)
    return taken.sums(top_k) if b12x else taken.sequences()


def _b12x_line(data: Mapping[str, object], top_k: int | None, taken: _Taken, place: str) -> None:
    source = taken.source
    name = data.get("layer")
    layer = layer_id(name) if isinstance(name, str) else name
    index = taken.layer(layer, place)
    phase = _phase(data.get("phase"), source, place)
    ids = _integers(data["expert_ids"], source, place)
    taken.in_range(ids, index, place, lowest=-1)
    if top_k is None:
        taken.add(0, phase, index, [expert for expert in ids if expert >= 0], 0)
        return
    if len(ids) % top_k:
        raise FormatError(source, place, f"{len(ids)} ids", f"rows of {top_k}")
    rows = [ids[at : at + top_k] for at in range(0, len(ids), top_k)]
    rows = [row for row in rows if max(row) >= 0]
    for row in rows:
        _distinct(row, source, place)
    taken.add(0, phase, index, [expert for row in rows for expert in row], len(rows))


def _plain_line(data: Mapping[str, object], top_k: int | None, taken: _Taken, place: str) -> None:
    source = taken.source
    index = taken.layer(data.get("layer"), place)
    phase = _phase(data.get("phase", "decode"), source, place)
    given = data["experts"]
    several = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    rows = [_integers(row, source, place) for row in (given if several else [given])]  # type: ignore[attr-defined]
    for row in rows:
        taken.in_range(row, index, place, lowest=0)
        _distinct(row, source, place)
        taken.check_top_k(index, len(row), top_k, place)
    sequence = taken.sequence(data.get("sequence", ""), place)
    taken.add(sequence, phase, index, [expert for row in rows for expert in row], len(rows))


def _phase(value: object, source: str, place: str) -> int:
    if value not in PHASES:
        raise FormatError(source, f"{place} phase", value, "prefill or decode")
    return PHASES.index(str(value))


def _integers(value: object, source: str, place: str) -> list[int]:
    # bool is a kind of int for isinstance, and True would be expert 1.
    if not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        raise FormatError(source, place, "no list of integers", "a list of expert ids")
    return value


def _distinct(row: list[int], source: str, place: str) -> None:
    if len(set(row)) != len(row) or min(row) < 0:
        expected = f"{len(row)} distinct ids (a duplicate is a placeholder)"
        raise FormatError(source, place, f"ids {row}", expected)


class _Taken:
    """Counts so far: int64[T,2,L,E], rows int64[T,2,L]; T grows in place."""

    def __init__(self, source: str, geometry: Mapping[int, int]) -> None:
        self.source = source
        self.ids = tuple(sorted(geometry))
        self.experts = tuple(geometry[layer] for layer in self.ids)
        self._index = {layer: index for index, layer in enumerate(self.ids)}
        self._names: dict[str, int] = {}
        self._top_k: list[int | None] = [None] * len(self.ids)
        self._table = np.zeros((1, 2, len(self.ids), max(self.experts)), dtype=np.int64)
        self._rows = np.zeros((1, 2, len(self.ids)), dtype=np.int64)
        self._pending: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._waiting = 0

    def layer(self, layer: object, place: str) -> int:
        index = self._index.get(layer) if type(layer) is int else None
        if index is None:
            expected = f"one of the {len(self.ids)} layers of the geometry"
            raise FormatError(self.source, f"{place} layer", layer, expected)
        return index

    def in_range(self, ids: Sequence[int], index: int, place: str, lowest: int) -> None:
        for expert in (min(ids), max(ids)):
            if not lowest <= expert < self.experts[index]:
                expected = f"{lowest} to {self.experts[index] - 1} in layer {self.ids[index]}"
                raise FormatError(self.source, place, f"expert {expert}", expected)

    def check_top_k(self, index: int, k: int, given: int | None, place: str) -> None:
        expected = given or self._top_k[index] or k
        if k != expected:
            where = f"layer {self.ids[index]}"
            raise FormatError(self.source, place, f"{k} ids", f"{expected} a row in {where}")
        self._top_k[index] = k

    def sequence(self, value: object, place: str) -> int:
        """The place of a sequence by its name."""
        if type(value) not in (str, int) or len(str(value)) > MAX_NAME:
            expected = f"a number or at most {MAX_NAME} characters"
            raise FormatError(self.source, f"{place} sequence", type(value).__name__, expected)
        at = self._names.setdefault(str(value), len(self._names))
        if at >= len(self._table):
            self._grow(at + 1)
        return at

    def _grow(self, count: int) -> None:
        size = count * self._table[:1].nbytes
        if count > MAX_TRANSCRIPTS or size > MAX_UNPACKED:
            found = f"{count} sequences, {size} bytes of counts"
            expected = f"at most {MAX_TRANSCRIPTS} and {MAX_UNPACKED}"
            raise FormatError(self.source, "sequences", found, expected)
        wanted = max(count, len(self._table) * 5 // 4)
        self._table.resize((wanted, *self._table.shape[1:]), refcheck=False)
        self._rows.resize((wanted, *self._rows.shape[1:]), refcheck=False)

    def add(self, sequence: int, phase: int, index: int, ids: list[int], rows: int) -> None:
        self._pending[sequence, phase, index] += ids
        self._rows[sequence, phase, index] += rows
        self._waiting += len(ids)
        if self._waiting > _PENDING:
            self._flush()

    def _flush(self) -> None:
        for (sequence, phase, index), ids in self._pending.items():
            found = np.bincount(np.array(ids, dtype=np.int64), minlength=self._table.shape[3])
            self._table[sequence, phase, index] += found
        self._pending.clear()
        self._waiting = 0

    def sums(self, top_k: int | None) -> Counts:
        """One sequence: what a trace without sequences holds."""
        self._flush()
        decode, prefill = self._table[:, 1], self._table[:, 0]
        if top_k is None:
            made = make_counts(self.source, decode, self.ids, prefill=prefill, names=["all"])
            experts = dict(zip(self.ids, self.experts, strict=True))
            kept = made.layout.layer_ids
            return replace(made, layout=Layout(kept, tuple(experts[layer] for layer in kept), None))
        self._top_k = [top_k] * len(self.ids)
        return self._made(("all",), False)

    def sequences(self) -> Counts:
        self._flush()
        if list(self._names) == [""]:
            return self._made(("all",), False)
        return self._made(tuple(self._names), True)

    def _made(self, names: tuple[str, ...], per_sequence: bool) -> Counts:
        if not names or not self._rows.any():
            raise FormatError(self.source, "lines", "none", "a line of routing at least")
        rows = self._rows[: len(names)]
        uneven = np.argwhere(rows != rows[:, :, :1])
        if uneven.size:
            t, phase, index = (int(i) for i in uneven[0])
            place = f"{PHASES[phase]}[{names[t]!r},layer {self.ids[index]}]"
            found = f"{int(rows[t, phase, index])} rows"
            expected = f"{int(rows[t, phase, 0])} as in layer {self.ids[0]}"
            raise FormatError(self.source, place, found, expected)
        return Counts(
            layout=Layout(self.ids, self.experts, tuple(k or 1 for k in self._top_k)),
            decode=self._table[: len(names), 1],
            prefill=self._table[: len(names), 0],
            rows=rows[:, :, 0].copy(),
            names=names,
            per_sequence=per_sequence,
        )


def write(counts: Counts, path: Path, form: Literal["plain", "b12x"] = "plain") -> None:
    """Lines of routing with these counts; which ids stand in one row is made up.

    Plain holds sequences, phases, rows and top-k, and needs rows and top-k. b12x holds the sums of
    each phase; `write_geometry` makes the file beside it. Raises FormatError.
    """
    source = str(path)
    with replacing(path) as out:
        for record in _plain(counts, source) if form == "plain" else _b12x(counts, source):
            out.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")


def _tables(counts: Counts) -> list[tuple[str, int, I64]]:
    prefill = [] if counts.prefill is None else [("prefill", 0, counts.prefill)]
    return [*prefill, ("decode", 1, counts.decode)]


def _plain(counts: Counts, source: str) -> Iterator[dict[str, object]]:
    rows, top_k = rows_and_top_k(counts, source)
    for t, name in enumerate(counts.names):
        for phase, at, table in _tables(counts):
            for index, layer in enumerate(counts.layout.layer_ids):
                dealt = deal(table[t, index], int(rows[t, at]), top_k[index], layer)
                for start in range(0, len(dealt), _ROWS_A_LINE):
                    experts = dealt[start : start + _ROWS_A_LINE].tolist()
                    record = {"layer": layer, "phase": phase, "experts": experts}
                    yield {"sequence": name, **record} if counts.per_sequence else record


def _b12x(counts: Counts, source: str) -> Iterator[dict[str, object]]:
    known = counts.rows is not None and counts.layout.top_k is not None
    rows = rows_and_top_k(counts, source)[0].sum(axis=0) if known else None
    for phase, at, table in _tables(counts):
        for index, layer in enumerate(counts.layout.layer_ids):
            sums = table[:, index].sum(axis=0)
            if int(sums.sum()) > _MOST_IDS:
                found = f"{int(sums.sum())} selections in layer {layer}"
                raise FormatError(source, phase, found, f"at most {_MOST_IDS}: a line has ids")
            if rows is None:
                ids = np.repeat(np.arange(len(sums)), sums)
                step = 4096
            else:
                k = (counts.layout.top_k or (1,))[index]
                dealt = deal(sums, int(rows[at]), k, layer)
                ids, step = dealt.reshape(-1), _ROWS_A_LINE * k
            for start in range(0, len(ids), step):
                part = ids[start : start + step].tolist()
                yield {"layer": f"layer.{layer}", "phase": phase, "expert_ids": part}
