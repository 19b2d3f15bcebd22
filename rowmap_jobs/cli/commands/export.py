"""`rowmap export`: a census or row map in another system's format."""

from __future__ import annotations

import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options, units
from ..command import Command, UsageError
from ..console import Console

if typing.TYPE_CHECKING:
    from ...exchange.adapters import Export
    from ...exchange.registry import Format

FOLDERS = ("vllm-routed-experts", "trtllm-statistics")
"""Formats that are folders of files."""

TEXT = """\
Write a census or a row map in a format of rowmap formats. Formats with slots
(SGLang, TensorRT-LLM, vllm-ascend, vLLM's proposals) place the experts of a
census over --ranks by its decode load; --slots beyond the experts hold
replicas. A note says what of a census a format has no place for, and what a
format of single rows makes up."""

USAGE = "FORMAT INPUT -o FILE [--ranks N] [options]"

EXAMPLES = """\
  rowmap export recipe-map rowmap.json -o expert_map.json
  rowmap export llamacpp-pin rowmap.json -o pin.csv
  rowmap export trtllm agent.npz --ranks 32 --slots 288 -o eplb.yaml
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("format", metavar="FORMAT", help="a name of rowmap formats")
    parser.add_argument("input", type=Path, metavar="INPUT", help="census or row map")
    options.output(parser, "the file (or folder)")
    group = parser.add_argument_group("formats with slots")
    group.add_argument("--ranks", type=units.positive, metavar="N", help="devices")
    group.add_argument(
        "--slots", type=units.positive, metavar="N", help="slots a layer (default: the experts)"
    )
    group.add_argument(
        "--hidden-layers",
        type=units.positive,
        metavar="N",
        help="layers of the model, dense ones included (default: up to its last MoE layer)",
    )


def run(args: Namespace, console: Console) -> int:
    from ...exchange import registry
    from .. import output

    entry = registry.FORMATS.get(args.format)
    if entry is not None and entry.only_read:
        raise UsageError(f"export: {entry.name} is only read: {entry.only_read}")
    if entry is None:
        known = ", ".join(registry.writable())
        raise UsageError(f"export: FORMAT: found {args.format!r}, expected one of {known}")
    folder = args.format in FOLDERS
    if not folder:
        output.check_free(args.output, args.force)
    with console.progress(2) as progress:
        progress.step(f"reading {args.input}")
        data = _export(args, entry)
        progress.step(f"writing {args.output}")
        with output.staged(args.output, args.force, folder) as path:
            _write(path, args, data)
    if data.counts is not None and data.slots is None and entry.loses:
        made_up = f"; {entry.made_up}" if entry.made_up else ""
        lost = " and ".join(entry.loses)
        console.note(f"{args.output}: {args.format} has no place for {lost}{made_up}")
    console.say(f"{args.output}: {args.format}, {entry.line}")
    return command.OK


def _write(path: Path, args: Namespace, data: Export) -> None:
    """Refusals of a writer are of the input: a format cannot say what is in it."""
    from ...exchange import registry
    from ...formats.base import FormatError

    try:
        registry.write(path, args.format, data)
    except FormatError as error:
        expected = f"{error.expected} (in {args.format})"
        raise FormatError(str(args.input), error.place, error.found, expected) from None


def _export(args: Namespace, entry: Format) -> Export:
    from ...exchange import slots
    from ...exchange.adapters import Export
    from ...exchange.census_io import from_census
    from ...exchange.convert import from_map
    from ...formats.base import FormatError
    from .. import inputs

    kind, form = inputs.kind_of(args.input)
    if kind in ("map", "census"):
        _check(args, entry, kind)
    if kind == "map":
        rows = inputs.row_map(args.input)
        layers = rows.geometry.moe_layers
        return Export(
            ranking=from_map(rows),
            rows=rows,
            ranks=args.ranks,
            hidden_layers=args.hidden_layers or layers[-1] + 1,
            layers=layers,
        )
    if kind != "census":
        raise FormatError(str(args.input), "file", form or kind, "a census or row map of ours")
    counts = from_census(inputs.census(args.input).census)
    placed = None
    if args.ranks is not None:
        try:
            placed = slots.balanced(counts, args.ranks, args.slots)
        except FormatError as error:
            raise UsageError(f"export: {error}") from None
    layers = counts.layout.layer_ids
    hidden = args.hidden_layers or layers[-1] + 1
    return Export(counts, None, None, placed, args.ranks, hidden, layers)


def _check(args: Namespace, entry: Format, kind: str) -> None:
    """Refuse an input of the other kind, and slots without devices. Raises UsageError."""
    wanted = {"map": "a row map", "counts": "a census", "slots": "a census"}.get(entry.holds)
    given = "a row map" if kind == "map" else "a census"
    if wanted is not None and given != wanted:
        found = f"found {given} in {args.input}, expected {wanted}"
        raise UsageError(f"export: {entry.name}: {found} (it holds {entry.holds})")
    if entry.holds == "slots" and args.ranks is None:
        raise UsageError(f"export: {entry.name}: found no --ranks, expected the number of devices")


COMMAND = Command(
    "export",
    "write a census or map for another system",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
