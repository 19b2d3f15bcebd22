"""Rollouts against a real API server and its Deployment controller; only kubelets are played."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from expertmaps_operator.act.workload import apply, dry_run
from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.decide.lane import decide
from expertmaps_operator.decide.lane_probe import probe_patch
from expertmaps_operator.observe.kube import MERGE, ApiError, Kube
from expertmaps_operator.observe.resources import DEPLOYMENT, POD, REPLICA_SET
from expertmaps_operator.plan import ApplyWorkload
from expertmaps_operator.snapshot import LanePod, LaneSnapshot, PodReport, Slots
from rowmap_jobs.formats import names
from rowmap_jobs.formats.rowmap import RowMap
from tests.api.apiserver import (  # noqa: F401
    ApiServer,
    api_server,
    controller_manager,
    namespace,
)
from tests.operator.lane_objects import (
    HOOK_ERROR,
    MAPS,
    PROSE,
    SETTINGS,
    deployment,
    expert_map,
    lane,
    map_object,
    report,
)

pytestmark = pytest.mark.api

BOOT_SECONDS = 1.0
TIMEOUT_SECONDS = 90.0


class Cluster:
    """A lane on a real API server. The hook's reports are made up, by digest and pod number."""

    def __init__(self, server: ApiServer, space: str, replicas: int) -> None:
        self.kube, self.space = Kube(server.client()), space
        found = lane(update={"minReadySeconds": 1})
        meta = found.metadata.model_copy(update={"namespace": space})
        self.lane = found.model_copy(update={"metadata": meta})
        self.bad: dict[tuple[str, int], str] = {}
        self.order: dict[str, list[str]] = {}
        self.most_unproven = 0
        manifest = deployment(replicas)
        for key in ("namespace", "uid", "generation"):
            del manifest["metadata"][key]
        del manifest["status"], manifest["spec"]["progressDeadlineSeconds"]
        # As a user does it: client-side apply, which makes kubectl the owner of every default.
        self.manifest = yaml.safe_dump(manifest)
        server.kubectl("-n", space, "apply", "-f", "-", stdin=self.manifest)
        self.hooks: set[str] = set()

    def pods(self) -> list[dict[str, Any]]:
        return self.kube.list_all(POD, self.space, "app=vllm")

    def workload(self) -> dict[str, Any]:
        found = self.kube.get(DEPLOYMENT, self.space, "vllm")
        assert found is not None
        return found

    def kubelet(self) -> None:
        """Pods become ready some time after they are made."""
        for pod in self.pods():
            made = datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
            age = (datetime.now(UTC) - made).total_seconds()
            if pod.get("status", {}).get("conditions") or age < BOOT_SECONDS:
                continue
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": stamp}
            status = {"phase": "Running", "conditions": [ready]}
            path = POD.path(self.space, pod["metadata"]["name"], "status")
            try:
                self.kube.request("PATCH", path, None, {"status": status}, MERGE)
            except ApiError as error:
                if error.status != 404:  # deleted meanwhile
                    raise

    def report(self, pod: dict[str, Any]) -> PodReport | None:
        digest = fields.annotations_of(pod).get(names.ANNOTATION_MAP_DIGEST)
        if digest is None:
            return None
        numbers = self.order.setdefault(digest, [])
        if pod["metadata"]["uid"] not in numbers:
            numbers.append(pod["metadata"]["uid"])
        found = next(item for item in MAPS.values() if item.digest == digest)
        if self.is_bad(pod, found):
            return report(found, **HOOK_ERROR)
        return report(found)

    def is_bad(self, pod: dict[str, Any], found: RowMap) -> bool:
        numbers = self.order.get(found.digest, [])
        uid = pod["metadata"]["uid"]
        return uid in numbers and (found.digest, numbers.index(uid) + 1) in self.bad

    def snapshot(self) -> LaneSnapshot:
        facts = LaneSnapshot(
            lane=self.lane,
            maps=tuple(expert_map(name, found) for name, found in MAPS.items()),
            traffic_class_exists=True,
            workload=self.workload(),
            replica_sets=tuple(self.kube.list_all(REPLICA_SET, self.space, "app=vllm")),
            pods=tuple(LanePod(pod, self.report(pod)) for pod in self.pods()),
            map_objects={one.digest: map_object(one, one.digest) for one in MAPS.values()},
            hook_config_maps=frozenset(self.hooks),
            jobs=(),
            job_pods=(),
            slots=Slots(0, 0),
            settings=SETTINGS,
        )
        probe = probe_patch(facts)
        if probe is None:
            return facts
        conflicts = dry_run(self.kube, self.space, *probe)
        return LaneSnapshot(**{**vars(facts), "dry_run_conflicts": conflicts})

    def turn(self) -> None:
        facts = self.snapshot()
        plan = decide(facts, datetime.now(UTC))
        wire = self.lane.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.lane = ExpertLane.model_validate({**wire, "status": plan.status})
        assert facts.workload is not None
        for action in plan.actions:
            if isinstance(action, ApplyWorkload):
                apply(self.kube, self.space, action, facts.workload["metadata"]["uid"])
            else:
                self.hooks.add(names.hook_configmap("lane-a", SETTINGS.hook.digest))

    def unproven(self) -> int:
        proven = 0
        for pod in self.pods():
            conditions = (pod.get("status") or {}).get("conditions") or ()
            ready = any(item["type"] == "Ready" for item in conditions)
            bad = any(self.is_bad(pod, found) for found in MAPS.values())
            proven += ready and not bad and "deletionTimestamp" not in pod["metadata"]
        return int(self.workload()["spec"]["replicas"]) - proven

    def until(self, what: str, check: Callable[[], bool], watch: bool = True) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not check():
            assert time.monotonic() < deadline, f"{what}: {self.said()}"
            self.kubelet()
            self.turn()
            if watch:
                self.most_unproven = max(self.most_unproven, self.unproven())

    def state(self) -> str:
        rollout = self.lane.status.rollout
        return rollout.state if rollout is not None else ""

    def said(self) -> dict[str, tuple[str, str, str]]:
        return {c.type: (c.status, c.reason, c.message) for c in self.lane.status.conditions}

    def ready(self) -> bool:
        return self.said().get("Ready", ("", "", ""))[0] == "True"

    def switch(self, traffic_class: str) -> None:
        wire = self.lane.model_dump(mode="json", by_alias=True, exclude_none=True)
        wire["spec"]["activeTrafficClass"] = traffic_class
        wire["metadata"]["generation"] += 1
        self.lane = ExpertLane.model_validate(wire)


def adopted(server: ApiServer, space: str, replicas: int) -> Cluster:
    cluster = Cluster(server, space, replicas)
    booted = lambda: len(cluster.pods()) == replicas and cluster.unproven() == 0  # noqa: E731
    cluster.until("booted", booted, watch=False)
    cluster.until("adopted", cluster.ready)
    return cluster


@pytest.mark.parametrize("replicas", [1, 3])
def test_adopt_and_switch(controller_manager: ApiServer, namespace: str, replicas: int) -> None:  # noqa: F811
    cluster = adopted(controller_manager, namespace, replicas)
    assert cluster.lane.status.active is not None
    cluster.switch("prose")
    cluster.turn()
    cluster.until("switched", cluster.ready)
    assert cluster.lane.status.active.traffic_class == "prose"
    assert cluster.most_unproven <= 1
    spec = cluster.workload()["spec"]
    assert spec["progressDeadlineSeconds"] == 600 and "minReadySeconds" not in spec
    name = names.workload_manager("lane-a")
    managers = [item["manager"] for item in cluster.workload()["metadata"]["managedFields"]]
    assert name in managers


def test_a_bad_second_pod_stops_and_the_way_back_works(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = adopted(controller_manager, namespace, 4)
    cluster.bad[(PROSE.digest, 2)] = "hook"
    cluster.switch("prose")
    cluster.until("stopped", lambda: cluster.state() == "Stopped")
    assert fields.gate_closed(cluster.workload())
    for _ in range(10):
        cluster.kubelet()
        cluster.turn()
        assert cluster.unproven() <= 1
    cluster.switch("agent")
    cluster.turn()
    cluster.until("back", cluster.ready)
    assert cluster.most_unproven <= 1
    assert cluster.lane.status.active is not None
    assert cluster.lane.status.active.traffic_class == "agent"


def test_a_second_lane_is_told_that_the_workload_is_taken(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = adopted(controller_manager, namespace, 1)
    other = lane()
    meta = other.metadata.model_copy(update={"namespace": namespace, "name": "lane-b"})
    cluster.lane = other.model_copy(update={"metadata": meta})
    cluster.turn()
    assert cluster.said()["Ready"][:2] == ("False", "WorkloadClaimed")


def test_an_own_value_in_the_gate_is_never_forced_over(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = Cluster(controller_manager, namespace, 1)
    own = yaml.safe_load(cluster.manifest)
    own["spec"]["minReadySeconds"] = 3
    manifest = yaml.safe_dump(own)
    controller_manager.kubectl("-n", namespace, "apply", "-f", "-", stdin=manifest)
    cluster.until("booted", lambda: cluster.unproven() == 0, watch=False)
    for _ in range(3):
        cluster.turn()
    assert cluster.said()["Ready"][:2] == ("False", "UnsafeStrategy")
    assert "found 3 set by kubectl-client-side-apply" in cluster.said()["Ready"][2]
    assert cluster.workload()["spec"]["minReadySeconds"] == 3


def test_the_printed_patches_are_accepted(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = Cluster(controller_manager, namespace, 1)
    bad = yaml.safe_load(cluster.manifest)
    del bad["spec"]["strategy"]
    container = bad["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "PYTHONPATH", "value": "/mine"}]
    controller_manager.kubectl("-n", namespace, "delete", "deployment", "vllm")
    manifest = yaml.safe_dump(bad)
    controller_manager.kubectl("-n", namespace, "apply", "-f", "-", stdin=manifest)
    cluster.until("booted", lambda: cluster.unproven() == 0, watch=False)
    for reason in ("UnsafeStrategy", "EnvConflict"):
        cluster.turn()
        status, found, message = cluster.said()["Ready"]
        assert (status, found) == ("False", reason)
        _, _, command = message.partition("kubectl ")
        head, _, body = command.partition(" -p ")
        controller_manager.kubectl(*head.split(), "-p", body.strip("'"))
    cluster.until("adopted", cluster.ready)
