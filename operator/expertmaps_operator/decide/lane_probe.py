"""What a dry-run apply should try before a lane is decided on."""

from __future__ import annotations

from rowmap_jobs.formats import names

from ..api.expertlane import ExpertLane
from ..api.reasons import RolloutState
from ..build import workload_fields as fields
from ..build.workload import Gate, template_holds, workload_patch
from ..snapshot import Invalid, LaneSnapshot, Manifest
from .lane_target import MOVING, Target, hook_items, resolve, way_back


def probe_patch(snapshot: LaneSnapshot) -> tuple[str, str, Manifest] | None:
    """What to apply with dryRun, unforced, so that `dry_run_conflicts` can be filled.

    (name of the workload, field manager, patch); None when the lane wants no change of it.
    """
    lane, workload = snapshot.lane, snapshot.workload
    if isinstance(lane, Invalid) or workload is None or lane.spec.paused:
        return None
    if fields.container(workload, lane.spec.container_name) is None:
        return None
    patch = _wanted(snapshot, lane, workload)
    if patch is None:
        return None
    return lane.spec.workload_ref.name, names.workload_manager(lane.metadata.name), patch


def _wanted(snapshot: LaneSnapshot, lane: ExpertLane, workload: Manifest) -> Manifest | None:
    rollout = lane.status.rollout
    if rollout is not None and rollout.state == RolloutState.ROLLING_BACK:
        origin = way_back(snapshot, lane, rollout)
        former = hook_items(snapshot, lane, origin.hook_digest) if origin is not None else ()
        return workload_patch(lane, workload, origin, former or (), Gate.CLOSED)
    target = resolve(snapshot, lane)
    if not isinstance(target, Target):
        return None
    items = hook_items(snapshot, lane, target.in_force.hook_digest)
    if items is None:
        return None
    patch = workload_patch(lane, workload, target.in_force, items, Gate.CLOSED)
    moving = rollout is not None and rollout.state in MOVING
    if not moving and lane.status.active is not None and template_holds(workload, patch):
        return None
    return patch
