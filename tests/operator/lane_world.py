"""A lane's world in memory: resources, and a stand-in for the API server, the Deployment and
ReplicaSet controllers, the kubelet and the hook. The stand-in follows the rolling update of
kube-controller-manager (deployment/rolling.go) as far as maxSurge 0 needs it; it proves nothing
about a real cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.api.expertmap import ExpertMap
from expertmaps_operator.build import workload_fields as fields
from expertmaps_operator.decide.lane import decide
from expertmaps_operator.observe.facts import config_maps_of_pod
from expertmaps_operator.plan import ApplyWorkload, Create, DeleteConfigMap, Plan
from expertmaps_operator.snapshot import Child, LanePod, LaneSnapshot, PodReport, Slots
from rowmap_jobs.formats import names
from rowmap_jobs.formats.rowmap import RowMap
from tests.operator.lane_objects import (
    HOOK_ERROR,
    MAPS,
    NOW,
    SETTINGS,
    deployment,
    expert_map,
    lane,
    map_object,
    release,
    report,
    sha,
)

TICK = timedelta(seconds=5)


@dataclass
class ReplicaSet:
    name: str
    template: dict[str, Any]
    replicas: int = 0
    min_ready: int = 0


@dataclass
class Pod:
    name: str
    owner: str
    template: dict[str, Any]
    behaviour: str = "good"
    """good, hook, crash, mute (unreachable), stuck (never ready) or digest."""
    node: bool = False
    boots: int = 2
    ready_since: datetime | None = None
    gone_in: int | None = None


@dataclass
class World:
    """Everything around one lane."""

    replicas: int = 2
    classes: dict[str, RowMap | None] = field(default_factory=lambda: dict(MAPS))
    boots: int = 2
    leaves: int = 1
    bad: dict[tuple[str, int], str] = field(default_factory=dict)
    """(digest, number of the pod with it) to behaviour."""
    conflicts: tuple[str, ...] = ()
    rollback: bool = True

    def __post_init__(self) -> None:
        self.now = NOW
        self.known: dict[str, RowMap] = {}
        self.seen: dict[str, RowMap | None] = {}
        self.expert_maps: tuple[ExpertMap, ...] = ()
        self.reports: dict[str, PodReport] = {}
        self.lane = lane(rollback={"enabled": self.rollback})
        self.workload = deployment(self.replicas)
        self.own_template = _copy(self.workload["spec"]["template"])
        self.maps = {found.digest for found in self.classes.values() if found is not None}
        self.config_maps: set[str] = set()
        self.jobs: list[dict[str, Any]] = []
        self.sets: list[ReplicaSet] = []
        self.pods: list[Pod] = []
        self.owned: dict[str, Any] = {}
        self.applies: list[ApplyWorkload] = []
        self.events: list[str] = []
        self.collected: list[str] = []
        self.made: dict[str, int] = {}
        self.settings = SETTINGS
        self.slots = 0
        self._serial = 0
        for _ in range(12):
            self.tick()

    # What the operator sees.

    def snapshot(self) -> LaneSnapshot:
        wanted = self.lane.spec.active_traffic_class
        if self.seen != self.classes:
            self.seen = dict(self.classes)
            self.known.update({item.digest: item for item in self.classes.values() if item})
            self.expert_maps = tuple(expert_map(*item) for item in sorted(self.classes.items()))
        return LaneSnapshot(
            lane=self.lane,
            maps=self.expert_maps,
            traffic_class_exists=wanted is None or wanted in self.classes,
            workload=_copy(self.workload),
            replica_sets=tuple(self._set_manifest(item) for item in self.sets),
            pods=tuple(self._lane_pod(item) for item in self.pods),
            map_objects={
                digest: map_object(found, digest)
                for digest, found in self.known.items()
                if digest in self.maps
            },
            hook_config_maps=frozenset(name for name in self.config_maps if "-hook-" in name),
            jobs=tuple(self.jobs),
            job_pods=(),
            slots=Slots(profiles=0, rollouts=self.slots),
            settings=self.settings,
            children=tuple(self._children()),
            mounted=frozenset(self.mounted()),
            dry_run_conflicts=self.conflicts,
        )

    def _children(self) -> Iterator[Child]:
        for digest in sorted(self.maps & set(self.known)):
            name = names.map_configmap("lane-a", digest)
            yield Child(name, f"uid-{name}", names.ROLE_MAP, digest, "")
        for name in sorted(item for item in self.config_maps if "-hook-" in item):
            yield Child(name, f"uid-{name}", names.ROLE_HOOK, "", "")

    def mounted(self) -> set[str]:
        """ConfigMaps that a pod can still be started with."""
        templates = [self.workload["spec"]["template"]]
        templates += [item.template for item in self.sets] + [pod.template for pod in self.pods]
        return {name for item in templates for name in config_maps_of_pod(item)}

    def _set_manifest(self, item: ReplicaSet) -> dict[str, Any]:
        template = _copy(item.template)
        template["metadata"].setdefault("labels", {})["pod-template-hash"] = item.name
        return {
            "metadata": {"name": item.name, "uid": item.name},
            "spec": {"replicas": item.replicas, "template": template},
        }

    def _lane_pod(self, pod: Pod) -> LanePod:
        conditions = [
            {"type": "Ready", "status": "True" if pod.ready_since else "False"},
            {"type": "PodScheduled", "status": "True"}
            if pod.node
            else {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"},
        ]
        container: dict[str, Any] = {"name": "vllm", "restartCount": 0, "state": {"running": {}}}
        if pod.behaviour == "crash" and pod.boots <= 0:
            container["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
            container["lastState"] = {"terminated": {"exitCode": 1, "reason": "Error"}}
        manifest: dict[str, Any] = {
            "metadata": {
                "name": pod.name,
                "annotations": dict(pod.template["metadata"].get("annotations") or {}),
                "ownerReferences": [{"kind": "ReplicaSet", "uid": pod.owner, "controller": True}],
            },
            "status": {
                "phase": "Running" if pod.node else "Pending",
                "conditions": conditions,
                "containerStatuses": [container],
            },
        }
        if pod.gone_in is not None:
            manifest["metadata"]["deletionTimestamp"] = "2026-01-05T12:00:00Z"
        return LanePod(manifest, self._report(pod))

    def _report(self, pod: Pod) -> PodReport | None:
        digest = (pod.template["metadata"].get("annotations") or {}).get(
            names.ANNOTATION_MAP_DIGEST
        )
        if digest is None or not pod.node:
            return None
        if pod.ready_since is None or pod.behaviour == "mute":
            return PodReport(None, "no answer within 2 s", reachable=False)
        found = self.known[digest]
        if pod.behaviour == "hook":
            return report(found, **HOOK_ERROR)
        if pod.behaviour == "digest":
            return report(found, map_digest=sha("another"))
        if digest not in self.reports:
            self.reports[digest] = report(found)
        return self.reports[digest]

    # What the operator does.

    def turn(self, crash: int | None = None) -> Plan:
        """One turn of the operator; `crash` 0 loses everything, n keeps status and n-1 actions."""
        plan = decide(self.snapshot(), self.now)
        if crash == 0:
            return plan
        if plan.status is not None:
            self.write_status(plan)
        for number, action in enumerate(plan.actions, start=1):
            if crash is not None and number >= crash:
                return plan
            self.act(action)
        self.events.extend(event.reason for event in plan.events)
        return plan

    def write_status(self, plan: Plan) -> None:
        wire = self.lane.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.lane = ExpertLane.model_validate({**wire, "status": plan.status})

    def act(self, action: Any) -> None:
        if isinstance(action, DeleteConfigMap):
            assert action.name not in self.mounted(), "a ConfigMap that a pod needs"
            self.maps = {d for d in self.maps if names.map_configmap("lane-a", d) != action.name}
            self.config_maps.discard(action.name)
            self.collected.append(action.name)
            return
        if isinstance(action, Create):
            if action.manifest["kind"] == "Job":
                self.jobs.append(dict(action.manifest))
            self.config_maps.add(action.manifest["metadata"]["name"])
        elif isinstance(action, ApplyWorkload):
            self.applies.append(action)
            self.apply(action.patch)

    def apply(self, patch: Any) -> None:
        """Server-side apply of the lane's manager, as far as its fields go."""
        before = _copy(self.workload["spec"])
        spec = self.workload["spec"]
        wanted = patch.get("spec") or {}
        for key in ("minReadySeconds", "progressDeadlineSeconds"):
            if key in self.owned and key not in wanted:
                spec.pop(key, None)
                spec["progressDeadlineSeconds"] = spec.get("progressDeadlineSeconds", 600)
        if "template" in self.owned and "template" not in wanted:
            release(spec["template"])
        _merge(self.workload, patch)
        if spec.get("minReadySeconds") == 0:
            del spec["minReadySeconds"]
        self.owned = dict(wanted)
        if spec != before:
            self.workload["metadata"]["generation"] += 1

    def edit(self, **spec: Any) -> None:
        """A user's patch of the lane's spec."""
        wire = self.lane.model_dump(mode="json", by_alias=True, exclude_none=True)
        wire["spec"].update(spec)
        wire["metadata"]["generation"] += 1
        self.lane = ExpertLane.model_validate(wire)

    # The cluster.

    def tick(self) -> None:
        """Five seconds of controllers, scheduler and kubelets."""
        self.now += TICK
        for pod in list(self.pods):
            self._run(pod)
        self._deployment()
        for item in self.sets:
            self._replica_set(item)
        self.workload["status"]["observedGeneration"] = self.workload["metadata"]["generation"]

    def _run(self, pod: Pod) -> None:
        if pod.gone_in is not None:
            pod.gone_in -= 1
            if pod.gone_in <= 0:
                self.pods.remove(pod)
            return
        if not pod.node:
            pod.node = sum(other.node for other in self.pods) < max(
                self.replicas, self.workload["spec"]["replicas"]
            )
            return
        pod.boots -= 1
        if pod.boots <= 0 and pod.ready_since is None and pod.behaviour not in ("stuck", "crash"):
            pod.ready_since = self.now

    def available(self, item: ReplicaSet) -> int:
        return sum(
            pod.owner == item.name
            and pod.gone_in is None
            and pod.ready_since is not None
            and (self.now - pod.ready_since).total_seconds() >= item.min_ready
            for pod in self.pods
        )

    def _deployment(self) -> None:
        spec = self.workload["spec"]
        newest = next((s for s in self.sets if s.template == spec["template"]), None)
        if newest is None:
            self._serial += 1
            newest = ReplicaSet(f"rs{self._serial}", _copy(spec["template"]))
            self.sets.append(newest)
        newest.min_ready = spec.get("minReadySeconds", 0)
        old = [item for item in self.sets if item is not newest]
        desired, total = spec["replicas"], sum(item.replicas for item in self.sets)
        if newest.replicas != desired and total < desired:
            newest.replicas += min(desired - total, desired - newest.replicas)
            return
        if newest.replicas > desired:
            newest.replicas = desired
            return
        self._scale_down(newest, old, total, desired - 1)

    def _scale_down(
        self, newest: ReplicaSet, old: list[ReplicaSet], total: int, least: int
    ) -> None:
        allowed = total - least - (newest.replicas - self.available(newest))
        if allowed <= 0:
            return
        left = allowed
        for item in old:
            unhealthy = min(left, item.replicas - self.available(item))
            if unhealthy > 0:
                item.replicas -= unhealthy
                left -= unhealthy
        spare = sum(min(self.available(item), item.replicas) for item in self.sets) - least
        for item in old:
            down = min(item.replicas, max(spare, 0))
            item.replicas -= down
            spare -= down

    def _replica_set(self, item: ReplicaSet) -> None:
        own = [pod for pod in self.pods if pod.owner == item.name and pod.gone_in is None]
        while len(own) < item.replicas:
            own.append(self._make(item))
        # Not ready first, then the one that became ready last.
        own.sort(key=lambda pod: pod.name, reverse=True)
        own.sort(key=lambda pod: pod.ready_since is not None)
        for pod in own[: len(own) - item.replicas]:
            pod.gone_in, pod.ready_since = self.leaves, None

    def _make(self, item: ReplicaSet) -> Pod:
        found = fields.annotations_of(item.template).get(names.ANNOTATION_MAP_DIGEST, "")
        number = self.made[found] = self.made.get(found, 0) + 1
        self._serial += 1
        pod = Pod(
            name=f"pod-{self._serial:03d}",
            owner=item.name,
            template=_copy(item.template),
            behaviour=self.bad.get((found, number), "good"),
            boots=self.boots,
        )
        self.pods.append(pod)
        return pod

    def delete_pod(self, name: str) -> None:
        pod = next(item for item in self.pods if item.name == name)
        pod.gone_in, pod.ready_since = self.leaves, None

    # Shorthands.

    def run(self, turns: int = 120) -> World:
        for _ in range(turns):
            self.turn()
            self.tick()
        return self

    def until(self, state: str, turns: int = 120) -> World:
        for _ in range(turns):
            self.turn()
            rollout = self.lane.status.rollout
            if rollout is not None and rollout.state == state:
                return self
            self.tick()
        raise AssertionError(f"never {state}: {self.said()}")

    def said(self) -> dict[str, tuple[str, str, str]]:
        return {c.type: (c.status, c.reason, c.message) for c in self.lane.status.conditions}

    def condition(self, type: str) -> tuple[str, str]:
        status, reason, _ = self.said()[type]
        return status, reason

    def not_ready(self) -> int:
        """Pods that are missing or serve nothing."""
        ready = sum(pod.ready_since is not None and pod.gone_in is None for pod in self.pods)
        return int(self.workload["spec"]["replicas"]) - ready

    def unproven(self) -> int:
        """Pods that are missing, not ready, or ready without what they should run with."""
        proven = sum(
            pod.ready_since is not None
            and pod.gone_in is None
            and pod.behaviour not in ("hook", "digest")
            for pod in self.pods
        )
        return int(self.workload["spec"]["replicas"]) - proven


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def _merge(target: dict[str, Any], patch: Any) -> None:
    for key, value in patch.items():
        if key in _KEYS:
            items = target.setdefault(key, [])
            for wanted in value:
                known = {item[_KEYS[key]]: item for item in items}
                if wanted[_KEYS[key]] in known:
                    _merge(known[wanted[_KEYS[key]]], wanted)
                else:
                    items.append(_copy(wanted))
        elif isinstance(value, dict):
            if not isinstance(target.get(key), dict):
                target[key] = {}
            _merge(target[key], value)
        else:
            target[key] = _copy(value)
