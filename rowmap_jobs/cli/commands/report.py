"""`rowmap report`: the page of a report.json."""

from __future__ import annotations

import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options
from ..command import Command, UsageError
from ..console import Console

if typing.TYPE_CHECKING:
    from ...formats.report import Report
    from ...report import Plots

TEXT = """\
Draw a report.json again as one page that loads nothing, and print its summary.
Plots by expert need the census and the map that the report speaks of."""

USAGE = "REPORT [-o FILE] [--census FILE --map FILE]"

EXAMPLES = """\
  rowmap report report.json -o report.html
  rowmap report report.json --census agent.npz --map rowmap.json -o report.html
  rowmap report report.json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("report", type=Path, metavar="REPORT", help="report.json")
    options.output(parser, "the page (HTML)", required=False)
    group = parser.add_argument_group("plots")
    group.add_argument("--census", type=Path, metavar="FILE", help="the report's census")
    group.add_argument("--map", type=Path, metavar="FILE", help="the report's row map")
    group.add_argument("--active", type=Path, metavar="FILE", help="the row map in force then")


def run(args: Namespace, console: Console) -> int:
    from ...report import render, summary
    from .. import inputs, output

    if (args.census is None) != (args.map is None) or (args.active and not args.map):
        raise UsageError("report: expected --census and --map together, --active only with them")
    if args.output is not None:
        output.check_free(args.output, args.force)
    with console.progress(2) as progress:
        progress.step("reading")
        report = inputs.report(args.report)
        plots = None if args.map is None else _plots(args, report)
        if args.output is not None:
            progress.step(f"writing {args.output}")
            page = render(report, plots)
            output.save(args.output, page.encode("utf-8"), args.force)
    console.say(summary(report))
    return command.OK


def _plots(args: Namespace, report: Report) -> Plots:
    """The arrays of the plots. Raises FormatError for files that are not the report's."""
    from ...evaluation.layout import check_census, check_map
    from ...formats.base import FormatError
    from ...report import Plots
    from .. import inputs

    file, rows = inputs.census(args.census), inputs.row_map(args.map)
    active = None if args.active is None else inputs.row_map(args.active)
    change = None if report.evidence is None else report.evidence.change
    wanted = [
        (args.census, file.digest, report.census_digest),
        (args.map, rows.digest, report.digest),
    ]
    if active is not None:
        wanted.append((args.active, active.digest, change.active_digest if change else None))
    for path, found, expected in wanted:
        if found != expected:
            raise FormatError(str(path), "sha256", found, f"{expected}, which the report names")
    with inputs.naming(args.census):
        check_census(file.census, rows.geometry)
    if active is not None:
        with inputs.naming(args.active):
            check_map(active, rows.geometry, "map")
    if report.geometry != rows.geometry:
        raise FormatError(str(args.report), "geometry", "another", "that of the map it names")
    return Plots.of(file.census.decode(), rows, active)


COMMAND = Command(
    "report",
    "draw a report.json again",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
