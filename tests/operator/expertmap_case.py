"""Tables of decisions on an ExpertMap: their rows, and the facts that they are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from expertmaps_operator.decide import expertmap
from expertmaps_operator.decide.conditions import timestamp
from expertmaps_operator.plan import Create
from expertmaps_operator.snapshot import MapSnapshot
from tests.operator import expertmap_world as world
from tests.operator.expertmap_world import FIRST_RUN, START

MINUTE = timedelta(minutes=1)
JOB = world.job()
COUNTING = world.container_status("runner", {"running": {}})
STARTED = world.container_status("vllm", {"running": {}}, started=True)
BOOTING = world.container_status("vllm", {"running": {}}, started=False)


def waits(name: str, reason: str, **more: Any) -> dict[str, Any]:
    return world.container_status(name, {"waiting": {"reason": reason, "message": "why"}}, **more)


def crashed(code: int, reason: str = "Error", restarts: int = 3, **more: Any) -> dict[str, Any]:
    return world.container_status(
        "vllm", {}, restartCount=restarts, lastState=world.ended(code, reason=reason), **more
    ) | {"restartCount": restarts}


def run_snapshot(
    *pods: dict[str, Any], job: dict[str, Any] | None = None, **more: Any
) -> MapSnapshot:
    """A run that is known, with its Job and pods."""
    map_ = more.pop("map", None) or world.expert_map(world.running())
    return world.snapshot(map_, jobs=(job or JOB,), pods=pods, lane_profiles=1, **more)


def ended_snapshot(
    *pods: dict[str, Any], kind: str = "Failed", reason: str = "", **more: Any
) -> MapSnapshot:
    job = world.job(**world.finished(kind, reason))
    return run_snapshot(*pods, job=job, **more)


def runner_said(verdict: Any, code: int = 0) -> dict[str, Any]:
    state = world.ended(code, verdict.to_message().decode())
    return world.pod(JOB, mains=(world.container_status("runner", state),))


def probe_said(verdict: Any, code: int) -> dict[str, Any]:
    state = world.ended(code, verdict.to_message().decode())
    return world.pod(JOB, inits=(world.container_status("probe", state),))


def failed_status(attempts: int = 1, generation: int = 1, **run: Any) -> dict[str, Any]:
    """A status whose last run failed at START."""
    more = {
        "generation": generation,
        "finishedAt": timestamp(START),
        "outcome": "Failed",
        "reason": "EngineFailed",
        "message": "why",
        **run,
    }
    return {**world.running(**more), "failedAttempts": attempts}


def accepted_status(at: Any = START, **more: Any) -> dict[str, Any]:
    found = world.row_map()
    accepted = {
        "digest": found.digest,
        "rowSetDigest": found.row_set_digest,
        "run": FIRST_RUN,
        "acceptedAt": timestamp(at),
    }
    run = world.running(finishedAt=timestamp(at), outcome="Accepted", reason="Accepted")
    return {**run, "accepted": accepted, **more}


ACCEPTED = runner_said(world.verdict(FIRST_RUN))
MAPS = {world.row_map().digest: world.map_object(world.row_map())}


@dataclass(frozen=True)
class Case:
    """A snapshot and what comes of it."""

    name: str
    snapshot: MapSnapshot
    conditions: dict[str, tuple[str, str]]
    actions: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    after: timedelta = timedelta()
    run: dict[str, Any] = field(default_factory=dict)
    says: str = ""
    """Part of the Profiling condition's message."""


RUNS = {"Profiling": ("True", "ProfileRunning"), "Ready": ("False", "NoMapYet")}


def kind(action: Any) -> str:
    if isinstance(action, Create):
        return f"Create {action.manifest['kind']}"
    return type(action).__name__


def check(case: Case) -> None:
    """The decision is the one of the row."""
    now = START + case.after
    plan = expertmap.decide(case.snapshot, now)
    found = world.conditions(plan)
    assert {name: found.get(name) for name in case.conditions} == case.conditions
    assert set(found) == {"Ready", "Profiling", "Accepted", "StoreReady"}
    assert tuple(kind(action) for action in plan.actions) == case.actions
    assert tuple(event.reason for event in plan.events) == case.events
    assert plan.status is not None
    run = plan.status.get("run", {})
    assert {key: run.get(key) for key in case.run} == case.run
    told = {item["type"]: item for item in plan.status["conditions"]}
    assert case.says in told["Profiling"]["message"]
    generation = case.snapshot.map.metadata.generation  # type: ignore[union-attr]
    assert plan.status["observedGeneration"] == generation
    for item in told.values():
        assert item["observedGeneration"] == generation
        assert "\n" not in item["message"]


def check_again(case: Case) -> None:
    """On the same facts, a while later, with the status of the first decision."""
    now = START + case.after
    first = expertmap.decide(case.snapshot, now)
    assert first.status is not None
    spec = case.snapshot.map.spec.model_dump(by_alias=True, exclude_none=True)  # type: ignore[union-attr]
    generation = case.snapshot.map.metadata.generation  # type: ignore[union-attr]
    map_ = world.expert_map(dict(first.status), generation=generation, **spec)
    again = expertmap.decide(
        MapSnapshot(**{**case.snapshot.__dict__, "map": map_}), now + timedelta(seconds=2)
    )
    assert again.status == first.status
    assert again.events == ()
    # What was not done is asked for again: the facts are the same.
    assert [kind(action) for action in again.actions] == [kind(action) for action in first.actions]
