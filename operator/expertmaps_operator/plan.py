"""What a decision wants done. The executor writes `status` first (fenced by resourceVersion), then
does the actions in order, then sends the events; a failed step ends the turn and the key is looked
at again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class Create:
    """Create an object; AlreadyExists is success."""

    manifest: Manifest


@dataclass(frozen=True)
class ApplyWorkload:
    """Server-side apply of our fields to the workload (field manager `expertmaps.<lane>`).

    The whole set of fields that the manager owns is in `patch`: what it leaves out is released.
    A conflict is never forced, but (`may_force_gate`) for gate fields that still hold their default
    and for the annotations and volumes of the pod template that only a lane names: the executor
    forces only if every conflict is on such a field.
    """

    name: str
    manager: str
    patch: Manifest
    may_force_gate: bool = False


@dataclass(frozen=True)
class DeleteJob:
    """Delete a Job with its pods (background propagation), by UID precondition."""

    name: str
    uid: str


@dataclass(frozen=True)
class PatchJob:
    """Merge-patch a Job (its ttlSecondsAfterFinished, once the result is recorded)."""

    name: str
    patch: Manifest


@dataclass(frozen=True)
class DeleteConfigMap:
    """Delete a ConfigMap of ours that nothing names any more, by UID precondition."""

    name: str
    uid: str


Action = Create | ApplyWorkload | DeleteJob | PatchJob | DeleteConfigMap


@dataclass(frozen=True)
class Event:
    """An event about the object the plan is for."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


@dataclass(frozen=True)
class Plan:
    """One turn for one object."""

    status: Manifest | None
    """The whole status to be there afterwards; None leaves it alone."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: float | None = None
    """Seconds after which the object is looked at again, besides events and resync."""
