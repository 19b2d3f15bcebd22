"""What one decision sees. `observe` fills these; a field that could not be read says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rowmap_jobs.formats.rowmap import RowMap
from rowmap_jobs.formats.status import HookStatus

from .api.expertlane import ExpertLane
from .api.expertmap import ExpertMap
from .api.trafficclass import TrafficClass

Manifest = Mapping[str, Any]
"""An object as the API server returns it."""


@dataclass(frozen=True)
class Invalid:
    """A custom resource whose spec this version cannot read (the API server let it pass)."""

    name: str
    generation: int
    message: str
    status: Mapping[str, Any] = field(default_factory=dict)
    """Its status as it is, so that saying InvalidSpec loses nothing of it."""


@dataclass(frozen=True)
class HookFiles:
    """The hook of this operator's release."""

    digest: str
    data: Mapping[str, str]
    items: tuple[Mapping[str, str], ...]
    version: str


@dataclass(frozen=True)
class Settings:
    """Settings of the operator process."""

    runner_image: str
    runner_service_account: str
    runner_pull_policy: str
    max_concurrent_profiles: int
    max_concurrent_rollouts: int
    hook: HookFiles


@dataclass(frozen=True)
class Slots:
    """What runs across all lanes, for the limits per operator."""

    profiles: int
    """Profile Jobs that are not finished."""
    rollouts: int
    """Lanes whose status.rollout is in Canary, Rolling or RollingBack."""


@dataclass(frozen=True)
class MapObject:
    """The ConfigMap of a map digest."""

    name: str
    digest: str
    """The digest that its annotation claims."""
    row_map: RowMap | None
    """The map, when its bytes hash to `digest` and parse whole."""
    error: str | None
    """Why not, in one line."""


@dataclass(frozen=True)
class Child:
    """A ConfigMap of ours that belongs to a lane."""

    name: str
    uid: str
    role: str
    """`map` or `hook`."""
    digest: str
    """Of its annotation; a hook's name has the digest alone, then it is empty."""
    traffic_class: str
    """The class that a map was made for; empty when its label is gone."""


@dataclass(frozen=True)
class PodReport:
    """A pod's status port: `status` or, when it could not be read, `error` in one line."""

    status: HookStatus | None
    error: str | None
    reachable: bool


@dataclass(frozen=True)
class LanePod:
    """A pod of the lane's workload."""

    manifest: Manifest
    report: PodReport | None
    """None: not asked (no IP yet, or no hook in its template)."""


@dataclass(frozen=True)
class MapSnapshot:
    """For one ExpertMap."""

    map: ExpertMap | Invalid
    lane: ExpertLane | Invalid | None
    traffic_class: TrafficClass | Invalid | None
    sibling_maps: tuple[ExpertMap, ...]
    """Other ExpertMaps of the same lane."""
    workload: Manifest | None
    jobs: tuple[Manifest, ...]
    """Profile Jobs labelled with this map, any age."""
    pods: tuple[Manifest, ...]
    """Pods of those Jobs."""
    map_objects: Mapping[str, MapObject]
    """Map ConfigMaps of the lane, by digest."""
    slots: Slots
    settings: Settings
    lane_profiles: int = 0
    """Unfinished profile Jobs of the same lane, this map's included."""


@dataclass(frozen=True)
class LaneSnapshot:
    """For one ExpertLane."""

    lane: ExpertLane | Invalid
    maps: tuple[ExpertMap, ...]
    """All readable ExpertMaps of the lane."""
    traffic_class_exists: bool
    """Whether the TrafficClass named by spec.activeTrafficClass exists."""
    workload: Manifest | None
    replica_sets: tuple[Manifest, ...]
    pods: tuple[LanePod, ...]
    map_objects: Mapping[str, MapObject]
    hook_config_maps: frozenset[str]
    """Names of hook ConfigMaps of the lane that exist."""
    jobs: tuple[Manifest, ...]
    """Fetch Jobs of the lane."""
    job_pods: tuple[Manifest, ...]
    slots: Slots
    settings: Settings
    all_maps_readable: bool = True
    """No ExpertMap of the namespace is left out of `maps` because its spec cannot be read."""
    children: tuple[Child, ...] = ()
    """The lane's ConfigMaps."""
    mounted: frozenset[str] = frozenset()
    """ConfigMaps that the workload's template, its ReplicaSets, pods of them or unfinished profile
    Jobs of the lane name."""
    dry_run_conflicts: tuple[str, ...] = field(default_factory=tuple)
    """Field paths with their managers that a dry-run apply of the wanted template conflicts on."""


@dataclass(frozen=True)
class OrphanSnapshot:
    """For a workload that a lane claims which is not there any more."""

    workload: Manifest
    lane: str
    children: tuple[Child, ...]
    mounted: frozenset[str]


@dataclass(frozen=True)
class ClassSnapshot:
    """For one TrafficClass."""

    traffic_class: TrafficClass | Invalid
    maps: tuple[ExpertMap, ...]
    """All readable ExpertMaps that name the class."""
