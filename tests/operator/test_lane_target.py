"""Which map a lane should serve with; and lanes that cannot be read or are gone."""

from __future__ import annotations

import pytest

from expertmaps_operator.decide.lane import decide
from expertmaps_operator.snapshot import Invalid
from rowmap_jobs.formats.rowmap import RowMap
from tests.operator.lane_objects import (
    AGENT,
    NOW,
    PROSE,
)
from tests.operator.lane_world import World


@pytest.mark.parametrize(
    ("wanted", "classes", "reason"),
    [
        (None, {"agent": AGENT}, "NoTrafficClass"),
        ("gone", {"agent": AGENT}, "TrafficClassNotFound"),
        ("agent", {"agent": None}, "NoAcceptedMap"),
    ],
)
def test_nothing_to_serve_with(
    wanted: str | None, classes: dict[str, RowMap | None], reason: str
) -> None:
    world = World(replicas=2, classes=classes)
    world.edit(activeTrafficClass=wanted)
    world.run(3)
    assert world.condition("Ready") == ("False", reason)
    assert world.condition("Progressing") == ("False", reason)
    assert world.lane.status.observed_generation == 2 and world.applies == []


def test_a_class_without_an_expert_map_says_which_to_make() -> None:
    world = World(replicas=2, classes={"agent": AGENT})
    world.snapshot()
    world.expert_maps = ()
    world.turn()
    assert world.condition("Ready") == ("False", "NoAcceptedMap")
    assert "found no ExpertMap lane-a.agent" in world.said()["Ready"][2]


@pytest.mark.parametrize("wanted", [None, "agent"])
def test_a_lane_keeps_what_it_runs(wanted: str | None) -> None:
    world = World(replicas=2).until("Verified").run(3)
    applies = len(world.applies)
    world.classes = {"prose": PROSE}
    world.edit(activeTrafficClass=wanted)
    world.run(3)
    assert world.condition("Ready") == ("True", "LaneServing")
    assert "keeps what it has" in world.said()["Progressing"][2]
    assert world.lane.status.effective_traffic_class == "agent"
    assert len(world.applies) == applies


def test_a_rollout_goes_on_when_its_expert_map_is_deleted() -> None:
    world = World(replicas=3).until("Rolling")
    world.classes["agent"] = None
    world.until("Verified")


def test_a_switch_to_a_class_without_a_map_freezes_a_rollout() -> None:
    world = World(replicas=4).until("Rolling")
    world.classes["new"] = None
    world.edit(activeTrafficClass="new")
    world.run(30)
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "Rolling" and world.unproven() <= 1
    assert world.condition("Ready") == ("False", "NoAcceptedMap")


def test_a_newer_map_of_the_class_is_rolled_out() -> None:
    world = World(replicas=2).until("Verified").run(3)
    world.classes["agent"] = PROSE
    world.until("Canary")
    world.until("Verified")
    active = world.lane.status.active
    assert active is not None and active.digest == PROSE.digest
    assert world.events.count("TrafficClassSwitched") == 1


def test_a_deleted_lane_is_left_as_it_runs() -> None:
    world = World(replicas=2).until("Verified")
    meta = world.lane.metadata.model_copy(update={"deletion_timestamp": "2026-01-05T12:00:00Z"})
    world.lane = world.lane.model_copy(update={"metadata": meta})
    plan = world.turn()
    assert (plan.status, plan.actions, plan.events) == (None, (), ())


def test_an_unreadable_spec_is_said_and_loses_nothing() -> None:
    world = World(replicas=2).until("Verified").run(3)
    before = world.lane.status
    facts = world.snapshot()
    invalid = Invalid("lane-a", 7, "ExpertLane lane-a: spec.x: found 1", before.to_wire())
    plan = decide(facts.__class__(**{**vars(facts), "lane": invalid}), NOW)
    assert plan.actions == () and plan.status is not None
    assert plan.status["active"] == before.to_wire()["active"]
    assert plan.status["observedGeneration"] == 7
    ready = next(item for item in plan.status["conditions"] if item["type"] == "Ready")
    assert (ready["reason"], ready["observedGeneration"]) == ("InvalidSpec", 7)
