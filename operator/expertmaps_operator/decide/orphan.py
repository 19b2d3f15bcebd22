"""A workload whose lane is gone: it serves on, or gets its own pod template back.

What was asked for stands in an annotation of the workload, so that it holds however long after the
deletion an operator looks.
"""

from __future__ import annotations

from datetime import datetime

from rowmap_jobs.formats import names

from ..api.reasons import Reason
from ..build.workload import opened_patch
from ..build.workload_fields import annotations_of, gate_in_use
from ..plan import ApplyWorkload, Event, Plan
from ..snapshot import OrphanSnapshot
from .collect import garbage

RESTORE = "Restore"


def decide(snapshot: OrphanSnapshot, now: datetime) -> Plan:
    """Release every field (Restore) or the gate alone (Retain); collect what no template names."""
    left = garbage(snapshot.children, snapshot.mounted)
    metadata = snapshot.workload.get("metadata") or {}
    if metadata.get("deletionTimestamp"):
        return Plan(status=None)
    name = str(metadata.get("name"))
    if annotations_of(snapshot.workload).get(names.ANNOTATION_DELETION_POLICY) != RESTORE:
        return Plan(status=None, actions=(*_opened(snapshot, name), *left))
    text = (
        f"ExpertLane {snapshot.lane} was deleted with deletionPolicy Restore: Deployment {name} "
        "has its own pod template back; its pods restart"
    )
    release = ApplyWorkload(name, names.workload_manager(snapshot.lane), {})
    return Plan(
        status=None,
        actions=(release, *left),
        events=(Event("Normal", Reason.TEMPLATE_RESTORED, text),),
    )


def _opened(snapshot: OrphanSnapshot, name: str) -> tuple[ApplyWorkload, ...]:
    """Give back a gate that a rollout left closed: its user's next change would stop at one pod."""
    if not gate_in_use(snapshot.workload):
        return ()
    patch = opened_patch(snapshot.lane, snapshot.workload)
    manager = names.workload_manager(snapshot.lane)
    # Where the template was taken back already, the gate is all that is left of the lane.
    return (ApplyWorkload(name, manager, {} if patch is None else patch),)
