"""Whether an accepted verdict holds: the map it names is there, whole, and fits the lane."""

from __future__ import annotations

from datetime import datetime, timedelta

from rowmap_jobs.formats.names import map_configmap
from rowmap_jobs.formats.rowmap import geometry_digest
from rowmap_jobs.formats.run import Verdict

from ..api.expertlane import ExpertLane
from ..api.expertmap import AcceptedMap
from ..api.reasons import Reason
from .conditions import timestamp
from .expertmap_checks import Scene
from .expertmap_run import Result

PATIENCE = timedelta(seconds=60)
"""How long after the end of a Job its ConfigMap may stay unseen."""


def confirm(scene: Scene, result: Result, ended: datetime, now: datetime) -> Result | None:
    """The result as it counts: an accepted one only after its map was read and hashed here.

    None: the map is not there yet, look again soon.
    """
    verdict = result.verdict
    if result.outcome != "Accepted" or verdict is None:
        return result
    lane = scene.map.spec.lane_ref.name
    if verdict.digest is None:
        return Result("Failed", Reason.NO_VERDICT, "an accepted verdict names no digest", verdict)
    found = scene.facts.map_objects.get(verdict.digest)
    name = map_configmap(lane, verdict.digest)
    if found is None:
        if now < ended + PATIENCE:
            return None
        return _refused(
            Reason.MAP_UNAVAILABLE,
            f"ConfigMap {name} is not there; set spec.runAt to measure again",
            verdict,
        )
    row_map = found.row_map
    if row_map is None:
        return _refused(
            Reason.CHECKSUM_MISMATCH,
            f"{found.error}: delete ConfigMap {found.name} and set spec.runAt to measure again",
            verdict,
        )
    if verdict.fingerprint is not None and verdict.fingerprint != row_map.fingerprint:
        return _refused(
            Reason.CHECKSUM_MISMATCH,
            f"ConfigMap {found.name}: fingerprint: found another than the run's verdict has; set "
            "spec.runAt to measure again",
            verdict,
        )
    if verdict.geometry is not None and verdict.geometry != row_map.geometry:
        return _refused(
            Reason.CHECKSUM_MISMATCH,
            f"ConfigMap {found.name}: geometry: found another than the run's verdict has; set "
            "spec.runAt to measure again",
            verdict,
        )
    return _fits_lane(scene, result, verdict, geometry_digest(row_map.geometry))


def _fits_lane(scene: Scene, result: Result, verdict: Verdict, geometry: str) -> Result:
    lane = scene.facts.lane
    frozen = lane.status.geometry if isinstance(lane, ExpertLane) else None
    if frozen is None or frozen.digest == geometry:
        return result
    return _refused(
        Reason.GEOMETRY_MISMATCH,
        f"geometry: found {geometry}, expected the lane's {frozen.digest}: give spec.residency of "
        f"ExpertLane {scene.map.spec.lane_ref.name} its first value or use a new ExpertLane",
        verdict,
    )


def _refused(reason: Reason, message: str, verdict: Verdict) -> Result:
    return Result("Rejected", reason, message, verdict)


def accepted_map(scene: Scene, result: Result, run: str, now: datetime) -> AcceptedMap | None:
    """What status.accepted says of a confirmed result; None when it is not an accepted one."""
    verdict = result.verdict
    if result.outcome != "Accepted" or verdict is None or verdict.digest is None:
        return None
    found = scene.facts.map_objects[verdict.digest].row_map
    if found is None:
        return None
    cold, counted = verdict.cold, verdict.counted
    return AcceptedMap(
        digest=verdict.digest,
        row_set_digest=found.row_set_digest,
        run=run,
        accepted_at=timestamp(now),
        cold_share_percent=percent(cold.own) if cold else None,
        positional_cold_share_percent=percent(cold.positional) if cold else None,
        other_cold_share_percent={name: percent(share) for name, share in cold.others.items()}
        if cold and cold.others
        else None,
        decode_tokens=counted.decode_tokens if counted else None,
        sessions=counted.sessions if counted else None,
        report_key=verdict.report_key,
    )


def percent(share: float) -> str:
    """A share of 0 to 1 as percent with two decimals."""
    return f"{100 * share:.2f}"
