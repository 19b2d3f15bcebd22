"""A schedule measures a map again and again, as a CronJob would; START is a Monday, 12:00 UTC."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmaps_operator.decide import expertmap
from expertmaps_operator.decide.conditions import timestamp
from tests.operator import expertmap_world as world
from tests.operator.expertmap_cluster import Cluster, CrashError
from tests.operator.expertmap_world import START

DAILY = {"schedule": "0 3 * * *"}
DAY = timedelta(days=1)
FIRST_TICK = datetime(2026, 1, 6, 3, 0, tzinfo=UTC)


def look(cluster: Cluster) -> float | None:
    return cluster.turn(expertmap.decide).requeue_after


def measured(cluster: Cluster, outcome: str = "Accepted", reason: str = "") -> None:
    """The run that goes on ends."""
    look(cluster)
    cluster.end_run(outcome, reason)
    cluster.wait(seconds=1)
    look(cluster)
    look(cluster)


def first_run(**spec: Any) -> Cluster:
    """A cluster whose first run made a map."""
    cluster = Cluster(spec={**DAILY, **spec})
    look(cluster)
    measured(cluster)
    assert cluster.created == [world.FIRST_RUN]
    return cluster


def at(cluster: Cluster, moment: datetime) -> None:
    cluster.now = moment
    look(cluster)


def run_name(moment: datetime) -> str:
    return f"lane-a.agent-{int(moment.timestamp()) // 60}"


def condition(cluster: Cluster, type: str) -> tuple[str, str]:
    found = {c["type"]: (c["status"], c["reason"]) for c in cluster.status["conditions"]}
    return found[type]


def test_the_operator_wakes_at_the_next_time_of_the_schedule() -> None:
    cluster = first_run()
    after = look(cluster)
    assert after == (FIRST_TICK - cluster.now).total_seconds()
    at(cluster, FIRST_TICK - timedelta(seconds=1))
    assert len(cluster.created) == 1
    at(cluster, FIRST_TICK)
    assert cluster.created[1:] == [run_name(FIRST_TICK)]
    assert cluster.status["lastScheduleTime"] == timestamp(FIRST_TICK)


def test_a_run_is_named_by_its_time_however_late_it_starts() -> None:
    cluster = first_run()
    at(cluster, FIRST_TICK + timedelta(hours=2, minutes=7))
    assert cluster.created[1:] == [run_name(FIRST_TICK)]


def test_times_missed_while_the_operator_was_down_are_made_up_for_once() -> None:
    cluster = first_run()
    at(cluster, FIRST_TICK + 5 * DAY + timedelta(hours=1))
    assert cluster.created[1:] == [run_name(FIRST_TICK + 5 * DAY)]
    measured(cluster)
    cluster.wait(minutes=1)
    look(cluster)
    assert len(cluster.created) == 2


@pytest.mark.parametrize(("late", "runs"), [(3600, 1), (3601, 0)])
def test_a_run_that_would_be_later_than_the_starting_deadline_is_left_out(
    late: int, runs: int
) -> None:
    cluster = first_run(startingDeadlineSeconds=3600)
    at(cluster, FIRST_TICK + timedelta(seconds=late))
    assert len(cluster.created) == 1 + runs
    at(cluster, FIRST_TICK + DAY)
    assert cluster.created[-1] == run_name(FIRST_TICK + (DAY if not runs else timedelta()))


def test_a_time_that_comes_while_a_run_goes_on_waits_for_its_end() -> None:
    cluster = first_run(schedule="*/10 * * * *")
    at(cluster, START + timedelta(minutes=10))
    at(cluster, START + timedelta(minutes=20))
    at(cluster, START + timedelta(minutes=35))
    assert cluster.created[1:] == [run_name(START + timedelta(minutes=10))]
    measured(cluster)
    # 12:20 and 12:30 are owed; the newest is made up for.
    assert cluster.created[2:] == [run_name(START + timedelta(minutes=30))]


def test_suspend_starts_nothing_but_what_run_at_asks_for() -> None:
    cluster = first_run()
    cluster.spec["suspend"] = True
    at(cluster, FIRST_TICK + 3 * DAY)
    assert len(cluster.created) == 1
    asked = cluster.now + timedelta(minutes=5)
    cluster.spec |= {"runAt": timestamp(asked), "generation": 2}
    at(cluster, asked)
    assert cluster.created[1:] == [run_name(asked)]


def test_a_suspended_new_map_is_not_measured() -> None:
    cluster = Cluster(spec={**DAILY, "suspend": True})
    look(cluster)
    assert cluster.created == []
    cluster.spec["suspend"] = False
    look(cluster)
    assert cluster.created == [world.FIRST_RUN]


def test_suspending_after_a_failure_starts_no_run() -> None:
    cluster = Cluster(spec={**DAILY})
    look(cluster)
    measured(cluster, "Failed", "EngineFailed")
    cluster.spec |= {"suspend": True, "generation": 2}
    cluster.wait(hours=20)
    look(cluster)
    assert len(cluster.created) == 1


def test_the_newest_missed_time_is_made_up_for_when_suspend_ends() -> None:
    cluster = first_run()
    cluster.spec["suspend"] = True
    at(cluster, FIRST_TICK + 3 * DAY + timedelta(hours=1))
    cluster.spec["suspend"] = False
    look(cluster)
    assert cluster.created[1:] == [run_name(FIRST_TICK + 3 * DAY)]


def test_a_schedule_written_later_owes_nothing_from_before_the_last_run() -> None:
    cluster = Cluster()
    look(cluster)
    measured(cluster)
    at(cluster, START + timedelta(hours=1))
    cluster.spec |= {"schedule": "30 12 * * *", "generation": 2}
    look(cluster)
    # 12:30 passed after the first run began, so that it is owed, once.
    assert cluster.created[1:] == [run_name(START + timedelta(minutes=30))]
    measured(cluster)
    cluster.spec |= {"schedule": "15 12 * * *", "generation": 3}
    look(cluster)
    assert len(cluster.created) == 2


def test_a_run_asked_for_serves_the_time_that_passed_before_it() -> None:
    cluster = first_run(runAt=timestamp(FIRST_TICK))
    at(cluster, FIRST_TICK + timedelta(minutes=1))
    measured(cluster)
    look(cluster)
    assert len(cluster.created) == 2


def test_a_failed_scheduled_run_is_tried_again_before_the_next_time() -> None:
    cluster = first_run()
    at(cluster, FIRST_TICK)
    measured(cluster, "Failed", "EngineFailed")
    cluster.wait(minutes=10)
    look(cluster)
    assert len(cluster.created) == 3
    measured(cluster, "Failed", "EngineFailed")
    at(cluster, FIRST_TICK + DAY)
    assert cluster.status["failedAttempts"] == 0


def test_a_map_that_is_not_better_moves_nothing_and_is_not_measured_again_for_an_edit() -> None:
    cluster = first_run()
    accepted = cluster.status["accepted"]
    at(cluster, FIRST_TICK)
    measured(cluster, "Rejected", "NotBetterThanCurrent")
    assert cluster.status["accepted"] == accepted
    assert condition(cluster, "Accepted") == ("False", "NotBetterThanCurrent")
    assert condition(cluster, "Ready") == ("True", "MapAccepted")
    cluster.spec["generation"] = 2
    cluster.wait(minutes=1)
    look(cluster)
    assert len(cluster.created) == 2


def test_spring_forward_has_no_run_and_autumn_has_two() -> None:
    cluster = first_run(schedule="30 2 * * *", timeZone="Europe/Berlin")
    at(cluster, datetime(2026, 3, 28, 12, tzinfo=UTC))
    measured(cluster)
    before = len(cluster.created)
    at(cluster, datetime(2026, 3, 29, 12, tzinfo=UTC))
    assert len(cluster.created) == before
    at(cluster, datetime(2026, 10, 24, 12, tzinfo=UTC))
    measured(cluster)
    before = len(cluster.created)
    for moment in (
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 25, 1, 30, tzinfo=UTC),
    ):
        at(cluster, moment)
        measured(cluster)
        assert cluster.created[before:] == [run_name(moment)]
        before += 1


@pytest.mark.parametrize(
    "spec",
    [
        {"schedule": "0 25 * * *"},
        {"schedule": "0 3 * * 1", "timeZone": "Europe/Atlantis"},
        {"schedule": "0 0 31 2 *"},
    ],
)
def test_a_schedule_that_cannot_be_read_is_named_and_keeps_the_map(spec: dict[str, str]) -> None:
    cluster = Cluster()
    look(cluster)
    measured(cluster)
    cluster.spec |= {**spec, "generation": 2}
    cluster.wait(days=40)
    look(cluster)
    assert condition(cluster, "Profiling") == ("False", "InvalidSpec")
    assert condition(cluster, "Ready") == ("True", "MapAccepted")
    assert len(cluster.created) == 1


def test_fresh_until_two_periods_went_by() -> None:
    cluster = first_run()
    assert condition(cluster, "Fresh") == ("True", "MeasuredRecently")
    for day in range(2):
        at(cluster, FIRST_TICK + day * DAY)
        measured(cluster, "Failed", "EngineNotReady")
    assert condition(cluster, "Fresh") == ("False", "TwoPeriodsOld")
    at(cluster, FIRST_TICK + 2 * DAY)
    measured(cluster)
    assert condition(cluster, "Fresh") == ("True", "MeasuredRecently")
    del cluster.spec["schedule"]
    look(cluster)
    assert "Fresh" not in {item["type"] for item in cluster.status["conditions"]}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "end", "fail", "better", "suspend", "crash", "lose"]),
        st.integers(1, 3000),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_one_run_at_a_time_and_each_time_of_the_schedule_at_most_once(
    steps: list[tuple[str, int]],
) -> None:
    cluster = Cluster(spec={"schedule": "0 */6 * * *"})
    for step, amount in steps:
        match step:
            case "wait":
                cluster.wait(minutes=amount)
            case "end" | "fail" | "better":
                outcome = {"end": "Accepted", "fail": "Failed", "better": "Rejected"}[step]
                reason = {"fail": "EngineFailed", "better": "NotBetterThanCurrent"}.get(step, "")
                cluster.end_run(outcome, reason)
            case "suspend":
                cluster.spec["suspend"] = not cluster.spec.get("suspend", False)
            case "lose":
                # With the newest Job gone too, nothing would know of its run.
                if cluster.created and cluster.created[-1] in cluster.jobs:
                    cluster.status = {}
            case "crash":
                with contextlib.suppress(CrashError):
                    cluster.turn(expertmap.decide, amount % 4)
        look(cluster)
        cluster.wait(seconds=1)
        look(cluster)
        assert len(cluster.going()) <= 1
    assert len(set(cluster.created)) == len(cluster.created)
