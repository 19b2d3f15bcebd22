"""The rollout of a lane, step by step; each step is computed from what is there, so that a crash
between any two writes leads back into it.

The gate opens only while every pod is either good with the new map or has not been touched, and
closes as soon as the next pod is taken: a pod that has not proved its map is always the only one.
"""

from __future__ import annotations

import hashlib

from rowmap_jobs.formats.rowmap import RowMap

from ..api.expertlane import MapInForce, Rollout
from ..api.reasons import Reason, RolloutState
from ..build.workload import Gate, gate_holds, template_holds
from ..plan import Event
from .lane_facts import Facts, Step
from .lane_rollback import fail
from .lane_step import (
    OPEN_GATE_SECONDS,
    POLL_SECONDS,
    clock_restarted,
    entered,
    first,
    going_on,
    hook_actions,
    late,
    pods_spoken,
    recorded,
    spoken,
    stop,
)
from .pods import Judgement, Standing, judge


def start(facts: Facts, to: MapInForce) -> Step:
    """Write down the intent, and nothing else: the workload is touched once it is seen there."""
    status = facts.status
    origin = status.active
    parts = (facts.lane.metadata.uid, str(facts.lane.metadata.generation), facts.stamp)
    moves = (origin.digest if origin else "", to.digest, to.hook_digest)
    rollout = Rollout(
        id=hashlib.sha256("\n".join((*parts, *moves)).encode()).hexdigest()[:10],
        from_=origin,
        to=to,
        state=RolloutState.CANARY,
        started_at=facts.stamp,
        state_since=facts.stamp,
        step_since=facts.stamp,
        template_hash=facts.template_hash,
        generation=facts.lane.metadata.generation,
    )
    history = status.history
    if (old := facts.moving) is not None:
        history = recorded(
            history,
            entered(
                facts,
                old,
                RolloutState.SUPERSEDED,
                finished_at=facts.stamp,
                reason=Reason.SUPERSEDED,
                message=f"rollout {rollout.id} to {spoken(to)} took its place",
            ),
        )
    text = f"rollout {rollout.id}: from {spoken(origin)} to {spoken(to)}"
    return Step(
        status=status.model_copy(update={"rollout": rollout, "history": history}),
        reason=Reason.ROLLOUT_STARTED,
        message=text,
        progressing=True,
        events=(Event("Normal", Reason.ROLLOUT_STARTED, text),),
        requeue_after=0,
    )


def proceed(facts: Facts, rollout: Rollout, row_map: RowMap) -> Step:
    """One step of the rollout that is under way; the workload has passed its checks."""
    if not template_holds(facts.workload, facts.patch(rollout.to, Gate.CLOSED)):
        return _to_template(facts, rollout)
    events: tuple[Event, ...] = ()
    if not rollout.applied:
        rollout = rollout.model_copy(update={"applied": True, "step_since": facts.stamp})
        text = f"rollout {rollout.id}: one pod takes {spoken(rollout.to)}, the others wait"
        events = (Event("Normal", Reason.CANARY, text),)
    elif (changed := _user_change(facts, rollout)) is not None:
        rollout, event = changed
        events = (event,)
    return _judged(facts, rollout, row_map, events)


def _to_template(facts: Facts, rollout: Rollout) -> Step:
    """The workload does not have the rollout's template (any more)."""
    if rollout.applied:
        if facts.lane.metadata.generation != rollout.generation:
            return start(facts, rollout.to)
        text = (
            f"Deployment {facts.lane.spec.workload_ref.name}: the lane's fields were taken out of "
            "the pod template or changed by another writer (kubectl replace, GitOps without "
            "server-side apply); expected them to stay; keep them, then change the lane's spec"
        )
        return stop(facts, rollout, Reason.TEMPLATE_REVERTED, text)
    where = f"rollout {rollout.id}: {spoken(rollout.to)}"
    if facts.terminating:
        # Two pods must not meet on one device, so a step starts when no pod is on its way out.
        text = f"{where}: waits until {pods_spoken(facts.terminating)} being deleted is gone"
        return going_on(facts, rollout, Reason.CANARY, text, facts.closing())
    apply = facts.apply(facts.patch(rollout.to, Gate.CLOSED))
    actions = (*hook_actions(facts, rollout.to.hook_digest), apply)
    return going_on(facts, rollout, Reason.CANARY, f"{where}: its template is applied", actions)


def _user_change(facts: Facts, rollout: Rollout) -> tuple[Rollout, Event] | None:
    """The user's own template change wins; its first pod is the canary again."""
    if facts.template_hash == rollout.template_hash:
        return None
    rollout = entered(
        facts,
        rollout,
        RolloutState.CANARY,
        template_hash=facts.template_hash,
        step_since=facts.stamp,
        good_pods=0,
    )
    text = (
        f"rollout {rollout.id}: the user changed the pod template; the rollout goes on with it, "
        "one pod first"
    )
    return rollout, Event("Normal", Reason.USER_CHANGE, text)


def _judged(facts: Facts, rollout: Rollout, row_map: RowMap, events: tuple[Event, ...]) -> Step:
    judged = [judge(pod, rollout.to, row_map) for pod in facts.updated]
    bad = first(judged, Standing.BAD)
    if bad is not None:
        return fail(facts, rollout, bad.reason, bad.message, events)
    good = sum(item.standing is Standing.GOOD for item in judged)
    if good != rollout.good_pods:
        rollout = rollout.model_copy(update={"good_pods": good, "step_since": facts.stamp})
    settled = bool(judged) and good == len(judged) and not facts.terminating
    whole = len(facts.live) == facts.desired
    if settled and whole and good == facts.desired:
        return _verified(facts, rollout, events)
    held = first(judged, Standing.UNKNOWN) or first(judged, Standing.UNSCHEDULABLE)
    if held is None:
        rollout = clock_restarted(facts, rollout)
        if (overdue := late(facts, rollout, judged)) is not None:
            return fail(facts, rollout, Reason.PROGRESS_DEADLINE_EXCEEDED, overdue, events)
    if settled and rollout.state == RolloutState.CANARY:
        rollout = entered(facts, rollout, RolloutState.ROLLING)
        text = f"rollout {rollout.id}: the first pod is good; the others follow one at a time"
        events = (*events, Event("Normal", Reason.ROLLING, text))
    may_open = rollout.state == RolloutState.ROLLING and settled and whole
    return _paced(facts, rollout, judged, Gate.OPEN if may_open else Gate.CLOSED, held, events)


def _paced(
    facts: Facts,
    rollout: Rollout,
    judged: list[Judgement],
    gate: Gate,
    held: Judgement | None,
    events: tuple[Event, ...],
) -> Step:
    """Bring the gate to where it has to be, and say what is waited for."""
    actions = hook_actions(facts, rollout.to.hook_digest)
    patch = facts.patch(rollout.to, gate)
    if not gate_holds(facts.workload, patch):
        actions = (*actions, facts.apply(patch))
    text = f"rollout {rollout.id}: {spoken(rollout.to)}: {rollout.good_pods} of {facts.desired} "
    text += "pods are good; " + _waited_for(facts, judged, gate)
    reason = Reason.ROLLING if rollout.state == RolloutState.ROLLING else Reason.CANARY
    poll = OPEN_GATE_SECONDS if gate is Gate.OPEN else POLL_SECONDS
    return going_on(facts, rollout, held.reason if held else reason, text, actions, events, poll)


def _waited_for(facts: Facts, judged: list[Judgement], gate: Gate) -> str:
    waiting = next((item for item in judged if item.standing is not Standing.GOOD), None)
    if waiting is not None:
        return waiting.message
    if facts.terminating:
        return f"{pods_spoken(facts.terminating)} being deleted"
    if gate is Gate.OPEN:
        return "the next pod is taken"
    return "waits for the next pod to be made"


def _verified(facts: Facts, rollout: Rollout, events: tuple[Event, ...]) -> Step:
    """All desired pods are good: the map is in force, and the gate is given back."""
    rollout = entered(facts, rollout, RolloutState.VERIFIED, finished_at=facts.stamp)
    to, origin = rollout.to, rollout.from_
    text = f"rollout {rollout.id}: {facts.desired} of {facts.desired} pods serve with {spoken(to)}"
    done = [Event("Normal", Reason.ROLLOUT_COMPLETE, text)]
    if origin is None or origin.traffic_class != to.traffic_class:
        switched = f"from {origin.traffic_class if origin else 'no class'} to {to.traffic_class}"
        done.append(Event("Normal", Reason.TRAFFIC_CLASS_SWITCHED, switched))
    update = {
        "rollout": rollout,
        "active": to,
        "last_known_good": to,
        "history": recorded(facts.status.history, rollout),
    }
    return Step(
        status=facts.status.model_copy(update=update),
        reason=Reason.IDLE,
        message=f"serves with {spoken(to)}",
        actions=(facts.apply(facts.patch(to, Gate.RELEASED)),),
        events=(*events, *done),
        requeue_after=POLL_SECONDS,
    )
