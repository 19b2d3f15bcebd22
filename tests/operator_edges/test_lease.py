"""Leases against the stand-in API server, by a clock that the test moves."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from expertmaps_operator import lease as lease_module
from expertmaps_operator.lease import DEADLINE_SECONDS, DURATION_SECONDS, Lease, LeaseLostError
from expertmaps_operator.observe.kube import REQUEST_SECONDS, Kube
from tests.operator_edges.fake_api import FakeApi, failure

PATHS = {
    space: f"/apis/coordination.k8s.io/v1/namespaces/{space}/leases/expertmaps-operator"
    for space in ("a", "b")
}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stop:
    """An event whose waiting moves the clock; it is set after some waits."""

    def __init__(self, clock: Clock, waits: int) -> None:
        self.clock, self.left = clock, waits

    def is_set(self) -> bool:
        return self.left <= 0

    def wait(self, seconds: float) -> bool:
        self.clock.now += seconds
        self.left -= 1
        return self.is_set()


def stop(clock: Clock, waits: int) -> Any:
    return Stop(clock, waits)


def test_a_write_begun_in_time_ends_before_another_may_take_over() -> None:
    assert DEADLINE_SECONDS + REQUEST_SECONDS < DURATION_SECONDS
    assert lease_module.RENEW_SECONDS * 2 < DEADLINE_SECONDS


def test_it_is_made_where_there_is_none(api: FakeApi, kube: Kube) -> None:
    clock = Clock()
    mine = Lease(kube, ["b", "a"], "me", clock)
    assert not mine.held()
    with pytest.raises(LeaseLostError):
        mine.guard()
    assert mine.acquire(threading.Event())
    mine.guard()
    assert [api.objects[path]["spec"]["holderIdentity"] for path in PATHS.values()] == ["me"] * 2
    assert api.objects[PATHS["a"]]["spec"]["leaseDurationSeconds"] == DURATION_SECONDS
    clock.now += DEADLINE_SECONDS
    assert not mine.held()


def test_another_holder_is_waited_for_until_it_has_stopped_renewing(
    api: FakeApi, kube: Kube
) -> None:
    clock = Clock()
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 30, "leaseTransitions": 4}
    api.put(PATHS["a"], {"spec": spec})
    mine = Lease(kube, ["a"], "me", clock)
    assert not mine.acquire(stop(clock, 5))
    assert api.writes() == []
    api.put(PATHS["a"], {"spec": spec})  # It renewed: the version changed.
    assert not mine.acquire(stop(clock, 6))
    assert mine.acquire(stop(clock, 100))
    taken = api.writes()[-1]
    assert taken.method == "PUT"
    assert taken.body["metadata"]["resourceVersion"] == str(api.version)
    assert taken.body["spec"]["leaseTransitions"] == 5
    assert taken.body["spec"]["holderIdentity"] == "me"


def test_of_two_that_take_it_over_the_refused_one_waits(api: FakeApi, kube: Kube) -> None:
    clock = Clock()
    api.put(PATHS["a"], {"spec": {"holderIdentity": ""}})
    api.answer("PUT", PATHS["a"], *failure(409, "Conflict"))
    mine = Lease(kube, ["a"], "me", clock)
    assert not mine.acquire(stop(clock, 1))
    assert not mine.held()


def test_it_is_lost_when_another_takes_it(api: FakeApi, kube: Kube) -> None:
    clock = Clock()
    mine = Lease(kube, ["a"], "me", clock)
    mine.acquire(threading.Event())
    api.put(PATHS["a"], {"spec": {"holderIdentity": "other"}})
    lost: list[str] = []
    mine.renew(stop(clock, 10), lost.append)
    assert lost == ["another operator holds the Lease a/expertmaps-operator"]
    assert not mine.held()


def test_it_is_lost_when_it_cannot_be_renewed(api: FakeApi, kube: Kube) -> None:
    clock = Clock()
    mine = Lease(kube, ["a"], "me", clock)
    mine.acquire(threading.Event())
    for _ in range(10):
        api.answer("GET", PATHS["a"], *failure(500, "InternalError"))
    lost: list[str] = []
    mine.renew(stop(clock, 10), lost.append)
    assert lost == ["the Lease was not renewed for 15 s"]
    assert clock.now == 1000.0 + DEADLINE_SECONDS


def test_one_failed_renewal_is_not_a_loss(api: FakeApi, kube: Kube) -> None:
    clock = Clock()
    mine = Lease(kube, ["a"], "me", clock)
    mine.acquire(threading.Event())
    api.answer("GET", PATHS["a"], *failure(500, "InternalError"))
    lost: list[str] = []
    mine.renew(stop(clock, 10), lost.append)
    assert lost == []
    assert mine.held()


def test_release_lets_a_successor_in_at_once_and_is_final(api: FakeApi, kube: Kube) -> None:
    clock = Clock()
    mine = Lease(kube, ["a"], "me", clock)
    mine.acquire(threading.Event())
    mine.release()
    assert api.objects[PATHS["a"]]["spec"]["holderIdentity"] == "me"  # The stand-in keeps PUTs off.
    assert api.writes()[-1].body["spec"]["holderIdentity"] == ""
    assert not mine.held()
    assert not mine.acquire(stop(clock, 2))
