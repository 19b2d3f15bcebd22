"""Which map a lane should serve with, and with which hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rowmap_jobs.formats import names

from ..api.expertlane import ExpertLane, MapInForce, Rollout
from ..api.expertmap import ExpertMap
from ..api.reasons import ConditionType, Reason, RolloutState
from ..build.workload_fields import hook_items_in_template
from ..snapshot import LaneSnapshot
from .conditions import find

MOVING = (RolloutState.CANARY, RolloutState.ROLLING)
"""States on the way to a rollout's map."""


@dataclass(frozen=True)
class Target:
    """What the lane should serve with."""

    in_force: MapInForce
    kept: str | None = None
    """Why this is what the lane has already, though nothing asks for it any more."""


@dataclass(frozen=True)
class Refusal:
    """Why nothing is moved, in one word and in a sentence that says what to do."""

    reason: str
    message: str
    writable: bool = True
    """Whether the lane's own fields on the workload may still be written (to close the gate)."""


def resolve(snapshot: LaneSnapshot, lane: ExpertLane) -> Target | Refusal:
    """The target of a lane.

    A lane keeps what it runs (or is moving to) when the resources behind it are gone.
    """
    wanted = lane.spec.active_traffic_class
    if wanted is None:
        kept = _kept(snapshot, lane, None)
        where = f"ExpertLane {lane.metadata.name}: spec.activeTrafficClass"
        if kept is not None:
            return Target(kept, f"{where} is not set; the lane keeps what it has")
        return Refusal(Reason.NO_TRAFFIC_CLASS, f"{where} is not set; {_switch(lane)}")
    accepted = _accepted(snapshot.maps, wanted)
    if accepted is not None and snapshot.traffic_class_exists:
        hook = _hook_digest(snapshot, lane, accepted)
        return Target(MapInForce(traffic_class=wanted, digest=accepted, hook_digest=hook))
    problem = _problem(snapshot, lane, wanted)
    kept = _kept(snapshot, lane, wanted)
    if kept is not None:
        return Target(kept, f"{problem.message}; the lane keeps what it has")
    return problem


def _kept(snapshot: LaneSnapshot, lane: ExpertLane, wanted: str | None) -> MapInForce | None:
    rollout = lane.status.rollout
    moving = rollout.to if rollout is not None and rollout.state in MOVING else None
    for candidate in (moving, lane.status.active):
        if candidate is not None and wanted in (None, candidate.traffic_class):
            if hook_items(snapshot, lane, candidate.hook_digest) is not None:
                return candidate
            present = {"hook_digest": snapshot.settings.hook.digest}
            return candidate.model_copy(update=present)
    return None


def _switch(lane: ExpertLane) -> str:
    return (
        f"choose one: kubectl -n {lane.metadata.namespace} patch expertlane {lane.metadata.name} "
        '--type merge -p \'{"spec":{"activeTrafficClass":"<class>"}}\''
    )


def _accepted(maps: Sequence[ExpertMap], traffic_class: str) -> str | None:
    found = _map_of(maps, traffic_class)
    if found is None or found.status.accepted is None:
        return None
    return found.status.accepted.digest


def _map_of(maps: Sequence[ExpertMap], traffic_class: str) -> ExpertMap | None:
    return next((item for item in maps if item.spec.traffic_class_ref.name == traffic_class), None)


def _problem(snapshot: LaneSnapshot, lane: ExpertLane, wanted: str) -> Refusal:
    where = f"ExpertLane {lane.metadata.name}: spec.activeTrafficClass: {wanted}"
    if not snapshot.traffic_class_exists:
        return Refusal(
            Reason.TRAFFIC_CLASS_NOT_FOUND,
            f"{where}: found no TrafficClass of that name; make it or choose another class",
        )
    name = f"{lane.metadata.name}.{wanted}"
    found = _map_of(snapshot.maps, wanted)
    if found is None:
        return Refusal(
            Reason.NO_ACCEPTED_MAP,
            f"{where}: found no ExpertMap {name}; make it, so that the class is measured",
        )
    why = find(found.status.conditions, ConditionType.PROFILING)
    detail = f" ({why.reason})" if why is not None else ""
    return Refusal(
        Reason.NO_ACCEPTED_MAP,
        f"{where}: ExpertMap {name} has no accepted map yet{detail}; "
        f"see kubectl -n {lane.metadata.namespace} describe expertmap {name}",
    )


def _hook_digest(snapshot: LaneSnapshot, lane: ExpertLane, digest: str) -> str:
    """The hook for a map: the one the lane runs, so that a new operator moves no lane."""
    status = lane.status
    rollout = status.rollout
    if (
        rollout is not None
        and rollout.to.digest == digest
        and rollout.state in MOVING
        and hook_items(snapshot, lane, rollout.to.hook_digest) is not None
    ):
        return rollout.to.hook_digest
    if (
        status.active is not None
        and hook_items(snapshot, lane, status.active.hook_digest) is not None
    ):
        return status.active.hook_digest
    return snapshot.settings.hook.digest


def hook_items(
    snapshot: LaneSnapshot, lane: ExpertLane, digest: str
) -> Sequence[Mapping[str, str]] | None:
    """Files of a hook as volume items; None when this hook can no longer be mounted."""
    if digest == snapshot.settings.hook.digest:
        return snapshot.settings.hook.items
    name = names.hook_configmap(lane.metadata.name, digest)
    if name not in snapshot.hook_config_maps or snapshot.workload is None:
        return None
    # A former template still says which files a hook has that the present one does not mount.
    templates = (snapshot.workload, *snapshot.replica_sets)
    return next((items for one in templates if (items := hook_items_in_template(one, name))), None)


def way_back(snapshot: LaneSnapshot, lane: ExpertLane, rollout: Rollout) -> MapInForce | None:
    """Where a failed rollout goes back to: the last verified map, or (None) no map at all.

    With the hook that the map was verified with, unless that one can no longer be mounted.
    """
    origin = rollout.from_
    if origin is None or hook_items(snapshot, lane, origin.hook_digest) is not None:
        return origin
    return origin.model_copy(update={"hook_digest": snapshot.settings.hook.digest})
