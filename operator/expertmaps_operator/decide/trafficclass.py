"""One TrafficClass: what the last profile run of its maps found of its transcripts."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from pydantic import ValidationError

from ..api.expertmap import ExpertMap, ProfileRun
from ..api.reasons import ConditionType, Reason
from ..api.trafficclass import TrafficClassStatus
from ..plan import Plan
from ..snapshot import ClassSnapshot, Invalid
from . import conditions
from .conditions import Status
from .expertmap import TRANSCRIPT_REASONS
from .expertmap_schedule import minute_of


def decide(snapshot: ClassSnapshot, now: datetime) -> Plan:
    """The plan for one TrafficClass: its status alone."""
    found = snapshot.traffic_class
    if isinstance(found, Invalid):
        try:
            before = TrafficClassStatus.model_validate(found.status)
        except ValidationError:
            before = TrafficClassStatus.model_validate({})
        return _plan(before, "False", Reason.INVALID_SPEC, found.message, found.generation, now)
    if found.metadata.deletion_timestamp is not None:
        return Plan(status=None)
    generation, status = found.metadata.generation, found.status
    run = last_run(snapshot.maps, status.last_run)
    if run is None or not _speaks_of_transcripts(run):
        held = conditions.find(status.conditions, ConditionType.READY)
        if held is not None and held.reason != Reason.INVALID_SPEC:
            return _plan(status, held.status, held.reason, held.message, generation, now)
        message = "no profile run has read the transcripts yet: create an ExpertMap for the class"
        return _plan(status, "Unknown", Reason.NOT_PROFILED, message, generation, now)
    status = status.model_copy(
        update={
            "last_run": run.name,
            "sessions": run.sessions,
            "decode_tokens": run.decode_tokens,
        }
    )
    if run.outcome == "Failed":
        message = f"run {run.name}: {run.message}"
        return _plan(status, "False", run.reason or Reason.NO_VERDICT, message, generation, now)
    message = f"run {run.name} counted {_of(run.sessions, 'sessions')} with "
    message += _of(run.decode_tokens, "decode tokens")
    return _plan(status, "True", Reason.TRANSCRIPTS_FOUND, message, generation, now)


def last_run(maps: Iterable[ExpertMap], known: str | None) -> ProfileRun | None:
    """The newest finished run; None when a newer one is known already (its map runs again)."""
    runs = [
        run for map_ in maps if (run := map_.status.run) is not None and run.finished_at is not None
    ]
    newest = max(runs, key=lambda run: (run.finished_at or "", run.name), default=None)
    if newest is None or known is None or newest.name == known:
        return newest
    return newest if minute_of(newest.name) >= minute_of(known) else None


def _speaks_of_transcripts(run: ProfileRun) -> bool:
    """A run that failed for another reason says nothing of the class."""
    return run.outcome != "Failed" or run.reason in TRANSCRIPT_REASONS


def _of(number: int | None, what: str) -> str:
    return f"an unknown number of {what}" if number is None else f"{number} {what}"


def _plan(
    status: TrafficClassStatus,
    ready: Status,
    reason: str,
    message: str,
    generation: int,
    now: datetime,
) -> Plan:
    type_ = ConditionType.READY
    made = conditions.condition(type_, ready, reason, message, generation, now, status.conditions)
    told = status.model_copy(
        update={
            "observed_generation": generation,
            "conditions": conditions.merge(status.conditions, [made]),
        }
    )
    return Plan(status=told.to_wire())
