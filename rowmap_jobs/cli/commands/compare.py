"""`rowmap compare`: what moves from one map to another."""

from __future__ import annotations

import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options
from ..command import Command
from ..console import Console

if typing.TYPE_CHECKING:
    from ..text import Fact
    from ..work.compared import Compared

MOST_LAYERS = 5

TEXT = """\
Compare two row maps of one model: rows and bytes that a switch from A to B
moves, overlap and churn; with a census, the cold share of its traffic under
each. Exits with 0 when the same rows are hot, else with 1."""

USAGE = "MAP_A MAP_B [--census FILE] [--json]"

EXAMPLES = """\
  rowmap compare old.json new.json
  rowmap compare agent.json prose.json --census agent.npz --json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("a", type=Path, metavar="MAP_A", help="row map")
    parser.add_argument("b", type=Path, metavar="MAP_B", help="row map")
    parser.add_argument("--census", type=Path, metavar="FILE", help="census to judge both by")
    options.as_json(parser)


def run(args: Namespace, console: Console) -> int:
    from .. import inputs, text
    from ..work import compared, placed

    with console.progress(2) as progress:
        progress.step("reading")
        a, b = inputs.row_map(args.a), inputs.row_map(args.b)
        census = None
        if args.census is not None:
            census = inputs.census(args.census).census
            for path, rows in ((args.a, a), (args.b, b)):
                inputs.same_model(rows.fingerprint, census.header.fingerprint, path, args.census)
            with inputs.naming(args.census):
                placed.fitting(a.geometry, census)
        progress.step("comparing")
        with inputs.naming(args.b):
            found = compared.compared(a, b, census)
    if args.json:
        console.json({"a": str(args.a), "b": str(args.b), **found.to_wire()})
    else:
        console.say(text.facts(f"{args.a} to {args.b}", _facts(found)))
    return command.OK if found.same_rows else command.NO


def _facts(found: Compared) -> list[Fact]:
    from ...report.words import size
    from .. import text

    ranks = found.ranks
    out = [
        ("rows moved", f"{found.rows_moved:,} become hot, {size(found.bytes_moved)}"),
        ("overlap", f"{text.percent(ranks.overlap)} of the hot rows stay"),
        ("churn", f"{text.percent(ranks.churn)} of the cold rows become hot"),
        ("jaccard", f"{ranks.jaccard:.3f}"),
    ]
    if ranks.spearman is not None:
        out.append(("rank correlation", f"Spearman {ranks.spearman:.3f}"))
    most = sorted(found.moved.items(), key=lambda item: (-item[1], item[0]))[:MOST_LAYERS]
    if found.rows_moved:
        shown = ", ".join(f"layer {layer}: {count:,}" for layer, count in most if count)
        out.append(("moved most in", shown))
    if found.change is not None:
        change = found.change
        low, high = text.points(change.interval.low), text.points(change.interval.high)
        out += [
            (
                "cold share",
                f"{text.percent(change.active)} to {text.percent(change.new)}, both as they are",
            ),
            ("gain", f"{text.points(change.improvement)} points (95% interval {low} to {high})"),
        ]
    if found.differ:
        out.append(("also differ", ", ".join(found.differ)))
    verdict = "the same rows are hot: nothing to do" if found.same_rows else "the maps differ"
    return [*out, ("verdict", verdict)]


COMMAND = Command(
    "compare",
    "say what moves from one map to another",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
