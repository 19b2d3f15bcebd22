"""A map whose rollout failed is not tried again at once: until when, and what is said."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..api.expertlane import MapInForce, Rollout
from ..api.meta import duration_seconds
from ..api.reasons import Reason, RolloutState
from ..build.workload import Gate, gate_holds, template_holds
from ..plan import Action
from .conditions import parse_timestamp, timestamp
from .lane_facts import Facts, Step
from .lane_step import hook_actions, spoken, stopped_message
from .lane_target import Refusal

IDLE_SECONDS = 60.0
REFUSED_SECONDS = 30.0
MAX_HOLD_SECONDS = 10 * 366 * 86400

_HELD = (RolloutState.STOPPED, RolloutState.ROLLED_BACK, RolloutState.ROLLBACK_FAILED)


def held(facts: Facts, target: MapInForce) -> Rollout | None:
    """The failed rollout because of which a map is not tried again now.

    A change of the lane's spec or of the user's own template ends every hold.
    """
    candidates = [] if facts.rollout is None else [facts.rollout]
    for old in (*candidates, *facts.status.history):
        if old.state not in _HELD:
            continue
        same = (old.to.digest, old.to.hook_digest) == (target.digest, target.hook_digest)
        unchanged = (
            old.generation == facts.lane.metadata.generation
            and old.template_hash == facts.template_hash
        )
        over = old.state == RolloutState.ROLLED_BACK and facts.now >= hold_end(facts, old)
        if same and unchanged and not over:
            return old
    return None


def hold_end(facts: Facts, rollout: Rollout) -> datetime:
    """When the map of a rollout that was rolled back may be tried again."""
    try:
        ended = parse_timestamp(rollout.finished_at or "")
        seconds = duration_seconds(facts.lane.spec.rollback.hold_duration)
    except ValueError:
        return facts.now
    return ended + timedelta(seconds=min(seconds, MAX_HOLD_SECONDS))


def rolled_back_message(facts: Facts, rollout: Rollout) -> str:
    """What was rolled back to what, why, and until when the map is held."""
    former = rollout.from_
    serves = f"the map of {former.traffic_class} ({former.digest})" if former else "no map"
    return (
        f"rollout {rollout.id} to the map of {rollout.to.traffic_class} ({rollout.to.digest}) was "
        f"rolled back to {serves}: {rollout.reason}: {rollout.message}; the map is held until "
        f"{timestamp(hold_end(facts, rollout))} (spec.rollback.holdDuration), then tried again; "
        "another map may go at once, and a change of the lane's spec ends the hold"
    )


def held_step(facts: Facts, rollout: Rollout) -> Step:
    """The target is the map of a failed rollout."""
    newest = facts.rollout is not None and facts.rollout.id == rollout.id
    if rollout.state == RolloutState.ROLLED_BACK and not facts.unfinished:
        return _rolled_back_step(facts, rollout)
    if newest and rollout.state == RolloutState.STOPPED:
        refusal = Refusal(rollout.reason or Reason.ROLLOUT_STOPPED, rollout.message or "")
        return _standing(facts, Reason.ROLLOUT_STOPPED, stopped_message(rollout), refusal)
    if newest and rollout.state == RolloutState.ROLLBACK_FAILED:
        return failed_step(facts, rollout)
    text = (
        f"rollout {rollout.id} to this map failed before (status.history); change the lane's "
        "spec to try it again, or measure the class again"
    )
    return _standing(facts, Reason.DIGEST_HELD, text, Refusal(Reason.DIGEST_HELD, text))


def _standing(facts: Facts, reason: str, message: str, refusal: Refusal) -> Step:
    return Step(
        status=facts.status,
        reason=reason,
        message=message,
        refusal=refusal,
        actions=facts.closing() if facts.unfinished else (),
        requeue_after=REFUSED_SECONDS,
    )


def _rolled_back_step(facts: Facts, rollout: Rollout) -> Step:
    """The lane serves as before the rollout, and says so until the hold ends."""
    left = (hold_end(facts, rollout) - facts.now).total_seconds()
    return Step(
        status=facts.status,
        reason=Reason.DIGEST_HELD,
        message=rolled_back_message(facts, rollout),
        actions=kept(facts, facts.status.active),
        requeue_after=min(IDLE_SECONDS, max(left, 1.0)),
    )


def kept(facts: Facts, active: MapInForce | None) -> tuple[Action, ...]:
    """The hook's ConfigMap is there, the workload is claimed and the gate is given back."""
    patch = facts.patch(active, Gate.RELEASED)
    actions = hook_actions(facts, active.hook_digest) if active is not None else ()
    if gate_holds(facts.workload, patch) or not template_holds(facts.workload, patch):
        return actions
    return (*actions, facts.apply(patch))


def failed_step(facts: Facts, rollout: Rollout) -> Step:
    """Neither the new map nor the way back led to good pods."""
    text = (
        f"rollout {rollout.id} to {spoken(rollout.to)} failed and so did the way back to "
        f"{spoken(rollout.from_)}; nothing is moved until the lane's spec changes or another map "
        f"is wanted: {rollout.reason}: {rollout.message}"
    )
    return Step(
        status=facts.status.model_copy(update={"rollout": rollout}),
        reason=Reason.ROLLBACK_FAILED,
        message=text,
        refusal=Refusal(Reason.ROLLBACK_FAILED, text),
        actions=facts.closing(),
        requeue_after=REFUSED_SECONDS,
    )
