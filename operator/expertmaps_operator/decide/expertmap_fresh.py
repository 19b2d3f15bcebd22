"""The condition Fresh of an ExpertMap with a schedule: was it measured in the last two periods?"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from ..api.expertmap import ExpertMap, ExpertMapStatus
from ..api.reasons import Reason
from .conditions import Status, parse_timestamp
from .cron import ScheduleError
from .expertmap_schedule import schedule_of


@dataclass(frozen=True)
class Freshness:
    """What the condition says; it does not change before `until`."""

    status: Status
    reason: Reason
    message: str
    until: datetime | None


def fresh(map_: ExpertMap, status: ExpertMapStatus, now: datetime) -> Freshness | None:
    """None without a schedule, or with one that cannot be read.

    Two periods reach back to the last but one time of the schedule, so that a map stays fresh while
    its run of the newest time goes on, and while one run in a row failed.
    """
    try:
        schedule = schedule_of(map_)
    except ScheduleError:
        return None
    if schedule is None:
        return None
    until, newest = schedule.next(now), schedule.last(now)
    measured = status.last_successful_time
    if measured is None:
        return Freshness("False", Reason.NEVER_MEASURED, "no run has measured it yet", until)
    before = None if newest is None else schedule.last(newest - timedelta(minutes=1))
    told = f"measured at {measured}"
    if before is None or parse_timestamp(measured) >= before:
        return Freshness("True", Reason.MEASURED_RECENTLY, told, until)
    message = (
        f"{told}, more than two periods of spec.schedule ago: see the conditions Profiling and "
        "Accepted, and spec.suspend"
    )
    return Freshness("False", Reason.TWO_PERIODS_OLD, message, until)
