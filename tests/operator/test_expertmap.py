"""Decisions on an ExpertMap: when a run starts, and what stays as it is."""

from __future__ import annotations

from datetime import timedelta

import pytest

from expertmaps_operator.decide import expertmap
from expertmaps_operator.decide.conditions import timestamp
from expertmaps_operator.plan import Create, DeleteJob, Plan
from expertmaps_operator.snapshot import Invalid, Slots
from rowmap_jobs import reasons as runner_reasons
from tests.operator import expertmap_world as world
from tests.operator.expertmap_case import (
    JOB,
    MINUTE,
    RUNS,
    Case,
    accepted_status,
    check,
    check_again,
    failed_status,
    run_snapshot,
)
from tests.operator.expertmap_world import FIRST_RUN, START

START_ACTIONS = ("Create ConfigMap", "Create Job")


def refusal(reason: str) -> dict[str, tuple[str, str]]:
    return {"Profiling": ("False", reason), "Ready": ("False", reason)}


STARTS = [
    Case(
        "first run at once",
        world.snapshot(),
        {
            **RUNS,
            "Accepted": ("Unknown", "NoMapYet"),
            "StoreReady": ("Unknown", "NotProbed"),
        },
        START_ACTIONS,
        ("ProfileStarted",),
        run={"name": FIRST_RUN, "generation": 1},
    ),
    Case("lane missing", world.snapshot(lane=None), refusal("LaneNotFound")),
    Case(
        "lane unreadable",
        world.snapshot(lane=Invalid("lane-a", 1, "spec.x: found y")),
        refusal("InvalidSpec"),
    ),
    Case("class missing", world.snapshot(traffic_class=None), refusal("TrafficClassNotFound")),
    Case("workload missing", world.snapshot(workload=None), refusal("WorkloadNotFound")),
    Case(
        "container missing",
        world.snapshot(lane=world.lane(containerName="sglang")),
        refusal("ContainerNotFound"),
    ),
    Case(
        "runAt is no time",
        world.snapshot(world.expert_map(runAt="tomorrow")),
        refusal("InvalidSpec"),
    ),
    Case(
        "another run of the lane",
        world.snapshot(lane_profiles=1, slots=Slots(1, 0)),
        {"Profiling": ("False", "WaitingForLane"), "Ready": ("False", "NoMapYet")},
    ),
    Case(
        "no slot",
        world.snapshot(slots=Slots(1, 0)),
        {"Profiling": ("False", "WaitingForSlot")},
    ),
    Case(
        "written down but not made",
        world.snapshot(world.expert_map(world.running(jobUid=None))),
        RUNS,
        START_ACTIONS,
        run={"name": FIRST_RUN},
    ),
    Case(
        "status lost while a run goes on",
        world.snapshot(jobs=(JOB,), lane_profiles=1),
        RUNS,
        run={"name": FIRST_RUN, "jobUid": f"uid-{FIRST_RUN}"},
    ),
    Case(
        "a Job of an ExpertMap of this name that was deleted",
        world.snapshot(
            world.expert_map(),
            jobs=({**JOB, "metadata": {**JOB["metadata"], "ownerReferences": []}},),
        ),
        RUNS,
        START_ACTIONS,
        ("ProfileStarted",),
    ),
    Case(
        "accepted and nothing to do",
        world.snapshot(world.expert_map(accepted_status())),
        {"Profiling": ("False", "ProfileSucceeded"), "Ready": ("True", "MapAccepted")},
        after=timedelta(days=30),
    ),
    Case(
        "accepted, and its lane deleted",
        world.snapshot(world.expert_map(accepted_status()), lane=None),
        {"Profiling": ("False", "LaneNotFound"), "Ready": ("True", "MapAccepted")},
    ),
    Case(
        "accepted, and the spec changed",
        world.snapshot(world.expert_map(accepted_status(), generation=2)),
        {"Profiling": ("False", "ProfileSucceeded")},
    ),
    Case(
        "runAt comes",
        world.snapshot(
            world.expert_map(accepted_status(), generation=2, runAt=timestamp(START + MINUTE))
        ),
        {"Profiling": ("True", "ProfileRunning"), "Ready": ("True", "MapAccepted")},
        START_ACTIONS,
        ("ProfileStarted",),
        after=2 * MINUTE,
        run={"generation": 2},
    ),
    Case(
        "runAt is still to come",
        world.snapshot(world.expert_map(accepted_status(), runAt=timestamp(START + MINUTE))),
        {"Profiling": ("False", "ProfileSucceeded")},
    ),
    Case(
        "runAt is past and done, to a fraction of a second",
        world.snapshot(
            world.expert_map(accepted_status(), runAt=START.isoformat().replace("+", ".9+"))
        ),
        {"Profiling": ("False", "ProfileSucceeded")},
        after=MINUTE,
    ),
    Case(
        "failed: waits",
        world.snapshot(world.expert_map(failed_status())),
        {"Profiling": ("False", "EngineFailed")},
        after=9 * MINUTE,
        says="next try at 2026-01-05T12:10:00Z",
    ),
    Case(
        "failed: tries again",
        world.snapshot(world.expert_map(failed_status())),
        {"Profiling": ("True", "ProfileRunning")},
        START_ACTIONS,
        ("ProfileStarted",),
        after=10 * MINUTE,
        run={"name": f"lane-a.agent-{int(START.timestamp()) // 60 + 10}"},
    ),
    Case(
        "failed for the fourth time: rests",
        world.snapshot(world.expert_map(failed_status(attempts=4))),
        {"Profiling": ("False", "EngineFailed")},
        after=timedelta(days=30),
        says="no further try",
    ),
    Case(
        "failed, and the spec changed",
        world.snapshot(world.expert_map(failed_status(attempts=4), generation=2)),
        {"Profiling": ("True", "ProfileRunning")},
        START_ACTIONS,
        ("ProfileStarted",),
        # In the minute of the run before it: the name moves on.
        run={"name": f"lane-a.agent-{int(START.timestamp()) // 60 + 1}", "generation": 2},
    ),
    Case(
        "rejected: no retry",
        world.snapshot(world.expert_map(failed_status(attempts=0, outcome="Rejected"))),
        {"Profiling": ("False", "ProfileSucceeded")},
        after=timedelta(days=30),
    ),
    Case(
        "environment keeps the hook out",
        world.snapshot(
            workload={
                **(found := world.workload()),
                "x": world.engine_of(found)["env"].append({"name": "VLLM_PLUGINS", "value": "a"}),
            }
        ),
        {"Profiling": ("False", "EnvConflict")},
        says="VLLM_PLUGINS=a,expertmaps",
    ),
]


@pytest.mark.parametrize("case", STARTS, ids=lambda case: case.name)
def test_decision(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", STARTS, ids=lambda case: case.name)
def test_deciding_again_changes_nothing(case: Case) -> None:
    check_again(case)


def test_a_deleted_map_is_left_alone() -> None:
    map_ = world.expert_map()
    gone = map_.model_copy(
        update={"metadata": map_.metadata.model_copy(update={"deletion_timestamp": "x"})}
    )
    assert expertmap.decide(world.snapshot(gone), START) == Plan(status=None)


def test_invalid_spec_keeps_what_is_known() -> None:
    status = accepted_status()
    plan = expertmap.decide(
        world.snapshot(Invalid("lane-a.agent", 4, "spec.x: found y", status)), START
    )
    assert plan.status is not None
    assert plan.status["accepted"] == status["accepted"]
    assert plan.status["observedGeneration"] == 4
    assert world.conditions(plan)["Ready"] == ("False", "InvalidSpec")
    assert plan.actions == ()


def test_transition_time_moves_with_the_status_alone() -> None:
    first = expertmap.decide(world.snapshot(lane=None), START)
    assert first.status is not None
    map_ = world.expert_map(dict(first.status))
    later = expertmap.decide(world.snapshot(map_, traffic_class=None), START + MINUTE)
    assert later.status is not None
    for item in later.status["conditions"]:
        assert item["lastTransitionTime"] == timestamp(START)


def test_a_stray_job_is_ended() -> None:
    """An older run that goes on beside the recorded one is nobody's."""
    stray = world.job("lane-a.agent-7")
    plan = expertmap.decide(
        world.snapshot(world.expert_map(accepted_status()), jobs=(stray,)), START
    )
    assert plan.actions == (DeleteJob("lane-a.agent-7", "uid-lane-a.agent-7"),)


def test_sibling_maps_are_compared_against() -> None:
    sibling = world.expert_map(accepted_status()).model_copy(
        update={
            "spec": world.expert_map(trafficClassRef={"name": "prose"}).spec,
        }
    )
    plan = expertmap.decide(world.snapshot(sibling_maps=(sibling,)), START)
    job = plan.actions[1]
    assert isinstance(job, Create)
    runner = job.manifest["spec"]["template"]["spec"]["containers"][0]
    assert f'"prose":"{world.row_map().digest}"' in runner["env"][0]["value"]


def test_requeue_follows_the_next_moment() -> None:
    waiting = expertmap.decide(world.snapshot(slots=Slots(1, 0)), START)
    assert waiting.requeue_after == 30
    pending = expertmap.decide(run_snapshot(world.pod(JOB)), START + MINUTE)
    assert pending.requeue_after == 3540
    retry = expertmap.decide(world.snapshot(world.expert_map(failed_status())), START + MINUTE)
    assert retry.requeue_after == 540
    done = expertmap.decide(world.snapshot(world.expert_map(accepted_status())), START)
    assert done.requeue_after is None


def test_reasons_about_transcripts_are_the_runners() -> None:
    assert {str(reason) for reason in runner_reasons.Reason} >= expertmap.TRANSCRIPT_REASONS
