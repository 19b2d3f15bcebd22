"""A lane on a real API server and its Deployment controller; kubelets and hooks are played."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

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
from tests.api.apiserver import ApiServer
from tests.operator.lane_objects import (
    HOOK_ERROR,
    MAPS,
    SETTINGS,
    deployment,
    expert_map,
    lane,
    map_object,
    report,
)

BOOT_SECONDS = 1.0
TIMEOUT_SECONDS = 90.0


class Cluster:
    """A lane on a real API server. The hook's reports are made up, by digest and pod number."""

    def __init__(self, server: ApiServer, space: str, replicas: int, **spec: Any) -> None:
        self.kube, self.space = Kube(server.client()), space
        found = lane(**{"update": {"minReadySeconds": 1}, **spec})
        meta = found.metadata.model_copy(update={"namespace": space})
        self.lane = found.model_copy(update={"metadata": meta})
        self.bad: dict[tuple[str, int], str] = {}
        """(digest, number of the pod with it) to behaviour: hook, crash or stuck (never ready)."""
        self.order: dict[str, list[str]] = {}
        self.most_unproven = self.most_not_ready = 0
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
            status = self.booted(self.behaviour(pod))
            path = POD.path(self.space, pod["metadata"]["name"], "status")
            try:
                self.kube.request("PATCH", path, None, {"status": status}, MERGE)
            except ApiError as error:
                if error.status != 404:  # deleted meanwhile
                    raise

    def booted(self, behaviour: str | None) -> dict[str, Any]:
        """Status of a pod that has started."""
        failing = behaviour in ("crash", "stuck")
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": stamp}
        status: dict[str, Any] = {"phase": "Running", "conditions": [ready]}
        if failing:
            ready["status"] = "False"
        if behaviour == "crash":
            container = {
                "name": "vllm",
                "image": "vllm:1",
                "imageID": "",
                "ready": False,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}},
            }
            status["containerStatuses"] = [container]
        return status

    def report(self, pod: dict[str, Any]) -> PodReport | None:
        digest = fields.annotations_of(pod).get(names.ANNOTATION_MAP_DIGEST)
        if digest is None:
            return None
        found = next(item for item in MAPS.values() if item.digest == digest)
        behaviour = self.behaviour(pod)
        if behaviour == "hook":
            return report(found, **HOOK_ERROR)
        if behaviour is not None:
            return PodReport(None, "connection refused", reachable=False)
        return report(found)

    def behaviour(self, pod: dict[str, Any]) -> str | None:
        """How a pod misbehaves, by its number among the pods that were made with its map."""
        digest = fields.annotations_of(pod).get(names.ANNOTATION_MAP_DIGEST, "")
        numbers, uid = self.order.setdefault(digest, []), pod["metadata"]["uid"]
        if uid not in numbers:
            numbers.append(uid)
        return self.bad.get((digest, numbers.index(uid) + 1))

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
                try:
                    apply(self.kube, self.space, action, facts.workload["metadata"]["uid"])
                except ApiError as error:
                    # Its controller wrote meanwhile; as in the operator, the next turn looks again.
                    if error.status != 409:
                        raise
            else:
                self.hooks.add(names.hook_configmap("lane-a", SETTINGS.hook.digest))

    def serving(self) -> dict[str, dict[str, Any]]:
        """Ready pods that stay, by UID."""
        found = {}
        for pod in self.pods():
            conditions = (pod.get("status") or {}).get("conditions") or ()
            ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
            if ready and "deletionTimestamp" not in pod["metadata"]:
                found[pod["metadata"]["uid"]] = pod
        return found

    def unproven(self) -> int:
        serving = self.serving()
        proven = sum(self.behaviour(pod) is None for pod in serving.values())
        replicas = int(self.workload()["spec"]["replicas"])
        self.most_not_ready = max(self.most_not_ready, replicas - len(serving))
        return replicas - proven

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
        self.edit(activeTrafficClass=traffic_class)

    def edit(self, **spec: Any) -> None:
        """A user's patch of the lane's spec."""
        wire = self.lane.model_dump(mode="json", by_alias=True, exclude_none=True)
        wire["spec"].update(spec)
        wire["metadata"]["generation"] += 1
        self.lane = ExpertLane.model_validate(wire)


def booted(server: ApiServer, space: str, replicas: int, **spec: Any) -> Cluster:
    """A lane whose pods serve without a map."""
    cluster = Cluster(server, space, replicas, **spec)
    wanted = cluster.lane.spec.active_traffic_class
    cluster.edit(activeTrafficClass=None)
    whole = lambda: len(cluster.pods()) == replicas and cluster.unproven() == 0  # noqa: E731
    cluster.until("booted", whole, watch=False)
    cluster.edit(activeTrafficClass=wanted)
    cluster.most_unproven = cluster.most_not_ready = 0
    return cluster


def adopted(server: ApiServer, space: str, replicas: int, **spec: Any) -> Cluster:
    """A lane that serves the map of agent."""
    cluster = booted(server, space, replicas, **spec)
    cluster.until("adopted", cluster.ready)
    return cluster
