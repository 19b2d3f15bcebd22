"""When a profile run is due, and its name.

- The first run starts at once; its name carries the minute of the ExpertMap's creation.
- `spec.runAt` asks for one run: due when the last run started before it.
- A failed run is tried again after 10 minutes, 1 hour and 6 hours; then nothing happens until the
  spec changes or runAt comes.
- A change of the spec asks for a new run only when the last one made no accepted map: thresholds of
  acceptance judge the next run, and a map that is in use is not measured again by an edit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rowmap_jobs.formats import names

from ..api.expertmap import ExpertMap, ProfileRun
from .conditions import parse_timestamp

BACKOFF = (timedelta(minutes=10), timedelta(hours=1), timedelta(hours=6))


@dataclass(frozen=True)
class Due:
    """The next run: at once when `at` is not after now."""

    at: datetime
    minute: int | None
    """Minute in the run's name; None: that of the moment it is started."""
    fresh: bool
    """Asked for by a person: failures before it do not count against it."""


_NEVER_AGAIN = frozenset({"TooManyHotRows", "NoExperts", "GeometryMismatch", "InvalidRunSpec"})
"""Failures that only a changed spec or model can cure; another try would boot an engine in vain."""


def next_run(map_: ExpertMap, now: datetime) -> Due | None:
    """The run that comes next when none goes on; None when nothing asks for one."""
    run = map_.status.run
    wanted = [due for due in (_asked(map_, now), _retry(map_, run)) if due is not None]
    if run is None and map_.status.accepted is None:
        created = map_.metadata.creation_timestamp
        wanted.append(Due(now, _minute(parse_timestamp(created)) if created else None, True))
    return min(wanted, key=lambda due: (max(due.at, now), not due.fresh), default=None)


def _asked(map_: ExpertMap, now: datetime) -> Due | None:
    """A run that the user asks for: spec.runAt, or a changed spec after a run without success."""
    run, accepted = map_.status.run, map_.status.accepted
    if run is not None and run.outcome != "Accepted" and run.generation < map_.metadata.generation:
        return Due(now, None, True)
    if map_.spec.run_at is None:
        return None
    # Whole seconds, as in startedAt; else a fraction of one would ask for a second run.
    run_at = parse_timestamp(map_.spec.run_at).replace(microsecond=0)
    last = run.started_at if run is not None else accepted.accepted_at if accepted else None
    if last is not None and parse_timestamp(last) >= run_at:
        return None
    return Due(run_at, _minute(run_at), True)


def _retry(map_: ExpertMap, run: ProfileRun | None) -> Due | None:
    if run is None or run.finished_at is None or run.outcome != "Failed":
        return None
    if run.reason in _NEVER_AGAIN:
        return None
    attempts = map_.status.failed_attempts
    if not 1 <= attempts <= len(BACKOFF):
        return None
    return Due(parse_timestamp(run.finished_at) + BACKOFF[attempts - 1], None, False)


def run_name(map_: ExpertMap, due: Due, now: datetime, taken: Iterable[str]) -> str:
    """A name that no run before it had."""
    wanted = due.minute if due.minute is not None else _minute(now)
    last = max((minute_of(name) for name in taken), default=-1)
    return names.profile_job(map_.metadata.name, max(wanted, last + 1))


def minute_of(name: str) -> int:
    """The minute in a run's name; -1 for a name that is none of ours."""
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else -1


def _minute(moment: datetime) -> int:
    return int(moment.astimezone(UTC).timestamp()) // 60
