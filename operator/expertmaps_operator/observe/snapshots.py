"""Builds what one decision sees: each kind is listed at most once per namespace and selector."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rowmap_jobs.formats.names import (
    ANNOTATION_MAP_DIGEST,
    LABEL_CLASS,
    LABEL_LANE,
    LABEL_ROLE,
    ROLE_HOOK,
    ROLE_MAP,
)

from ..api.expertlane import ExpertLane
from ..api.expertmap import ExpertMap
from ..api.trafficclass import TrafficClass
from ..snapshot import (
    Child,
    ClassSnapshot,
    Invalid,
    LanePod,
    LaneSnapshot,
    MapObject,
    MapSnapshot,
    OrphanSnapshot,
    Settings,
    Slots,
)
from . import facts
from .kube import Kube, Manifest
from .parse import MapReader, custom, readable
from .resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    EXPERT_LANE,
    EXPERT_MAP,
    JOB,
    POD,
    REPLICA_SET,
    TRAFFIC_CLASS,
    Resource,
)
from .status_port import StatusPorts

Snapshot = MapSnapshot | LaneSnapshot | ClassSnapshot | OrphanSnapshot

Probe = Callable[[LaneSnapshot], tuple[str, str, Any] | None]
"""`decide.lane_probe.probe_patch`: what a dry-run apply should try."""
DryRun = Callable[[str, str, str, Any], tuple[str, ...]]
"""Namespace, workload, manager, patch to conflicts as `field: manager`."""


@dataclasses.dataclass(frozen=True)
class Observed:
    """One object with the snapshot that its decision sees."""

    resource: Resource
    manifest: Manifest
    """As the API server returned it; its resourceVersion fences the status write."""
    snapshot: Snapshot

    @property
    def namespace(self) -> str:
        return str(self.manifest["metadata"]["namespace"])

    @property
    def name(self) -> str:
        return facts.name_of(self.manifest)


class _Lists:
    """Lists of one snapshot, each asked for once."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._found: dict[tuple[Resource, str, str], list[Manifest]] = {}

    def of(self, resource: Resource, namespace: str, selector: str | None = None) -> list[Manifest]:
        terms = resource.selector if selector is None else selector
        key = (resource, namespace, terms)
        if key not in self._found:
            self._found[key] = self._kube.list_all(resource, namespace, terms)
        return self._found[key]

    def named(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        found = self.of(resource, namespace)
        return next((item for item in found if facts.name_of(item) == name), None)


class Observer:
    """Reads snapshots."""

    def __init__(
        self,
        kube: Kube,
        settings: Settings,
        namespaces: Iterable[str],
        ports: StatusPorts,
        probe: Probe,
        dry_run: DryRun,
        paused: bool = False,
    ) -> None:
        self._kube, self._settings, self._ports = kube, settings, ports
        self._namespaces = tuple(sorted(namespaces))
        self._probe, self._dry_run, self._paused = probe, dry_run, paused
        self._maps = MapReader()

    def observe(self, kind: str, namespace: str, name: str) -> Observed | None:
        """The snapshot for an object, or None when the object is gone. Raises ApiError."""
        lists = _Lists(self._kube)
        if kind == DEPLOYMENT.kind:
            return self._orphan(lists, namespace, name)
        resource = {item.kind: item for item in (EXPERT_MAP, EXPERT_LANE, TRAFFIC_CLASS)}[kind]
        manifest = lists.named(resource, namespace, name)
        if manifest is None:
            return None
        read: dict[Resource, Callable[[_Lists, str, Manifest], Snapshot]] = {
            EXPERT_MAP: self._map,
            EXPERT_LANE: self._lane,
            TRAFFIC_CLASS: self._class,
        }
        return Observed(resource, manifest, read[resource](lists, namespace, manifest))

    def _map(self, lists: _Lists, namespace: str, manifest: Manifest) -> MapSnapshot:
        expert_map = custom(ExpertMap, manifest)
        name = facts.name_of(manifest)
        jobs = [item for item in lists.of(JOB, namespace) if facts.is_profile_of(item, name)]
        base = MapSnapshot(
            map=expert_map,
            lane=None,
            traffic_class=None,
            sibling_maps=(),
            workload=None,
            jobs=tuple(sorted(jobs, key=facts.name_of)),
            pods=self._job_pods(lists, namespace, jobs),
            map_objects={},
            slots=self._slots(lists),
            settings=self._settings,
        )
        if isinstance(expert_map, Invalid):
            return base
        lane_name = expert_map.spec.lane_ref.name
        lane = lists.named(EXPERT_LANE, namespace, lane_name)
        traffic_class = lists.named(
            TRAFFIC_CLASS, namespace, expert_map.spec.traffic_class_ref.name
        )
        parsed_lane = None if lane is None else custom(ExpertLane, lane)
        maps = readable(ExpertMap, lists.of(EXPERT_MAP, namespace))
        return dataclasses.replace(
            base,
            lane=parsed_lane,
            traffic_class=None if traffic_class is None else custom(TrafficClass, traffic_class),
            sibling_maps=tuple(
                item
                for item in maps
                if item.spec.lane_ref.name == lane_name and item.metadata.name != name
            ),
            workload=self._workload(namespace, parsed_lane),
            map_objects=self._map_objects(lists, namespace, lane_name),
            lane_profiles=sum(
                facts.labels_of(item).get(LABEL_LANE) == lane_name
                for item in lists.of(JOB, namespace)
                if facts.is_profile(item) and not facts.finished(item)
            ),
        )

    def _lane(self, lists: _Lists, namespace: str, manifest: Manifest) -> LaneSnapshot:
        lane = custom(ExpertLane, manifest)
        name = facts.name_of(manifest)
        if self._paused and not isinstance(lane, Invalid):
            lane = lane.model_copy(update={"spec": lane.spec.model_copy(update={"paused": True})})
        workload = self._workload(namespace, lane)
        replica_sets, pods = self._workload_pods(lists, namespace, lane, workload)
        jobs = [item for item in lists.of(JOB, namespace) if facts.is_fetch_of(item, name)]
        maps = readable(ExpertMap, lists.of(EXPERT_MAP, namespace))
        wanted = None if isinstance(lane, Invalid) else lane.spec.active_traffic_class
        snapshot = LaneSnapshot(
            lane=lane,
            maps=tuple(item for item in maps if item.spec.lane_ref.name == name),
            traffic_class_exists=wanted is not None
            and lists.named(TRAFFIC_CLASS, namespace, wanted) is not None,
            workload=workload,
            replica_sets=replica_sets,
            pods=pods,
            map_objects=self._map_objects(lists, namespace, name),
            hook_config_maps=frozenset(
                facts.name_of(item) for item in self._ours(lists, namespace, name, ROLE_HOOK)
            ),
            jobs=tuple(sorted(jobs, key=facts.name_of)),
            job_pods=self._job_pods(lists, namespace, jobs),
            slots=self._slots(lists),
            settings=self._settings,
            all_maps_readable=len(maps) == len(lists.of(EXPERT_MAP, namespace)),
            children=self._children(lists, namespace, name),
            mounted=self._mounted(
                lists, namespace, name, (workload or {}, *replica_sets), (p.manifest for p in pods)
            ),
        )
        wanted_patch = self._probe(snapshot)
        if wanted_patch is None:
            return snapshot
        conflicts = self._dry_run(namespace, *wanted_patch)
        return dataclasses.replace(snapshot, dry_run_conflicts=conflicts)

    def _orphan(self, lists: _Lists, namespace: str, name: str) -> Observed | None:
        """A workload with the label of a lane that does not exist, or is another workload's."""
        workload = self._kube.get(DEPLOYMENT, namespace, name)
        lane = facts.labels_of(workload or {}).get(LABEL_LANE)
        if workload is None or not lane:
            return None
        claimant = lists.named(EXPERT_LANE, namespace, lane)
        if claimant is not None and facts.workload_name(claimant) == name:
            return None
        sets, pods = _controlled(lists, namespace, workload)
        owned = {facts.uid_of(workload)}
        children = self._children(lists, namespace, lane, owned)
        mounted = self._mounted(lists, namespace, lane, (workload, *sets), pods)
        return Observed(DEPLOYMENT, workload, OrphanSnapshot(workload, lane, children, mounted))

    def _children(
        self, lists: _Lists, namespace: str, lane: str, owners: set[str] | None = None
    ) -> tuple[Child, ...]:
        found = []
        for role in (ROLE_MAP, ROLE_HOOK):
            for item in self._ours(lists, namespace, lane, role):
                refs = item["metadata"].get("ownerReferences") or []
                if owners is not None and not owners & {str(ref.get("uid")) for ref in refs}:
                    continue
                annotations = item["metadata"].get("annotations") or {}
                found.append(
                    Child(
                        name=facts.name_of(item),
                        uid=facts.uid_of(item),
                        role=role,
                        digest=str(annotations.get(ANNOTATION_MAP_DIGEST, "")),
                        traffic_class=facts.labels_of(item).get(LABEL_CLASS, ""),
                    )
                )
        return tuple(found)

    def _mounted(
        self,
        lists: _Lists,
        namespace: str,
        lane: str,
        templates: Iterable[Manifest],
        pods: Iterable[Mapping[str, Any]],
    ) -> frozenset[str]:
        """Names of the ConfigMaps that templates, running Jobs of the lane or pods name."""
        jobs = [
            item
            for item in lists.of(JOB, namespace)
            if facts.labels_of(item).get(LABEL_LANE) == lane and not facts.finished(item)
        ]
        return frozenset().union(
            *map(facts.config_maps_of_template, (*templates, *jobs)),
            *map(facts.config_maps_of_pod, pods),
        )

    def _class(self, lists: _Lists, namespace: str, manifest: Manifest) -> ClassSnapshot:
        name = facts.name_of(manifest)
        maps = readable(ExpertMap, lists.of(EXPERT_MAP, namespace))
        return ClassSnapshot(
            traffic_class=custom(TrafficClass, manifest),
            maps=tuple(item for item in maps if item.spec.traffic_class_ref.name == name),
        )

    def _workload(self, namespace: str, lane: ExpertLane | Invalid | None) -> Manifest | None:
        if lane is None or isinstance(lane, Invalid):
            return None
        return self._kube.get(DEPLOYMENT, namespace, lane.spec.workload_ref.name)

    def _workload_pods(
        self,
        lists: _Lists,
        namespace: str,
        lane: ExpertLane | Invalid,
        workload: Manifest | None,
    ) -> tuple[tuple[Manifest, ...], tuple[LanePod, ...]]:
        if workload is None or isinstance(lane, Invalid):
            return (), ()
        sets, pods = _controlled(lists, namespace, workload)
        port = lane.spec.hook.status_port
        asked = [address for pod in pods if (address := facts.status_address(pod, port))]
        reports = self._ports.read_all(asked)
        return sets, tuple(LanePod(pod, reports.get(facts.name_of(pod))) for pod in pods)

    def _job_pods(
        self, lists: _Lists, namespace: str, jobs: Iterable[Manifest]
    ) -> tuple[Manifest, ...]:
        uids = {facts.uid_of(job) for job in jobs}
        if not uids:
            return ()
        return facts.controlled_by(lists.of(POD, namespace, LABEL_ROLE), uids)

    def _ours(self, lists: _Lists, namespace: str, lane: str, role: str) -> list[Manifest]:
        return lists.of(CONFIG_MAP, namespace, f"{LABEL_LANE}={lane},{LABEL_ROLE}={role}")

    def _map_objects(self, lists: _Lists, namespace: str, lane: str) -> dict[str, MapObject]:
        return self._maps.by_digest(lane, self._ours(lists, namespace, lane, ROLE_MAP))

    def _slots(self, lists: _Lists) -> Slots:
        jobs = (item for space in self._namespaces for item in lists.of(JOB, space))
        lanes = (item for space in self._namespaces for item in lists.of(EXPERT_LANE, space))
        return Slots(
            profiles=sum(facts.is_profile(job) and not facts.finished(job) for job in jobs),
            rollouts=sum(facts.is_moving(lane) for lane in lanes),
        )


def _controlled(
    lists: _Lists, namespace: str, workload: Manifest
) -> tuple[tuple[Manifest, ...], tuple[Manifest, ...]]:
    """ReplicaSets and pods of a Deployment."""
    selector = facts.selector_of(workload)
    sets = facts.controlled_by(lists.of(REPLICA_SET, namespace, selector), {facts.uid_of(workload)})
    pods = facts.controlled_by(
        lists.of(POD, namespace, selector), {facts.uid_of(item) for item in sets}
    )
    return sets, pods
