"""`rowmap evaluate`: how good a map is for traffic that it has not seen."""

from __future__ import annotations

import time
import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options, units
from ..command import Command, UsageError
from ..console import Console, Progress

if typing.TYPE_CHECKING:
    from ...evaluation import Speed
    from ...formats.census import Census
    from ...formats.report import Report
    from ...formats.rowmap import RowMap
    from ...formats.run import Acceptance
    from ..inputs import CensusFile
    from ..work.judged import Case

REPORT_JSON, REPORT_HTML = "report.json", "report.html"

TEXT = """\
Judge the map of a census: each session under the map of all others, so that no
map is judged by what made it. Give a budget (the map is placed) or --map (a map
that was not placed from this census is judged as it is). Prints the verdict;
exits with 1 when the map is rejected."""

USAGE = "CENSUS (--map FILE | --model DIR hot-rows) [options]"

EXAMPLES = """\
  rowmap evaluate agent.npz --model models/v41-flash --hot 295
  rowmap evaluate agent.npz --map rowmap.json --active old.json --min-improvement 0.5
  rowmap evaluate agent.npz --map rowmap.json --other prose=prose.npz,prose.json \\
      --link 55GB/s --memory 3.3TB/s --measured 23.2%:89.3 --report-dir out/
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("census", type=Path, metavar="CENSUS", help="census")
    parser.add_argument("--map", type=Path, metavar="FILE", help="row map to judge")
    group = parser.add_argument_group("model (with a budget, one of)")
    options.model_folder(group)
    group.add_argument(
        "--geometry", type=Path, metavar="FILE", help="row map or status.json of a lane instead"
    )
    options.parallel(group)
    options.budget(parser, required=False)
    options.shrink(parser)
    group = parser.add_argument_group("compare with")
    group.add_argument("--active", type=Path, metavar="MAP", help="the row map in force")
    group.add_argument(
        "--other",
        type=units.named,
        action="append",
        default=[],
        metavar="NAME=CENSUS[,MAP]",
        help="another class of the lane (repeat)",
    )
    _speed_options(parser)
    _gate_options(parser)
    parser.add_argument("--seed", type=units.count, default=0, metavar="N", help="of resamples")
    parser.add_argument(
        "--report-dir",
        type=Path,
        metavar="DIR",
        help=f"write {REPORT_JSON} and {REPORT_HTML} there",
    )
    options.force(parser)
    options.as_json(parser)


def _speed_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("predict decode speed (link, memory and measured together)")
    group.add_argument(
        "--link", type=units.rate, metavar="RATE", help="what cold rows come over: 55GB/s"
    )
    group.add_argument(
        "--memory", type=units.rate, metavar="RATE", help="where hot rows are: 3.3TB/s"
    )
    group.add_argument(
        "--measured",
        type=units.measured,
        metavar="SHARE:SPEED",
        help="one measured pair: cold share and tokens a second of one sequence",
    )
    group.add_argument(
        "--concurrency", type=units.positive, default=1, metavar="N", help="sequences at a time"
    )
    group.add_argument(
        "--drafts", type=units.count, default=0, metavar="N", help="speculated rows a step"
    )
    group.add_argument(
        "--accepted-drafts",
        type=units.number,
        default=0.0,
        metavar="X",
        help="of them become tokens, on average",
    )


def _gate_options(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("accept only")
    group.add_argument(
        "--min-tokens",
        type=units.count,
        default=8000,
        metavar="N",
        help="decode tokens counted (default: 8000)",
    )
    group.add_argument(
        "--max-cold-share", type=units.share, metavar="SHARE", help="cold share at most: 5%%"
    )
    group.add_argument(
        "--max-vs-positional",
        type=units.number,
        metavar="RATIO",
        help="cold share over that by position at most: 0.5",
    )
    group.add_argument(
        "--min-improvement",
        type=units.number,
        default=0.2,
        metavar="POINTS",
        help="better than --active by percentage points (default: 0.2)",
    )


def run(args: Namespace, console: Console) -> int:
    from ...formats.base import canonical_json
    from ...report import summary
    from .. import loading

    _check(args)
    with console.progress(6 + len(args.shrink) + len(args.other)) as progress:
        case = _case(args, loading.named_once(args.other, "--other"), progress)
        report = _judge(args, case, progress)
        if args.report_dir is not None:
            progress.step(f"writing {args.report_dir}")
            _write(args, case, report)
    console.say(canonical_json(report.to_wire()).decode("utf-8") if args.json else summary(report))
    return command.OK if report.accepted else command.NO


def _check(args: Namespace) -> None:
    """Refuse what does not fit together, before anything is read. Raises UsageError."""
    from .. import loading, output

    by_budget = loading.has_budget(args)
    if (args.map is None) != by_budget:
        raise UsageError("evaluate: expected either --map or hot rows (--hot, --hot-bytes, ...)")
    if by_budget and (args.model is None) == (args.geometry is None):
        raise UsageError("evaluate: hot rows: expected one of --model and --geometry with them")
    if args.map is not None and (args.model or args.geometry or args.shrink or args.quantum):
        raise UsageError("evaluate: --map has its geometry: expected no model, --shrink, --quantum")
    given = [value is not None for value in (args.link, args.memory, args.measured)]
    if any(given) and not all(given):
        raise UsageError("evaluate: expected --link, --memory and --measured together")
    if args.report_dir is not None:
        for name in (REPORT_JSON, REPORT_HTML):
            if args.report_dir.is_dir():
                output.check_free(args.report_dir / name, args.force)


def _case(args: Namespace, others: dict[str, str], progress: Progress) -> Case:
    from .. import inputs, loading
    from ..work import placed
    from ..work.judged import Case

    progress.step(f"reading {args.census}")
    file = inputs.census(args.census)
    fingerprint = file.census.header.fingerprint
    prior = None
    if args.map is not None:
        rows = _map(args.map, file, args)
    else:
        shape = loading.shape(args, fingerprint, args.census)
        pooled = []
        for path in args.shrink:
            progress.step(f"reading {path}")
            pooled.append(loading.alike(path, shape, fingerprint, args.census))
        progress.step("placing")
        with inputs.naming(args.census):
            placed.fitting(shape, file.census)
            counts = placed.totals_of(file.census)
            prior = placed.prior_of(counts, pooled, shape, args.kappa)
        with loading.budget_errors(args):
            budget = loading.budget(args)
            rows = placed.placed(counts, fingerprint, shape, budget, prior).rows
    active = None if args.active is None else _map(args.active, file, args)
    censuses, maps = _others(args, file, rows, others, progress)
    return Case(
        census=file.census,
        census_digest=file.digest,
        rows=rows,
        prior=prior,
        active=active,
        other_censuses=censuses,
        other_maps=maps,
        speed=_speed(args),
        acceptance=_acceptance(args),
        seed=args.seed,
    )


def _map(path: Path, file: CensusFile, args: Namespace) -> RowMap:
    """A map of the census's model and layers. Raises FormatError."""
    from .. import inputs
    from ..work import placed

    rows = inputs.row_map(path)
    inputs.same_model(rows.fingerprint, file.census.header.fingerprint, path, str(args.census))
    with inputs.naming(args.census):
        placed.fitting(rows.geometry, file.census)
    return rows


def _others(
    args: Namespace, file: CensusFile, rows: RowMap, others: dict[str, str], progress: Progress
) -> tuple[dict[str, Census], dict[str, RowMap]]:
    from .. import loading

    own = file.census.header.traffic_class
    censuses, maps = {}, {}
    for name, value in others.items():
        if name == own:
            raise UsageError(f"evaluate: --other: found {name!r}, the class of {args.census}")
        census, _, rows_file = value.partition(",")
        progress.step(f"reading {census}")
        fingerprint = file.census.header.fingerprint
        censuses[name] = loading.alike(Path(census), rows.geometry, fingerprint, args.census)
        if rows_file:
            maps[name] = _map(Path(rows_file), file, args)
    return censuses, maps


def _speed(args: Namespace) -> Speed | None:
    from ...evaluation import Speed
    from ...formats.base import FormatError

    if args.link is None:
        return None
    share, tokens = args.measured
    try:
        return Speed(
            link_bytes_per_second=args.link,
            memory_bytes_per_second=args.memory,
            measured_share=share,
            measured_tokens_per_second=tokens,
            concurrency=args.concurrency,
            drafts=args.drafts,
            accepted_drafts=args.accepted_drafts,
        )
    except FormatError as error:
        raise UsageError(f"evaluate: {error}") from None


def _acceptance(args: Namespace) -> Acceptance:
    from ...formats.run import Acceptance

    most = args.max_cold_share
    return Acceptance(
        min_decode_tokens=args.min_tokens,
        max_cold_share_percent=None if most is None else most * 100,
        max_cold_share_vs_positional=args.max_vs_positional,
        min_improvement_points=args.min_improvement,
    )


def _judge(args: Namespace, case: Case, progress: Progress) -> Report:
    from ...formats.base import FormatError
    from .. import inputs
    from ..work import judged

    others = judged.maps_of_others(case)
    progress.step("judging each session under the map of the others")
    with inputs.naming(args.census):
        evaluation = judged.judged(case, others)
    progress.step("gathering the evidence")
    try:
        seen = judged.found(case, others)
    except FormatError as error:
        if error.source == "speed":
            # A measured speed that the bandwidths do not allow.
            raise UsageError(f"evaluate: {error}") from None
        raise
    return judged.report(case, evaluation, seen, int(time.time()))


def _write(args: Namespace, case: Case, report: Report) -> None:
    from ...formats.base import canonical_json
    from ...report import Plots, render
    from .. import output

    page = render(report, Plots.of(case.census.decode(), case.rows, case.active))
    files = {REPORT_JSON: canonical_json(report.to_wire()), REPORT_HTML: page.encode("utf-8")}
    output.save_all(args.report_dir, files, args.force)


COMMAND = Command(
    "evaluate",
    "judge a map by traffic that it has not seen",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
