"""A lane's rollouts in a world in memory (a stand-in: see lane_world), step by step."""

from __future__ import annotations

import pytest

from expertmaps_operator.build import workload_fields as fields
from rowmap_jobs.formats import names
from tests.operator.lane_objects import (
    AGENT,
    HOOK,
    PROSE,
    row_map,
)
from tests.operator.lane_world import World


def test_the_intent_is_written_before_anything_is_touched() -> None:
    world = World(replicas=2)
    first = world.turn()
    assert first.actions == () and first.requeue_after == 0
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "Canary" and rollout.from_ is None
    assert rollout.to.digest == AGENT.digest and rollout.to.hook_digest == HOOK.digest
    assert world.condition("Progressing") == ("True", "RolloutStarted")
    assert world.condition("Ready") == ("False", "RolloutStarted")
    second = world.turn()
    kinds = [type(action).__name__ for action in second.actions]
    assert kinds == ["Create", "ApplyWorkload"]
    assert names.hook_configmap("lane-a", HOOK.digest) in world.config_maps


def test_the_first_apply_closes_the_gate_with_the_template() -> None:
    world = World(replicas=2)
    world.turn()
    world.turn()
    (apply,) = world.applies
    assert apply.manager == "expertmaps.lane-a" and apply.may_force_gate
    assert apply.patch["spec"]["minReadySeconds"] == 864000
    assert apply.patch["spec"]["progressDeadlineSeconds"] == 864001
    assert fields.in_template(world.workload) == (AGENT.digest, HOOK.digest)


def test_a_good_rollout_ends_verified_and_gives_the_gate_back() -> None:
    world = World(replicas=3).until("Verified")
    status = world.lane.status
    assert status.active is not None and status.active.digest == AGENT.digest
    assert status.last_known_good == status.active
    assert [item.state for item in status.history] == ["Verified"]
    assert "minReadySeconds" not in world.workload["spec"]
    assert world.workload["spec"]["progressDeadlineSeconds"] == 600
    assert world.condition("Ready") == ("True", "LaneServing")
    assert world.condition("Verified") == ("True", "AllPodsReportDigest")
    assert world.condition("HashHit") == ("True", "CompileCacheHit")
    assert world.condition("Progressing") == ("False", "Idle")
    expected = ["RolloutStarted", "Canary", "Rolling", "RolloutComplete", "TrafficClassSwitched"]
    assert world.events == expected
    assert (status.replicas, status.updated_replicas, status.ready_replicas) == (3, 3, 3)
    assert status.effective_traffic_class == "agent"
    assert status.geometry is not None and status.geometry.hot_rows == "2"


def test_active_stays_until_all_pods_report() -> None:
    world = World(replicas=3)
    seen = set()
    for _ in range(60):
        world.turn()
        active = world.lane.status.active
        good = world.lane.status.rollout.good_pods if world.lane.status.rollout else 0
        seen.add((active is not None, good))
        world.tick()
    assert (False, 1) in seen and (False, 2) in seen and (True, 2) not in seen


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_switch_moves_one_pod_at_a_time(replicas: int) -> None:
    world = World(replicas=replicas).until("Verified").run(3)
    world.edit(activeTrafficClass="prose")
    plan = world.turn()
    assert plan.status is not None and plan.status["observedGeneration"] == 2
    assert world.condition("Progressing") == ("True", "RolloutStarted")
    for _ in range(100):
        world.turn()
        assert world.unproven() <= 1
        world.tick()
    active = world.lane.status.active
    assert active is not None and active.traffic_class == "prose"
    assert world.condition("Ready") == ("True", "LaneServing")


def test_idle_does_nothing() -> None:
    world = World(replicas=2).until("Verified").run(3)
    before = world.lane.status
    plan = world.turn()
    assert plan.actions == () and plan.events == () and world.lane.status == before


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [("hook", "HookFailed"), ("crash", "PodFailed"), ("digest", "MapDigestMismatch")],
)
@pytest.mark.parametrize("position", [1, 2])
def test_a_failing_pod_stops_the_rollout(behaviour: str, reason: str, position: int) -> None:
    world = World(replicas=3, bad={(AGENT.digest, position): behaviour}, rollback=False).until(
        "Stopped"
    )
    assert world.condition("Ready") == ("False", reason)
    assert world.condition("Progressing") == ("False", "RolloutStopped")
    assert world.condition("Verified") == ("False", reason)
    assert world.events[-1] == "RolloutStopped"
    applies = len(world.applies)
    world.run(60)
    assert fields.gate_closed(world.workload) and len(world.applies) == applies
    assert world.unproven() == 1 and world.lane.status.active is None
    assert world.condition("Ready") == ("False", reason)


def test_a_hook_error_names_its_reason() -> None:
    world = World(bad={(AGENT.digest, 1): "hook"}, rollback=False).until("Stopped")
    assert "HookUnsupported: no such engine" in world.said()["Ready"][2]


def test_a_pod_that_never_becomes_ready_stops_at_the_deadline() -> None:
    world = World(bad={(AGENT.digest, 1): "stuck"}, rollback=False)
    world.edit(update={"progressDeadlineSeconds": 60, "minReadySeconds": 10})
    world.until("Stopped")
    assert world.condition("Ready") == ("False", "ProgressDeadlineExceeded")
    rollout = world.lane.status.rollout
    assert rollout is not None and "60 s" in (rollout.message or "")


def test_an_unreachable_status_waits_and_never_stops() -> None:
    world = World(bad={(AGENT.digest, 1): "mute"})
    world.edit(update={"progressDeadlineSeconds": 60, "minReadySeconds": 10})
    world.run(60)
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "Canary"
    assert world.condition("Verified") == ("Unknown", "StatusUnreachable")
    assert fields.gate_closed(world.workload)
    for pod in world.pods:
        pod.behaviour = "good"
    world.until("Verified")


def test_an_unschedulable_pod_does_not_use_up_the_deadline() -> None:
    world = World(replicas=2)
    world.edit(update={"progressDeadlineSeconds": 60, "minReadySeconds": 10})
    world.leaves = 30
    world.run(20)
    assert world.condition("Progressing") == ("True", "PodUnschedulable")
    world.leaves = 1
    world.until("Verified", 200)


def test_a_step_waits_for_pods_on_their_way_out() -> None:
    world = World(replicas=2)
    world.turn()
    world.leaves = 5
    world.delete_pod(world.pods[0].name)
    world.turn()
    assert world.applies == [] and "waits until 1 pod" in world.said()["Progressing"][2]
    world.leaves = 1
    world.until("Verified")


def test_the_same_map_is_not_tried_again_until_the_spec_changes() -> None:
    world = (
        World(replicas=2, bad={(AGENT.digest, 1): "hook"}, rollback=False).until("Stopped").run(5)
    )
    first = world.lane.status.rollout
    for pod in world.pods:
        pod.behaviour = "good"
    world.run(5)
    assert world.lane.status.rollout == first
    world.edit(update={"progressDeadlineSeconds": 900, "minReadySeconds": 10})
    world.until("Verified")
    assert [item.state for item in world.lane.status.history] == ["Verified", "Stopped"]


def test_a_stopped_map_stays_held_after_another_one() -> None:
    world = World(replicas=2, bad={(AGENT.digest, 1): "hook"}, rollback=False).until("Stopped")
    other = row_map((1, 2))
    world.classes["agent"], world.maps = other, {*world.maps, other.digest}
    world.until("Verified")
    world.classes = {"agent": AGENT, "other": other}
    world.turn()
    assert world.condition("Progressing") == ("False", "DigestHeld")


def test_back_to_the_old_class_from_stopped() -> None:
    world = World(replicas=3, bad={(PROSE.digest, 2): "hook"}, rollback=False).until("Verified")
    world.edit(activeTrafficClass="prose")
    world.until("Stopped")
    assert world.lane.status.active is not None
    assert world.lane.status.active.traffic_class == "agent"
    world.edit(activeTrafficClass="agent")
    for _ in range(100):
        world.turn()
        assert world.unproven() <= 1
        world.tick()
    assert world.condition("Ready") == ("True", "LaneServing")
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "Verified"
    assert rollout.from_ == rollout.to == world.lane.status.active


@pytest.mark.parametrize("state", ["Canary", "Rolling"])
def test_a_newer_target_supersedes_from_the_last_verified_map(state: str) -> None:
    world = World(replicas=3).until("Verified").run(2)
    world.edit(activeTrafficClass="prose")
    world.until(state)
    world.edit(activeTrafficClass="code")
    world.turn()
    rollout, (old, *_) = world.lane.status.rollout, world.lane.status.history
    assert rollout is not None and rollout.from_ is not None
    assert rollout.from_.traffic_class == "agent" and rollout.to.traffic_class == "code"
    assert (old.state, old.to.traffic_class) == ("Superseded", "prose")
    world.until("Verified")
    assert world.lane.status.active is not None
    assert world.lane.status.active.traffic_class == "code"


def test_a_user_change_is_recorded_and_goes_first() -> None:
    world = World(replicas=3).until("Rolling")
    world.workload["spec"]["template"]["spec"]["containers"][0]["image"] = "vllm:2"
    world.workload["metadata"]["generation"] += 1
    world.turn()
    assert "UserChange" in world.events
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "Canary"
    world.until("Verified")
    images = {pod.template["spec"]["containers"][0]["image"] for pod in world.pods}
    assert images == {"vllm:2"}


def test_a_template_that_was_taken_back_is_reported_not_fought_over() -> None:
    world = World(replicas=2).until("Verified").run(3)
    _replace(world)
    applies = len(world.applies)
    world.run(10)
    assert world.condition("Ready") == ("False", "TemplateReverted")
    assert len(world.applies) == applies
    world.edit(update={"progressDeadlineSeconds": 900, "minReadySeconds": 10})
    world.until("Verified")
    assert world.condition("Ready") == ("True", "LaneServing")


def test_a_template_that_is_taken_back_during_a_rollout_stops_it() -> None:
    world = World(replicas=2).until("Canary")
    world.turn()
    world.tick()
    world.turn()
    _replace(world)
    world.turn()
    assert world.condition("Ready") == ("False", "TemplateReverted")
    applies = len(world.applies)
    world.run(10)
    assert len(world.applies) == applies


def _replace(world: World) -> None:
    """As kubectl replace does: a manifest without the lane's fields."""
    container = world.workload["spec"]["template"]["spec"]["containers"][0]
    del container["env"], container["volumeMounts"]
    del world.workload["spec"]["template"]["spec"]["volumes"]
    del world.workload["spec"]["template"]["metadata"]["annotations"]
    world.workload["metadata"]["generation"] += 1
