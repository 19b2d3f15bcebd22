"""`rowmap place`: the row map of a census."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from .. import command, options, units
from ..command import Command, UsageError
from ..console import Console

NEVER_SHOWN = 8

TEXT = """\
Place the experts of every layer by how often they were chosen: the hottest rows
in fast memory, the others in slow memory. Experts that were never chosen come
last, by id. Without -o nothing is written, and the map is only described."""

USAGE = "CENSUS (--model DIR | --geometry FILE) hot-rows [-o FILE] [options]"

EXAMPLES = """\
  rowmap place agent.npz --model models/v41-flash --hot 295 -o rowmap.json
  rowmap place agent.npz --geometry status.json --hot-bytes 180GiB -o rowmap.json
  rowmap place small.npz --model models/moe --hot 24 --shrink prose.npz code.npz -o rowmap.json
  rowmap place wiki.npz --model model.gguf --global-bytes 10GiB -o rowmap.json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("census", type=Path, metavar="CENSUS", help="census")
    options.output(parser, "the row map", required=False)
    options.model(parser)
    options.budget(parser)
    options.shrink(parser)
    group = parser.add_argument_group("ranking")
    group.add_argument(
        "--phase",
        choices=("decode", "prefill", "all"),
        default="decode",
        help="whose selections rank (default: decode)",
    )
    group.add_argument(
        "--half-life",
        type=units.duration,
        metavar="SPAN",
        help="a transcript of this age counts half: 7d, 168h",
    )
    group.add_argument(
        "--order", action="store_true", help="add one order over all layers (llama.cpp)"
    )
    options.as_json(parser)


def run(args: Namespace, console: Console) -> int:
    from ...placement import never_seen
    from .. import inputs, loading, output, text
    from ..work import describe, placed

    if args.half_life is not None and args.phase != "decode":
        raise UsageError("place: --half-life: expected --phase decode")
    budget = loading.budget(args)
    if args.output is not None:
        output.check_free(args.output, args.force)
    with console.progress(3 + len(args.shrink)) as progress:
        progress.step(f"reading {args.census}")
        census = inputs.census(args.census).census
        fingerprint = census.header.fingerprint
        shape = loading.shape(args, fingerprint, args.census)
        pooled = []
        for path in args.shrink:
            progress.step(f"reading {path}")
            pooled.append(loading.alike(path, shape, fingerprint, args.census))
        progress.step("placing")
        with inputs.naming(args.census):
            placed.fitting(shape, census)
            counts = placed.totals_of(census, args.phase, args.half_life, int(time.time()))
            prior = placed.prior_of(counts, pooled, shape, args.kappa)
        with loading.budget_errors(args):
            made = placed.placed(counts, fingerprint, shape, budget, prior, args.order)
        if args.output is not None:
            progress.step(f"writing {args.output}")
            output.save(args.output, made.rows.to_bytes(), args.force)
    never = never_seen(counts, made.rows.geometry)
    if args.json:
        wire = {**describe.map_wire(made.rows), "neverSeen": never, "notes": made.notes}
        console.json(wire)
        return command.OK
    facts = [*describe.of_map(made.rows), ("never chosen", _never(never))]
    title = "row map (not written)" if args.output is None else f"{args.output}: row map"
    console.say(text.facts(title, [*facts, *(("note", note) for note in made.notes)]))
    return command.OK


def _never(never: Mapping[str, tuple[int, ...]]) -> str:
    """Experts without a selection: how many, and the first of them."""
    every = [(layer, expert) for layer, experts in never.items() for expert in experts]
    if not every:
        return "none"
    shown = ", ".join(f"{layer}.{expert}" for layer, expert in every[:NEVER_SHOWN])
    more = f" and {len(every) - NEVER_SHOWN:,} more" if len(every) > NEVER_SHOWN else ""
    return f"{len(every):,} experts, ranked last: {shown}{more} (layer.expert)"


COMMAND = Command(
    "place",
    "make the row map of a census under a budget",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
