"""Decisions on a TrafficClass: what the last run of its maps found."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from expertmaps_operator.api.expertmap import ExpertMap
from expertmaps_operator.api.trafficclass import TrafficClass
from expertmaps_operator.decide import trafficclass
from expertmaps_operator.decide.conditions import timestamp
from expertmaps_operator.plan import Plan
from expertmaps_operator.snapshot import ClassSnapshot, Invalid
from tests.operator import expertmap_world as world
from tests.operator.expertmap_world import FIRST_RUN, START


def ran(outcome: str | None, reason: str = "x", name: str = FIRST_RUN, **run: Any) -> ExpertMap:
    """A map whose last run ended so; None: goes on."""
    done: dict[str, Any] = {
        "finishedAt": timestamp(START),
        "outcome": outcome,
        "reason": reason,
        "message": "why",
    }
    return world.expert_map(world.running(name, **(done if outcome else {}), **run))


def decide(*maps: ExpertMap, tc: TrafficClass | Invalid | None = None) -> Plan:
    return trafficclass.decide(ClassSnapshot(tc or world.traffic_class(), maps), START)


def with_status(status: Any) -> TrafficClass:
    plain = world.traffic_class().model_dump(by_alias=True, exclude_none=True)
    return TrafficClass.model_validate({**plain, "status": status})


@pytest.mark.parametrize(
    ("maps", "ready"),
    [
        ((), ("Unknown", "NotProfiled")),
        ((world.expert_map(),), ("Unknown", "NotProfiled")),
        ((ran(None),), ("Unknown", "NotProfiled")),
        ((ran("Accepted"),), ("True", "TranscriptsFound")),
        ((ran("Rejected", "ColdShareTooHigh"),), ("True", "TranscriptsFound")),
        ((ran("Failed", "NoTranscripts"),), ("False", "NoTranscripts")),
        ((ran("Failed", "TooFewTranscripts"),), ("False", "TooFewTranscripts")),
        ((ran("Failed", "EngineFailed"),), ("Unknown", "NotProfiled")),
    ],
)
def test_ready(maps: tuple[ExpertMap, ...], ready: tuple[str, str]) -> None:
    assert world.conditions(decide(*maps)) == {"Ready": ready}


def test_numbers_of_the_last_run() -> None:
    plan = decide(ran("Accepted", sessions=20, decodeTokens=9000))
    assert plan.status is not None
    assert plan.status["sessions"] == 20
    assert plan.status["decodeTokens"] == 9000
    assert plan.status["lastRun"] == FIRST_RUN
    assert plan.status["observedGeneration"] == 1


def test_the_newest_run_counts() -> None:
    late = ran("Failed", "NoTranscripts", name="lane-b.agent-99999999")
    late = late.model_copy(
        update={
            "status": late.status.model_copy(
                update={
                    "run": late.status.run.model_copy(  # type: ignore[union-attr]
                        update={"finished_at": timestamp(START + timedelta(hours=1))}
                    )
                }
            )
        }
    )
    assert world.conditions(decide(late, ran("Accepted")))["Ready"] == ("False", "NoTranscripts")


@pytest.mark.parametrize(
    "maps", [(), (ran(None),), (ran("Failed", "EngineFailed"),), (ran("Accepted", name="x-1"),)]
)
def test_what_is_known_stays_until_a_newer_run_says_more(maps: tuple[ExpertMap, ...]) -> None:
    before = decide(ran("Failed", "NoTranscripts")).status
    plan = decide(*maps, tc=with_status(before))
    assert plan.status == before


def test_deciding_again_changes_nothing() -> None:
    before = decide(ran("Accepted", sessions=1, decodeTokens=2)).status
    snapshot = ClassSnapshot(with_status(before), (ran("Accepted", sessions=1, decodeTokens=2),))
    assert trafficclass.decide(snapshot, START + timedelta(hours=1)) == Plan(status=before)


def test_invalid_spec() -> None:
    before = decide(ran("Accepted", sessions=3)).status
    plan = decide(tc=Invalid("agent", 7, "spec.window: found x", before or {}))
    assert plan.status is not None
    assert world.conditions(plan) == {"Ready": ("False", "InvalidSpec")}
    assert (plan.status["observedGeneration"], plan.status["sessions"]) == (7, 3)


def test_a_spec_that_is_read_again_is_not_invalid_any_more() -> None:
    broken = decide(tc=Invalid("agent", 7, "spec.window: found x")).status
    plan = decide(tc=with_status(broken))
    assert world.conditions(plan) == {"Ready": ("Unknown", "NotProfiled")}


def test_a_deleted_class_is_left_alone() -> None:
    tc = world.traffic_class()
    gone = tc.model_copy(
        update={"metadata": tc.metadata.model_copy(update={"deletion_timestamp": "x"})}
    )
    assert decide(tc=gone) == Plan(status=None)
