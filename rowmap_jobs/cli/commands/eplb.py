"""`rowmap eplb`: replicas of hot experts over devices."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options, units
from ..command import Command, UsageError
from ..console import Console

TEXT = """\
Spread the experts of every layer over devices by the decode load of a census,
with replicas of the hot ones, by DeepSeek's EPLB. The file has phy2log, log2phy
and logcnt; rowmap export writes the forms of engines."""

USAGE = "CENSUS --slots N --devices N [-o FILE] [options]"

EXAMPLES = """\
  rowmap eplb agent.npz --slots 288 --devices 32 -o eplb.json
  rowmap eplb agent.npz --slots 288 --groups 8 --nodes 4 --devices 32
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("census", type=Path, metavar="CENSUS", help="census")
    options.output(parser, "phy2log, log2phy and logcnt (JSON)", required=False)
    parser.add_argument(
        "--slots", type=units.positive, required=True, metavar="N", help="slots a layer"
    )
    parser.add_argument(
        "--devices", type=units.positive, required=True, metavar="N", help="of all nodes"
    )
    parser.add_argument("--groups", type=units.positive, default=1, metavar="N", help="of experts")
    parser.add_argument("--nodes", type=units.positive, default=1, metavar="N", help="(default: 1)")
    options.as_json(parser)


def run(args: Namespace, console: Console) -> int:
    from ...formats.base import FormatError, canonical_json
    from ...placement.eplb import SOURCE
    from .. import inputs, output, text
    from ..work.spread import spread

    if args.output is not None:
        output.check_free(args.output, args.force)
    with console.progress(2) as progress:
        progress.step(f"reading {args.census}")
        census = inputs.census(args.census).census
        progress.step("balancing")
        try:
            with inputs.naming(args.census):
                found = spread(census, args.slots, args.groups, args.nodes, args.devices)
        except FormatError as error:
            if error.place.startswith(SOURCE):
                raise UsageError(f"eplb: {error}") from None
            raise
        if args.output is not None:
            output.save(args.output, canonical_json(found.to_wire()), args.force)
    if args.json:
        console.json(found.to_wire())
        return command.OK
    replicas = args.slots - found.replicas.logcnt.shape[1]
    plain = "no even split" if found.plain is None else f"{text.percent(found.plain)}"
    facts = [
        ("layers", text.layers(found.layers)),
        ("slots", f"{args.slots:,} a layer, {replicas:,} of them replicas, {args.devices} devices"),
        ("most replicas", f"{int(found.replicas.logcnt.max()):,} of one expert"),
        ("balance", f"{text.percent(found.balance)} (mean over greatest load of a device)"),
        ("without", plain),
    ]
    title = "placement (not written)" if args.output is None else f"{args.output}: placement"
    console.say(text.facts(title, facts))
    return command.OK


COMMAND = Command(
    "eplb",
    "spread replicas of hot experts over devices",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
