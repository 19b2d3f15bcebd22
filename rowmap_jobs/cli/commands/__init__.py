"""The subcommands, in the order of their work; nothing heavy is imported before one runs."""

from __future__ import annotations

from ..command import Command
from . import (
    blend,
    compare,
    drift,
    eplb,
    evaluate,
    export,
    filter,
    formats,
    import_,
    inspect,
    merge,
    place,
    report,
)

COMMANDS: tuple[Command, ...] = tuple(
    module.COMMAND
    for module in (
        inspect,
        formats,
        import_,
        export,
        merge,
        filter,
        place,
        evaluate,
        compare,
        drift,
        blend,
        eplb,
        report,
    )
)
