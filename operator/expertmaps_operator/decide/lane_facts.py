"""What a decision about a lane is made from, and what it comes to before it is a status."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from ..api.expertlane import ExpertLane, ExpertLaneStatus, MapInForce, Rollout
from ..api.reasons import RolloutState
from ..build import workload_fields as fields
from ..build.workload import (
    Gate,
    closing_patch,
    template_hash,
    template_holds,
    workload_patch,
)
from ..plan import Action, ApplyWorkload, Event
from ..snapshot import LaneSnapshot, Manifest
from .conditions import timestamp
from .lane_target import MOVING, Refusal, hook_items
from .pods import PodView, newest_replica_set, views

_UNFINISHED = (
    RolloutState.CANARY,
    RolloutState.ROLLING,
    RolloutState.STOPPED,
    RolloutState.ROLLING_BACK,
    RolloutState.ROLLBACK_FAILED,
)
_BACK = (RolloutState.ROLLING_BACK, RolloutState.ROLLBACK_FAILED)


@dataclass(frozen=True)
class Facts:
    """One lane as it is now."""

    snapshot: LaneSnapshot
    lane: ExpertLane
    now: datetime
    pods: tuple[PodView, ...]
    manager: str

    @property
    def status(self) -> ExpertLaneStatus:
        return self.lane.status

    @property
    def stamp(self) -> str:
        return timestamp(self.now)

    @property
    def workload(self) -> Manifest:
        return self.snapshot.workload or {}

    @property
    def rollout(self) -> Rollout | None:
        return self.lane.status.rollout

    @property
    def moving(self) -> Rollout | None:
        """The rollout that is under way to its map."""
        found = self.rollout
        return found if found is not None and found.state in MOVING else None

    @property
    def unfinished(self) -> bool:
        """Whether the pods may not be what the map in force says: a rollout is under way or failed
        without its way back.
        """
        return self.rollout is not None and self.rollout.state in _UNFINISHED

    @property
    def desired(self) -> int:
        return fields.replicas(self.workload) if self.snapshot.workload is not None else 0

    @property
    def live(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if not pod.terminating)

    @property
    def terminating(self) -> int:
        return sum(pod.terminating for pod in self.pods)

    @property
    def updated(self) -> tuple[PodView, ...]:
        """Pods of the newest template."""
        return tuple(pod for pod in self.live if pod.updated)

    @cached_property
    def template_hash(self) -> str:
        return template_hash(self.workload)

    def patch(self, in_force: MapInForce | None, gate: Gate) -> Manifest:
        """The lane's fields for a map and a hook that can be mounted, or for none."""
        if in_force is None:
            return workload_patch(self.lane, self.workload, None, (), gate)
        items = hook_items(self.snapshot, self.lane, in_force.hook_digest)
        files = items if items is not None else self.snapshot.settings.hook.items
        return workload_patch(self.lane, self.workload, in_force, files, gate)

    def apply(self, patch: Manifest) -> ApplyWorkload:
        """Write the lane's fields; defaults in the gate's fields are forced over, nothing else."""
        name = self.lane.spec.workload_ref.name
        return ApplyWorkload(name=name, manager=self.manager, patch=patch, may_force_gate=True)

    def closing(self) -> tuple[Action, ...]:
        """Close the gate of a rollout that must not take a further pod now."""
        rollout = self.rollout
        if rollout is None or self.snapshot.workload is None or fields.gate_closed(self.workload):
            return ()
        if not (rollout.applied or fields.gate_in_use(self.workload)):
            return ()
        patch = closing_patch(self.lane, self.workload)
        if patch is None and rollout.state in _BACK and rollout.from_ is None:
            bare = self.patch(None, Gate.CLOSED)
            patch = bare if template_holds(self.workload, bare) else None
        return () if patch is None else (self.apply(patch),)


@dataclass(frozen=True)
class Step:
    """What one decision comes to; conditions are derived from it."""

    status: ExpertLaneStatus
    """The status without new conditions."""
    reason: str
    """Reason of Progressing."""
    message: str
    progressing: bool = False
    refusal: Refusal | None = None
    """Why the lane is not as its spec wants it."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None


def facts_of(snapshot: LaneSnapshot, lane: ExpertLane, now: datetime, manager: str) -> Facts:
    """The facts of a lane that can be read."""
    newest = None
    if snapshot.workload is not None:
        newest = newest_replica_set(snapshot.workload, snapshot.replica_sets)
    pods = views(snapshot.pods, newest, lane.spec.container_name)
    return Facts(snapshot=snapshot, lane=lane, now=now, pods=pods, manager=manager)
