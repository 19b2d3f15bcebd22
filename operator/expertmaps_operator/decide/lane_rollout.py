"""The rollout of a lane, step by step; each step is computed from what is there, so that a crash
between any two writes leads back into it.

The gate opens only while every pod is either good with the new map or has not been touched, and
closes as soon as the next pod is taken: a pod that has not proved its map is always the only one.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

from rowmap_jobs.formats import names
from rowmap_jobs.formats.rowmap import RowMap

from ..api.expertlane import MapInForce, Rollout
from ..api.reasons import Reason, RolloutState
from ..build import workload_fields as fields
from ..build.hook_configmap import hook_config_map
from ..build.workload import Gate, gate_holds, template_holds
from ..plan import Action, Create, Event
from .conditions import find, one_line, parse_timestamp
from .lane_facts import Facts, Step
from .lane_target import Refusal
from .pods import Judgement, Standing, judge
from .workload_checks import startup_budget_seconds

POLL_SECONDS = 5.0
OPEN_GATE_SECONDS = 2.0
HISTORY = 10

_COUNTED = (Reason.CANARY, Reason.ROLLING, Reason.ROLLOUT_STARTED)
"""Reasons of Progressing under which the progress deadline runs; all others hold it."""


def spoken(in_force: MapInForce | None) -> str:
    """A map in force, for messages."""
    if in_force is None:
        return "no map"
    return f"the map of {in_force.traffic_class} ({in_force.digest[:19]})"


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
        history = _recorded(
            history,
            _entered(
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


def _recorded(history: list[Rollout], rollout: Rollout) -> list[Rollout]:
    others = [item for item in history if item.id != rollout.id]
    return [rollout, *others][:HISTORY]


def _entered(facts: Facts, rollout: Rollout, state: RolloutState, **more: object) -> Rollout:
    entered = {
        "state": state.value,
        "state_since": facts.stamp,
        "generation": facts.lane.metadata.generation,
    }
    return rollout.model_copy(update={**entered, **more})


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
        text = f"{where}: waits until {_pods(facts.terminating)} being deleted is gone"
        return _going_on(facts, rollout, Reason.CANARY, text, facts.closing())
    apply = facts.apply(facts.patch(rollout.to, Gate.CLOSED))
    actions = (*hook_actions(facts, rollout.to.hook_digest), apply)
    return _going_on(facts, rollout, Reason.CANARY, f"{where}: its template is applied", actions)


def hook_actions(facts: Facts, digest: str) -> tuple[Action, ...]:
    """Make the hook's ConfigMap, if it is not there and is of this release."""
    name = facts.lane.metadata.name
    hook = facts.snapshot.settings.hook
    if digest != hook.digest or names.hook_configmap(name, digest) in (
        facts.snapshot.hook_config_maps
    ):
        return ()
    return (Create(hook_config_map(name, facts.lane.metadata.namespace, facts.workload, hook)),)


def _user_change(facts: Facts, rollout: Rollout) -> tuple[Rollout, Event] | None:
    """The user's own template change wins; its first pod is the canary again."""
    if facts.template_hash == rollout.template_hash:
        return None
    entered = _entered(
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
    return entered, Event("Normal", Reason.USER_CHANGE, text)


def _judged(facts: Facts, rollout: Rollout, row_map: RowMap, events: tuple[Event, ...]) -> Step:
    judged = [judge(pod, rollout.to, row_map) for pod in facts.updated]
    bad = _first(judged, Standing.BAD)
    if bad is not None:
        return stop(facts, rollout, bad.reason, bad.message, events)
    good = sum(item.standing is Standing.GOOD for item in judged)
    if good != rollout.good_pods:
        rollout = rollout.model_copy(update={"good_pods": good, "step_since": facts.stamp})
    settled = bool(judged) and good == len(judged) and not facts.terminating
    whole = len(facts.live) == facts.desired
    if settled and whole and good == facts.desired:
        return _verified(facts, rollout, events)
    held = _first(judged, Standing.UNKNOWN) or _first(judged, Standing.UNSCHEDULABLE)
    if held is None:
        rollout = _clock_restarted(facts, rollout)
        if (late := _late(facts, rollout, judged)) is not None:
            return stop(facts, rollout, Reason.PROGRESS_DEADLINE_EXCEEDED, late, events)
    if settled and rollout.state == RolloutState.CANARY:
        rollout = _entered(facts, rollout, RolloutState.ROLLING)
        text = f"rollout {rollout.id}: the first pod is good; the others follow one at a time"
        events = (*events, Event("Normal", Reason.ROLLING, text))
    may_open = rollout.state == RolloutState.ROLLING and settled and whole
    return _paced(facts, rollout, judged, Gate.OPEN if may_open else Gate.CLOSED, held, events)


def _first(judged: list[Judgement], standing: Standing) -> Judgement | None:
    return next((item for item in judged if item.standing is standing), None)


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
    return _going_on(facts, rollout, held.reason if held else reason, text, actions, events, poll)


def _waited_for(facts: Facts, judged: list[Judgement], gate: Gate) -> str:
    waiting = next((item for item in judged if item.standing is not Standing.GOOD), None)
    if waiting is not None:
        return waiting.message
    if facts.terminating:
        return f"{_pods(facts.terminating)} being deleted"
    if gate is Gate.OPEN:
        return "the next pod is taken"
    return "waits for the next pod to be made"


def _pods(count: int) -> str:
    return "1 pod" if count == 1 else f"{count} pods"


def _going_on(
    facts: Facts,
    rollout: Rollout,
    reason: str,
    message: str,
    actions: tuple[Action, ...],
    events: tuple[Event, ...] = (),
    poll: float = POLL_SECONDS,
) -> Step:
    return Step(
        status=facts.status.model_copy(update={"rollout": rollout}),
        reason=reason,
        message=message,
        progressing=True,
        actions=actions,
        events=events,
        requeue_after=poll,
    )


def _clock_restarted(facts: Facts, rollout: Rollout) -> Rollout:
    """The deadline does not run while a rollout is held; it starts anew at the first turn after."""
    before = find(facts.status.conditions, "Progressing")
    if before is None or before.reason in _COUNTED:
        return rollout
    return rollout.model_copy(update={"step_since": facts.stamp})


def _late(facts: Facts, rollout: Rollout, judged: list[Judgement]) -> str | None:
    """Why the rollout has taken too long, if it has."""
    deadline = facts.lane.spec.update.progress_deadline_seconds
    if (facts.now - _moment(rollout.step_since, facts.now)).total_seconds() <= deadline:
        return None
    waiting = next((item.message for item in judged if item.standing is Standing.WAITING), None)
    text = (
        f"{waiting or 'no new pod became good'}: expected a good pod within {deadline} s "
        "(spec.update.progressDeadlineSeconds)"
    )
    container = fields.container(facts.workload, facts.lane.spec.container_name) or {}
    budget = startup_budget_seconds(container)
    if budget is not None and budget > deadline:
        text += f"; its startup probe allows {budget} s: write a deadline above that"
    return text


def _moment(text: str, otherwise: datetime) -> datetime:
    try:
        return parse_timestamp(text)
    except ValueError:
        return otherwise


def stop(
    facts: Facts, rollout: Rollout, reason: str, message: str, events: tuple[Event, ...] = ()
) -> Step:
    """End the rollout where it is: no further pod is taken, and none is taken back."""
    message = one_line(message)
    rollout = _entered(
        facts,
        rollout,
        RolloutState.STOPPED,
        finished_at=facts.stamp,
        reason=str(reason),
        message=message,
    )
    text = f"rollout {rollout.id} to {spoken(rollout.to)} stopped: {reason}: {message}"
    update = {"rollout": rollout, "history": _recorded(facts.status.history, rollout)}
    return Step(
        status=facts.status.model_copy(update=update),
        reason=Reason.ROLLOUT_STOPPED,
        message=stopped_message(rollout),
        refusal=Refusal(str(reason), message),
        actions=facts.closing(),
        events=(*events, Event("Warning", Reason.ROLLOUT_STOPPED, one_line(text))),
        requeue_after=POLL_SECONDS,
    )


def stopped_message(rollout: Rollout) -> str:
    """Why a stopped rollout stands still, and what moves it."""
    return (
        f"rollout {rollout.id} to {spoken(rollout.to)} stopped ({rollout.reason}) and takes no "
        "further pod; choose another class (spec.activeTrafficClass), or repair the cause, delete "
        "the pod and change the lane's spec or the workload's template to try again"
    )


def _verified(facts: Facts, rollout: Rollout, events: tuple[Event, ...]) -> Step:
    """All desired pods are good: the map is in force, and the gate is given back."""
    rollout = _entered(facts, rollout, RolloutState.VERIFIED, finished_at=facts.stamp)
    to, origin = rollout.to, rollout.from_
    text = f"rollout {rollout.id}: all {_pods(facts.desired)} serve with {spoken(to)}"
    done = [Event("Normal", Reason.ROLLOUT_COMPLETE, text)]
    if origin is None or origin.traffic_class != to.traffic_class:
        switched = f"from {origin.traffic_class if origin else 'no class'} to {to.traffic_class}"
        done.append(Event("Normal", Reason.TRAFFIC_CLASS_SWITCHED, switched))
    update = {
        "rollout": rollout,
        "active": to,
        "last_known_good": to,
        "history": _recorded(facts.status.history, rollout),
    }
    return Step(
        status=facts.status.model_copy(update=update),
        reason=Reason.IDLE,
        message=f"serves with {spoken(to)}",
        actions=(facts.apply(facts.patch(to, Gate.RELEASED)),),
        events=(*events, *done),
        requeue_after=POLL_SECONDS,
    )


def held(facts: Facts, target: MapInForce) -> Rollout | None:
    """The stopped rollout because of which a map is not tried again."""
    candidates = [] if facts.rollout is None else [facts.rollout]
    for old in (*candidates, *facts.status.history):
        if old.state != RolloutState.STOPPED:
            continue
        same = (old.to.digest, old.to.hook_digest) == (target.digest, target.hook_digest)
        unchanged = (
            old.generation == facts.lane.metadata.generation
            and old.template_hash == facts.template_hash
        )
        if same and unchanged:
            return old
    return None
