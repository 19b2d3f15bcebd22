"""Schedules mean what a CronJob's mean, daylight saving included."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmaps_operator.decide import cron


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).astimezone(UTC)


NEXT = [
    ("0 3 * * 1", None, "2026-01-05T12:00:00Z", "2026-01-12T03:00:00Z"),
    ("0 3 * * 1", None, "2026-01-05T02:59:59Z", "2026-01-05T03:00:00Z"),
    ("0 3 * * 1", None, "2026-01-05T03:00:00Z", "2026-01-12T03:00:00Z"),
    ("0 3 * * MON", "Europe/Berlin", "2026-01-05T12:00:00Z", "2026-01-12T02:00:00Z"),
    ("*/15 * * * *", None, "2026-01-05T12:01:30Z", "2026-01-05T12:15:00Z"),
    ("5/20 * * * *", None, "2026-01-05T12:06:00Z", "2026-01-05T12:25:00Z"),
    ("@hourly", None, "2026-01-05T12:00:00Z", "2026-01-05T13:00:00Z"),
    ("@weekly", None, "2026-01-05T12:00:00Z", "2026-01-11T00:00:00Z"),
    ("0 0 29 2 *", None, "2026-01-05T12:00:00Z", "2028-02-29T00:00:00Z"),
    ("0 0 29 2 *", None, "2096-03-01T00:00:00Z", "2104-02-29T00:00:00Z"),
    ("0 0 31 JAN,apr *", None, "2026-02-01T00:00:00Z", "2027-01-31T00:00:00Z"),
    # Both day fields restricted: one of them is enough.
    ("0 0 13 * FRI", None, "2026-01-05T12:00:00Z", "2026-01-09T00:00:00Z"),
    ("0 0 13 * ?", None, "2026-01-05T12:00:00Z", "2026-01-13T00:00:00Z"),
    # A step restricts: the 1st, 11th, 21st, 31st, or a Monday.
    ("0 0 */10 * 1", None, "2026-01-05T12:00:00Z", "2026-01-11T00:00:00Z"),
    # Daylight saving begins: 2:30 does not come on the 29th of March in Berlin.
    ("30 2 * * *", "Europe/Berlin", "2026-03-28T02:00:00Z", "2026-03-30T00:30:00Z"),
    # It ends: 2:30 comes twice on the 25th of October.
    ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", "2026-10-25T00:30:00Z"),
    ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z"),
    ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:30:00Z", "2026-10-26T01:30:00Z"),
    # The day with no midnight: Cuba's clocks jump from 0:00 to 1:00.
    ("0 0 * * *", "America/Havana", "2026-03-07T12:00:00Z", "2026-03-09T04:00:00Z"),
    # Half an hour of daylight saving, and a zone of 45 minutes.
    ("15 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00:00Z", "2026-10-04T15:15:00Z"),
    ("0 6 * * *", "Asia/Kathmandu", "2026-01-05T00:15:00Z", "2026-01-06T00:15:00Z"),
]


@pytest.mark.parametrize(("text", "zone", "after", "expected"), NEXT)
def test_the_next_run_is_the_next_matching_wall_clock_time(
    text: str, zone: str | None, after: str, expected: str
) -> None:
    assert cron.parse(text, zone).next(at(after)) == at(expected)


@pytest.mark.parametrize(("text", "zone", "after", "expected"), NEXT)
def test_the_last_run_until_a_moment_is_the_one_that_next_found(
    text: str, zone: str | None, after: str, expected: str
) -> None:
    schedule = cron.parse(text, zone)
    assert schedule.last(at(expected)) == at(expected)
    before = schedule.last(at(expected) - timedelta(minutes=1))
    assert before is not None
    assert before <= at(after)


REFUSED = [
    ("", "five fields"),
    ("0 3 * *", "five fields"),
    ("0 3 * * 1 2026", "five fields"),
    ("@reboot", "five fields"),
    ("60 3 * * *", "minute '60', expected 0 to 59"),
    ("0 24 * * *", "hour '24', expected 0 to 23"),
    ("0 0 0 * *", "day of month '0', expected 1 to 31"),
    ("0 0 * 13 *", "month '13', expected 1 to 12"),
    ("0 0 * * 7", "day of week '7', expected 0 to 6"),
    ("0 0 * * MOM", "day of week 'mom'"),
    ("5-1 * * * *", "minute '5-1'"),
    ("*/0 * * * *", "expected a step from 1"),
    ("*/99 * * * *", "expected a step from 1"),
    ("*-3 * * * *", "minute '*-3'"),
    ("1,,2 * * * *", "minute ''"),
    ("-1 * * * *", "minute '-1'"),
    ("0 0 31 2 *", "a day that one of its months has"),
    ("TZ=Europe/Berlin 0 3 * * *", "five fields"),
    ("٣ * * * *", "minute"),
]


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_a_schedule_that_cannot_be_read_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(cron.ScheduleError) as error:
        cron.parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "zone", ["", "Local", "Europe/Atlantis", "../etc/passwd", "/etc/localtime", "Europe", "a\0b"]
)
def test_a_time_zone_that_is_none_is_refused(zone: str) -> None:
    with pytest.raises(cron.ScheduleError, match="timeZone"):
        cron.parse("0 3 * * *", zone)


MOMENTS = st.datetimes(datetime(2025, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC))
ZONES = st.sampled_from([None, "Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
TEXTS = st.builds(
    "{} {} * * {}".format,
    st.sampled_from(["0", "30", "*/20", "15,45"]),
    st.sampled_from(["*", "2", "0,3", "*/6"]),
    st.sampled_from(["*", "SUN", "1-5"]),
)


@settings(max_examples=30)
@given(text=TEXTS, zone=ZONES, moment=MOMENTS)
def test_next_is_the_first_minute_whose_wall_clock_matches(
    text: str, zone: str | None, moment: datetime
) -> None:
    schedule = cron.parse(text, zone)
    found = schedule.next(moment)
    assert found is not None
    minute = moment.replace(second=0, microsecond=0)
    for _ in range(3 * 24 * 60):
        minute += timedelta(minutes=1)
        local = minute.astimezone(schedule.zone)
        day = local.isoweekday() % 7 in schedule.weekdays
        if day and local.hour in schedule.hours and local.minute in schedule.minutes:
            assert minute == found
            break
    else:
        assert found > minute
    assert schedule.last(found) == found


@given(st.text(max_size=40), st.none() | st.text(max_size=20))
def test_no_text_is_worse_than_refused(text: str, zone: str | None) -> None:
    try:
        schedule = cron.parse(text, zone)
    except cron.ScheduleError as error:
        assert "\n" not in str(error)
    else:
        assert schedule.minutes
