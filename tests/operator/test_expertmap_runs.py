"""Decisions on a run that goes on or has ended: what it shows, and what its end means."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from expertmaps_operator.api.expertlane import LaneGeometry
from expertmaps_operator.decide import expertmap
from expertmaps_operator.decide.conditions import timestamp
from expertmaps_operator.plan import PatchJob
from tests.operator import expertmap_world as world
from tests.operator.expertmap_case import (
    ACCEPTED,
    BOOTING,
    COUNTING,
    JOB,
    MAPS,
    MINUTE,
    RUNS,
    STARTED,
    Case,
    accepted_status,
    check,
    check_again,
    crashed,
    ended_snapshot,
    probe_said,
    run_snapshot,
    runner_said,
    waits,
)
from tests.operator.expertmap_world import FIRST_RUN, START

PODLESS: dict[str, Any] = {
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes"}]
}

FOLLOWS = [
    Case("no pod yet", run_snapshot(), RUNS),
    Case(
        "no node",
        run_snapshot(world.pod(JOB, **PODLESS)),
        {"Profiling": ("False", "WaitingForAccelerator")},
        says="0/1 nodes",
    ),
    Case(
        "image cannot be pulled",
        run_snapshot(world.pod(JOB, inits=(waits("vllm", "ImagePullBackOff"),))),
        {"Profiling": ("False", "ImagePullFailed")},
    ),
    Case(
        "Secret missing",
        run_snapshot(world.pod(JOB, inits=(waits("probe", "CreateContainerConfigError"),))),
        {"Profiling": ("False", "EnginePodFailed")},
    ),
    Case("engine boots", run_snapshot(world.pod(JOB, inits=(BOOTING,))), RUNS),
    Case("engine up", run_snapshot(world.pod(JOB, inits=(STARTED,), mains=(COUNTING,))), RUNS),
    Case(
        "engine up, past the pending deadline",
        run_snapshot(world.pod(JOB, inits=(STARTED,), mains=(COUNTING,))),
        RUNS,
        after=timedelta(hours=2),
    ),
    Case(
        "one crash is forgiven",
        run_snapshot(world.pod(JOB, inits=({**crashed(1, restarts=1), "state": {"running": {}}},))),
        RUNS,
        says="exit code 1",
    ),
    Case(
        "store proved",
        run_snapshot(
            world.pod(
                JOB,
                inits=(
                    world.container_status(
                        "probe",
                        world.ended(0, world.verdict(FIRST_RUN, "Probed").to_message().decode()),
                    ),
                    BOOTING,
                ),
            )
        ),
        {**RUNS, "StoreReady": ("True", "WriteVerified")},
    ),
    Case(
        "crash loop",
        run_snapshot(
            world.pod(
                JOB,
                inits=(
                    waits("vllm", "CrashLoopBackOff")
                    | {"restartCount": 2, "lastState": world.ended(7)},
                ),
            )
        ),
        {"Profiling": ("False", "EnginePodFailed")},
        ("DeleteJob",),
        ("ProfileFailed",),
        says="exit code 7 after 2 restarts",
    ),
    Case(
        "out of memory again and again",
        run_snapshot(world.pod(JOB, inits=(crashed(137, "OOMKilled"),))),
        {"Profiling": ("False", "EngineOutOfMemory")},
        ("DeleteJob",),
        ("ProfileFailed",),
    ),
    Case(
        "pending too long",
        run_snapshot(world.pod(JOB, **PODLESS)),
        {"Profiling": ("False", "ProfileDeadlineExceeded")},
        ("DeleteJob",),
        ("ProfileFailed",),
        after=timedelta(hours=1),
        says="WaitingForAccelerator",
    ),
    Case(
        "Job deleted by hand",
        world.snapshot(world.expert_map(world.running())),
        {"Profiling": ("False", "NoVerdict")},
        (),
        ("ProfileFailed",),
    ),
]

ENDS = [
    Case(
        "accepted",
        ended_snapshot(ACCEPTED, kind="Complete", map_objects=MAPS),
        {
            "Profiling": ("False", "ProfileSucceeded"),
            "Accepted": ("True", "MapAccepted"),
            "Ready": ("True", "MapAccepted"),
        },
        ("PatchJob",),
        ("MapAccepted",),
        run={"outcome": "Accepted", "sessions": 20, "decodeTokens": 9000, "engineSeconds": "12.3"},
    ),
    Case(
        "accepted, ConfigMap not seen yet",
        ended_snapshot(ACCEPTED, kind="Complete"),
        {"Profiling": ("True", "ProfileRunning"), "Accepted": ("Unknown", "NoMapYet")},
    ),
    Case(
        "accepted, ConfigMap gone",
        ended_snapshot(ACCEPTED, kind="Complete"),
        {"Accepted": ("False", "MapUnavailable"), "Ready": ("False", "NoMapYet")},
        ("PatchJob",),
        ("MapRejected",),
        after=2 * MINUTE,
    ),
    Case(
        "accepted, ConfigMap changed",
        ended_snapshot(
            ACCEPTED,
            kind="Complete",
            map_objects={
                world.row_map().digest: world.map_object(world.row_map(), "sha256: found another")
            },
        ),
        {"Accepted": ("False", "ChecksumMismatch"), "Ready": ("False", "NoMapYet")},
        ("PatchJob",),
        ("MapRejected",),
    ),
    Case(
        "accepted, another geometry than the lane's",
        ended_snapshot(
            ACCEPTED,
            kind="Complete",
            map_objects=MAPS,
            lane=world.lane().model_copy(
                update={
                    "status": world.lane().status.model_copy(
                        update={
                            "geometry": LaneGeometry(
                                digest="sha256:" + "0" * 64,
                                experts="4",
                                top_k=1,
                                hot_rows="3",
                                moe_layers=2,
                            )
                        }
                    )
                }
            ),
        ),
        {"Accepted": ("False", "GeometryMismatch")},
        ("PatchJob",),
        ("MapRejected",),
    ),
    Case(
        "rejected; the earlier map stays",
        ended_snapshot(
            runner_said(world.verdict(FIRST_RUN, "Rejected", "ColdShareTooHigh")),
            kind="Complete",
            map=world.expert_map({**accepted_status(), **world.running()}),
        ),
        {
            "Profiling": ("False", "ProfileSucceeded"),
            "Accepted": ("False", "ColdShareTooHigh"),
            "Ready": ("True", "MapAccepted"),
        },
        ("PatchJob",),
        ("MapRejected",),
        run={"outcome": "Rejected", "reason": "ColdShareTooHigh"},
    ),
    Case(
        "runner failed",
        ended_snapshot(runner_said(world.verdict(FIRST_RUN, "Failed", "HookNotLoaded"), 42)),
        {"Profiling": ("False", "HookNotLoaded"), "Accepted": ("Unknown", "NoMapYet")},
        ("PatchJob",),
        ("ProfileFailed",),
        run={"outcome": "Failed", "reason": "HookNotLoaded"},
    ),
    Case(
        "store refused",
        ended_snapshot(probe_said(world.verdict(FIRST_RUN, "Failed", "AccessDenied"), 42)),
        {"Profiling": ("False", "AccessDenied"), "StoreReady": ("False", "AccessDenied")},
        ("PatchJob",),
        ("ProfileFailed",),
    ),
    Case(
        "no transcripts says nothing against the store",
        ended_snapshot(probe_said(world.verdict(FIRST_RUN, "Failed", "NoTranscripts"), 42)),
        {"Profiling": ("False", "NoTranscripts"), "StoreReady": ("True", "WriteVerified")},
        ("PatchJob",),
        ("ProfileFailed",),
    ),
    Case(
        "active deadline",
        ended_snapshot(reason="DeadlineExceeded"),
        {"Profiling": ("False", "ProfileDeadlineExceeded")},
        ("PatchJob",),
        ("ProfileFailed",),
    ),
    Case(
        "verdict is not readable",
        ended_snapshot(
            world.pod(JOB, mains=(world.container_status("runner", world.ended(1, "Killed")),))
        ),
        {"Profiling": ("False", "NoVerdict")},
        ("PatchJob",),
        ("ProfileFailed",),
        says="termination message of runner",
    ),
    Case(
        "verdict of another run",
        ended_snapshot(runner_said(world.verdict("lane-a.agent-1"))),
        {"Profiling": ("False", "NoVerdict")},
        ("PatchJob",),
        ("ProfileFailed",),
        says="lane-a.agent-1",
    ),
    Case(
        "runner ran out of memory",
        ended_snapshot(
            world.pod(
                JOB,
                inits=(STARTED,),
                mains=(world.container_status("runner", world.ended(137, reason="OOMKilled")),),
            )
        ),
        {"Profiling": ("False", "NoVerdict")},
        ("PatchJob",),
        ("ProfileFailed",),
        says="container runner ended with exit code 137 (OOMKilled)",
    ),
    Case(
        "user's init container failed",
        ended_snapshot(
            world.pod(JOB, inits=(world.container_status("fetch-model", world.ended(3)),))
        ),
        {"Profiling": ("False", "EnginePodFailed")},
        ("PatchJob",),
        ("ProfileFailed",),
        says="container fetch-model ended with exit code 3",
    ),
    Case(
        "pod refused by the node",
        ended_snapshot(
            world.pod(JOB, phase="Failed", reason="UnexpectedAdmissionError", message="no device")
        ),
        {"Profiling": ("False", "EnginePodFailed")},
        ("PatchJob",),
        ("ProfileFailed",),
        says="UnexpectedAdmissionError: no device",
    ),
    Case(
        "nothing left of it",
        ended_snapshot(reason="BackoffLimitExceeded"),
        {"Profiling": ("False", "NoVerdict")},
        ("PatchJob",),
        ("ProfileFailed",),
    ),
]


@pytest.mark.parametrize("case", FOLLOWS + ENDS, ids=lambda case: case.name)
def test_decision(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", FOLLOWS + ENDS, ids=lambda case: case.name)
def test_deciding_again_changes_nothing(case: Case) -> None:
    check_again(case)


def test_accepted_map_in_status() -> None:
    case = next(case for case in ENDS if case.name == "accepted")
    plan = expertmap.decide(case.snapshot, START + MINUTE)
    assert plan.status is not None
    assert plan.status["accepted"] == {
        "digest": world.row_map().digest,
        "rowSetDigest": world.row_map().row_set_digest,
        "run": FIRST_RUN,
        "acceptedAt": timestamp(START + MINUTE),
        "coldSharePercent": "1.55",
        "positionalColdSharePercent": "23.00",
        "decodeTokens": 9000,
        "sessions": 20,
        "reportKey": "reports/x/report.json",
    }
    patch = plan.actions[0]
    assert isinstance(patch, PatchJob)
    assert patch.patch == {"spec": {"ttlSecondsAfterFinished": 86400}}
