"""Failed rollouts go back, in a world in memory (a stand-in: see lane_world)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.decide.lane import decide
from rowmap_jobs.formats import names
from tests.operator.lane_failures import FAST, adopted, failing, no_pod_lost
from tests.operator.lane_objects import AGENT, HOOK, PROSE, release, sha
from tests.operator.lane_world import World

HOUR = timedelta(hours=1)
FAULTS = [("hook", "HookFailed"), ("crash", "PodFailed"), ("digest", "MapDigestMismatch")]


@pytest.mark.parametrize(("how", "reason"), FAULTS)
@pytest.mark.parametrize("position", [1, 2])
def test_a_failing_pod_brings_the_last_map_back(how: str, reason: str, position: int) -> None:
    world = failing(position=position, how=how)
    before = {pod.name for pod in world.pods}
    world.events.clear()
    no_pod_lost(world)
    status = world.lane.status
    assert status.rollout is not None and status.rollout.state == "RolledBack"
    assert status.active is not None and status.active.traffic_class == "agent"
    assert status.last_known_good == status.active
    assert world.unproven() == 0 and not fields.gate_in_use(world.workload)
    assert fields.in_template(world.workload) == (AGENT.digest, HOOK.digest)
    assert len(before & {pod.name for pod in world.pods}) == 3 - position
    assert world.condition("Ready") == ("True", "LaneServing")
    assert world.condition("Verified") == ("True", "AllPodsReportDigest")
    assert world.condition("HashHit") == ("True", "CompileCacheHit")
    assert world.condition("Progressing") == ("False", "DigestHeld")
    assert world.condition("RolledBack") == ("True", reason)
    assert [item.state for item in status.history] == ["RolledBack", "Verified"]
    assert world.events[-2:] == ["RollingBack", "RolledBack"]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_failed_first_adoption_gives_the_own_template_back(replicas: int) -> None:
    world = World(replicas=replicas, bad={(AGENT.digest, 1): "crash"})
    before = {pod.name for pod in world.pods}
    no_pod_lost(world)
    status = world.lane.status
    assert status.rollout is not None and status.rollout.state == "RolledBack"
    assert status.active is None and status.last_known_good is None
    assert world.workload["spec"]["template"] == world.own_template
    assert world.workload["metadata"]["labels"][names.LABEL_LANE] == "lane-a"
    assert len(before & {pod.name for pod in world.pods}) == replicas - 1
    assert world.unproven() == 0 and not fields.gate_in_use(world.workload)
    assert world.condition("Ready") == ("False", "ServingUnhooked")
    assert "all pods serve without a map" in world.said()["Ready"][2]
    assert world.condition("Verified") == ("False", "ServingUnhooked")
    assert world.condition("RolledBack") == ("True", "PodFailed")


def test_the_message_names_digests_pod_and_the_end_of_the_hold() -> None:
    world = failing().until("RolledBack")
    ended = world.lane.status.rollout
    assert ended is not None and ended.finished_at is not None
    world.turn()
    message = world.said()["RolledBack"][2]
    assert AGENT.digest in message and PROSE.digest in message
    assert "pod pod-" in message and "HookUnsupported" in message
    until = (world.now + HOUR).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert f"held until {until}" in message
    assert world.said()["Progressing"][2] == message


def test_a_pod_that_is_never_ready_goes_back_at_the_deadline() -> None:
    world = failing(how="stuck")
    world.edit(update=FAST)
    no_pod_lost(world)
    assert world.condition("RolledBack") == ("True", "ProgressDeadlineExceeded")
    assert "60 s" in world.said()["RolledBack"][2]
    assert world.condition("Ready") == ("True", "LaneServing")


def test_an_unreachable_status_never_goes_back() -> None:
    world = failing(how="mute")
    world.edit(update=FAST)
    world.run(100)
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "Canary"
    assert world.condition("Verified") == ("Unknown", "StatusUnreachable")
    assert world.condition("RolledBack") == ("False", "NotRolledBack")


def test_the_intent_is_written_before_the_workload_is_touched() -> None:
    world = failing().until("RollingBack")
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.reason == "HookFailed" and rollout.finished_at is None
    assert fields.in_template(world.workload) == (PROSE.digest, HOOK.digest)
    assert world.condition("Progressing") == ("True", "RollingBack")
    assert world.condition("Ready") == ("False", "RollingBack")
    assert world.condition("RolledBack") == ("False", "RollingBack")
    applies = len(world.applies)
    world.turn()
    (apply,) = world.applies[applies:]
    assert fields.in_template({"spec": apply.patch["spec"]}) == (AGENT.digest, HOOK.digest)
    assert fields.gate_closed(world.workload)


def test_the_way_back_waits_for_pods_on_their_way_out() -> None:
    world = failing().until("RollingBack")
    world.leaves = 5
    world.delete_pod(world.pods[0].name)
    world.turn()
    assert fields.in_template(world.workload) == (PROSE.digest, HOOK.digest)
    assert "waits until 1 pod" in world.said()["Progressing"][2]
    world.leaves = 1
    world.until("RolledBack")


def test_the_map_is_held_and_then_tried_again() -> None:
    world = failing().until("RolledBack")
    first = world.lane.status.rollout
    assert first is not None
    ended = world.now
    world.run(10)
    assert world.lane.status.rollout == first
    world.now = ended + HOUR - timedelta(seconds=20)
    assert world.turn().requeue_after == 20
    world.now = ended + HOUR
    world.turn()
    again = world.lane.status.rollout
    assert again is not None and again.id != first.id and again.state == "Canary"
    assert world.condition("RolledBack") == ("False", "NotRolledBack")
    world.until("Verified")
    assert [item.state for item in world.lane.status.history[:2]] == ["Verified", "RolledBack"]


def test_a_map_that_fails_again_is_held_again() -> None:
    world = World(replicas=2, bad={(PROSE.digest, n): "hook" for n in (1, 2)}).until("Verified")
    world.edit(activeTrafficClass="prose")
    world.until("RolledBack")
    world.now += HOUR
    world.until("RollingBack").until("RolledBack").run(3)
    assert world.condition("Progressing") == ("False", "DigestHeld")
    assert [item.state for item in world.lane.status.history[:2]] == ["RolledBack"] * 2


def test_another_map_goes_at_once() -> None:
    world = failing().until("RolledBack")
    world.edit(activeTrafficClass="code")
    world.until("Verified", 60)
    assert world.lane.status.active is not None
    assert world.lane.status.active.traffic_class == "code"
    assert world.condition("RolledBack") == ("False", "NotRolledBack")


def test_back_to_the_map_that_serves_moves_nothing() -> None:
    world = failing().until("RolledBack").run(2)
    world.edit(activeTrafficClass="agent")
    applies = len(world.applies)
    world.run(5)
    assert len(world.applies) == applies
    assert world.condition("Progressing") == ("False", "Idle")
    assert world.condition("Ready") == ("True", "LaneServing")
    assert world.condition("RolledBack") == ("False", "NotRolledBack")


def test_a_change_of_the_spec_ends_the_hold() -> None:
    world = failing().until("RolledBack").run(2)
    world.edit(update={"progressDeadlineSeconds": 900, "minReadySeconds": 10})
    world.until("Verified", 60)


def test_a_change_of_the_users_template_ends_the_hold() -> None:
    world = failing().until("RolledBack").run(2)
    world.workload["spec"]["template"]["spec"]["containers"][0]["image"] = "vllm:2"
    world.workload["metadata"]["generation"] += 1
    world.until("Verified")


def test_a_write_that_is_lost_at_the_end_is_made_up_for() -> None:
    world = failing().until("RollingBack")
    while (plan := decide(world.snapshot(), world.now)).status is not None:
        if plan.status["rollout"]["state"] == "RolledBack":
            break
        world.turn()
        world.tick()
    world.write_status(plan)
    assert fields.gate_in_use(world.workload)
    world.turn()
    assert not fields.gate_in_use(world.workload)


@pytest.mark.parametrize("adopting", [False, True])
def test_it_is_finished_though_it_is_switched_off_midway(adopting: bool) -> None:
    world = World(bad={(AGENT.digest, 1): "hook"}) if adopting else failing()
    world.until("RollingBack")
    world.edit(rollback={"enabled": False})
    world.until("RolledBack")
    assert world.unproven() == 0


def test_a_new_target_waits_until_it_is_done() -> None:
    world = failing(position=2).until("RollingBack")
    world.edit(activeTrafficClass="code")
    for _ in range(60):
        world.turn()
        rollout = world.lane.status.rollout
        assert rollout is not None
        if rollout.state != "RollingBack":
            break
        assert rollout.to.traffic_class == "prose"
        world.tick()
    assert rollout.state == "RolledBack" and world.unproven() == 0
    world.turn()
    started = world.lane.status.rollout
    assert started is not None and started.to.traffic_class == "code"
    assert started.from_ is not None and started.from_.traffic_class == "agent"
    world.until("Verified")


@pytest.mark.parametrize("adopting", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 3, 5])
def test_paused_freezes_in_place(turns: int, adopting: bool) -> None:
    world = World(replicas=4, bad={(AGENT.digest, 2): "hook"}) if adopting else failing(4, 3)
    world.until("RollingBack")
    for _ in range(turns):
        world.turn()
        world.tick()
    world.edit(paused=True)
    world.turn()
    for _ in range(4):
        world.tick()
    template = world.workload["spec"]["template"]
    pods = {pod.name for pod in world.pods}
    world.run(30)
    assert world.workload["spec"]["template"] == template
    assert {pod.name for pod in world.pods} == pods
    assert fields.gate_closed(world.workload) and world.not_ready() <= 1
    assert world.condition("Progressing") == ("False", "Paused")
    world.now += timedelta(hours=10)
    world.edit(paused=False)
    no_pod_lost(world, 1).until("RolledBack")


def test_scaling_to_zero_holds_it() -> None:
    world = failing().until("RollingBack").run(1)
    world.workload["spec"]["replicas"] = 0
    for item in world.sets:
        item.replicas = 0
    world.run(5)
    assert world.condition("Ready") == ("False", "ScaledToZero")
    world.now += timedelta(hours=2)
    world.workload["spec"]["replicas"] = 2
    world.until("RolledBack")


def test_a_status_that_cannot_be_read_makes_it_wait() -> None:
    world = failing()
    world.edit(update=FAST)
    world.bad[(AGENT.digest, 4)] = "mute"
    world.until("RollingBack").run(60)
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "RollingBack"
    assert world.condition("Progressing") == ("True", "StatusUnreachable")
    for pod in world.pods:
        pod.behaviour = "good"
    world.until("RolledBack")


def test_other_lane_fields_are_written_on_the_way() -> None:
    world = failing().until("RollingBack").run(2)
    world.edit(hook={"statusPort": 9500})
    world.until("RolledBack", 200)
    holder = fields.container(world.workload, "vllm") or {}
    assert fields.env_value(holder, names.ENV_STATUS_PORT) == "9500"


def test_a_users_change_goes_along() -> None:
    world = failing().until("RollingBack").run(1)
    world.workload["spec"]["template"]["spec"]["containers"][0]["image"] = "vllm:2"
    world.workload["metadata"]["generation"] += 1
    no_pod_lost(world, 1).until("RolledBack", 200)
    images = {pod.template["spec"]["containers"][0]["image"] for pod in world.pods}
    assert images == {"vllm:2"}


def test_a_map_that_is_gone_is_fetched_first() -> None:
    world = failing().until("RollingBack")
    world.maps.discard(AGENT.digest)
    world.turn()
    made = [job["metadata"]["name"] for job in world.jobs]
    assert made == [names.fetch_job("lane-a", AGENT.digest)]
    assert world.condition("Ready") == ("False", "FetchingMap")
    assert fields.in_template(world.workload) == (PROSE.digest, HOOK.digest)
    world.maps.add(AGENT.digest)
    world.until("RolledBack")


def test_the_former_hook_comes_back_with_the_former_map() -> None:
    world = adopted(bad={(PROSE.digest, 1): "hook"})
    newer = HOOK.__class__(digest=sha("newer"), data={}, items=({"key": "n"},), version="2")
    world.settings = world.settings.__class__(**{**vars(world.settings), "hook": newer})
    world.until("RolledBack")
    assert fields.in_template(world.workload) == (AGENT.digest, HOOK.digest)
    volumes = world.workload["spec"]["template"]["spec"]["volumes"]
    assert next(v for v in volumes if v["name"] == names.VOLUME_HOOK)["configMap"]["items"] == list(
        HOOK.items
    )


def test_a_rollout_to_the_map_it_came_from_stops() -> None:
    world = World(replicas=2).until("Verified").run(3)
    release(world.workload["spec"]["template"])
    world.workload["metadata"]["generation"] += 1
    world.run(10)
    assert world.condition("Ready") == ("False", "TemplateReverted")
    world.bad[(AGENT.digest, 3)] = "hook"
    world.edit(update={"progressDeadlineSeconds": 900, "minReadySeconds": 10})
    world.until("Stopped")
    assert world.condition("Ready") == ("False", "HookFailed")
