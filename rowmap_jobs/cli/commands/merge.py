"""`rowmap merge`: one census of several."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options
from ..command import Command
from ..console import Console
from .filter import choice, kept, write

TEXT = """\
Put the transcripts of several censuses of one class and model into one. A
transcript that is in two of them counts once, and sessions that share one are
one session. Counts stay whole numbers whatever their age: give a half-life to
rowmap place, which knows the present moment."""

USAGE = "CENSUS... -o FILE [options]"

EXAMPLES = """\
  rowmap merge monday.npz tuesday.npz -o week.npz
  rowmap merge old.npz new.npz --since 30d --fidelity tokens -o month.npz
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("census", type=Path, nargs="+", metavar="CENSUS", help="censuses")
    options.output(parser, "the census")
    options.filters(parser, sessions=False)


def run(args: Namespace, console: Console) -> int:
    from ...census.merge import merge
    from .. import inputs, output

    output.check_free(args.output, args.force)
    with console.progress(len(args.census) + 2) as progress:
        files = []
        for path in args.census:
            progress.step(f"reading {path}")
            files.append(inputs.census(path).census)
        progress.step("merging")
        names = ", ".join(map(str, args.census))
        with inputs.naming(names):
            merged = merge(files, names, [str(path) for path in args.census])
            result = kept(merged, choice(args))
        progress.step(f"writing {args.output}")
        said = write(args, result)
    console.say(said)
    return command.OK


COMMAND = Command(
    "merge",
    "make one census of several",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
