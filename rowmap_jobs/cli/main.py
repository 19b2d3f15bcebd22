"""`rowmap`: the parser of all subcommands, and how each end becomes an exit code."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import command
from .command import Command, UsageError
from .commands import COMMANDS
from .console import Console, OutputError

DESCRIPTION = """\
Which experts of a mixture-of-experts model are hot, by kind of traffic: read
counted expert selections (a census), place the rows of each layer in fast and
slow memory (a row map), and judge the map by traffic that it has not seen."""

EPILOG = """\
exit codes:
  0    done
  1    the answer is no: a verdict or gate refuses, drift recommends, maps differ
  2    usage
  3    a file was refused, or could not be read or written (one line says why)
  130  interrupted; no output is left half-written
  141  whoever read the output has gone
  70   a defect of rowmap itself (ROWMAP_TRACEBACK=1 shows where)

rowmap COMMAND --help has examples."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Text as written, at one width on every terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=96)


class Parser(argparse.ArgumentParser):
    """Usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.partition(' ')[2] or 'rowmap'}: {message} (see --help)")


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line; the chosen Command is in `command`.

    With `only`, the arguments of that subcommand alone are made: most of a start's time.
    """
    top = Parser(
        prog="rowmap",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    below = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for each in COMMANDS:
        sub = below.add_parser(
            each.name,
            usage=f"rowmap {each.name} {each.usage}",
            help=each.line,
            description=each.text,
            epilog=f"examples:\n{each.examples.rstrip()}",
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        if only in (None, each.name):
            each.arguments(sub)
            sub.add_argument("-q", "--quiet", action="store_true", help="no notes, no progress")
            sub.set_defaults(command=each)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default) and return the exit code."""
    if arguments is None:
        _prepare_process()
    console = Console.of_process()
    try:
        with warnings.catch_warnings():
            # What libraries remark about damaged files is said by the refusal.
            warnings.simplefilter("ignore")
            code = _run(arguments, console)
        console.flush()
    except BrokenPipeError:
        _drop_output()
        return command.BROKEN_PIPE
    except OutputError as error:
        _drop_output()
        console.error(f"stdout: output: found {error}, expected room for it")
        return command.REFUSED
    except KeyboardInterrupt as error:
        console.error("interrupted")
        number = error.args[0] if error.args else signal.SIGINT
        return 128 + int(number)
    return code


def _run(arguments: Sequence[str] | None, console: Console) -> int:
    try:
        given = sys.argv[1:] if arguments is None else arguments
        first = next((word for word in given if not word.startswith("-")), None)
        chosen = parser(first).parse_args(given)
        run: Command = chosen.command
        console.quiet = chosen.quiet
        return run.run(chosen, console)
    except UsageError as error:
        console.error(str(error))
        return command.USAGE
    except SystemExit as stop:
        # --help has been printed.
        return int(stop.code or 0)
    except (BrokenPipeError, OutputError):
        raise
    except OSError as error:
        found = error.strerror or type(error).__name__
        console.error(f"{error.filename or 'file'}: file: found {found}, expected a readable file")
        return command.REFUSED
    except MemoryError:
        console.error("memory: found too little, expected room for the counts")
        return command.REFUSED
    except Exception as error:
        return _refused(error, console)


def _refused(error: Exception, console: Console) -> int:
    from ..formats.base import FormatError

    if isinstance(error, FormatError):
        console.error(str(error))
        return command.REFUSED
    if isinstance(error, ModuleNotFoundError) and error.name in ("numpy", "yaml"):
        found = f"no package {error.name}, expected one (pip install 'expertmaps[rowmap]')"
        console.error(f"python: found {found}")
        return command.USAGE
    if os.environ.get("ROWMAP_TRACEBACK"):
        raise error
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name}:{last.lineno}"
    console.error(f"a defect: {type(error).__name__} at {place} (ROWMAP_TRACEBACK=1 shows more)")
    return command.INTERNAL


def _prepare_process() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(AttributeError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # One that is ignored (nohup) stays so.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, stop)


def _drop_output() -> None:
    """Nothing more can be written: what is left in the buffer goes nowhere, without a complaint."""
    with suppress(AttributeError, OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
