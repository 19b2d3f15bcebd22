"""A workload whose lane is gone: it serves on, or gets its own pod template back.

What was asked for stands in an annotation of the workload, so that it holds however long after the
deletion an operator looks.
"""

from __future__ import annotations

from datetime import datetime

from rowmap_jobs.formats import names

from ..api.reasons import Reason
from ..build.workload_fields import annotations_of
from ..plan import ApplyWorkload, Event, Plan
from ..snapshot import OrphanSnapshot
from .collect import garbage

RESTORE = "Restore"


def decide(snapshot: OrphanSnapshot, now: datetime) -> Plan:
    """Release every field (Restore) or none (Retain); collect what no template names."""
    left = garbage(snapshot.children, snapshot.mounted)
    metadata = snapshot.workload.get("metadata") or {}
    if annotations_of(snapshot.workload).get(names.ANNOTATION_DELETION_POLICY) != RESTORE:
        return Plan(status=None, actions=left)
    if metadata.get("deletionTimestamp"):
        return Plan(status=None)
    name = str(metadata.get("name"))
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
