"""The status of a lane: conditions derived from its pods and from what a decision came to."""

from __future__ import annotations

from ..api.expertlane import ExpertLaneStatus, MapInForce
from ..api.meta import Condition
from ..api.reasons import ConditionType, Reason, RolloutState
from .conditions import Status, condition, merge
from .lane_facts import Facts, Step
from .lane_held import rolled_back_message
from .lane_step import spoken
from .lane_target import MOVING
from .pods import Judgement, PodView, Standing, judge

Said = tuple[Status, str, str]
"""Status, reason and message of a condition."""


def lane_status(facts: Facts, step: Step) -> ExpertLaneStatus:
    """The whole status, with generation and conditions that speak of the same spec."""
    status = step.status
    generation = facts.lane.metadata.generation
    previous = facts.status.conditions
    effective = facts.lane.spec.active_traffic_class
    if effective is None and status.active is not None:
        effective = status.active.traffic_class
    said: dict[ConditionType, Said] = {
        ConditionType.READY: _ready(facts, step),
        ConditionType.PROGRESSING: _progressing(step),
        ConditionType.VERIFIED: _verified(facts, step),
        ConditionType.HASH_HIT: _hash_hit(facts, step),
        ConditionType.ROLLED_BACK: _rolled_back(facts, step, effective),
        ConditionType.PAUSED: _paused(facts),
    }
    changed: list[Condition] = [
        condition(kind, value[0], value[1], value[2], generation, facts.now, previous)
        for kind, value in said.items()
    ]
    return status.model_copy(
        update={
            "observed_generation": generation,
            "conditions": merge(previous, changed),
            "replicas": facts.desired,
            "updated_replicas": len(facts.updated),
            "ready_replicas": sum(pod.ready for pod in facts.live),
            "effective_traffic_class": effective,
        }
    )


def _progressing(step: Step) -> Said:
    return ("True" if step.progressing else "False", step.reason, step.message)


def _paused(facts: Facts) -> Said:
    if facts.lane.spec.paused:
        return "True", Reason.PAUSED, "spec.paused is true: nothing of the lane is changed"
    return "False", Reason.NOT_PAUSED, "spec.paused is false"


def _ready(facts: Facts, step: Step) -> Said:
    if step.progressing:
        return "False", step.reason, step.message
    if step.refusal is not None:
        return "False", step.refusal.reason, step.refusal.message
    active = step.status.active
    if active is not None:
        return _pods(facts, active)
    if not _was_rolled_back(step):
        return "False", step.reason, step.message
    status, reason, message = _pods(facts, None)
    if status != "True":
        return status, reason, message
    return "False", Reason.SERVING_UNHOOKED, f"all pods serve without a map; {step.message}"


def _was_rolled_back(step: Step) -> bool:
    rollout = step.status.rollout
    return rollout is not None and rollout.state == RolloutState.ROLLED_BACK


def _pods(facts: Facts, active: MapInForce | None) -> Said:
    """Whether all desired pods are ready and report the map in force (or have none)."""
    if facts.desired == 0:
        return "False", Reason.SCALED_TO_ZERO, "the workload has no replicas"
    judged = _judged(facts, active)
    for standing in (Standing.BAD, Standing.UNSCHEDULABLE, Standing.WAITING, Standing.UNKNOWN):
        found = next((item for item in judged if item.standing is standing), None)
        if found is not None:
            status: Status = "Unknown" if standing is Standing.UNKNOWN else "False"
            return status, found.reason, found.message
    if len(judged) < facts.desired:
        text = f"{len(judged)} of {facts.desired} pods are there"
        return "False", Reason.PODS_NOT_READY, text
    return "True", Reason.LANE_SERVING, f"all pods serve with {spoken(active)}"


def _judged(facts: Facts, expected: MapInForce | None) -> list[Judgement]:
    known = facts.snapshot.map_objects.get(expected.digest) if expected is not None else None
    row_map = known.row_map if known is not None else None
    return [judge(pod, expected, row_map) for pod in facts.live]


def _verified(facts: Facts, step: Step) -> Said:
    """Whether the pods prove the map: by their reports, never by the lack of an answer."""
    if step.progressing:
        unknown = step.reason in (Reason.STATUS_UNREACHABLE, Reason.STATUS_INVALID)
        return ("Unknown" if unknown else "False", step.reason, step.message)
    rollout = step.status.rollout
    failed = (RolloutState.STOPPED, RolloutState.ROLLBACK_FAILED)
    if rollout is not None and rollout.state in failed and step.refusal is not None:
        return "False", rollout.reason or Reason.ROLLOUT_STOPPED, rollout.message or ""
    active = step.status.active
    if active is None:
        return "False", Reason.SERVING_UNHOOKED, "no map is in force: the pods serve without one"
    status, reason, message = _pods(facts, active)
    if status == "True":
        return "True", Reason.ALL_PODS_REPORT_DIGEST, message
    contradicted = any(item.standing is Standing.BAD for item in _judged(facts, active))
    return ("False" if contradicted else "Unknown", reason, message)


def _rolled_back(facts: Facts, step: Step, wanted: str | None) -> Said:
    """Whether the map that is wanted was given up for the one before it."""
    rollout = step.status.rollout
    if rollout is not None and rollout.state == RolloutState.ROLLING_BACK:
        text = f"rollout {rollout.id} failed ({rollout.reason}) and is on its way back"
        return "False", Reason.ROLLING_BACK, text
    if rollout is not None and rollout.state == RolloutState.ROLLBACK_FAILED:
        return "False", Reason.ROLLBACK_FAILED, rollout.message or ""
    if rollout is None or not _was_rolled_back(step) or rollout.to.traffic_class != wanted:
        return "False", Reason.NOT_ROLLED_BACK, "no rollout to the wanted map was rolled back"
    return "True", rollout.reason or Reason.ROLLED_BACK, rolled_back_message(facts, rollout)


def _hash_hit(facts: Facts, step: Step) -> Said:
    """Whether the engines loaded their compile caches, by their own counters."""
    rollout = step.status.rollout
    expected = step.status.active
    forth = (*MOVING, RolloutState.STOPPED)
    if rollout is not None and rollout.state in forth:
        expected = rollout.to
    found = [pod for pod in facts.live if expected is not None and _reports(pod, expected)]
    hits = [(pod, _compile_hit(pod)) for pod in found]
    missed = [pod for pod, hit in hits if hit is False]
    if missed:
        return "False", Reason.COMPILE_CACHE_MISS, _miss(missed[0], step)
    if not hits or any(hit is None for _, hit in hits):
        text = "no pod with the map reports compile caches that were used"
        return "Unknown", Reason.NO_COMPILE_EVIDENCE, text
    return "True", Reason.COMPILE_CACHE_HIT, "every pod loaded its compile caches, none compiled"


def _reports(pod: PodView, expected: MapInForce) -> bool:
    status = pod.report.status if pod.report is not None else None
    return status is not None and status.map_digest == expected.digest


def _compile_hit(pod: PodView) -> bool | None:
    status = pod.report.status if pod.report is not None else None
    if status is None or status.compile is None:
        return None
    return status.compile.hit


def _miss(pod: PodView, step: Step) -> str:
    status = pod.report.status if pod.report is not None else None
    seen = status.compile if status is not None else None
    counters = ""
    if seen is not None:
        counters = (
            f"cacheMisses {seen.cache_misses}, aotCompiled {seen.aot_compiled}, "
            f"autotuneWritten {seen.autotune_written}, cacheHits {seen.cache_hits}, "
            f"aotLoaded {seen.aot_loaded}"
        )
    rollout = step.status.rollout
    first = rollout is not None and rollout.from_ is None
    advice = (
        "normal at the first adoption"
        if first
        else "keep the engine's compile caches on a volume that outlives the pod"
    )
    return f"pod {pod.name} compiled ({counters}): {advice}"
