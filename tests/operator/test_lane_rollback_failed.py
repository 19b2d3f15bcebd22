"""When the way back of a rollout fails too, in a world in memory (a stand-in: see lane_world)."""

from __future__ import annotations

from typing import Any

import pytest

from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.decide.lane_probe import probe_patch
from tests.operator.lane_failures import FAST, failing
from tests.operator.lane_objects import AGENT, HOOK, release
from tests.operator.lane_world import World


def failed_both_ways(**more: Any) -> World:
    world = failing(how="hook", **more)
    world.bad.update({(AGENT.digest, number): "stuck" for number in range(4, 9)})
    world.edit(update=FAST)
    return world.until("RollbackFailed")


def test_a_way_back_that_fails_moves_nothing_more() -> None:
    world = failed_both_ways()
    assert world.events[-1] == "RollbackFailed"
    applies = len(world.applies)
    world.run(40)
    assert len(world.applies) == applies and fields.gate_closed(world.workload)
    assert world.not_ready() == 1
    assert world.condition("Ready") == ("False", "RollbackFailed")
    assert world.condition("Progressing") == ("False", "RollbackFailed")
    assert world.condition("Verified") == ("False", "HookFailed")
    assert world.condition("RolledBack") == ("False", "RollbackFailed")
    message = world.said()["Ready"][2]
    assert "HookUnsupported" in message and "is not ready" in message and "60 s" in message
    history = world.lane.status.history
    assert [item.state for item in history] == ["RollbackFailed", "Verified"]
    world.edit(paused=True)
    world.turn()
    assert world.condition("Ready") == ("False", "RollbackFailed")


def test_a_failed_way_back_to_the_own_template() -> None:
    world = World(replicas=2, bad={(AGENT.digest, 1): "hook", ("", 3): "crash"})
    world.edit(update=FAST)
    world.until("RollbackFailed").run(20)
    assert world.workload["spec"]["template"] == world.own_template
    assert fields.gate_closed(world.workload) and world.not_ready() == 1
    assert world.condition("Ready") == ("False", "RollbackFailed")


@pytest.mark.parametrize("wanted", ["agent", "code"])
def test_another_target_leads_out(wanted: str) -> None:
    world = failed_both_ways()
    world.bad.clear()
    for pod in world.pods:
        pod.behaviour = "good"
    world.edit(activeTrafficClass=wanted)
    world.turn()
    rollout = world.lane.status.rollout
    assert rollout is not None and (rollout.state, rollout.to.traffic_class) == ("Canary", wanted)
    world.until("Verified").run(2)
    assert world.unproven() == 0 and world.condition("Ready") == ("True", "LaneServing")


def test_a_change_of_the_spec_leads_out() -> None:
    world = failed_both_ways()
    world.bad.clear()
    for pod in world.pods:
        pod.behaviour = "good"
    world.edit(update={"progressDeadlineSeconds": 900, "minReadySeconds": 10})
    world.until("Verified")
    assert world.lane.status.active is not None
    assert world.lane.status.active.traffic_class == "prose"


def test_another_writer_on_the_way_back_is_not_fought() -> None:
    world = failing().until("RollingBack").run(2)
    release(world.workload["spec"]["template"])
    world.workload["metadata"]["generation"] += 1
    world.turn()
    assert world.condition("Ready") == ("False", "RollbackFailed")
    assert "changed by another writer" in world.said()["Ready"][2]
    applies = len(world.applies)
    world.run(10)
    assert len(world.applies) == applies


def test_the_dry_run_tries_the_way_back() -> None:
    world = failing().until("RollingBack")
    probe = probe_patch(world.snapshot())
    assert probe is not None
    assert fields.in_template({"spec": probe[2]["spec"]}) == (AGENT.digest, HOOK.digest)
    world = World(bad={(AGENT.digest, 1): "hook"}).until("RollingBack")
    probe = probe_patch(world.snapshot())
    assert probe is not None and "template" not in probe[2]["spec"]
