"""`rowmap formats`: what can be read and written."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from .. import command, options
from ..command import Command
from ..console import Console

TEXT = """\
List the formats of other systems: which are read (rowmap import), which are
written (rowmap export), and what a file of each looks like. Counts are imported
as a census; a map, or slots with --hot, as a row map."""

USAGE = "[--json]"

EXAMPLES = """\
  rowmap formats
  rowmap formats --json
"""


def arguments(parser: ArgumentParser) -> None:
    options.as_json(parser)


def run(args: Namespace, console: Console) -> int:
    from ...exchange.registry import FORMATS
    from .. import text

    if args.json:
        for entry in FORMATS.values():
            console.json(
                {
                    "name": entry.name,
                    "reads": entry.read is not None,
                    "writes": entry.write is not None,
                    "holds": entry.holds,
                    "line": entry.line,
                    "example": entry.example,
                }
            )
        return command.OK
    rows = [
        (
            entry.name,
            "yes" if entry.read else "",
            "yes" if entry.write else "",
            entry.holds,
            entry.line,
        )
        for entry in FORMATS.values()
    ]
    head = ("format", "import", "export", "holds", "what it is")
    examples = [(entry.name, entry.example) for entry in FORMATS.values()]
    console.say(text.table(head, rows, left=5))
    console.say("\n" + text.table(("format", "looks like"), examples, left=2))
    return command.OK


COMMAND = Command(
    "formats",
    "list the formats of other systems",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
