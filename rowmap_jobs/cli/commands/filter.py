"""`rowmap filter`: a part of a census."""

from __future__ import annotations

import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options
from ..command import Command, UsageError
from ..console import Console

if typing.TYPE_CHECKING:
    from ...formats.census import Census
    from ..work.chosen import Choice

TEXT = """\
Keep some transcripts of a census. Whole transcripts are taken or left, never
rows of them; the header says how many were left out and why."""

USAGE = "CENSUS -o FILE condition..."

EXAMPLES = """\
  rowmap filter agent.npz --since 7d -o week.npz
  rowmap filter agent.npz --prompt-tokens 16384: -o long.npz
  rowmap filter agent.npz --sessions 0,3,8-11 --fidelity tokens,live -o some.npz
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("census", type=Path, metavar="CENSUS", help="census")
    options.output(parser, "the census")
    options.filters(parser)


def run(args: Namespace, console: Console) -> int:
    from .. import inputs, output

    wanted = choice(args)
    if wanted.empty:
        raise UsageError("filter: found no condition, expected one at least (see --help)")
    output.check_free(args.output, args.force)
    with console.progress(2) as progress:
        progress.step(f"reading {args.census}")
        with inputs.naming(args.census):
            result = kept(inputs.census(args.census).census, wanted)
        progress.step(f"writing {args.output}")
        said = write(args, result)
    console.say(said)
    return command.OK


def choice(args: Namespace) -> Choice:
    """The filter options of a command line. Raises UsageError for an unknown word."""
    from ...formats.census import FIDELITY
    from ..work.chosen import Choice

    unknown = sorted(set(args.fidelity or ()) - set(FIDELITY))
    if unknown or args.fidelity == ():
        found, known = unknown[0] if unknown else "none", ", ".join(FIDELITY)
        raise UsageError(f"--fidelity: found {found!r}, expected some of {known}")
    return Choice(
        phase=args.phase,
        since=args.since,
        until=args.until,
        sessions=getattr(args, "sessions", None),
        fidelity=args.fidelity,
        prompt_tokens=args.prompt_tokens,
    )


def kept(census: Census, wanted: Choice) -> Census:
    """What of a census is wanted. Raises FormatError when nothing is left."""
    from ..work.chosen import chosen

    return chosen(census, wanted)


def write(args: Namespace, census: Census) -> str:
    """Write a census and describe it."""
    from ...formats import census as census_format
    from ...formats.base import sha256_digest
    from .. import inputs, output, text
    from ..work import describe

    raw = census_format.to_bytes(census)
    output.save(args.output, raw, args.force)
    file = inputs.CensusFile(census, sha256_digest(raw), len(raw))
    return text.facts(f"{args.output}: census", describe.of_census(file))


COMMAND = Command(
    "filter",
    "keep some transcripts of a census",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
