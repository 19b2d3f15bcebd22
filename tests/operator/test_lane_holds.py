"""What holds a lane, and what it keeps while nothing moves (a stand-in: see lane_world)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.plan import ApplyWorkload, Create, DeleteJob
from expertmaps_operator.snapshot import MapObject
from rowmap_jobs.formats import names, rowmap
from tests.operator.lane_objects import (
    AGENT,
    FINGERPRINT,
    GEOMETRY,
    HOOK,
    HOOK_ERROR,
    PROSE,
    report,
    row_map,
    sha,
)
from tests.operator.lane_world import World


def test_paused_freezes_in_place_and_closes_an_open_gate() -> None:
    world = World(replicas=4).until("Rolling")
    world.edit(paused=True)
    world.run(30)
    assert fields.gate_closed(world.workload) and world.unproven() <= 1
    assert world.condition("Paused") == ("True", "Paused")
    assert world.condition("Progressing") == ("False", "Paused")
    rollout = world.lane.status.rollout
    assert rollout is not None and rollout.state == "Rolling"
    world.now += timedelta(hours=10)
    world.edit(paused=False)
    world.until("Verified")


def test_a_paused_lane_in_force_stays_ready() -> None:
    world = World(replicas=2).until("Verified").run(3)
    world.edit(paused=True, activeTrafficClass="prose")
    world.run(5)
    assert world.condition("Ready") == ("True", "LaneServing")
    assert world.lane.status.active is not None
    assert world.lane.status.active.traffic_class == "agent"


def test_scaling_to_zero_holds_the_rollout() -> None:
    world = World(replicas=2).until("Canary")
    world.run(2)
    world.workload["spec"]["replicas"] = 0
    for item in world.sets:
        item.replicas = 0
    world.run(5)
    assert world.condition("Ready") == ("False", "ScaledToZero")
    world.now += timedelta(hours=2)
    world.workload["spec"]["replicas"] = 2
    world.until("Verified")


def test_a_map_of_a_fine_tune_is_tried_on_no_pod() -> None:
    world = World(replicas=2).until("Verified").run(3)
    fine_tune = FINGERPRINT.model_copy(update={"router": sha("another router")})
    rows = {0: ([2, 3], [0, 1]), 1: ([2, 3], [0, 1])}
    world.classes["prose"] = stranger = rowmap.build(fine_tune, GEOMETRY, rows)
    world.maps.add(stranger.digest)
    pods = [pod.name for pod in world.pods]
    world.edit(activeTrafficClass="prose")
    world.run(10)
    assert world.condition("Ready") == ("False", "FingerprintMismatch")
    assert [pod.name for pod in world.pods] == pods
    (ready,) = [one for one in world.lane.status.conditions if one.type == "Ready"]
    assert f"router {sha('another router')}, expected {sha('router')}" in ready.message
    assert "runAt" in ready.message


def test_after_a_new_model_was_rolled_out_its_own_map_is_taken() -> None:
    world = World(replicas=2).until("Verified").run(3)
    fine_tune = FINGERPRINT.model_copy(update={"router": sha("another router")})
    rows = {0: ([2, 3], [0, 1]), 1: ([2, 3], [0, 1])}
    stranger = rowmap.build(fine_tune, GEOMETRY, rows)
    world.classes["agent"] = stranger
    world.maps.add(stranger.digest)
    # The pods run the new model, so that the hook refuses the old map.
    world.reports[AGENT.digest] = report(AGENT, **HOOK_ERROR)
    world.reports[stranger.digest] = report(stranger, fingerprint=fine_tune)
    world.run(3).until("Verified")
    assert world.lane.status.active is not None
    assert world.lane.status.active.digest == stranger.digest


def test_equal_rows_restart_nothing() -> None:
    world = World(replicas=2).until("Verified").run(3)
    same = row_map((0, 1), order=True)
    assert same.digest != AGENT.digest and same.row_set_digest == AGENT.row_set_digest
    world.classes["twin"], world.maps = same, {*world.maps, same.digest}
    world.edit(activeTrafficClass="twin")
    applies = len(world.applies)
    world.run(5)
    active = world.lane.status.active
    assert active is not None
    assert (active.traffic_class, active.digest) == ("twin", AGENT.digest)
    assert len(world.applies) == applies and world.condition("Ready") == ("True", "LaneServing")
    assert world.events[-1] == "TrafficClassSwitched"


def test_another_geometry_is_refused() -> None:
    world = World(replicas=2).until("Verified").run(3)
    wider = row_map((2, 3), geometry=AGENT.geometry.model_copy(update={"row_bytes": 128}))
    world.classes["prose"], world.maps = wider, {*world.maps, wider.digest}
    world.edit(activeTrafficClass="prose")
    world.turn()
    assert world.condition("Ready") == ("False", "GeometryMismatch")


def test_a_missing_map_is_fetched() -> None:
    world = World(replicas=2)
    world.maps.discard(AGENT.digest)
    plan = world.turn()
    (create,) = plan.actions
    assert isinstance(create, Create)
    assert create.manifest["metadata"]["name"] == names.fetch_job("lane-a", AGENT.digest)
    assert world.condition("Ready") == ("False", "FetchingMap")
    assert world.turn().actions == ()
    world.maps.add(AGENT.digest)
    world.until("Verified")


def test_a_map_in_force_is_fetched_while_the_lane_serves() -> None:
    world = World(replicas=2).until("Verified").run(3)
    world.maps.discard(AGENT.digest)
    world.turn()
    assert [job["metadata"]["name"] for job in world.jobs] == [
        names.fetch_job("lane-a", AGENT.digest)
    ]
    assert world.condition("Ready") == ("True", "LaneServing")
    assert world.condition("Progressing") == ("False", "FetchingMap")


@pytest.mark.parametrize(("kind", "after"), [("Complete", 60), ("Failed", 300)])
def test_a_finished_fetch_is_tried_again_later(kind: str, after: int) -> None:
    world = World(replicas=2)
    world.maps.discard(AGENT.digest)
    world.turn()
    ended = {"type": kind, "status": "True", "lastTransitionTime": world.now.isoformat()}
    world.jobs[0] = {**world.jobs[0], "status": {"conditions": [ended]}}
    world.jobs[0]["metadata"] = {**world.jobs[0]["metadata"], "uid": "job-uid"}
    assert world.turn().actions == ()
    reason = "FetchingMap" if kind == "Complete" else "MapUnavailable"
    assert world.condition("Ready") == ("False", reason)
    world.now += timedelta(seconds=after)
    (delete,) = world.turn().actions
    assert isinstance(delete, DeleteJob)
    assert (delete.name, delete.uid) == (names.fetch_job("lane-a", AGENT.digest), "job-uid")


def test_a_map_with_wrong_bytes_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.operator.lane_world.map_object",
        lambda _, digest: MapObject("cm", digest, None, "ConfigMap cm: sha256: found x"),
    )
    world = World(replicas=2).run(5)
    assert world.condition("Ready") == ("False", "ChecksumMismatch")
    assert world.applies == [] and world.lane.status.rollout is None


def test_a_lane_waits_for_a_slot() -> None:
    world = World(replicas=2)
    world.slots = 1
    world.run(3)
    assert world.condition("Ready") == ("False", "NoSlot") and world.applies == []
    world.slots = 0
    world.until("Verified")


def test_a_new_operator_keeps_the_hook_of_a_lane() -> None:
    world = World(replicas=2).until("Verified").run(3)
    newer = HOOK.__class__(digest=sha("newer"), data={}, items=({"key": "n"},), version="2")
    world.settings = world.settings.__class__(**{**vars(world.settings), "hook": newer})
    applies = len(world.applies)
    world.run(3)
    assert len(world.applies) == applies
    world.edit(activeTrafficClass="prose")
    world.until("Verified")
    active = world.lane.status.active
    assert active is not None and active.hook_digest == HOOK.digest


def test_a_lost_status_is_found_again_without_a_restart() -> None:
    world = World(replicas=3).until("Verified").run(3)
    pods = [pod.name for pod in world.pods]
    wire = world.lane.model_dump(mode="json", by_alias=True, exclude_none=True)
    world.lane = world.lane.__class__.model_validate({**wire, "status": {}})
    world.until("Verified")
    assert [pod.name for pod in world.pods] == pods


def test_a_lane_pod_that_fails_later_is_reported() -> None:
    world = World(replicas=2).until("Verified").run(3)
    world.pods[0].behaviour = "hook"
    world.turn()
    assert world.condition("Ready") == ("False", "HookFailed")
    assert world.condition("Verified") == ("False", "HookFailed")
    world.pods[0].behaviour = "mute"
    world.turn()
    assert world.condition("Ready") == ("Unknown", "StatusUnreachable")
    assert world.condition("Verified") == ("Unknown", "StatusUnreachable")


def test_every_apply_holds_all_fields_of_the_lane() -> None:
    world = World(replicas=3, bad={(PROSE.digest, 2): "hook"}, rollback=False).until("Verified")
    world.edit(activeTrafficClass="prose")
    world.until("Stopped")
    world.edit(activeTrafficClass="agent")
    world.until("Verified")
    assert all(isinstance(item, ApplyWorkload) for item in world.applies)
    for item in world.applies:
        assert item.patch["metadata"]["labels"] == {names.LABEL_LANE: "lane-a"}
        (container,) = item.patch["spec"]["template"]["spec"]["containers"]
        assert len(container["env"]) == 5 and len(container["volumeMounts"]) == 3


def test_no_pod_follows_one_that_is_not_proved_while_the_operator_is_gone() -> None:
    world = World(replicas=4, bad={(AGENT.digest, 2): "hook"}, boots=4, rollback=False).until(
        "Rolling"
    )
    while world.unproven() == 0:
        world.turn()
        world.tick()
    world.turn()
    assert fields.gate_closed(world.workload)
    for _ in range(60):
        world.tick()
        assert world.unproven() <= 1
    world.until("Stopped")
