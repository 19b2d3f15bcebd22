"""Schedules with the meaning that a CronJob's has: five fields of local wall clock time.

An instant matches when its local wall clock matches all fields (day of month or day of week is
enough when both are restricted). So an hour that daylight saving skips does not come, and one that
it repeats comes twice, as in Kubernetes' own CronJob. Libraries for cron follow Debian's rules
instead, which run a skipped job late and a repeated one once.

Fields: minute 0-59, hour 0-23, day of month 1-31, month 1-12 or JAN-DEC, day of week 0-6 or SUN-SAT
(0 is Sunday); lists, ranges, steps, `*` and `?`; or @yearly, @annually, @monthly, @weekly,
@daily, @midnight, @hourly.
"""

from __future__ import annotations

import calendar
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

_MACROS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_DAYS = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, _MONTHS),
    ("day of week", 0, 6, _DAYS),
)
_PART = re.compile(r"^(\*|\?|[0-9a-z]+)(?:-([0-9a-z]+))?(?:/([0-9]+))?$")
_YEARS = 8
"""The 29th of February of a leap year may be eight years away."""


class ScheduleError(ValueError):
    """A schedule or time zone that cannot be read, in one line: found and expected."""


@dataclass(frozen=True)
class Schedule:
    """A parsed schedule."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    either_day: bool
    """Both day fields are restricted: one that matches is enough."""
    zone: ZoneInfo

    def next(self, after: datetime) -> datetime | None:
        """The first instant later than `after`, in UTC; None when there is none in eight years."""
        return self._search(after + timedelta(minutes=1), forward=True)

    def last(self, until: datetime) -> datetime | None:
        """The last instant not later than `until`, in UTC."""
        return self._search(until, forward=False)

    def _search(self, start: datetime, forward: bool) -> datetime | None:
        start = start.astimezone(UTC).replace(second=0, microsecond=0)
        day = start.astimezone(self.zone).date()
        # A day's instants are found whole, from the day before on: a zone may jump over midnight.
        day += timedelta(days=-1 if forward else 1)
        for _ in range(366 * _YEARS):
            if self._matches(day):
                instants = self._instants(day)
                fitting = [at for at in instants if (at >= start if forward else at <= start)]
                if fitting:
                    return min(fitting) if forward else max(fitting)
            day += timedelta(days=1 if forward else -1)
        return None

    def _matches(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return in_month or in_week if self.either_day else in_month and in_week

    def _instants(self, day: date) -> set[datetime]:
        out = set()
        for hour in self.hours:
            for minute in self.minutes:
                for fold in (0, 1):
                    local = datetime(
                        day.year, day.month, day.day, hour, minute, tzinfo=self.zone, fold=fold
                    )
                    at = local.astimezone(UTC)
                    back = at.astimezone(self.zone)
                    # A wall clock time that daylight saving skips does not come back as itself.
                    if (back.date(), back.hour, back.minute) == (day, hour, minute):
                        out.add(at)
        return out


def parse(text: str, time_zone: str | None = None) -> Schedule:
    """A schedule in a time zone (UTC without one). Raises ScheduleError."""
    zone = _zone(time_zone)
    fields = _MACROS.get(text.strip().lower(), text).split()
    if len(fields) != len(_FIELDS):
        raise ScheduleError(
            f"found {text!r}, expected five fields (minute, hour, day of month, month, day of "
            "week) such as '0 3 * * 1', or @daily"
        )
    sets = [_field(field.lower(), index, text) for index, field in enumerate(fields)]
    schedule = Schedule(
        minutes=sets[0],
        hours=sets[1],
        days=sets[2],
        months=sets[3],
        weekdays=sets[4],
        either_day=not any(_starred(fields[i]) for i in (2, 4)),
        zone=zone,
    )
    if not schedule.either_day and not any(
        day <= calendar.monthrange(2000, month)[1] for month in sets[3] for day in sets[2]
    ):
        raise ScheduleError(f"found {text!r}, expected a day that one of its months has")
    return schedule


def _zone(name: str | None) -> ZoneInfo:
    if name is None:
        return ZoneInfo("UTC")
    # "Local" and the like would mean the zone of the operator's node.
    if name.lower() in ("", "local") or name.startswith("/") or ".." in name:
        raise ScheduleError(f"timeZone: found {name!r}, expected a name such as Europe/Berlin")
    try:
        return ZoneInfo(name)
    except Exception:  # zoneinfo raises many kinds on names that are none
        raise ScheduleError(
            f"timeZone: found {name!r}, expected a name such as Europe/Berlin"
        ) from None


def _field(field: str, index: int, text: str) -> frozenset[int]:
    name, low, high, words = _FIELDS[index]
    out: set[int] = set()
    for part in field.split(","):
        match = _PART.match(part)
        begin = end = None
        if match is not None:
            first, last, step = match.groups()
            if first in ("*", "?"):
                begin, end = (None, None) if last else (low, high)
            else:
                begin = _number(first, words)
                end = (
                    _number(last, words) if last else high if step and begin is not None else begin
                )
        if begin is None or end is None or not low <= begin <= end <= high:
            raise ScheduleError(
                f"found {text!r}: {name} {part!r}, expected {low} to {high}, such as "
                f"{low}-{high}/2 or *"
            )
        stride = int(match.group(3) or 1) if match else 1
        if stride < 1 or stride > high:
            raise ScheduleError(
                f"found {text!r}: {name} {part!r}, expected a step from 1 to {high}"
            )
        out.update(range(begin, end + 1, stride))
    return frozenset(out)


def _starred(field: str) -> bool:
    """Whether a day field leaves all days to the other one; `*/2` restricts them itself."""
    return any(part in ("*", "?", "*/1", "?/1") for part in field.split(","))


def _number(word: str, words: dict[str, int]) -> int | None:
    if word in words:
        return words[word]
    return int(word) if word.isascii() and word.isdigit() and len(word) <= 4 else None
