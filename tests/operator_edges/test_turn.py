"""One look at one object, with decisions that the test makes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from expertmaps_operator.act.executor import Result
from expertmaps_operator.act.turn import Reconciler, Slot, Turnstile, takes_slot
from expertmaps_operator.act.workload import WorkloadConflictError
from expertmaps_operator.metrics import Metrics
from expertmaps_operator.observe.resources import EXPERT_LANE, EXPERT_MAP
from expertmaps_operator.observe.snapshots import Observed
from expertmaps_operator.plan import Create, DeleteJob, Plan
from expertmaps_operator.queue import Key
from expertmaps_operator.snapshot import LaneSnapshot, MapSnapshot
from tests.operator_edges.objects import NS, expert_map, lane

KEY = Key("ExpertLane", NS, "lane-a")
START = Plan({"run": {"name": "r"}}, (Create({"kind": "Job", "metadata": {"name": "r"}}),))


def blank(kind: type[Any]) -> Any:
    return object.__new__(kind)


def seen(status: dict[str, Any] | None = None, **metadata: Any) -> Observed:
    manifest = {**lane(), "status": status or {}}
    manifest["metadata"] |= metadata
    return Observed(EXPERT_LANE, manifest, blank(LaneSnapshot))


class Parts:
    """An observer and an executor that do as told and remember."""

    def __init__(self, observed: Observed | None, plan: Plan) -> None:
        self.observed, self.plan = observed, plan
        self.result: Result | Exception = Result()
        self.executed: list[Plan] = []
        self.metrics = Metrics()

    def observe(self, *_: str) -> Observed | None:
        return self.observed

    def execute(self, _observed: Observed, plan: Plan) -> Result:
        self.executed.append(plan)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def reconciler(self, paused: bool = False) -> Reconciler:
        observer: Any = self
        executor: Any = self
        decide = {"ExpertLane": lambda *_: self.plan, "ExpertMap": lambda *_: self.plan}
        return Reconciler(observer, executor, decide, self.metrics, paused)

    def count(self, result: str, kind: str = "ExpertLane") -> float | None:
        labels = {"kind": kind, "result": result}
        return self.metrics.registry.get_sample_value("expertmaps_reconcile_total", labels)


def test_a_turn_gives_the_plans_requeue() -> None:
    parts = Parts(seen(), Plan(None, requeue_after=30.0))
    assert parts.reconciler()(KEY) == 30.0
    assert parts.count("looked") == 1


def test_an_object_that_is_gone_or_going_is_left() -> None:
    parts = Parts(None, Plan(None, (DeleteJob("j", "u"),)))
    assert parts.reconciler()(KEY) is None
    parts.observed = seen(deletionTimestamp="2026-01-01T00:00:00Z")
    assert parts.reconciler()(KEY) is None
    assert parts.executed == []
    assert parts.count("gone") == 2


def test_a_fence_that_fell_looks_again_soon() -> None:
    parts = Parts(seen(), Plan({"replicas": 1}))
    parts.result = Result(look_again=True)
    assert parts.reconciler()(KEY) == 0.5
    assert parts.count("again") == 1


def test_errors_are_counted_and_raised() -> None:
    parts = Parts(seen(), Plan(None))
    parts.result = WorkloadConflictError("server", ("a: b",))
    with pytest.raises(WorkloadConflictError):
        parts.reconciler()(KEY)
    parts.result = RuntimeError("x")
    with pytest.raises(RuntimeError):
        parts.reconciler()(KEY)
    assert (parts.count("conflict"), parts.count("error")) == (1, 1)


def test_a_paused_operator_does_no_action_and_writes_statuses_without_one() -> None:
    parts = Parts(seen(), Plan({"replicas": 1}, (DeleteJob("j", "u"),), requeue_after=9.0))
    assert parts.reconciler(paused=True)(KEY) == 9.0
    assert parts.executed == []
    parts.plan = Plan({"replicas": 1})
    parts.reconciler(paused=True)(KEY)
    assert parts.executed == [parts.plan]


def test_the_metrics_follow_the_status() -> None:
    before = {"rollout": {"id": "r", "state": "Rolling"}}
    after = {
        "rollout": {"id": "r", "state": "Verified", "finishedAt": "2026-01-01T00:00:00Z"},
        "active": {"trafficClass": "agent", "digest": "sha256:x"},
    }
    parts = Parts(seen(before), Plan(after))
    parts.result = Result(status=after)
    parts.reconciler()(KEY)
    value = parts.metrics.registry.get_sample_value
    assert value("expertmaps_rollouts_total", {"result": "Verified"}) == 1
    info = {"namespace": NS, "lane": "lane-a", "traffic_class": "agent", "digest": "sha256:x"}
    assert value("expertmaps_lane_info", info) == 1


def test_which_plans_take_a_slot() -> None:
    map_seen = Observed(EXPERT_MAP, expert_map(), blank(MapSnapshot))
    assert takes_slot(map_seen, START) is Slot.PROFILE
    assert takes_slot(map_seen, Plan({"run": {}}, (DeleteJob("j", "u"),))) is None
    begins = Plan({"rollout": {"state": "Canary"}})
    assert takes_slot(seen(), begins) is Slot.ROLLOUT
    assert takes_slot(seen({"rollout": {"state": "Canary"}}), begins) is None
    assert takes_slot(seen(), START) is None


def test_two_turns_never_take_the_last_slot_together() -> None:
    both_looked = threading.Barrier(2)
    observed = Observed(EXPERT_MAP, expert_map(), blank(MapSnapshot))
    parts = Parts(observed, START)
    looks = []

    def observe(*_: str) -> Observed:
        looks.append(1)
        if len(looks) <= 2:
            both_looked.wait(60)
        return observed

    parts.observe = observe  # type: ignore[method-assign]
    reconcile = parts.reconciler()
    threads = [
        threading.Thread(target=reconcile, args=(Key("ExpertMap", NS, name),)) for name in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert parts.executed == [START]
    assert (parts.count("acted", "ExpertMap"), parts.count("again", "ExpertMap")) == (1, 1)


def test_a_turn_that_failed_used_its_ticket_too() -> None:
    turnstile = Turnstile()
    ticket = turnstile.ticket()
    with pytest.raises(RuntimeError), turnstile.passing(ticket):
        raise RuntimeError
    with turnstile.passing(ticket) as passed:
        assert not passed
