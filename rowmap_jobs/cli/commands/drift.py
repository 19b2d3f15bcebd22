"""`rowmap drift`: whether traffic has moved away from the map in force."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options, units
from ..command import Command
from ..console import Console

TEXT = """\
Judge the map in force by a new census: its cold share less that of a map made
anew, each session left out of it. Exits with 1 when the low end of the regret's
95% interval is above 2 points: then a new profile is worth its time."""

USAGE = "CENSUS --active MAP [--json]"

EXAMPLES = """\
  rowmap drift --active rowmap.json this-week.npz
  rowmap drift --active rowmap.json this-week.npz --json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("census", type=Path, metavar="CENSUS", help="census of the new window")
    parser.add_argument(
        "--active", type=Path, metavar="MAP", required=True, help="the row map in force"
    )
    parser.add_argument("--seed", type=units.count, default=0, metavar="N", help="of resamples")
    options.as_json(parser)


def run(args: Namespace, console: Console) -> int:
    from ...evaluation import drift
    from .. import inputs, text
    from ..work import placed

    with console.progress(2) as progress:
        progress.step("reading")
        active = inputs.row_map(args.active)
        census = inputs.census(args.census).census
        fingerprint = census.header.fingerprint
        inputs.same_model(active.fingerprint, fingerprint, args.active, str(args.census))
        progress.step("judging each session under the map of the others")
        with inputs.naming(args.census):
            placed.fitting(active.geometry, census)
            placed.totals_of(census)
            found = drift(census, active.geometry, active, args.seed)
    if args.json:
        console.json({"active": str(args.active), "census": str(args.census), **found.to_wire()})
    else:
        low, high = (text.points(end) for end in (found.interval.low, found.interval.high))
        advice = "profile again: the map is behind the traffic" if found.recommend else "keep it"
        facts = [
            ("cold share", f"{text.percent(found.active)} under the active map"),
            ("made anew", f"{text.percent(found.refit)}, leave one session out"),
            ("regret", f"{text.points(found.regret)} points (95% interval {low} to {high})"),
            ("verdict", advice),
        ]
        console.say(text.facts(f"{args.active} on {args.census}", facts))
    return command.NO if found.recommend else command.OK


COMMAND = Command(
    "drift",
    "say whether traffic has left the map in force",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
