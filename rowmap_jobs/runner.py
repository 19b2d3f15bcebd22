"""`python -m rowmap_jobs.runner probe|profile|fetch`: one run of a Job.

Reads the RunSpec (JSON) from EXPERTMAPS_RUN. Writes its Verdict to /dev/termination-log
(EXPERTMAPS_TERMINATION_LOG) and exits with
0   Probed, Fetched, Accepted, or Rejected (a map that was measured and is not good enough);
42  Failed, and another try would not change it;
1   Failed for a reason that another try may cure, or interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from . import fetch, probe, profile
from .formats import names
from .formats.base import FormatError
from .formats.run import EXIT_FINAL, RunSpec, Verdict
from .log import say
from .reasons import Reason, RunError, one_line
from .services import Services

COMMANDS: Mapping[str, tuple[str, Callable[[RunSpec, Services], Verdict]]] = {
    "probe": ("Profile", probe.run),
    "profile": ("Profile", profile.run),
    "fetch": ("Fetch", fetch.run),
}
EXIT_RETRY = 1


def read_spec(command: str, environ: Mapping[str, str]) -> RunSpec:
    """The RunSpec of the environment. Raises RunError InvalidRunSpec."""
    raw = environ.get(names.ENV_RUN)
    if not raw:
        raise RunError(
            Reason.INVALID_RUN_SPEC, f"{names.ENV_RUN}: found nothing, expected a RunSpec as JSON"
        )
    try:
        spec = RunSpec.from_bytes(raw.encode("utf-8", "surrogateescape"), names.ENV_RUN)
    except FormatError as error:
        raise RunError(Reason.INVALID_RUN_SPEC, str(error)) from None
    kind = COMMANDS[command][0]
    if spec.kind != kind:
        raise RunError(
            Reason.INVALID_RUN_SPEC,
            f"{names.ENV_RUN}: kind: found {spec.kind}, expected {kind} for {command}",
        )
    return spec


def execute(
    command: str, environ: Mapping[str, str], services: Services | None = None
) -> tuple[Verdict, int]:
    """Run a command; every end, a programming error included, is a verdict and an exit code."""
    run = "unknown"
    try:
        spec = read_spec(command, environ)
        run = spec.run
        verdict = COMMANDS[command][1](spec, services or Services.from_environ(environ))
        return verdict, 0
    except RunError as error:
        return failed(run, error), EXIT_FINAL if error.final else EXIT_RETRY
    except Exception as error:
        return failed(run, internal(error)), EXIT_RETRY


def failed(run: str, error: RunError) -> Verdict:
    """The verdict of a run that could not finish."""
    return Verdict(run=run, outcome="Failed", reason=error.reason, message=error.message)


def internal(error: Exception) -> RunError:
    """A programming error by type and place; its text could hold somebody's conversation."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown"
    ours = [f for f in frames if "rowmap_jobs" in f.filename]
    if ours and ours[-1] is not frames[-1]:
        place += f", called at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return RunError(Reason.INTERNAL_ERROR, f"found {type(error).__name__} at {place}")


def publish(verdict: Verdict, environ: Mapping[str, str]) -> None:
    """Write the termination message and one line of it to stderr."""
    path = Path(environ.get(names.ENV_TERMINATION_LOG) or names.TERMINATION_LOG)
    say(f"{verdict.outcome} {verdict.reason}: {verdict.message}")
    try:
        path.write_bytes(verdict.to_message())
    except OSError as error:
        say(one_line(f"{path}: not written: {error.strerror}"))


def end_on_sigterm(command: str, environ: Mapping[str, str]) -> None:
    """Have SIGTERM write the verdict Interrupted and end the process with exit code 1.

    The handler does it all itself: an exception raised from it would be lost when the signal
    comes within a destructor. It writes to file descriptors, for `say` may be half-way.
    """
    try:
        run = read_spec(command, environ).run
    except RunError:
        return
    path = environ.get(names.ENV_TERMINATION_LOG) or names.TERMINATION_LOG
    stop = RunError(Reason.INTERRUPTED, "found SIGTERM, expected to finish: the pod ends")
    message = failed(run, stop).to_message()

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        try:
            Path(path).write_bytes(message)
            os.write(2, f"Failed {stop}\n".encode())
        finally:
            os._exit(EXIT_RETRY)

    signal.signal(signal.SIGTERM, end)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="rowmap_jobs.runner", description=__doc__.split("\n")[0] if __doc__ else None
    )
    parser.add_argument("command", choices=sorted(COMMANDS))
    command = parser.parse_args(arguments).command
    end_on_sigterm(command, os.environ)
    verdict, code = execute(command, os.environ)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    publish(verdict, os.environ)
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stderr.flush()
    # Threads may still wait for an engine that is gone; nothing of theirs is needed any more.
    os._exit(exit_code)
