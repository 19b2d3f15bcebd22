"""What a subcommand is, and how one says no. Nothing heavy is imported here."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from .console import Console

OK = 0
NO = 1
"""The answer is no: a verdict or gate refuses, drift recommends a new profile, maps differ."""
USAGE = 2
REFUSED = 3
"""A file was refused, or could not be read or written."""
INTERNAL = 70
"""A defect of this program (EX_SOFTWARE)."""
INTERRUPTED = 130
BROKEN_PIPE = 141
"""Whoever read the output has gone; what a program that SIGPIPE ends would leave."""


class UsageError(Exception):
    """Arguments that do not fit together, or do not fit the files: one line, exit code 2."""


@dataclass(frozen=True)
class Command:
    """A subcommand. `run` returns the exit code; it may raise UsageError and FormatError."""

    name: str
    line: str
    """What it does, for the list of subcommands."""
    text: str
    """What it does, for its own help."""
    usage: str
    """Its arguments in short, behind the name."""
    examples: str
    arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Console], int]
