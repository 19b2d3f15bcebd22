"""Where the console script begins: before anything that takes time is imported."""

from __future__ import annotations

import signal


def main() -> int:
    """`rowmap`. An interruption while modules are loaded ends it quietly, as one later does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import main as run

    return run()
