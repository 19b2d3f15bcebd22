"""The operator may end after any step: looking again comes to the same, and never to two runs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmaps_operator.decide import expertmap
from expertmaps_operator.decide.conditions import timestamp
from tests.operator import expertmap_world as world
from tests.operator.expertmap_cluster import Cluster, CrashError

CRASHES = [f"crash {steps}" for steps in range(5)]
ENDS = ["accept", "reject", "fail"]
WORLD = ["minutes", "hours", "edit", "run at", "lose job", "lose status"]
STEPS = st.sampled_from(["look", "look", *CRASHES, *ENDS, *WORLD])


def look(cluster: Cluster, crash_after: int = 99) -> None:
    """One turn, with what must hold at any time."""
    before = list(cluster.created)
    try:
        cluster.turn(expertmap.decide, crash_after)
    except CrashError:
        assert crash_after < 99
    assert len(cluster.going()) <= 1, "two runs at a time"
    new = cluster.created[len(before) :]
    assert len(new) <= 1
    assert not set(new) & set(before), "a name twice"


def settle(cluster: Cluster) -> None:
    """Turns until nothing is left to do."""
    for _ in range(6):
        look(cluster)


def act(cluster: Cluster, step: str) -> None:
    match step.split():
        case ["look"]:
            look(cluster)
        case ["crash", number]:
            look(cluster, int(number))
        case ["accept"]:
            cluster.end_run("Accepted")
        case ["reject"]:
            cluster.end_run("Rejected", "ColdShareTooHigh")
        case ["fail"]:
            cluster.end_run("Failed", "EngineFailed")
        case ["minutes"]:
            cluster.wait(minutes=11)
        case ["hours"]:
            cluster.wait(hours=3)
        case ["edit"]:
            cluster.spec["generation"] = cluster.spec.get("generation", 1) + 1
        case ["run", "at"]:
            cluster.spec["generation"] = cluster.spec.get("generation", 1) + 1
            cluster.spec["runAt"] = timestamp(cluster.now)
        case ["lose", "job"]:
            # Only a Job that was seen: one deleted before that is made again under its name.
            seen = (cluster.status.get("run") or {}).get("jobUid")
            for name, job in list(cluster.jobs.items()):
                if job["metadata"]["uid"] == seen:
                    cluster._delete(name, seen)
        case ["lose", "status"]:
            # As after a restore; with the Jobs gone too there would be nothing to know of runs.
            if cluster.jobs:
                cluster.status = {}


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_never_two_runs_and_it_always_settles(steps: list[str]) -> None:
    cluster = Cluster()
    for step in steps:
        act(cluster, step)
    settle(cluster)
    cluster.end_run("Accepted")
    settle(cluster)
    status, events, created = cluster.status, list(cluster.events), list(cluster.created)
    settle(cluster)
    assert (cluster.status, cluster.events, cluster.created) == (status, events, created)
    assert all(
        job["spec"].get("ttlSecondsAfterFinished") is not None
        for name, job in cluster.jobs.items()
        if name not in cluster.going()
    ), "a recorded Job that stays forever"


@pytest.mark.parametrize("outcome", ["Accepted", "Rejected", "Failed"])
@pytest.mark.parametrize("crash_start", range(5))
@pytest.mark.parametrize("crash_end", range(4))
def test_a_crash_after_any_step_comes_to_the_same(
    outcome: str, crash_start: int, crash_end: int
) -> None:
    def story(*crashes: int) -> Cluster:
        cluster = Cluster()
        start, end = crashes or (99, 99)
        look(cluster, start)
        cluster.wait(seconds=1)
        look(cluster)
        cluster.wait(seconds=1)
        look(cluster)
        cluster.end_run(outcome, "EngineFailed" if outcome == "Failed" else "")
        cluster.wait(seconds=1)
        look(cluster, end)
        cluster.wait(seconds=1)
        settle(cluster)
        return cluster

    plain, interrupted = story(), story(crash_start, crash_end)
    assert interrupted.created == plain.created == [world.FIRST_RUN]
    assert set(interrupted.jobs) == set(plain.jobs)
    assert interrupted.config_maps == plain.config_maps
    assert _timeless(interrupted.status) == _timeless(plain.status)
    for cluster in (plain, interrupted):
        (job,) = cluster.jobs.values()
        assert job["spec"]["ttlSecondsAfterFinished"] == 86400
    # An event may be lost with the process, but none comes twice.
    assert len(interrupted.events) == len(set(interrupted.events)) <= len(plain.events)


def _timeless(value: object) -> object:
    if isinstance(value, dict):
        times = (
            "startedAt",
            "finishedAt",
            "acceptedAt",
            "lastSuccessfulTime",
            "lastTransitionTime",
            "message",
        )
        return {key: _timeless(item) for key, item in value.items() if key not in times}
    return [_timeless(item) for item in value] if isinstance(value, list) else value


def test_retries_back_off_and_then_rest() -> None:
    cluster = Cluster()
    waits = (timedelta(0), timedelta(minutes=10), timedelta(hours=1), timedelta(hours=6))
    for number, wait in enumerate(waits, start=1):
        cluster.wait(seconds=wait.total_seconds() - 1)
        look(cluster)
        if number > 1:
            assert len(cluster.created) == number - 1
        cluster.wait(seconds=1)
        look(cluster)
        look(cluster)
        assert len(cluster.created) == number
        cluster.end_run("Failed", "EngineFailed")
        look(cluster)
        assert cluster.status["failedAttempts"] == number
    cluster.wait(days=30)
    settle(cluster)
    assert len(cluster.created) == len(waits)
    cluster.spec["generation"] = 2
    settle(cluster)
    assert len(cluster.created) == len(waits) + 1
    assert cluster.status["failedAttempts"] == 0
