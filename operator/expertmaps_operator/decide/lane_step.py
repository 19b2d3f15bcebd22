"""What the steps of a rollout, forth and back, have in common."""

from __future__ import annotations

from datetime import datetime

from rowmap_jobs.formats import names

from ..api.expertlane import MapInForce, Rollout
from ..api.reasons import Reason, RolloutState
from ..build import workload_fields as fields
from ..build.hook_configmap import hook_config_map
from ..plan import Action, Create, Event
from .conditions import find, one_line, parse_timestamp
from .lane_facts import Facts, Step
from .lane_target import Refusal
from .pods import Judgement, Standing
from .workload_checks import startup_budget_seconds

POLL_SECONDS = 5.0
OPEN_GATE_SECONDS = 2.0
HISTORY = 10

_COUNTED = (Reason.CANARY, Reason.ROLLING, Reason.ROLLOUT_STARTED, Reason.ROLLING_BACK)
"""Reasons of Progressing under which the progress deadline runs; all others hold it."""


def spoken(in_force: MapInForce | None) -> str:
    """A map in force, for messages."""
    if in_force is None:
        return "no map"
    return f"the map of {in_force.traffic_class} ({in_force.digest[:19]})"


def recorded(history: list[Rollout], rollout: Rollout) -> list[Rollout]:
    """The history with a rollout that has ended."""
    others = [item for item in history if item.id != rollout.id]
    return [rollout, *others][:HISTORY]


def entered(facts: Facts, rollout: Rollout, state: RolloutState, **more: object) -> Rollout:
    """A rollout that enters a state now."""
    update = {
        "state": state.value,
        "state_since": facts.stamp,
        "generation": facts.lane.metadata.generation,
    }
    return rollout.model_copy(update={**update, **more})


def hook_actions(facts: Facts, digest: str) -> tuple[Action, ...]:
    """Make the hook's ConfigMap, if it is not there and is of this release."""
    name = facts.lane.metadata.name
    hook = facts.snapshot.settings.hook
    if digest != hook.digest or names.hook_configmap(name, digest) in (
        facts.snapshot.hook_config_maps
    ):
        return ()
    return (Create(hook_config_map(name, facts.lane.metadata.namespace, facts.workload, hook)),)


def first(judged: list[Judgement], standing: Standing) -> Judgement | None:
    """The first pod of a standing."""
    return next((item for item in judged if item.standing is standing), None)


def pods_spoken(count: int) -> str:
    """A number of pods, for messages."""
    return "1 pod" if count == 1 else f"{count} pods"


def going_on(
    facts: Facts,
    rollout: Rollout,
    reason: str,
    message: str,
    actions: tuple[Action, ...],
    events: tuple[Event, ...] = (),
    poll: float = POLL_SECONDS,
) -> Step:
    """A step of a rollout that is under way."""
    return Step(
        status=facts.status.model_copy(update={"rollout": rollout}),
        reason=reason,
        message=message,
        progressing=True,
        actions=actions,
        events=events,
        requeue_after=poll,
    )


def clock_restarted(facts: Facts, rollout: Rollout) -> Rollout:
    """The deadline does not run while a rollout is held; it starts anew at the first turn after."""
    before = find(facts.status.conditions, "Progressing")
    if before is None or before.reason in _COUNTED:
        return rollout
    return rollout.model_copy(update={"step_since": facts.stamp})


def late(facts: Facts, rollout: Rollout, judged: list[Judgement]) -> str | None:
    """Why the rollout has taken too long, if it has."""
    deadline = facts.lane.spec.update.progress_deadline_seconds
    if (facts.now - _moment(rollout.step_since, facts.now)).total_seconds() <= deadline:
        return None
    waiting = first(judged, Standing.WAITING) or first(judged, Standing.BAD)
    found = waiting.message if waiting is not None else "no new pod became good"
    text = f"{found}: expected a good pod within {deadline} s (spec.update.progressDeadlineSeconds)"
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
    rollout = entered(
        facts,
        rollout,
        RolloutState.STOPPED,
        finished_at=facts.stamp,
        reason=str(reason),
        message=message,
    )
    text = f"rollout {rollout.id} to {spoken(rollout.to)} stopped: {reason}: {message}"
    update = {"rollout": rollout, "history": recorded(facts.status.history, rollout)}
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
