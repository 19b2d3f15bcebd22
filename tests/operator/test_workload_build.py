"""The fields that a lane owns on its workload."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from expertmaps_operator.api.expertlane import MapInForce
from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.build.hook_configmap import hook_config_map
from expertmaps_operator.build.workload import (
    Gate,
    closing_patch,
    gate_holds,
    template_hash,
    template_holds,
    workload_patch,
)
from expertmaps_operator.decide.lane_probe import probe_patch
from rowmap_jobs.formats import names
from tests.operator.lane_objects import (
    AGENT,
    HOOK,
    deployment,
    lane,
)
from tests.operator.lane_world import World

IN_FORCE = MapInForce(traffic_class="agent", digest=AGENT.digest, hook_digest=HOOK.digest)


def patch(gate: Gate, workload: Any = None, **spec: Any) -> Any:
    return workload_patch(lane(**spec), workload or deployment(), IN_FORCE, HOOK.items, gate)


def test_the_patch_holds_exactly_the_fields_of_the_lane() -> None:
    closed = patch(Gate.CLOSED)
    hook = names.hook_configmap("lane-a", HOOK.digest)
    assert closed == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "vllm",
            "namespace": "ns",
            "labels": {"expertmaps.dev/lane": "lane-a"},
            "annotations": {"expertmaps.dev/deletion-policy": "Retain"},
        },
        "spec": {
            "minReadySeconds": 864000,
            "progressDeadlineSeconds": 864001,
            "template": {
                "metadata": {
                    "annotations": {
                        "expertmaps.dev/map-digest": AGENT.digest,
                        "expertmaps.dev/hook-digest": HOOK.digest,
                    }
                },
                "spec": {
                    "containers": [
                        {
                            "name": "vllm",
                            "env": [
                                {"name": "PYTHONPATH", "value": "/opt/expertmaps/hook"},
                                {"name": "EXPERTMAPS_MODE", "value": "serve"},
                                {
                                    "name": "EXPERTMAPS_MAP",
                                    "value": "/etc/expertmaps/rowmap.json",
                                },
                                {"name": "EXPERTMAPS_DIR", "value": "/var/run/expertmaps"},
                                {"name": "EXPERTMAPS_STATUS_PORT", "value": "9477"},
                            ],
                            "volumeMounts": [
                                {
                                    "name": "expertmaps-hook",
                                    "mountPath": "/opt/expertmaps/hook",
                                    "readOnly": True,
                                },
                                {
                                    "name": "expertmaps-map",
                                    "mountPath": "/etc/expertmaps",
                                    "readOnly": True,
                                },
                                {"name": "expertmaps-run", "mountPath": "/var/run/expertmaps"},
                            ],
                        }
                    ],
                    "volumes": [
                        {
                            "name": "expertmaps-hook",
                            "configMap": {
                                "name": hook,
                                "optional": True,
                                "items": [dict(item) for item in HOOK.items],
                            },
                        },
                        {
                            "name": "expertmaps-map",
                            "configMap": {
                                "name": names.map_configmap("lane-a", AGENT.digest),
                                "optional": True,
                            },
                        },
                        {"name": "expertmaps-run", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def test_the_gate_differs_and_nothing_else() -> None:
    closed, opened, released = (patch(gate) for gate in Gate)
    assert opened["spec"]["minReadySeconds"] == 10
    assert opened["spec"]["progressDeadlineSeconds"] == 864001
    assert set(released["spec"]) == {"template"}
    assert closed["spec"]["template"] == opened["spec"]["template"] == released["spec"]["template"]


def test_without_a_map_only_claim_and_gate_are_left() -> None:
    bare = {
        gate: workload_patch(lane(), deployment(), None, (), gate)
        for gate in (Gate.CLOSED, Gate.RELEASED)
    }
    assert set(bare[Gate.CLOSED]["spec"]) == {"minReadySeconds", "progressDeadlineSeconds"}
    assert "spec" not in bare[Gate.RELEASED]
    assert bare[Gate.RELEASED]["metadata"]["labels"] == {names.LABEL_LANE: "lane-a"}
    assert template_holds(deployment(), bare[Gate.RELEASED])
    workload = adopted()
    assert gate_holds(workload, bare[Gate.RELEASED])
    assert not gate_holds(workload, bare[Gate.CLOSED])


@pytest.mark.parametrize("left", ["annotations", "volumes", "env"])
def test_a_template_with_anything_of_a_lane_is_not_released(left: str) -> None:
    bare = workload_patch(lane(), deployment(), None, (), Gate.RELEASED)
    template = adopted()["spec"]["template"]
    workload = deployment()
    own = workload["spec"]["template"]
    if left == "annotations":
        own["metadata"]["annotations"] = template["metadata"]["annotations"]
    elif left == "volumes":
        own["spec"]["volumes"] = template["spec"]["volumes"]
    else:
        own["spec"]["containers"][0]["env"] = template["spec"]["containers"][0]["env"]
    assert not template_holds(workload, bare)


def test_nothing_in_the_environment_differs_between_maps() -> None:
    other = IN_FORCE.model_copy(update={"digest": HOOK.digest})
    one, two = (
        workload_patch(lane(), deployment(), item, HOOK.items, Gate.RELEASED)
        for item in (IN_FORCE, other)
    )
    pods = [item["spec"]["template"]["spec"]["containers"] for item in (one, two)]
    assert pods[0] == pods[1]


def test_an_own_python_path_with_the_hook_first_is_left_alone() -> None:
    own = deployment(env=[{"name": "PYTHONPATH", "value": f"{names.HOOK_MOUNT}:/mine"}])
    (container,) = patch(Gate.CLOSED, own)["spec"]["template"]["spec"]["containers"]
    assert "PYTHONPATH" not in [item["name"] for item in container["env"]]


def adopted() -> dict[str, Any]:
    world = World(replicas=1).until("Verified")
    world.run(2)
    return world.workload


def test_what_the_api_server_fills_in_does_not_hide_our_fields() -> None:
    workload = adopted()
    template = workload["spec"]["template"]
    template["spec"]["volumes"][0]["configMap"]["defaultMode"] = 420
    template["spec"]["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
    assert template_holds(workload, patch(Gate.RELEASED))
    assert gate_holds(workload, patch(Gate.RELEASED))
    assert not gate_holds(workload, patch(Gate.CLOSED))


@pytest.mark.parametrize(
    "place",
    [
        ("metadata", "annotations", names.ANNOTATION_MAP_DIGEST),
        ("spec", "containers", 0, "env", 1, "value"),
        ("spec", "containers", 0, "volumeMounts", 0, "readOnly"),
        ("spec", "volumes", 1, "configMap", "name"),
        ("spec", "volumes", 0, "configMap", "items"),
    ],
)
def test_a_changed_field_is_seen(place: tuple[Any, ...]) -> None:
    workload = adopted()
    target = workload["spec"]["template"]
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = "other"
    assert not template_holds(workload, patch(Gate.RELEASED))


def test_a_gate_of_zero_seconds_is_seen_though_the_api_server_leaves_zeros_out() -> None:
    workload = adopted()
    workload["spec"]["progressDeadlineSeconds"] = 864001
    update = {"minReadySeconds": 0, "progressDeadlineSeconds": 1800}
    assert gate_holds(workload, patch(Gate.OPEN, update=update))


def test_a_lost_claim_is_seen() -> None:
    workload = adopted()
    del workload["metadata"]["labels"][names.LABEL_LANE]
    assert not gate_holds(workload, patch(Gate.RELEASED))


def test_the_template_hash_is_the_users_own() -> None:
    plain, workload = deployment(), adopted()
    assert template_hash(plain) == template_hash(workload)
    workload["spec"]["template"]["metadata"]["creationTimestamp"] = None
    assert template_hash(plain) == template_hash(workload)
    workload["spec"]["template"]["spec"]["containers"][0]["image"] = "vllm:2"
    assert template_hash(plain) != template_hash(workload)


@pytest.mark.parametrize("name", ["PYTHONPATH", "HF_HOME"])
def test_the_template_hash_sees_the_users_variables(name: str) -> None:
    own = deployment(env=[{"name": name, "value": f"{names.HOOK_MOUNT}:/mine"}])
    assert template_hash(own) != template_hash(deployment())


def test_closing_changes_the_gate_alone() -> None:
    workload = adopted()
    other = lane(hook={"statusPort": 9999})
    closing = closing_patch(other, workload)
    assert closing is not None
    assert template_holds(workload, closing)
    assert closing["spec"]["minReadySeconds"] == fields.GATE_MIN_READY
    assert closing_patch(other, deployment()) is None
    del workload["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert closing_patch(other, workload) is None


def test_the_hook_config_map_belongs_to_the_workload() -> None:
    made = hook_config_map("lane-a", "ns", deployment(), HOOK)
    metadata = made["metadata"]
    assert metadata["name"] == names.hook_configmap("lane-a", HOOK.digest)
    assert metadata["labels"] == {
        names.LABEL_LANE: "lane-a",
        names.LABEL_ROLE: "hook",
        names.LABEL_DIGEST: names.hex16(HOOK.digest),
    }
    (owner,) = metadata["ownerReferences"]
    assert owner == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "vllm",
        "uid": "dep-uid",
    }
    assert made["immutable"] is True and made["data"] == HOOK.data


def test_the_probe_is_the_first_write() -> None:
    world = World(replicas=1)
    probe = probe_patch(world.snapshot())
    assert probe is not None
    world.turn()
    world.turn()
    assert probe == ("vllm", "expertmaps.lane-a", world.applies[0].patch)


def test_no_probe_when_nothing_is_wanted() -> None:
    world = World(replicas=1).until("Verified").run(2)
    assert probe_patch(world.snapshot()) is None
    world.edit(activeTrafficClass="prose")
    assert probe_patch(world.snapshot()) is not None
    world.edit(paused=True)
    assert probe_patch(world.snapshot()) is None
    world.edit(paused=False, activeTrafficClass="unknown")
    assert probe_patch(world.snapshot()) is None
    world.edit(activeTrafficClass="prose", containerName="other")
    assert probe_patch(world.snapshot()) is None


def test_building_changes_no_input() -> None:
    workload = deployment()
    before = copy.deepcopy(workload)
    patch(Gate.CLOSED, workload)
    template_hash(workload)
    assert workload == before
