"""One ExpertMap: start a profile run when one is due, follow it, and judge what it made.

A run is one Job with a name that is fixed before it is made: status.run is written first, so a
crash between the two makes the same Job again, never a second one. A run's result is recorded in
status before its Job may go. Everything in status comes from facts; nothing in it moves with time.
When a run is due is told in `expertmap_schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from pydantic import ValidationError

from ..api.expertmap import ExpertMap, ExpertMapStatus, ProfileRun
from ..api.meta import Condition
from ..api.reasons import ConditionType, Reason
from ..build.hook_configmap import hook_config_map
from ..build.profile_job import profile_job
from ..build.runner import Refusal
from ..plan import Action, Create, DeleteJob, Event, PatchJob, Plan
from ..snapshot import Invalid, Manifest, MapSnapshot
from . import conditions
from . import expertmap_jobs as jobs
from .conditions import Status, one_line, parse_timestamp, timestamp
from .expertmap_accept import accepted_map, confirm
from .expertmap_checks import PREREQUISITES, TURN, WAITING, Scene, first_failure, parts
from .expertmap_fresh import fresh
from .expertmap_run import Progress, Result, gone, look
from .expertmap_schedule import BACKOFF, Due, minute_of, next_run, run_name

SOON = timedelta(seconds=5)
WAIT = timedelta(seconds=30)
"""How long to wait for a slot or another run before looking again: no event may tell of it."""

# Transcripts are looked at after the store was proved, so these say nothing against it.
TRANSCRIPT_REASONS = frozenset({"NoTranscripts", "TooFewTranscripts", "OnlyBrokenTranscripts"})
DONE = {"Accepted": "made an accepted map", "Rejected": "measured; its map is not used"}


@dataclass
class Turn:
    """What one decision comes to, piece by piece."""

    scene: Scene
    now: datetime
    status: ExpertMapStatus
    owned: list[Manifest]
    actions: list[Action] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    moments: list[datetime] = field(default_factory=list)
    """When to look again; the earliest holds."""
    changed: dict[str, Condition] = field(default_factory=dict)

    def say(self, type: ConditionType, status: Status, reason: str, message: str) -> None:
        """Set a condition."""
        self.changed[type] = conditions.condition(
            type,
            status,
            reason,
            message,
            self.scene.map.metadata.generation,
            self.now,
            self.scene.map.status.conditions,
        )

    def update(self, **fields: object) -> None:
        """Set fields of the status."""
        self.status = self.status.model_copy(update=fields)


def decide(snapshot: MapSnapshot, now: datetime) -> Plan:
    """The plan for one ExpertMap."""
    if isinstance(snapshot.map, Invalid):
        return _invalid(snapshot.map, now)
    map_ = snapshot.map
    if map_.metadata.deletion_timestamp is not None:
        return Plan(status=None)
    scene = Scene(map_, snapshot)
    turn = Turn(scene, now, map_.status, jobs.owned_jobs(snapshot, map_.metadata.uid))
    _adopt(turn)
    run = turn.status.run
    if run is not None and run.finished_at is None:
        _follow(turn, run)
    else:
        _idle(turn)
    _store(turn)
    _summary(turn)
    _freshness(turn)
    _housekeeping(turn)
    return _plan(turn)


def _adopt(turn: Turn) -> None:
    """A Job newer than status.run is our run: the status was lost or is an older one's."""
    run = turn.status.run
    if not turn.owned:
        return
    newest = jobs.name_of(turn.owned[0])
    if minute_of(newest) <= (minute_of(run.name) if run is not None else -1):
        return
    created = jobs.created_at(turn.owned[0]) or turn.now
    generation = turn.scene.map.metadata.generation
    turn.update(run=ProfileRun(name=newest, generation=generation, started_at=timestamp(created)))


def _follow(turn: Turn, run: ProfileRun) -> None:
    """A run that has no result yet."""
    job = _job(turn, run.name)
    if job is None:
        if run.job_uid is None:
            # Written down but not made: a crash came between.
            _start(turn, run)
        else:
            _finish(turn, run, gone(run.name))
        return
    if run.job_uid is None:
        run = run.model_copy(update={"job_uid": jobs.uid_of(job)})
        turn.update(run=run)
    state = look(turn.scene, job, turn.now)
    if isinstance(state, Progress):
        turn.say(ConditionType.PROFILING, state.status, state.reason, state.message)
        if state.until is not None:
            turn.moments.append(state.until)
        return
    end = jobs.ended(job)
    result = confirm(turn.scene, state, end.at if end else turn.now, turn.now)
    if result is None:
        turn.say(
            ConditionType.PROFILING,
            "True",
            Reason.PROFILE_RUNNING,
            f"run {run.name} ended; its map's ConfigMap is awaited",
        )
        turn.moments.append(turn.now + SOON)
        return
    _finish(turn, run, result)


def _job(turn: Turn, name: str) -> Manifest | None:
    return next(
        (job for job in turn.owned if jobs.name_of(job) == name and not jobs.terminating(job)),
        None,
    )


def _idle(turn: Turn) -> None:
    """No run goes on: start the next one when it is due, else say what the last one came to."""
    missing = first_failure(turn.scene, PREREQUISITES)
    if missing is not None:
        turn.say(ConditionType.PROFILING, "False", missing.reason, missing.message)
        return
    map_ = turn.scene.map.model_copy(update={"status": turn.status})
    due = next_run(map_, turn.now)
    if due is not None and due.at <= turn.now:
        _begin(turn, map_, due)
        return
    if due is not None:
        turn.moments.append(due.at)
    _last_run(turn)


def _begin(turn: Turn, map_: ExpertMap, due: Due) -> None:
    last = turn.status.run
    taken = [jobs.name_of(job) for job in turn.owned] + ([last.name] if last is not None else [])
    run = ProfileRun(
        name=run_name(map_, due, turn.now, taken),
        generation=map_.metadata.generation,
        started_at=timestamp(turn.now),
    )
    if not _start(turn, run):
        return
    turn.update(run=run, failed_attempts=0 if due.fresh else turn.status.failed_attempts)
    if due.scheduled:
        turn.update(last_schedule_time=timestamp(due.at))
    message = f"run {run.name} measures the map of TrafficClass {map_.spec.traffic_class_ref.name}"
    turn.events.append(Event("Normal", Reason.PROFILE_STARTED, message))


def _start(turn: Turn, run: ProfileRun) -> bool:
    """Make the hook's ConfigMap and the Job of a run, if it is its turn."""
    objects = _objects(turn.scene, run.name)
    if isinstance(objects, Refusal):
        turn.say(ConditionType.PROFILING, "False", objects.reason, objects.message)
        if objects.reason in WAITING:
            turn.moments.append(turn.now + WAIT)
        return False
    turn.actions += [Create(manifest) for manifest in objects]
    turn.moments.append(turn.now + WAIT)
    turn.say(ConditionType.PROFILING, "True", Reason.PROFILE_RUNNING, f"run {run.name} starts")
    return True


def _objects(scene: Scene, run: str) -> list[Manifest] | Refusal:
    """What a run is made of, in the order in which it is made; or why it cannot start now."""
    refused = first_failure(scene, (*PREREQUISITES, *TURN))
    if refused is not None:
        return refused
    built = parts(scene)
    job = profile_job(built, run)
    if isinstance(job, Refusal):
        return job
    lane, hook = built.lane.metadata, built.settings.hook
    return [hook_config_map(lane.name, lane.namespace, built.workload, hook), job]


def _finish(turn: Turn, run: ProfileRun, result: Result) -> None:
    """Record a result; what it means for the map follows from it."""
    message = one_line(result.message)
    said = result.verdict
    counted = said.counted if said is not None else None
    run = run.model_copy(
        update={
            "finished_at": timestamp(turn.now),
            "outcome": result.outcome,
            "reason": str(result.reason),
            "message": message,
            "engine_seconds": _seconds(said.engine_seconds if said else None),
            "count_seconds": _seconds(said.count_seconds if said else None),
            "sessions": counted.sessions if counted else None,
            "decode_tokens": counted.decode_tokens if counted else None,
        }
    )
    failed = result.outcome == "Failed"
    turn.update(run=run, failed_attempts=turn.status.failed_attempts + 1 if failed else 0)
    if not failed:
        turn.update(last_successful_time=timestamp(turn.now))
    accepted = accepted_map(turn.scene, result, run.name, turn.now)
    if accepted is not None:
        turn.update(accepted=accepted)
        message = f"map {accepted.digest} of run {run.name}: {message}"
        turn.say(ConditionType.ACCEPTED, "True", Reason.MAP_ACCEPTED, message)
        turn.events.append(Event("Normal", Reason.MAP_ACCEPTED, one_line(message)))
    elif failed:
        note = one_line(f"run {run.name}: {result.reason}: {message}")
        turn.events.append(Event("Warning", Reason.PROFILE_FAILED, note))
    else:
        note = one_line(f"run {run.name}: {result.reason}: {message}")
        turn.say(ConditionType.ACCEPTED, "False", result.reason, f"run {run.name}: {message}")
        turn.events.append(Event("Warning", Reason.MAP_REJECTED, note))
    due = next_run(turn.scene.map.model_copy(update={"status": turn.status}), turn.now)
    if due is not None:
        turn.moments.append(max(due.at, turn.now + timedelta(seconds=1)))
    _last_run(turn)


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"


def _last_run(turn: Turn) -> None:
    run = turn.status.run
    if run is None or run.finished_at is None:
        turn.say(ConditionType.PROFILING, "False", Reason.IDLE, "no run goes on")
        return
    if run.outcome != "Failed":
        done = DONE.get(run.outcome or "", "ended")
        turn.say(
            ConditionType.PROFILING, "False", Reason.PROFILE_SUCCEEDED, f"run {run.name} {done}"
        )
        return
    attempts = turn.status.failed_attempts
    if 1 <= attempts <= len(BACKOFF):
        at = parse_timestamp(run.finished_at) + BACKOFF[attempts - 1]
        then = f"next try at {timestamp(at)}"
    else:
        then = "no further try: change the spec or set spec.runAt"
    turn.say(
        ConditionType.PROFILING,
        "False",
        run.reason or Reason.PROFILE_FAILED,
        f"run {run.name} failed ({attempts}): {run.message}; {then}",
    )


def _store(turn: Turn) -> None:
    """StoreReady, from the newest run's probe; what an earlier one found holds until then."""
    run = turn.status.run
    job = _job(turn, run.name) if run is not None else None
    probe = None
    if run is not None and job is not None:
        probe = jobs.probe_verdict(jobs.pods_of(turn.scene.facts, job), run.name)
    if probe is None:
        before = conditions.find(turn.status.conditions, ConditionType.STORE_READY)
        if before is None:
            message = "no run has tried to write to the store yet"
            turn.say(ConditionType.STORE_READY, "Unknown", Reason.NOT_PROBED, message)
        else:
            turn.say(ConditionType.STORE_READY, before.status, before.reason, before.message)
    elif probe.outcome == "Failed" and probe.reason not in TRANSCRIPT_REASONS:
        turn.say(ConditionType.STORE_READY, "False", probe.reason, probe.message)
    else:
        message = "a run wrote to the store and read it back"
        turn.say(ConditionType.STORE_READY, "True", Reason.WRITE_VERIFIED, message)


def _summary(turn: Turn) -> None:
    """Accepted, when this turn did not set it, and Ready."""
    accepted = turn.status.accepted
    if ConditionType.ACCEPTED not in turn.changed:
        before = conditions.find(turn.status.conditions, ConditionType.ACCEPTED)
        if before is not None:
            turn.say(ConditionType.ACCEPTED, before.status, before.reason, before.message)
        else:
            turn.say(ConditionType.ACCEPTED, "Unknown", Reason.NO_MAP_YET, "no map was judged yet")
    if accepted is not None:
        message = f"map {accepted.digest} of run {accepted.run}"
        turn.say(ConditionType.READY, "True", Reason.MAP_ACCEPTED, message)
        return
    missing = first_failure(turn.scene, PREREQUISITES)
    if missing is not None:
        turn.say(ConditionType.READY, "False", missing.reason, missing.message)
    else:
        message = "no run has made an accepted map yet: see the conditions Profiling and Accepted"
        turn.say(ConditionType.READY, "False", Reason.NO_MAP_YET, message)


def _freshness(turn: Turn) -> None:
    """Fresh, for a map with a schedule that can be read."""
    found = fresh(turn.scene.map, turn.status, turn.now)
    if found is not None:
        turn.say(ConditionType.FRESH, found.status, found.reason, found.message)
        if found.until is not None:
            turn.moments.append(found.until)


def _housekeeping(turn: Turn) -> None:
    """Let recorded Jobs go after their time, and end those that nobody waits for any more."""
    run = turn.status.run
    if run is None:
        return
    ttl = turn.scene.map.spec.profile.ttl_seconds_after_finished
    for job in turn.owned:
        name = jobs.name_of(job)
        if jobs.terminating(job) or (name == run.name and run.finished_at is None):
            continue
        if minute_of(name) > minute_of(run.name):
            continue
        if jobs.ended(job) is None:
            turn.actions.append(DeleteJob(name, jobs.uid_of(job)))
        elif (job.get("spec") or {}).get("ttlSecondsAfterFinished") is None:
            turn.actions.append(PatchJob(name, {"spec": {"ttlSecondsAfterFinished": ttl}}))


ORDER = (
    ConditionType.READY,
    ConditionType.PROFILING,
    ConditionType.ACCEPTED,
    ConditionType.STORE_READY,
    ConditionType.FRESH,
)


def _plan(turn: Turn) -> Plan:
    map_ = turn.scene.map
    changed = [turn.changed[type] for type in ORDER if type in turn.changed]
    kept = turn.status.conditions
    if ConditionType.FRESH not in turn.changed:
        kept = [item for item in kept if item.type != ConditionType.FRESH]
    turn.update(
        observed_generation=map_.metadata.generation, conditions=conditions.merge(kept, changed)
    )
    return Plan(
        status=turn.status.to_wire(),
        actions=tuple(turn.actions),
        events=tuple(turn.events),
        requeue_after=_requeue(turn.moments, turn.now),
    )


def _requeue(moments: Iterable[datetime], now: datetime) -> float | None:
    first = min(moments, default=None)
    return None if first is None else max((first - now).total_seconds(), 1.0)


def _invalid(found: Invalid, now: datetime) -> Plan:
    """A spec of another version: say so, and keep everything else that is known."""
    try:
        status = ExpertMapStatus.model_validate(found.status)
    except ValidationError:
        status = ExpertMapStatus.model_validate({})
    ready = conditions.condition(
        ConditionType.READY,
        "False",
        Reason.INVALID_SPEC,
        found.message,
        found.generation,
        now,
        status.conditions,
    )
    kept = conditions.merge(status.conditions, [ready])
    told = status.model_copy(
        update={"observed_generation": found.generation, "conditions": kept},
    )
    return Plan(status=told.to_wire())
