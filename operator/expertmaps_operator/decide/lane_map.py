"""The ConfigMap of the map that a lane wants: whether it may be used, and what brings it back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import FormatError, canonical_json, sha256_digest
from rowmap_jobs.formats.rowmap import Geometry, PerLayer, RowMap
from rowmap_jobs.formats.run import parse_verdict

from ..api.expertlane import ExpertLane, LaneGeometry
from ..api.reasons import Reason
from ..build.fetch_job import fetch_job
from ..plan import Action, Create, DeleteJob
from ..snapshot import LaneSnapshot, Manifest
from .conditions import parse_timestamp
from .lane_target import Refusal
from .pods import PodView

RETRY_SECONDS = {True: 60, False: 300}
"""How long a finished fetch Job stays before the map is fetched anew, by its success."""


@dataclass(frozen=True)
class Absent:
    """There is no ConfigMap of the map: why, and what is done about it."""

    refusal: Refusal
    actions: tuple[Action, ...] = ()


def wanted_map(
    snapshot: LaneSnapshot, lane: ExpertLane, digest: str, now: datetime
) -> RowMap | Refusal | Absent:
    """The map of a digest, re-hashed, or why it cannot be used."""
    found = snapshot.map_objects.get(digest)
    if found is None:
        return _fetch(snapshot, lane, digest, now)
    if found.row_map is None:
        return Refusal(
            Reason.CHECKSUM_MISMATCH,
            f"ConfigMap {found.name}: {found.error}; delete it, so that it is made again from the "
            f"store: kubectl -n {lane.metadata.namespace} delete configmap {found.name}",
        )
    return found.row_map


def _fetch(
    snapshot: LaneSnapshot, lane: ExpertLane, digest: str, now: datetime
) -> Refusal | Absent:
    name = names.map_configmap(lane.metadata.name, digest)
    if snapshot.workload is None:
        return Refusal(Reason.WORKLOAD_NOT_FOUND, f"ConfigMap {name}: its workload is not there")
    job_name = names.fetch_job(lane.metadata.name, digest)
    waiting = Refusal(
        Reason.FETCHING_MAP,
        f"ConfigMap {name} is not there; Job {job_name} makes it from the store",
    )
    job = next((one for one in snapshot.jobs if one["metadata"].get("name") == job_name), None)
    if job is None:
        manifest = fetch_job(lane, snapshot.workload, digest, snapshot.settings)
        return Absent(waiting, (Create(manifest),))
    ended = _ended(job)
    if ended is None:
        return Absent(waiting)
    succeeded, when = ended
    again: tuple[Action, ...] = ()
    if (now - when).total_seconds() >= RETRY_SECONDS[succeeded]:
        again = (DeleteJob(job_name, str(job["metadata"].get("uid", ""))),)
    if succeeded:
        return Absent(waiting, again)
    return Absent(_failed(snapshot, job_name, name), again)


def _ended(job: Manifest) -> tuple[bool, datetime] | None:
    for item in (job.get("status") or {}).get("conditions") or ():
        if item.get("type") in ("Complete", "Failed") and item.get("status") == "True":
            try:
                moment = parse_timestamp(str(item.get("lastTransitionTime")))
            except ValueError:
                continue
            return item["type"] == "Complete", moment
    return None


def _failed(snapshot: LaneSnapshot, job_name: str, config_map: str) -> Refusal:
    where = f"ConfigMap {config_map} is not there and Job {job_name} could not make it"
    for message in _termination_messages(snapshot.job_pods, job_name):
        try:
            verdict = parse_verdict(message, f"Job {job_name}")
        except FormatError:
            continue
        bytes_differ = verdict.reason == Reason.CHECKSUM_MISMATCH
        reason = Reason.CHECKSUM_MISMATCH if bytes_differ else Reason.MAP_UNAVAILABLE
        cure = "; set spec.runAt of its ExpertMap to measure again" if bytes_differ else ""
        return Refusal(reason, f"{where}: {verdict.reason}: {verdict.message}{cure}")
    return Refusal(Reason.MAP_UNAVAILABLE, f"{where}; see kubectl describe job {job_name}")


def _termination_messages(pods: tuple[Manifest, ...], job_name: str) -> list[str]:
    """What the Job's containers said last, newest pod first."""
    own = [
        pod
        for pod in pods
        if any(
            owner.get("kind") == "Job" and owner.get("name") == job_name
            for owner in pod["metadata"].get("ownerReferences") or ()
        )
    ]
    own.sort(key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True)
    found: list[str] = []
    for pod in own:
        for status in (pod.get("status") or {}).get("containerStatuses") or ():
            ended = (status.get("state") or {}).get("terminated") or {}
            if ended.get("message"):
                found.append(str(ended["message"]))
    return found


def lane_geometry(geometry: Geometry) -> LaneGeometry:
    """A map's geometry as the lane's status keeps it."""
    return LaneGeometry(
        digest=sha256_digest(canonical_json(geometry.to_wire())),
        experts=_spoken(geometry.experts),
        top_k=geometry.top_k,
        hot_rows=_spoken(geometry.hot_rows),
        moe_layers=len(geometry.moe_layers),
    )


def _spoken(value: PerLayer) -> str:
    if isinstance(value, int):
        return str(value)
    low, high = min(value.values()), max(value.values())
    return str(low) if low == high else f"{low} to {high} by layer"


def geometry_refusal(lane: ExpertLane, digest: str, row_map: RowMap) -> Refusal | None:
    """Why a map of another shape than the lane's is not used."""
    frozen = lane.status.geometry
    found = lane_geometry(row_map.geometry)
    if frozen is None or frozen.digest == found.digest:
        return None
    return Refusal(
        Reason.GEOMETRY_MISMATCH,
        f"map {digest}: found {_shape(found)}, expected {_shape(frozen)} as the lane's first map "
        "has: another shape loses every compile cache; write the former spec.residency and "
        "measure again, or make a new lane",
    )


def fingerprint_refusal(pods: Sequence[PodView], digest: str, row_map: RowMap) -> Refusal | None:
    """Why a map of another model than the pods run is not tried on any of them.

    A pod whose hook holds a map has proved its model; one without says nothing.
    """
    for pod in pods:
        said = pod.report.status if pod.report is not None else None
        if said is None or said.error is not None or said.map_digest is None:
            continue
        if said.fingerprint is None or said.fingerprint == row_map.fingerprint:
            continue
        ours, its = said.fingerprint.to_wire(), row_map.fingerprint.to_wire()
        differ = [
            f"{key} {its[key]}, expected {ours[key]}" for key in ours if its[key] != ours[key]
        ]
        return Refusal(
            Reason.FINGERPRINT_MISMATCH,
            f"map {digest}: found {'; '.join(differ)} as pod {pod.name} reports: it was measured "
            "on another model; set spec.runAt of its ExpertMap to measure again",
        )
    return None


def _shape(geometry: LaneGeometry) -> str:
    return (
        f"{geometry.hot_rows} hot of {geometry.experts} experts, top {geometry.top_k}, in "
        f"{geometry.moe_layers} MoE layers ({geometry.digest[:19]})"
    )
