"""When a profile run is due, and its name.

- The first run starts at once; its name carries the minute of the ExpertMap's creation.
- `spec.runAt` asks for one run: due when the last run started before it.
- A failed run is tried again after 10 minutes, 1 hour and 6 hours; then nothing happens until the
  spec changes or runAt comes.
- `spec.schedule` asks for a run at each of its times, as a CronJob with concurrencyPolicy Forbid
  does: of times that were missed (a run was going on, the operator was down) the newest alone is
  made up for, and not later than startingDeadlineSeconds.
- `spec.suspend` leaves only runAt.
- A change of the spec asks for a new run only when the last one made no accepted map: thresholds of
  acceptance judge the next run, and a map that is in use is not measured again by an edit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from rowmap_jobs.formats import names

from ..api.expertmap import ExpertMap, ProfileRun
from . import cron
from .conditions import parse_timestamp

BACKOFF = (timedelta(minutes=10), timedelta(hours=1), timedelta(hours=6))


@dataclass(frozen=True)
class Due:
    """The next run: at once when `at` is not after now."""

    at: datetime
    minute: int | None
    """Minute in the run's name; None: that of the moment it is started."""
    fresh: bool
    """Asked for by a person or the schedule: failures before it do not count against it."""
    scheduled: bool = False
    """`at` is a time of the schedule."""


_NEVER_AGAIN = frozenset({"TooManyHotRows", "NoExperts", "GeometryMismatch", "InvalidRunSpec"})
"""Failures that only a changed spec or model can cure; another try would boot an engine in vain."""


def next_run(map_: ExpertMap, now: datetime) -> Due | None:
    """The run that comes next when none goes on; None when nothing asks for one."""
    run, suspended = map_.status.run, map_.spec.suspend
    found = [_run_at(map_)]
    if not suspended:
        found += [_changed(map_, now), _scheduled(map_, now), _retry(map_, run)]
    wanted = [due for due in found if due is not None]
    if run is None and map_.status.accepted is None and not suspended:
        created = map_.metadata.creation_timestamp
        wanted.append(Due(now, _minute(parse_timestamp(created)) if created else None, True))
    return min(wanted, key=lambda due: (max(due.at, now), not due.fresh), default=None)


def schedule_of(map_: ExpertMap) -> cron.Schedule | None:
    """The map's schedule, or None without one. Raises cron.ScheduleError."""
    if map_.spec.schedule is None:
        return None
    return cron.parse(map_.spec.schedule, map_.spec.time_zone)


def _changed(map_: ExpertMap, now: datetime) -> Due | None:
    """A changed spec after a run without an accepted map."""
    run = map_.status.run
    if run is None or run.outcome == "Accepted" or run.generation >= map_.metadata.generation:
        return None
    if run.reason == "NotBetterThanCurrent":
        return None  # it measured well, and the map in use holds: nothing is broken
    return Due(now, None, True)


def _scheduled(map_: ExpertMap, now: datetime) -> Due | None:
    """The newest time of the schedule that is owed, else the next one."""
    schedule = schedule_of(map_)
    if schedule is None:
        return None
    run, status = map_.status.run, map_.status
    told = (
        map_.metadata.creation_timestamp,
        status.last_schedule_time,
        run.started_at if run is not None else None,
        status.accepted.accepted_at if run is None and status.accepted is not None else None,
    )
    # A run that started after a time of the schedule has served it, whoever asked for that run.
    served = max((parse_timestamp(text) for text in told if text), default=now)
    latest, limit = schedule.last(now), map_.spec.starting_deadline_seconds
    late = timedelta.max if limit is None else timedelta(seconds=limit)
    if latest is not None and latest > served and now - latest <= late:
        return Due(latest, _minute(latest), True, scheduled=True)
    coming = schedule.next(now)
    return None if coming is None else Due(coming, _minute(coming), True, scheduled=True)


def _run_at(map_: ExpertMap) -> Due | None:
    """The run that spec.runAt asks for, unless one started after it."""
    run, accepted = map_.status.run, map_.status.accepted
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
