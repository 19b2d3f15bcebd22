"""Ordered checks before a profile run is started: the first that fails says why nothing is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rowmap_jobs.formats.rowmap import Geometry, geometry_digest

from ..api.expertlane import ExpertLane
from ..api.expertmap import ExpertMap
from ..api.reasons import Reason
from ..api.trafficclass import TrafficClass
from ..build.profile_job import ProfileParts
from ..build.runner import Refusal
from ..snapshot import Invalid, Manifest, MapSnapshot
from .conditions import parse_timestamp
from .cron import ScheduleError
from .expertmap_schedule import schedule_of


@dataclass(frozen=True)
class Scene:
    """A snapshot whose ExpertMap could be read."""

    map: ExpertMap
    facts: MapSnapshot


Check = Callable[[Scene], Refusal | None]


def run_at_valid(scene: Scene) -> Refusal | None:
    """spec.runAt is a moment."""
    text = scene.map.spec.run_at
    if text is None:
        return None
    try:
        parse_timestamp(text)
    except ValueError:
        return Refusal(
            Reason.INVALID_SPEC,
            f"spec.runAt: found {text!r}, expected RFC 3339 such as 2026-01-31T12:00:00Z",
        )
    return None


def schedule_valid(scene: Scene) -> Refusal | None:
    """spec.schedule and spec.timeZone can be read."""
    try:
        schedule_of(scene.map)
    except ScheduleError as error:
        return Refusal(Reason.INVALID_SPEC, f"spec.schedule: {error}")
    return None


def lane_found(scene: Scene) -> Refusal | None:
    """The lane is there and stays."""
    name, lane = scene.map.spec.lane_ref.name, scene.facts.lane
    if lane is None:
        return Refusal(
            Reason.LANE_NOT_FOUND, f"ExpertLane {name} is not in this namespace: create it"
        )
    if isinstance(lane, Invalid):
        return Refusal(Reason.INVALID_SPEC, f"ExpertLane {name}: {lane.message}")
    if lane.metadata.deletion_timestamp is not None:
        return Refusal(Reason.LANE_NOT_FOUND, f"ExpertLane {name} is being deleted")
    return None


def class_found(scene: Scene) -> Refusal | None:
    """The traffic class is there and stays."""
    name, found = scene.map.spec.traffic_class_ref.name, scene.facts.traffic_class
    if found is None:
        return Refusal(
            Reason.TRAFFIC_CLASS_NOT_FOUND,
            f"TrafficClass {name} is not in this namespace: create it",
        )
    if isinstance(found, Invalid):
        return Refusal(Reason.INVALID_SPEC, f"TrafficClass {name}: {found.message}")
    if found.metadata.deletion_timestamp is not None:
        return Refusal(Reason.TRAFFIC_CLASS_NOT_FOUND, f"TrafficClass {name} is being deleted")
    return None


def workload_found(scene: Scene) -> Refusal | None:
    """The workload whose pod is copied is there."""
    lane, workload = _lane(scene), scene.facts.workload
    if workload is None or workload["metadata"].get("deletionTimestamp"):
        ref = lane.spec.workload_ref
        return Refusal(
            Reason.WORKLOAD_NOT_FOUND,
            f"{ref.kind} {ref.name} is not in this namespace: create it or correct "
            f"spec.workloadRef of ExpertLane {lane.metadata.name}",
        )
    return None


def container_found(scene: Scene) -> Refusal | None:
    """The workload has the container that serves."""
    lane = _lane(scene)
    template = (_workload(scene).get("spec") or {}).get("template") or {}
    containers = [str(c.get("name")) for c in (template.get("spec") or {}).get("containers") or []]
    if lane.spec.container_name not in containers:
        return Refusal(
            Reason.CONTAINER_NOT_FOUND,
            f"ExpertLane {lane.metadata.name}: spec.containerName: found "
            f"{lane.spec.container_name!r}, expected one of {', '.join(containers)}",
        )
    return None


def lane_free(scene: Scene) -> Refusal | None:
    """No other run of the lane goes on: runs of one lane would share its spare accelerator."""
    if scene.facts.lane_profiles > 0:
        return Refusal(
            Reason.WAITING_FOR_LANE,
            f"another profile run of ExpertLane {scene.map.spec.lane_ref.name} goes on; this one "
            "starts after it",
        )
    return None


def slot_free(scene: Scene) -> Refusal | None:
    """The operator may run one more profile."""
    limit = scene.facts.settings.max_concurrent_profiles
    if scene.facts.slots.profiles >= limit:
        return Refusal(
            Reason.WAITING_FOR_SLOT,
            f"{limit} profile runs go on, as many as --max-concurrent-profiles allows; this one "
            "starts after one of them",
        )
    return None


PREREQUISITES: tuple[Check, ...] = (
    run_at_valid,
    schedule_valid,
    lane_found,
    class_found,
    workload_found,
    container_found,
)
"""What has to be there; each may rely on those before it."""

TURN: tuple[Check, ...] = (lane_free, slot_free)
"""Whether it is this run's turn."""

WAITING = frozenset({Reason.WAITING_FOR_LANE, Reason.WAITING_FOR_SLOT})


def first_failure(scene: Scene, checks: tuple[Check, ...]) -> Refusal | None:
    """The first refusal in order."""
    return next((found for check in checks if (found := check(scene)) is not None), None)


def parts(scene: Scene) -> ProfileParts:
    """What the run is built of; only after PREREQUISITES passed."""
    siblings = {
        item.spec.traffic_class_ref.name: item.status.accepted.digest
        for item in scene.facts.sibling_maps
        if item.status.accepted is not None
    }
    found = scene.facts.traffic_class
    if not isinstance(found, TrafficClass):
        raise TypeError("parts() before class_found passed")
    return ProfileParts(
        map=scene.map,
        lane=_lane(scene),
        traffic_class=found,
        workload=_workload(scene),
        settings=scene.facts.settings,
        other_map_digests=siblings,
        frozen_geometry=frozen_geometry(scene),
    )


def frozen_geometry(scene: Scene) -> Geometry | None:
    """The lane's geometry in full: its status has the digest, a map of that digest the numbers."""
    lane = scene.facts.lane
    if not isinstance(lane, ExpertLane) or lane.status.geometry is None:
        return None
    for item in scene.facts.map_objects.values():
        if item.row_map is not None:
            geometry = item.row_map.geometry
            if geometry_digest(geometry) == lane.status.geometry.digest:
                return geometry
    return None


def _lane(scene: Scene) -> ExpertLane:
    if not isinstance(scene.facts.lane, ExpertLane):
        raise TypeError("a check that needs the lane before lane_found passed")
    return scene.facts.lane


def _workload(scene: Scene) -> Manifest:
    if scene.facts.workload is None:
        raise TypeError("a check that needs the workload before workload_found passed")
    return scene.facts.workload
