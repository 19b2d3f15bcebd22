"""What to do about one lane."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from rowmap_jobs.formats import names
from rowmap_jobs.formats.rowmap import RowMap

from ..api.expertlane import ExpertLaneStatus, MapInForce, Rollout
from ..api.reasons import ConditionType, Reason, RolloutState
from ..build.workload import Gate, template_holds
from ..plan import Action, Event, Plan
from ..snapshot import Invalid, LaneSnapshot
from .collect import lane_garbage
from .conditions import condition, merge
from .lane_facts import Facts, Step, facts_of
from .lane_held import IDLE_SECONDS, REFUSED_SECONDS, held, held_step, kept
from .lane_map import Absent, fingerprint_refusal, geometry_refusal, lane_geometry, wanted_map
from .lane_rollback import proceed_back
from .lane_rollout import proceed, start
from .lane_status import lane_status
from .lane_step import POLL_SECONDS, spoken
from .lane_target import Refusal, Target, resolve, way_back
from .workload_checks import BEFORE, DURING, RELEASING, Checked, first_refusal, presence


def decide(snapshot: LaneSnapshot, now: datetime) -> Plan:
    """One turn for one lane.

    Deciding again on the same facts gives the same status and nothing more to do. A deleted lane is
    left as it runs.
    """
    lane = snapshot.lane
    if isinstance(lane, Invalid):
        return _invalid(lane, now)
    if lane.metadata.deletion_timestamp is not None:
        return Plan(status=None)
    facts = facts_of(snapshot, lane, now, names.workload_manager(lane.metadata.name))
    step = _step(facts)
    return Plan(
        status=lane_status(facts, step).to_wire(),
        actions=(*step.actions, *lane_garbage(snapshot, lane, step.status)),
        events=step.events,
        requeue_after=step.requeue_after,
    )


def _invalid(lane: Invalid, now: datetime) -> Plan:
    """Say what is wrong with the spec and leave the rest of the status as it is."""
    try:
        previous = ExpertLaneStatus.model_validate(lane.status)
    except ValueError:
        return Plan(status=None)
    texts = {
        ConditionType.READY: lane.message,
        ConditionType.PROGRESSING: "nothing is moved until the spec can be read",
    }
    before, generation = previous.conditions, lane.generation
    changed = [
        condition(kind, "False", Reason.INVALID_SPEC, text, generation, now, before)
        for kind, text in texts.items()
    ]
    status = previous.model_copy(
        update={
            "observed_generation": generation,
            "conditions": merge(before, changed),
        }
    )
    return Plan(status=status.to_wire())


def _step(facts: Facts) -> Step:
    if facts.lane.spec.paused:
        return _paused(facts)
    rollout = facts.rollout
    if rollout is not None and rollout.state == RolloutState.ROLLING_BACK:
        return _back(facts, rollout)
    target = resolve(facts.snapshot, facts.lane)
    if isinstance(target, Refusal):
        return _refused(facts, target)
    found = presence(
        facts.lane, facts.snapshot.workload, facts.snapshot.dry_run_conflicts, facts.live
    )
    if isinstance(found, Refusal):
        return _refused(facts, found)
    in_force = target.in_force
    row_map = wanted_map(facts.snapshot, facts.lane, in_force.digest, facts.now)
    if isinstance(row_map, Absent):
        if _settled(facts, in_force):
            return _idle(facts, target, row_map)
        return _refused(facts, row_map.refusal, row_map.actions)
    if isinstance(row_map, Refusal):
        return _refused(facts, row_map)
    facts = _with_geometry(facts, row_map)
    refusal = geometry_refusal(facts.lane, in_force.digest, row_map)
    if refusal is not None:
        return _refused(facts, refusal)
    return _toward(facts, target, row_map, found)


def _back(facts: Facts, rollout: Rollout) -> Step:
    """Finish the way back before anything else, whatever the spec asks for by now."""
    found = presence(
        facts.lane, facts.snapshot.workload, facts.snapshot.dry_run_conflicts, facts.live
    )
    if isinstance(found, Refusal):
        return _refused(facts, found)
    to = way_back(facts.snapshot, facts.lane, rollout)
    refusal = first_refusal(found, RELEASING if to is None else DURING)
    if refusal is not None:
        return _refused(facts, refusal)
    if to is None:
        return proceed_back(facts, rollout, None, None)
    row_map = wanted_map(facts.snapshot, facts.lane, to.digest, facts.now)
    if isinstance(row_map, Absent):
        return _refused(facts, row_map.refusal, row_map.actions)
    if isinstance(row_map, Refusal):
        return _refused(facts, row_map)
    return proceed_back(facts, rollout, to, row_map)


def _with_geometry(facts: Facts, row_map: RowMap) -> Facts:
    """Freeze the lane's geometry with the first map that it is to serve with."""
    if facts.status.geometry is not None:
        return facts
    update = {"geometry": lane_geometry(row_map.geometry)}
    status = facts.status.model_copy(update=update)
    lane = facts.lane.model_copy(update={"status": status})
    return replace(facts, lane=lane)


def _toward(facts: Facts, target: Target, row_map: RowMap, checked: Checked) -> Step:
    """Go to a target whose map is at hand."""
    in_force = target.in_force
    if _settled(facts, in_force):
        return _idle(facts, target, None)
    same_rows = _same_rows(facts, in_force, row_map)
    if same_rows is not None:
        return same_rows
    moving = facts.moving
    if moving is not None and _same(moving.to, in_force):
        refusal = first_refusal(checked, DURING)
        return _refused(facts, refusal) if refusal else proceed(facts, moving, row_map)
    failed = held(facts, in_force)
    if failed is not None:
        return held_step(facts, failed)
    stranger = fingerprint_refusal(facts.live, in_force.digest, row_map)
    if stranger is not None:
        return _refused(facts, stranger)
    reverted = _reverted(facts, in_force)
    if reverted is not None:
        return _refused(facts, reverted)
    refusal = first_refusal(checked, BEFORE) or (None if moving else _slot(facts))
    return _refused(facts, refusal) if refusal else start(facts, in_force)


def _same(one: MapInForce, other: MapInForce) -> bool:
    return (one.digest, one.hook_digest) == (other.digest, other.hook_digest)


def _at(facts: Facts, in_force: MapInForce) -> bool:
    """Whether new pods start with this map and hook, by the fields of the lane as it is now."""
    return template_holds(facts.workload, facts.patch(in_force, Gate.RELEASED))


def _serving(facts: Facts) -> MapInForce | None:
    """The map in force, when nothing else is under way or left half done."""
    active, rollout = facts.status.active, facts.rollout
    failed = rollout is not None and rollout.state == RolloutState.ROLLBACK_FAILED
    if active is None or facts.moving is not None or failed or not _at(facts, active):
        return None
    return active


def _settled(facts: Facts, target: MapInForce) -> bool:
    """Whether the target is in force and nothing else is under way."""
    active = _serving(facts)
    return active is not None and _same(active, target)


def _same_rows(facts: Facts, target: MapInForce, row_map: RowMap) -> Step | None:
    """A map with the same rows as the one in force needs no pod to restart."""
    active = _serving(facts)
    if active is None:
        return None
    present = facts.snapshot.map_objects.get(active.digest)
    if present is None or present.row_map is None or active.hook_digest != target.hook_digest:
        return None
    if (present.row_map.row_set_digest, present.row_map.fingerprint) != (
        row_map.row_set_digest,
        row_map.fingerprint,
    ):
        return None
    events: tuple[Event, ...] = ()
    serving = active
    if active.traffic_class != target.traffic_class:
        serving = active.model_copy(update={"traffic_class": target.traffic_class})
        text = (
            f"from {active.traffic_class} to {target.traffic_class}: their maps have the same "
            "rows, so no pod restarts"
        )
        events = (Event("Normal", Reason.TRAFFIC_CLASS_SWITCHED, text),)
    return Step(
        status=facts.status.model_copy(update={"active": serving, "last_known_good": serving}),
        reason=Reason.IDLE,
        message=f"serves with {spoken(serving)}; the newest map has the same rows",
        actions=kept(facts, serving),
        events=events,
        requeue_after=IDLE_SECONDS,
    )


def _idle(facts: Facts, target: Target, absent: Absent | None) -> Step:
    """The target is in force: keep what a restarting pod needs."""
    active = facts.status.active or target.in_force
    serving = active.model_copy(update={"traffic_class": target.in_force.traffic_class})
    message = target.kept or f"serves with {spoken(serving)}"
    status = facts.status
    if serving != active:
        status = status.model_copy(update={"active": serving, "last_known_good": serving})
    return Step(
        status=status,
        reason=absent.refusal.reason if absent else Reason.IDLE,
        message=absent.refusal.message if absent else message,
        actions=(*kept(facts, active), *(absent.actions if absent else ())),
        requeue_after=REFUSED_SECONDS if absent else IDLE_SECONDS,
    )


def _reverted(facts: Facts, target: MapInForce) -> Refusal | None:
    """Somebody took the lane's fields out: they are written again only when the spec changes, so
    that two writers never fight over the pods.
    """
    active, rollout = facts.status.active, facts.rollout
    ended = (RolloutState.VERIFIED, RolloutState.ROLLED_BACK)
    if active is None or rollout is None or rollout.state not in ended:
        return None
    if active.digest != target.digest or rollout.generation != facts.lane.metadata.generation:
        return None
    name = facts.lane.spec.workload_ref.name
    return Refusal(
        Reason.TEMPLATE_REVERTED,
        f"Deployment {name}: the lane's fields were taken out of the pod template or changed by "
        "another writer (kubectl replace, GitOps without server-side apply); expected them to "
        "stay; let that writer keep them, then change the lane's spec to have them written again",
    )


def _slot(facts: Facts) -> Refusal | None:
    running, limit = facts.snapshot.slots.rollouts, facts.snapshot.settings.max_concurrent_rollouts
    if running < limit:
        return None
    return Refusal(
        Reason.NO_SLOT,
        f"{running} of {limit} rollouts are under way (--max-concurrent-rollouts); this one "
        "starts when one of them has ended",
    )


def _refused(facts: Facts, refusal: Refusal, actions: tuple[Action, ...] = ()) -> Step:
    """Nothing moves. A rollout under way takes no further pod."""
    closing = facts.closing() if refusal.writable and facts.unfinished else ()
    return Step(
        status=facts.status,
        reason=refusal.reason,
        message=refusal.message,
        refusal=refusal,
        actions=(*closing, *actions),
        requeue_after=REFUSED_SECONDS if not actions else POLL_SECONDS,
    )


def _paused(facts: Facts) -> Step:
    """Freeze in place. An open gate is closed: open, it would let the rollout run on by itself."""
    rollout = facts.rollout
    text = f"ExpertLane {facts.lane.metadata.name}: spec.paused is true; nothing is moved"
    refusal = None
    if rollout is not None and rollout.state == RolloutState.STOPPED:
        refusal = Refusal(rollout.reason or Reason.ROLLOUT_STOPPED, rollout.message or text)
    elif rollout is not None and rollout.state == RolloutState.ROLLBACK_FAILED:
        refusal = Refusal(Reason.ROLLBACK_FAILED, rollout.message or text)
    elif facts.unfinished or facts.status.active is None:
        refusal = Refusal(Reason.PAUSED, text)
    return Step(
        status=facts.status,
        reason=Reason.PAUSED,
        message=text,
        refusal=refusal,
        actions=facts.closing() if facts.unfinished else (),
        requeue_after=IDLE_SECONDS,
    )
