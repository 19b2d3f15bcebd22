"""The way back of a failed rollout: to the last verified map, or to the workload's own template.

The pods that the new map took are given back one at a time: the gate opens only while every pod of
the former template is ready and none is missing or on its way out. The Deployment's controller then
replaces pods that are not available first.
"""

from __future__ import annotations

from rowmap_jobs.formats.rowmap import RowMap

from ..api.expertlane import MapInForce, Rollout
from ..api.reasons import Reason, RolloutState
from ..build.workload import Gate, gate_holds, template_holds
from ..plan import Event
from .conditions import one_line
from .lane_facts import Facts, Step
from .lane_held import failed_step, rolled_back_message
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


def fail(
    facts: Facts, rollout: Rollout, reason: str, message: str, events: tuple[Event, ...] = ()
) -> Step:
    """A pod failed with the new map: go back, if the lane wants that and there is a way."""
    origin = rollout.from_
    nowhere = origin is not None and (origin.digest, origin.hook_digest) == (
        rollout.to.digest,
        rollout.to.hook_digest,
    )
    if nowhere or not facts.lane.spec.rollback.enabled:
        return stop(facts, rollout, reason, message, events)
    rollout = entered(
        facts,
        rollout,
        RolloutState.ROLLING_BACK,
        step_since=facts.stamp,
        good_pods=0,
        applied=False,
        reason=str(reason),
        message=one_line(message),
    )
    text = one_line(f"{_goes_back(rollout, origin)}: {message}")
    # Only the intent is written: the workload is touched once it is seen in the status.
    return Step(
        status=facts.status.model_copy(update={"rollout": rollout}),
        reason=Reason.ROLLING_BACK,
        message=text,
        progressing=True,
        actions=facts.closing(),
        events=(*events, Event("Warning", Reason.ROLLING_BACK, text)),
        requeue_after=0,
    )


def _goes_back(rollout: Rollout, to: MapInForce | None) -> str:
    return (
        f"rollout {rollout.id} to {spoken(rollout.to)} failed ({rollout.reason}) and goes back to "
        f"{spoken(to)}"
    )


def proceed_back(
    facts: Facts, rollout: Rollout, to: MapInForce | None, row_map: RowMap | None
) -> Step:
    """One step of the way back; the workload has passed its checks."""
    generation = facts.lane.metadata.generation
    if rollout.generation != generation:
        # The lane's fields may be others now, so that they may be written again.
        rollout = rollout.model_copy(update={"generation": generation, "applied": False})
    if not template_holds(facts.workload, facts.patch(to, Gate.CLOSED)):
        return _to_former_template(facts, rollout, to)
    rollout = rollout.model_copy(update={"applied": True})
    judged = [judge(pod, to, row_map) for pod in facts.updated]
    good = sum(item.standing is Standing.GOOD for item in judged)
    if good != rollout.good_pods:
        rollout = rollout.model_copy(update={"good_pods": good, "step_since": facts.stamp})
    whole = len(facts.live) == facts.desired and not facts.terminating
    if whole and good == facts.desired:
        return _rolled_back(facts, rollout, to)
    held = first(judged, Standing.UNKNOWN) or first(judged, Standing.UNSCHEDULABLE)
    if held is None:
        rollout = clock_restarted(facts, rollout)
        if (overdue := late(facts, rollout, judged)) is not None:
            return _failed(facts, rollout, Reason.PROGRESS_DEADLINE_EXCEEDED, overdue)
    may_open = whole and all(pod.ready for pod in facts.updated)
    return _paced(facts, rollout, to, judged, Gate.OPEN if may_open else Gate.CLOSED)


def _to_former_template(facts: Facts, rollout: Rollout, to: MapInForce | None) -> Step:
    """The workload does not have the template to go back to (any more)."""
    if rollout.applied:
        text = (
            f"Deployment {facts.lane.spec.workload_ref.name}: the pod template was changed by "
            "another writer (kubectl replace, GitOps without server-side apply) on the way back; "
            "expected the lane's fields to stay as they were written"
        )
        return _failed(facts, rollout, Reason.TEMPLATE_REVERTED, text)
    rollout = clock_restarted(facts, rollout)
    if (overdue := late(facts, rollout, [])) is not None:
        return _failed(facts, rollout, Reason.PROGRESS_DEADLINE_EXCEEDED, overdue)
    where = _goes_back(rollout, to)
    if facts.terminating:
        text = f"{where}: waits until {pods_spoken(facts.terminating)} being deleted is gone"
        return going_on(facts, rollout, Reason.ROLLING_BACK, text, facts.closing())
    hook = hook_actions(facts, to.hook_digest) if to is not None else ()
    actions = (*hook, facts.apply(facts.patch(to, Gate.CLOSED)))
    text = f"{where}: its template is applied"
    return going_on(facts, rollout, Reason.ROLLING_BACK, text, actions)


def _paced(
    facts: Facts, rollout: Rollout, to: MapInForce | None, judged: list[Judgement], gate: Gate
) -> Step:
    """Bring the gate to where it has to be, and say what is waited for."""
    actions = hook_actions(facts, to.hook_digest) if to is not None else ()
    patch = facts.patch(to, gate)
    if not gate_holds(facts.workload, patch):
        actions = (*actions, facts.apply(patch))
    text = f"{_goes_back(rollout, to)}: {rollout.good_pods} of {facts.desired} pods are good; "
    text += _waited_for(facts, judged, gate)
    held = first(judged, Standing.UNKNOWN) or first(judged, Standing.UNSCHEDULABLE)
    reason = held.reason if held is not None else Reason.ROLLING_BACK
    poll = OPEN_GATE_SECONDS if gate is Gate.OPEN else POLL_SECONDS
    return going_on(facts, rollout, reason, text, actions, poll=poll)


def _waited_for(facts: Facts, judged: list[Judgement], gate: Gate) -> str:
    waiting = next((item for item in judged if item.standing is not Standing.GOOD), None)
    if waiting is not None:
        return waiting.message
    if facts.terminating:
        return f"{pods_spoken(facts.terminating)} being deleted"
    return "the next pod is taken" if gate is Gate.OPEN else "waits for the next pod to be made"


def _rolled_back(facts: Facts, rollout: Rollout, to: MapInForce | None) -> Step:
    """All desired pods are what they were: the lane serves as before, and the map is held."""
    rollout = entered(facts, rollout, RolloutState.ROLLED_BACK, finished_at=facts.stamp)
    text = rolled_back_message(facts, rollout)
    update = {
        "rollout": rollout,
        "active": to,
        "last_known_good": to or facts.status.last_known_good,
        "history": recorded(facts.status.history, rollout),
    }
    return Step(
        status=facts.status.model_copy(update=update),
        reason=Reason.ROLLED_BACK,
        message=text,
        actions=(facts.apply(facts.patch(to, Gate.RELEASED)),),
        events=(Event("Normal", Reason.ROLLED_BACK, one_line(text)),),
        requeue_after=0,
    )


def _failed(facts: Facts, rollout: Rollout, reason: str, message: str) -> Step:
    """The way back did not lead to good pods either: nothing moves until somebody decides."""
    text = one_line(f"{rollout.message}; going back failed too: {reason}: {message}")
    rollout = entered(
        facts, rollout, RolloutState.ROLLBACK_FAILED, finished_at=facts.stamp, message=text
    )
    step = failed_step(facts, rollout)
    history = recorded(facts.status.history, rollout)
    event = Event("Warning", Reason.ROLLBACK_FAILED, one_line(step.message))
    return Step(
        status=step.status.model_copy(update={"history": history}),
        reason=step.reason,
        message=step.message,
        refusal=step.refusal,
        actions=step.actions,
        events=(event,),
        requeue_after=0,
    )
