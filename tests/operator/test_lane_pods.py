"""A pod against the map and the hook that it should run with."""

from __future__ import annotations

from typing import Any

import pytest

from expertmaps_operator.api.expertlane import MapInForce
from expertmaps_operator.decide.pods import (
    PodView,
    Standing,
    judge,
    newest_replica_set,
    views,
)
from expertmaps_operator.snapshot import LanePod, PodReport
from rowmap_jobs.formats.status import ModelGeometry, Residency
from tests.operator.lane_objects import (
    AGENT,
    FINGERPRINT,
    HOOK,
    HOOK_ERROR,
    deployment,
    report,
    sha,
)

IN_FORCE = MapInForce(traffic_class="agent", digest=AGENT.digest, hook_digest=HOOK.digest)
NO_ROWS = Residency(
    hot_rows=0, cold_rows=8, hot_bytes=0, cold_bytes=1, locked_bytes=0, tier="overlay"
)
OTHER_MODEL = ModelGeometry(experts=8, top_k=1, moe_layers=(0, 1), row_bytes=64)
UNREACHABLE = PodReport(None, "connection refused", reachable=False)
GARBLED = PodReport(None, "status of pod: not JSON", reachable=True)


def view(found: PodReport | None = None, **more: Any) -> PodView:
    base: dict[str, Any] = {
        "name": "pod",
        "updated": True,
        "map_digest": AGENT.digest,
        "hook_digest": HOOK.digest,
        "ready": True,
        "terminating": False,
        "unschedulable": None,
        "failure": None,
        "report": found,
    }
    return PodView(**{**base, **more})


CASES: list[tuple[PodView, Standing, str]] = [
    (view(report(AGENT)), Standing.GOOD, "AllPodsReportDigest"),
    (view(report(AGENT, phase="Ready")), Standing.GOOD, "AllPodsReportDigest"),
    (view(report(AGENT, phase="Loading")), Standing.WAITING, "PodsNotReady"),
    (view(report(AGENT, phase="Stopped")), Standing.WAITING, "PodsNotReady"),
    (view(report(AGENT), ready=False), Standing.WAITING, "PodsNotReady"),
    (view(report(AGENT), terminating=True), Standing.WAITING, "PodsNotReady"),
    (view(report(AGENT), map_digest=None), Standing.WAITING, "PodsNotReady"),
    (view(UNREACHABLE, ready=False), Standing.WAITING, "PodsNotReady"),
    (view(UNREACHABLE), Standing.UNKNOWN, "StatusUnreachable"),
    (view(None), Standing.UNKNOWN, "StatusUnreachable"),
    (view(GARBLED), Standing.UNKNOWN, "StatusInvalid"),
    (view(unschedulable="no gpu", ready=False), Standing.UNSCHEDULABLE, "PodUnschedulable"),
    (view(failure="crash"), Standing.BAD, "PodFailed"),
    (view(report(AGENT, **HOOK_ERROR)), Standing.BAD, "HookFailed"),
    (view(report(AGENT, **HOOK_ERROR), ready=False), Standing.BAD, "HookFailed"),
    (view(report(AGENT, phase="Failed")), Standing.BAD, "HookFailed"),
    (view(report(AGENT, mode="off")), Standing.BAD, "HookNotLoaded"),
    (view(report(AGENT, generation=0, map_digest=None)), Standing.BAD, "HookNotLoaded"),
    (view(report(AGENT, residency=None)), Standing.BAD, "HookNotLoaded"),
    (view(report(AGENT, residency=NO_ROWS)), Standing.BAD, "HookNotLoaded"),
    (view(report(AGENT, map_digest=sha("x"))), Standing.BAD, "MapDigestMismatch"),
    (view(report(AGENT, hook_digest=sha("x"))), Standing.BAD, "MapDigestMismatch"),
    (view(report(AGENT, fingerprint=None)), Standing.BAD, "MapDigestMismatch"),
    (
        view(report(AGENT, fingerprint=FINGERPRINT.model_copy(update={"router": sha("x")}))),
        Standing.BAD,
        "MapDigestMismatch",
    ),
    (view(report(AGENT, geometry=OTHER_MODEL)), Standing.BAD, "GeometryMismatch"),
]


@pytest.mark.parametrize(("pod", "standing", "reason"), CASES)
def test_judgement(pod: PodView, standing: Standing, reason: str) -> None:
    found = judge(pod, IN_FORCE, AGENT)
    assert (found.standing, found.reason) == (standing, reason)
    assert "pod" in found.message and "\n" not in found.message


BARE = {"map_digest": None, "hook_digest": None}
BARE_CASES: list[tuple[PodView, Standing, str]] = [
    (view(None, **BARE), Standing.GOOD, "ServingUnhooked"),
    (view(None, **BARE, ready=False), Standing.WAITING, "PodsNotReady"),
    (view(None, **BARE, terminating=True), Standing.WAITING, "PodsNotReady"),
    (
        view(None, **BARE, unschedulable="no", ready=False),
        Standing.UNSCHEDULABLE,
        "PodUnschedulable",
    ),
    (view(None, **BARE, failure="crash"), Standing.BAD, "PodFailed"),
    (view(report(AGENT)), Standing.WAITING, "PodsNotReady"),
    (view(UNREACHABLE), Standing.WAITING, "PodsNotReady"),
]


@pytest.mark.parametrize(("pod", "standing", "reason"), BARE_CASES)
def test_judgement_of_a_pod_that_should_have_no_map(
    pod: PodView, standing: Standing, reason: str
) -> None:
    found = judge(pod, None, None)
    assert (found.standing, found.reason) == (standing, reason)


def container(**state: Any) -> dict[str, Any]:
    return {"name": "vllm", "restartCount": 0, "ready": False, **state}


OOM = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
FAILURES = [
    (container(state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=OOM), True),
    (container(state={"waiting": {"reason": "ImagePullBackOff", "message": "no"}}), True),
    (container(state={"waiting": {"reason": "InvalidImageName"}}), True),
    (container(state={"waiting": {"reason": "ErrImagePull"}}), False),
    (container(state={"waiting": {"reason": "ContainerCreating"}}), False),
    (container(restartCount=1, state={"running": {}}, lastState=OOM), False),
    (container(restartCount=2, state={"running": {}}, lastState=OOM), True),
    (container(restartCount=2, state={"running": {}}, lastState=OOM, ready=True), False),
    ({**container(state={"waiting": {"reason": "CrashLoopBackOff"}}), "name": "side"}, False),
]


@pytest.mark.parametrize(("status", "failed"), FAILURES)
def test_container_failures(status: dict[str, Any], failed: bool) -> None:
    manifest = {"metadata": {"name": "pod"}, "status": {"containerStatuses": [status]}}
    (found,) = views([LanePod(manifest, None)], None, "vllm")
    assert (found.failure is not None) is failed


def test_a_failing_init_container_is_a_failure() -> None:
    status = {"name": "init", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    manifest = {"metadata": {"name": "pod"}, "status": {"initContainerStatuses": [status]}}
    (found,) = views([LanePod(manifest, None)], None, "vllm")
    assert found.failure is not None and "init" in found.failure


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_finished_pods_are_not_looked_at(phase: str) -> None:
    manifest = {"metadata": {"name": "pod"}, "status": {"phase": phase}}
    assert views([LanePod(manifest, None)], None, "vllm") == ()


def replica_set(name: str, image: str, revision: str = "1") -> dict[str, Any]:
    template = deployment()["spec"]["template"]
    template["spec"]["containers"][0]["image"] = image
    template["metadata"]["labels"]["pod-template-hash"] = name
    annotations = {"deployment.kubernetes.io/revision": revision}
    return {
        "metadata": {"name": name, "uid": name, "annotations": annotations},
        "spec": {"template": template},
    }


def test_the_newest_replica_set_is_found_by_its_template() -> None:
    sets = [replica_set("a", "vllm:0"), replica_set("b", "vllm:1")]
    found = newest_replica_set(deployment(), sets)
    assert found is not None and found["metadata"]["name"] == "b"
    assert newest_replica_set(deployment(), sets[:1]) is None


def test_the_revision_decides_when_no_template_is_equal() -> None:
    workload = deployment()
    workload["metadata"]["annotations"] = {"deployment.kubernetes.io/revision": "7"}
    sets = [replica_set("a", "vllm:0", "7")]
    found = newest_replica_set(workload, sets)
    assert found is not None and found["metadata"]["name"] == "a"
    workload["status"]["observedGeneration"] = 0
    assert newest_replica_set(workload, sets) is None
