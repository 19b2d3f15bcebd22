"""vLLM's routed experts (`--enable-return-routed-experts`): ids of each token, layer and choice.

A response's `choices[].routed_experts` is base64 of a .npy array [tokens - 1, hidden layers, k],
uint8 up to 256 experts and uint16 above (vllm/model_executor/layers/fused_moe/
routed_experts_capturer.py, vllm/utils/serial_utils.py): row i is what token i of the sequence
chose, the last generated token was never fed, and dense layers are zero. Rows before
`usage.prompt_tokens` are prefill, the others decode; with `routed_experts_prompt_start` in the
request the array begins at that token. Read are

- a JSONL file (or .jsonl.gz) of responses, bare or as `{"request", "response"}`;
- a .npy file (or .npy.gz, or several arrays one after the other in one file) or a .npz of them;
- a folder of such .npy, .npy.gz and .npz files, in the order of their names.

Beside `x.npy`, `x.npy.gz` or `x.npz` a sidecar `x.json` says where decode begins: a response or
`{"prompt_tokens": n, "completion_tokens": m}`, or a list of them, one for each array.
"""

from __future__ import annotations

import binascii
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..census import routing
from ..formats.base import FormatError, canonical_json, load_json
from ..formats.census import MAX_TRANSCRIPTS
from . import npz
from .base import I64, Counts, Layout
from .collect import Collector
from .npz import Header
from .streams import json_file, lines, replacing, unpacked
from .synthetic import deal, rows_and_top_k
from .usage import Usage, response_of, split, usage_of

SUFFIXES = (".npy.gz", ".npy", ".npz")
LINE_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
_CHUNK = 8 << 20
"""Bytes of ids that are counted at a time; the check for repeated rows sees them together."""


@dataclass(frozen=True)
class Options:
    """What the caller brings.

    `layout` is the model's (its top_k is checked where given); without it `experts` is needed, and
    layers that are zero throughout are dense. `prompt_tokens` stands in for missing sidecars.
    `decode_only` leaves prompt rows unread: for engines that have none for cached prompts.
    `touched` are the step sizes for which distinct experts are counted in decode.
    """

    layout: Layout | None = None
    experts: int | None = None
    prompt_tokens: int | None = None
    decode_only: bool = False
    touched: tuple[int, ...] = ()


def read(path: Path, options: Options) -> Counts:
    """Counts of a file or folder as above, one sequence for each array.

    Memory is bounded by the counts. Raises FormatError naming file and place.
    """
    source = str(path)
    if options.layout is None and options.experts is None:
        raise FormatError(source, "experts", "neither", "the model's layout or number of experts")
    taken = _Taken(source, options)
    if path.is_dir():
        names = _listed(path, source)
        taken.expected = len(names)
        for name in names:
            _read_arrays(path / name, f"{source}/{name}", name, taken)
    elif path.name.endswith(LINE_SUFFIXES):
        _read_lines(path, source, taken)
    else:
        _read_arrays(path, source, path.name, taken)
    return taken.counts()


def _listed(folder: Path, source: str) -> list[str]:
    """Names of the arrays in a folder; links are refused, they may lead out of it."""
    names = []
    for entry in folder.iterdir():
        if entry.name.startswith(".") or not entry.name.endswith(SUFFIXES):
            continue
        if entry.is_symlink() or not entry.is_file():
            raise FormatError(source, entry.name, "a link or no file", "a regular file")
        names.append(entry.name)
        if len(names) > MAX_TRANSCRIPTS:
            raise FormatError(source, "files", f"more than {MAX_TRANSCRIPTS}", "fewer files")
    if not names:
        raise FormatError(source, "files", "none", f"files named {', '.join(SUFFIXES)}")
    return sorted(names)


def _read_arrays(path: Path, source: str, name: str, taken: _Taken) -> None:
    usages = _sidecar(path, source)
    count = 0
    for number, (label, stream) in enumerate(_streams(path, source)):
        place = label or f"array {number}"
        header = npz.read_header(stream, source, place)
        if header is None:
            break
        usage = taken.options.prompt_tokens
        given = Usage(usage) if usage is not None else None
        if usages is not None:
            if number >= len(usages):
                found = f"{len(usages)} entries"
                raise FormatError(
                    source, "sidecar", found, f"one for each array ({place} has none)"
                )
            given = usages[number]
        if given is None:
            expected = f"{_stem(path)}.json with prompt_tokens, or prompt_tokens given"
            raise FormatError(source, "prompt_tokens", "none", expected)
        sequence = f"{name}/{label}" if label else f"{name}#{number}" if number else name
        taken.add(stream, header, given, source, place, sequence)
        if label:
            npz.ended(stream, source, place)
        count = number + 1
    if count == 0:
        raise FormatError(source, "arrays", "none", "a .npy array")
    if usages is not None and len(usages) != count:
        found = f"{len(usages)} entries for {count} arrays"
        raise FormatError(source, "sidecar", found, "one entry for each array")


def _streams(path: Path, source: str) -> Iterator[tuple[str, BinaryIO]]:
    """Streams at the beginning of an array: members of a .npz, or one file again and again."""
    if path.name.endswith(".npz"):
        # Counts bound the memory, arrays are read in pieces: so the file may unpack to any size.
        with npz.archive(path, source, limit=1 << 62) as archive:
            for name in archive.names:
                with archive.open(name) as stream:
                    yield name, stream
        return
    with unpacked(path, source) as stream:
        while True:
            yield "", stream


def _stem(path: Path) -> str:
    return next(path.name.removesuffix(end) for end in SUFFIXES if path.name.endswith(end))


def _sidecar(path: Path, source: str) -> list[Usage] | None:
    if not path.name.endswith(SUFFIXES):
        raise FormatError(source, "name", path.name, f"a name that ends in {', '.join(SUFFIXES)}")
    beside = path.parent / f"{_stem(path)}.json"
    if not beside.exists():
        return None
    place = str(beside)
    data = json_file(beside, place)
    return [usage_of(item, place) for item in (data if isinstance(data, list) else [data])]


def _read_lines(path: Path, source: str, taken: _Taken) -> None:
    without = 0
    for number, line in lines(path, source):
        place = f"line {number}"
        data = load_json(line, f"{source} {place}")
        request, response = response_of(data, source, place)
        choices = response.get("choices")
        if not isinstance(choices, list) or not choices:
            raise FormatError(source, place, "no choices", "a response with choices")
        for index, choice in enumerate(choices):
            text = choice.get("routed_experts") if isinstance(choice, dict) else 0
            if text is None:
                without += 1
                continue
            if not isinstance(text, str):
                found = f"choices[{index}] of another form"
                raise FormatError(source, place, found, "routed_experts as base64 text")
            usage = usage_of({**request, "usage": response.get("usage")}, f"{source} {place}")
            if len(choices) > 1:
                # usage adds up the choices.
                usage = Usage(usage.prompt, None, usage.start)
            name = response.get("id")
            name = name if isinstance(name, str) and name else place
            sequence = f"{name}#{index}" if len(choices) > 1 else name
            where = f"{place} choices[{index}]"
            taken.add_bytes(_decoded(text, source, where), usage, source, where, sequence)
    if without:
        taken.notes.append(f"{without} choices had no routed_experts (aborted): left out")


def _decoded(text: str, source: str, place: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise FormatError(source, place, "damaged base64", "base64 of a .npy array") from None


class _Taken:
    """Counts of the sequences so far. Shape and dense layers are those of the first array."""

    def __init__(self, source: str, options: Options) -> None:
        self.source, self.options = source, options
        self.notes: list[str] = []
        self.padding = self.empty = 0
        self.expected = 1
        self._shape: tuple[int, ...] | None = None
        self._experts: list[int] = []
        self._dense: tuple[int, ...] | None = None
        self._layers: list[int] = []
        self._collected: Collector | None = None
        most = max(options.touched, default=0)
        self._steps = np.zeros(most, dtype=np.int64)
        self._touched: I64 | None = None

    def add_bytes(self, raw: bytes, usage: Usage, source: str, place: str, name: str) -> None:
        stream = io.BytesIO(raw)
        header = npz.read_header(stream, source, place)
        if header is None:
            raise FormatError(source, place, "no bytes", "a .npy array")
        self.add(stream, header, usage, source, place, name)
        npz.ended(stream, source, place)

    def add(
        self, stream: BinaryIO, header: Header, usage: Usage, source: str, place: str, name: str
    ) -> None:
        """Count one array whose header has been read."""
        prompt, decode = split(header, usage, source, place)
        self._agree(header, source, place)
        if self.options.decode_only:
            npz.skip(stream, header.nbytes // header.shape[0] * prompt, source, place)
            before, prompt_rows = None, 0
        else:
            parts = npz.rows(stream, header, prompt, source, place, _CHUNK)
            before, prompt_rows = self._count(parts, source, f"{place} prefill")
        parts = npz.rows(stream, header, decode, source, place, _CHUNK)
        after, decode_rows = self._count(parts, source, f"{place} decode", self.options.touched)
        if before is None and after is None:
            self.empty += 1
            return
        assert self._collected is not None  # noqa: S101  # made with the first counted row
        self._collected.append(name, before, after, (prompt_rows, decode_rows))

    def _agree(self, header: Header, source: str, place: str) -> None:
        if self._shape is None:
            self._shape = header.shape[1:]
            layout = self.options.layout
            if layout is None:
                self._experts = [self.options.experts or 0] * self._shape[0]
            else:
                self._settle(_dense_of(layout, self._shape, source, place), layout)
        if header.shape[1:] != self._shape:
            found = f"{list(header.shape[1:])} layers and ids"
            raise FormatError(source, place, found, f"{list(self._shape)} as in the array before")

    def _settle(self, dense: tuple[int, ...], layout: Layout) -> None:
        """From here on the layers of the counts are known."""
        layers = (self._shape or (0,))[0]
        each = dict(zip(layout.layer_ids, layout.experts, strict=True))
        self._experts = [each.get(layer, 1) for layer in range(layers)]
        self._dense, self._layers = dense, list(layout.layer_ids)
        self._collected = Collector(
            layout, self.source, not self.options.decode_only, self.expected
        )
        self._touched = np.zeros((len(self._steps), len(self._layers)), dtype=np.int64)

    def _count(
        self, parts: Iterable[npt.NDArray[Any]], source: str, place: str, sizes: Sequence[int] = ()
    ) -> tuple[I64 | None, int]:
        """Counts int64[L,E] of the MoE layers and rows without padding; None of no rows."""
        total: I64 | None = None
        rows = 0
        for part in parts:
            if self._dense is None:
                dense = routing.dense_layers(part, source, place)
                self._settle(dense, routing.layout(part, self._experts, dense))
            tally = routing.tally(part, self._experts, source, place, self._dense)
            counts = tally.counts[self._layers]
            total = counts if total is None else total + counts
            rows += tally.rows
            self.padding += tally.padding
            if sizes and self._touched is not None:
                steps, touched = routing.touched(part, sizes, self._dense or ())
                self._steps += steps
                self._touched += touched[:, self._layers]
        return total, rows

    def counts(self) -> Counts:
        """All of it. Raises FormatError when there is nothing."""
        if self._collected is None or not self._collected.names:
            raise FormatError(self.source, "routed_experts", "no rows", "routing of some sequence")
        notes = list(self.notes)
        if self.padding:
            notes.append(f"{self.padding} rows of padding (-1) were skipped")
        if self.empty:
            notes.append(f"{self.empty} sequences without decode rows were left out")
        if self._dense and self.options.layout is None:
            notes.append(f"layers {list(self._dense)} are zero throughout: taken for dense")
        made = self._collected.counts(tuple(notes))
        if self.options.touched:
            return replace(made, steps=self._steps, touched=self._touched)
        return made


def _dense_of(layout: Layout, shape: tuple[int, ...], source: str, place: str) -> tuple[int, ...]:
    """The layers of an array that the model's layout does not have."""
    layers, k = shape
    if layout.layer_ids[-1] >= layers:
        expected = f"layer {layout.layer_ids[-1]} of the model among them"
        raise FormatError(source, place, f"{layers} layers", expected)
    if layout.top_k is not None and set(layout.top_k) != {k}:
        expected = f"top-k {sorted(set(layout.top_k))}, the model's"
        raise FormatError(source, place, f"{k} ids a row", expected)
    return tuple(sorted(set(range(layers)) - set(layout.layer_ids)))


def write(counts: Counts, folder: Path) -> None:
    """One `NNNNN.npy` and sidecar a sequence, with routing made up to have these counts.

    The folder must be there. Which ids stand in one row, and the order of the rows, is made up:
    counts, rows, layers and phases are held, names are not. Raises FormatError for counts without
    rows or top-k, or with layers of different top-k.
    """
    source = str(folder)
    rows, top_k = rows_and_top_k(counts, source)
    if len(set(top_k)) != 1:
        raise FormatError(source, "top-k", sorted(set(top_k)), "one top-k for all layers")
    layout = counts.layout
    kind = np.uint8 if max(layout.experts) <= 256 else np.uint16
    for t, (before, after) in enumerate(rows.tolist()):
        if before + after == 0:
            raise FormatError(source, f"sequence {t}", "no rows", "one row at least")
        ids = np.zeros((before + after, layout.layer_ids[-1] + 1, top_k[0]), dtype=kind)
        for index, layer in enumerate(layout.layer_ids):
            if counts.prefill is not None:
                ids[:before, layer] = deal(counts.prefill[t, index], before, top_k[0], layer)
            ids[before:, layer] = deal(counts.decode[t, index], after, top_k[0], layer)
        with replacing(folder / f"{t:05}.npy") as out:
            np.lib.format.write_array(out, ids, allow_pickle=False)
        with replacing(folder / f"{t:05}.json") as out:
            out.write(canonical_json({"completion_tokens": after + 1, "prompt_tokens": before}))
