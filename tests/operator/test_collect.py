"""ConfigMaps go when nobody needs them, and never one that a pod may be started with."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.decide import orphan
from expertmaps_operator.decide.collect import garbage, lane_garbage
from expertmaps_operator.plan import ApplyWorkload, DeleteConfigMap
from expertmaps_operator.snapshot import Child, OrphanSnapshot
from rowmap_jobs.formats import names
from tests.operator.lane_objects import AGENT, CODE, HOOK, NOW, PROSE, deployment, expert_map, sha
from tests.operator.lane_world import World

OLD_HOOK = names.hook_configmap("lane-a", sha("old hook"))


def map_name(found: Any) -> str:
    return names.map_configmap("lane-a", found.digest)


def test_a_map_of_a_deleted_expert_map_goes_once_no_template_names_it() -> None:
    world = World(replicas=2).until("Verified").run(3)
    del world.classes["prose"]
    world.run(3)
    assert world.collected == [map_name(PROSE)]
    assert map_name(AGENT) in world.mounted()


def test_the_map_in_force_stays_though_its_expert_map_is_gone() -> None:
    world = World(replicas=2).until("Verified").run(3)
    del world.classes["agent"]
    world.run(5)
    assert AGENT.digest in world.maps
    assert world.condition("Ready")[0] == "True"


def test_maps_that_rollout_undo_may_go_back_to_stay() -> None:
    world = World(replicas=2).until("Verified").run(3)
    for name in ("prose", "code"):
        world.edit(activeTrafficClass=name)
        world.run(2).until("Verified").run(3)
    del world.classes["agent"]
    world.run(3)
    assert AGENT.digest in world.maps
    world.sets = [item for item in world.sets if item.replicas]
    world.run(3)
    assert AGENT.digest not in world.maps


def test_an_old_hook_goes_and_the_current_one_stays() -> None:
    world = World(replicas=2).until("Verified").run(3)
    world.config_maps.add(OLD_HOOK)
    world.run(2)
    assert world.collected == [OLD_HOOK]
    assert names.hook_configmap("lane-a", HOOK.digest) in world.config_maps


def test_a_paused_lane_keeps_everything() -> None:
    world = World(replicas=2).until("Verified").run(3)
    world.edit(paused=True)
    del world.classes["prose"]
    world.run(3)
    assert world.collected == []


def test_the_map_of_a_run_that_goes_on_waits_for_its_verdict() -> None:
    world = World(replicas=2).until("Verified").run(3)
    world.classes["prose"] = None
    run = {"name": "r", "startedAt": "2026-01-05T11:00:00Z"}
    snapshot = world.snapshot()
    going = expert_map("prose", None)
    going = going.model_validate(
        {**going.model_dump(by_alias=True), "status": {"conditions": [], "run": run}}
    )
    made = Child(map_name(PROSE), "u", names.ROLE_MAP, PROSE.digest, "prose")

    def collected(maps: tuple[Any, ...], **more: Any) -> list[str]:
        seen = replace(snapshot, maps=maps, children=(made,), **more)
        return [item.name for item in lane_garbage(seen, world.lane, world.lane.status)]

    assert collected((going,)) == []
    assert collected(()) == [map_name(PROSE)]
    # One that cannot be read may have accepted it.
    assert collected((), all_maps_readable=False) == []


def orphaned(policy: str | None, **metadata: Any) -> OrphanSnapshot:
    workload = deployment()
    workload["metadata"]["labels"] = {names.LABEL_LANE: "lane-a"}
    if policy is not None:
        workload["metadata"]["annotations"] = {names.ANNOTATION_DELETION_POLICY: policy}
    workload["metadata"].update(metadata)
    children = tuple(
        Child(map_name(found), f"uid-{map_name(found)}", names.ROLE_MAP, found.digest, "")
        for found in (AGENT, CODE)
    )
    return OrphanSnapshot(workload, "lane-a", children, frozenset({map_name(AGENT)}))


LEFT = DeleteConfigMap(map_name(CODE), f"uid-{map_name(CODE)}")


@pytest.mark.parametrize("policy", ["Retain", None, "restore", "Other"])
def test_a_workload_whose_lane_is_gone_serves_on(policy: str | None) -> None:
    plan = orphan.decide(orphaned(policy), NOW)
    assert plan.actions == (LEFT,)
    assert plan.events == ()
    assert plan.status is None


def test_a_gate_that_a_rollout_left_closed_is_given_back_and_no_pod_restarts() -> None:
    world = World(replicas=4).until("Canary").run(2)
    assert fields.gate_closed(world.workload)
    template = world.workload["spec"]["template"]
    snapshot = OrphanSnapshot(world.workload, "lane-a", (), frozenset(world.mounted()))
    plan = orphan.decide(snapshot, NOW)
    (opening,) = plan.actions
    assert isinstance(opening, ApplyWorkload)
    world.act(opening)
    assert not fields.gate_in_use(world.workload)
    assert world.workload["spec"]["template"] == template
    assert world.workload["metadata"]["labels"][names.LABEL_LANE] == "lane-a"
    again = OrphanSnapshot(world.workload, "lane-a", (), frozenset(world.mounted()))
    assert orphan.decide(again, NOW).actions == ()


def test_restore_releases_every_field_of_the_lane() -> None:
    plan = orphan.decide(orphaned("Restore"), NOW)
    assert plan.actions == (ApplyWorkload("vllm", "expertmaps.lane-a", {}), LEFT)
    assert [event.reason for event in plan.events] == ["TemplateRestored"]
    assert plan.status is None


def test_a_workload_that_goes_itself_is_left_alone() -> None:
    gone = orphaned("Restore", deletionTimestamp="2026-01-05T12:00:00Z")
    assert orphan.decide(gone, datetime.max).actions == ()


def test_nothing_is_collected_that_is_kept_by_name_digest_or_class() -> None:
    child = Child("a", "1", names.ROLE_MAP, "d", "code")
    assert garbage([child], ()) == (DeleteConfigMap("a", "1"),)
    assert garbage([child], ("a",)) == ()
    assert garbage([child], (), ("d",)) == ()
    assert garbage([child], (), (), ("code",)) == ()
    hook = Child("h", "2", names.ROLE_HOOK, "", "code")
    assert garbage([hook], (), (), ("code",)) == (DeleteConfigMap("h", "2"),)
