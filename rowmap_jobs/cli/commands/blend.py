"""`rowmap blend`: several classes under each other's maps and under one for all."""

from __future__ import annotations

import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options, units
from ..command import Command, UsageError
from ..console import Console

if typing.TYPE_CHECKING:
    from ..work.blended import Blended

TEXT = """\
Put every class of traffic under every class's map (its own left out by session)
and under one blend of all. A blend is refused, with exit code 1 and nothing
written, when some single class's map loses less at its worst."""

USAGE = "CLASS=CENSUS... (--model DIR | --geometry FILE) hot-rows [options]"

EXAMPLES = """\
  rowmap blend agent=agent.npz prose=prose.npz --model models/moe --hot 24
  rowmap blend agent=agent.npz prose=prose.npz --geometry rowmap.json --hot 24 \\
      --weights agent=3 prose=1 -o both.json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "classes", type=units.named, nargs="+", metavar="CLASS=CENSUS", help="two or more"
    )
    options.output(parser, "the blend's row map", required=False)
    options.model(parser)
    options.budget(parser)
    parser.add_argument(
        "--weights",
        type=units.weight,
        nargs="+",
        metavar="CLASS=WEIGHT",
        help="of the classes (default: those of least regret)",
    )
    options.as_json(parser)


def run(args: Namespace, console: Console) -> int:
    from .. import inputs, loading, output
    from ..work import blended, placed

    paths = {name: Path(path) for name, path in loading.named_once(args.classes, "blend").items()}
    if len(paths) < 2:
        raise UsageError("blend: found one class, expected two or more")
    weights = None if args.weights is None else dict(args.weights)
    if weights is not None and (set(weights) != set(paths) or not any(weights.values())):
        raise UsageError(f"blend: --weights: expected a weight for each of {', '.join(paths)}")
    if loading.budget(args).is_global:
        raise UsageError("blend: expected hot rows by layer (--hot, --hot-per-layer, --hot-bytes)")
    if args.output is not None:
        output.check_free(args.output, args.force)
    with console.progress(len(paths) + 2) as progress:
        first = next(iter(paths.values()))
        fingerprint = inputs.census(first).census.header.fingerprint
        shape = loading.shape(args, fingerprint, first)
        censuses = {}
        for name, path in paths.items():
            progress.step(f"reading {path}")
            censuses[name] = loading.alike(path, shape, fingerprint, first)
            with inputs.naming(path):
                placed.totals_of(censuses[name])
        progress.step("judging every class under every map")
        with loading.budget_errors(args):
            geometry = blended.geometry_of(shape, loading.budget(args), censuses)
        found = blended.judged(censuses, geometry, fingerprint, weights)
        if args.output is not None and not found.refused:
            progress.step(f"writing {args.output}")
            output.save(args.output, found.rows.to_bytes(), args.force)
    if args.json:
        console.json(_wire(found))
    else:
        written = args.output is not None and not found.refused
        console.say(_said(found, f"{args.output}: row map" if written else "blend (not written)"))
    return command.NO if found.refused else command.OK


def _wire(found: Blended) -> dict[str, object]:
    return {
        "matrix": found.matrix.to_wire(),
        "weights": found.weights,
        "regret": found.regret,
        "refused": found.refused,
        "digest": found.rows.digest,
    }


def _said(found: Blended, title: str) -> str:
    from .. import text

    matrix = found.matrix
    head = ("map \\ traffic", *matrix.classes, "regret")
    rows = [
        (name, *map(text.percent, shares), text.points(loss))
        for name, shares, loss in zip(matrix.classes, matrix.shares, matrix.regret, strict=True)
    ]
    weights = ", ".join(f"{name} {value:.2f}" for name, value in sorted(found.weights.items()))
    if found.refused:
        least = text.points(min(matrix.regret))
        verdict = f"refused: the map of {matrix.minimax} loses {least} points at most"
    else:
        verdict = "no class loses more than under the best single map"
    facts = [
        ("weights", weights),
        ("regret", f"{text.points(found.regret)} points for its worst class"),
        ("sha256", found.rows.digest),
        ("verdict", verdict),
    ]
    return f"{text.table(head, rows)}\n\n{text.facts(title, facts)}"


COMMAND = Command(
    "blend",
    "put several classes under one map, if none loses",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
