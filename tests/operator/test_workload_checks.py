"""What is checked before a lane touches its workload, and what each refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from expertmaps_operator.decide.lane_target import Refusal
from expertmaps_operator.decide.pods import PodView
from expertmaps_operator.decide.workload_checks import (
    BEFORE,
    first_refusal,
    presence,
    startup_budget_seconds,
)
from rowmap_jobs.formats import names
from tests.operator.lane_objects import (
    AGENT,
    HOOK,
    deployment,
    lane,
)
from tests.operator.lane_world import World

READY = PodView("pod", False, None, None, True, False, None, None, None)
GATE = ".spec.minReadySeconds: kubectl-client-side-apply"


def check(
    workload: dict[str, Any] | None,
    conflicts: tuple[str, ...] = (),
    pods: tuple[PodView, ...] = (READY,),
    **spec: Any,
) -> Refusal | None:
    found = presence(lane(**spec), workload, conflicts, pods)
    return found if isinstance(found, Refusal) else first_refusal(found, BEFORE)


def changed(replicas: int = 2, container: dict[str, Any] | None = None, **spec: Any) -> Any:
    workload = deployment(replicas, **(container or {}))
    workload["spec"].update(spec)
    return workload


def rolling(surge: Any, unavailable: Any) -> dict[str, Any]:
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable},
    }


def env(name: str, value: str) -> dict[str, Any]:
    return {"env": [{"name": name, "value": value}]}


def with_metadata(**metadata: Any) -> Any:
    workload = deployment()
    workload["metadata"].update(metadata)
    return workload


GOOD = [
    deployment(),
    changed(strategy=rolling("0%", 1)),
    changed(strategy=rolling(0, "50%")),
    changed(replicas=4, strategy=rolling(0, "25%")),
    changed(replicas=1, strategy={"type": "Recreate"}),
    changed(container=env("PYTHONPATH", names.HOOK_MOUNT)),
    changed(container=env("PYTHONPATH", f"{names.HOOK_MOUNT}:/mine")),
    changed(container=env("VLLM_PLUGINS", "lora, expertmaps")),
    changed(container={"resources": {"limits": {"nvidia.com/gpu": "1"}}}),
    changed(container={"resources": {"claims": [{"name": "gpu"}]}}),
    with_metadata(ownerReferences=[{"kind": "App", "name": "a", "uid": "u"}]),
    with_metadata(labels={names.LABEL_LANE: "lane-a"}),
]


@pytest.mark.parametrize("workload", GOOD)
def test_accepted(workload: dict[str, Any]) -> None:
    assert check(workload) is None


BAD: list[tuple[Any, tuple[str, ...], str, str]] = [
    (None, (), "WorkloadNotFound", "found none in namespace ns"),
    (with_metadata(deletionTimestamp="x"), (), "WorkloadNotFound", "being deleted"),
    (changed(container={"name": "other"}), (), "ContainerNotFound", "found other, expected vllm"),
    (
        with_metadata(ownerReferences=[{"kind": "LLM", "name": "m", "controller": True}]),
        (),
        "WorkloadHasController",
        "LLM m controls it",
    ),
    (with_metadata(labels={names.LABEL_LANE: "lane-b"}), (), "WorkloadClaimed", "found lane-b"),
    (
        deployment(),
        (".metadata.labels.expertmaps.dev/lane: expertmaps.lane-b",),
        "WorkloadClaimed",
        "found expertmaps.lane-b",
    ),
    (changed(paused=True), (), "UnsafeStrategy", "rollout resume deployment vllm"),
    (
        changed(strategy=rolling("25%", "25%")),
        (),
        "UnsafeStrategy",
        '{"spec":{"strategy":{"type":"RollingUpdate","rollingUpdate":'
        '{"maxSurge":0,"maxUnavailable":1}}}}',
    ),
    (changed(strategy={"type": "RollingUpdate"}), (), "UnsafeStrategy", "maxSurge 25% (1 of 2"),
    (changed(strategy=rolling(0, 2)), (), "UnsafeStrategy", "maxUnavailable 2 (2)"),
    (changed(strategy={"type": "Recreate"}), (), "UnsafeStrategy", "Recreate with 2 replicas"),
    (
        changed(minReadySeconds=30),
        (GATE,),
        "UnsafeStrategy",
        "found 30 set by kubectl-client-side-apply",
    ),
    (
        changed(progressDeadlineSeconds=900),
        (".spec.progressDeadlineSeconds: helm",),
        "UnsafeStrategy",
        '{"spec":{"progressDeadlineSeconds":null}}',
    ),
    (changed(container={"resources": {}}), (), "UnsafeStrategy", "resources.requests"),
    (
        changed(container=env("PYTHONPATH", "/mine")),
        (),
        "EnvConflict",
        '"env":[{"name":"PYTHONPATH","value":"/opt/expertmaps/hook:/mine"}]',
    ),
    (
        changed(container={"env": [{"name": "PYTHONPATH", "valueFrom": {}}]}),
        (),
        "EnvConflict",
        "found valueFrom",
    ),
    (
        changed(container=env("VLLM_PLUGINS", "lora")),
        (),
        "EnvConflict",
        '"value":"lora,expertmaps"',
    ),
    (
        deployment(),
        ('.spec.template.spec.containers[name="vllm"].env[name="EXPERTMAPS_MODE"].value: argo',),
        "EnvConflict",
        "set by argo",
    ),
    (
        deployment(),
        ('.spec.template.spec.containers[name="vllm"].volumeMounts[mountPath="/x"].name: argo',),
        "FieldConflict",
        "found argo there",
    ),
    (changed(replicas=0), (), "ScaledToZero", "found 0"),
]


@pytest.mark.parametrize(("workload", "conflicts", "reason", "text"), BAD)
def test_refused(workload: Any, conflicts: tuple[str, ...], reason: str, text: str) -> None:
    found = check(workload, conflicts)
    assert found is not None and found.reason == reason
    assert text in found.message and "\n" not in found.message


def test_defaults_in_the_gate_fields_are_no_refusal() -> None:
    assert check(deployment(), (GATE, ".spec.progressDeadlineSeconds: kubectl")) is None


@pytest.mark.parametrize(
    "pods",
    [
        (),
        (PodView("pod", False, None, None, False, False, None, None, None),),
        (PodView("pod", False, None, None, True, True, None, None, None),),
        (PodView("pod", False, AGENT.digest, HOOK.digest, True, False, None, None, None),),
    ],
)
def test_a_first_adoption_needs_a_pod_that_serves_by_itself(pods: tuple[PodView, ...]) -> None:
    found = check(deployment(), pods=pods)
    assert found is not None and found.reason == "LaneNotHealthy"


def test_an_adopted_workload_needs_none() -> None:
    world = World(replicas=1).until("Verified")
    assert check(world.workload, pods=()) is None


@pytest.mark.parametrize(
    ("probe", "seconds"),
    [(None, None), ({}, None), ({"periodSeconds": 5, "failureThreshold": 60}, 300)],
)
def test_startup_budget(probe: dict[str, int] | None, seconds: int | None) -> None:
    assert startup_budget_seconds({"startupProbe": probe} if probe else {}) == seconds


REFUSED_IN_A_TURN = [
    ({"strategy": rolling("25%", "25%")}, "UnsafeStrategy"),
    ({"paused": True}, "UnsafeStrategy"),
    ({"replicas": 0}, "ScaledToZero"),
]


@pytest.mark.parametrize(("spec", "reason"), REFUSED_IN_A_TURN)
def test_a_refused_lane_touches_nothing(spec: dict[str, Any], reason: str) -> None:
    world = World(replicas=2)
    world.workload["spec"].update(spec)
    world.run(4)
    assert world.applies == [] and world.lane.status.rollout is None
    assert world.condition("Ready") == ("False", reason)
    assert world.condition("Progressing") == ("False", reason)
    assert world.condition("Verified") == ("False", "ServingUnhooked")
