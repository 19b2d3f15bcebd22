"""The ledger of deliveries, and the resync that finds a stalled watch."""

from __future__ import annotations

from typing import Any

from expertmaps_operator.observe.index import Index
from expertmaps_operator.observe.kube import Kube
from expertmaps_operator.observe.ledger import Ledger
from expertmaps_operator.observe.resync import Resync
from expertmaps_operator.queue import Key
from tests.operator_edges.fake_api import FakeApi
from tests.operator_edges.objects import CUSTOM, NS, expert_map, lane

LANE = f"{CUSTOM}/expertlanes/lane-a"


def _with_version(version: str) -> dict[str, Any]:
    there = lane()
    there["metadata"]["resourceVersion"] = version
    return there


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def made(kube: Kube) -> tuple[Resync, Ledger, list[Key], Clock]:
    ledger, added, clock = Ledger(), list[Key](), Clock()
    return Resync(kube, [NS], Index(), ledger, added.append, clock), ledger, added, clock


def test_everything_is_looked_at(api: FakeApi, kube: Kube) -> None:
    resync, _, added, clock = made(kube)
    api.put(LANE, lane())
    api.put(f"{CUSTOM}/expertmaps/lane-a.agent", expert_map())
    clock.now = 200.0
    resync.once()
    assert set(added) == {
        Key("ExpertLane", NS, "lane-a"),
        Key("ExpertMap", NS, "lane-a.agent"),
        Key("TrafficClass", NS, "agent"),
    }
    assert resync.last_success == 200.0
    selectors = {request.path: request.query.get("labelSelector") for request in api.requests}
    assert selectors[f"/apis/batch/v1/namespaces/{NS}/jobs"] == "expertmaps.dev/role"
    assert selectors[f"/api/v1/namespaces/{NS}/pods"] is None


def test_a_version_that_no_watch_delivers_stays_missing(api: FakeApi, kube: Kube) -> None:
    resync, ledger, _, clock = made(kube)
    there = api.put(LANE, lane())
    older = {**there, "metadata": {**there["metadata"], "resourceVersion": "50"}}
    ledger.delivered("ExpertLane", older, False, clock.now)
    suspects = resync.once()
    assert [item.place for item in suspects] == [("ExpertLane", NS, "lane-a")]
    assert resync.still_missing(suspects) == suspects
    newer = {**there, "metadata": {**there["metadata"], "resourceVersion": "999"}}
    ledger.delivered("ExpertLane", newer, False, clock.now)
    assert resync.still_missing(suspects) == []


def test_a_deletion_that_was_delivered_is_not_missing(api: FakeApi, kube: Kube) -> None:
    resync, ledger, _, clock = made(kube)
    there = api.put(LANE, lane())
    suspects = resync.once()
    assert len(suspects) == 1
    ledger.delivered("ExpertLane", there, True, clock.now)
    assert resync.still_missing(suspects) == []


def test_an_object_that_is_gone_without_an_event_is_looked_at(api: FakeApi, kube: Kube) -> None:
    resync, ledger, added, clock = made(kube)
    ledger.delivered("ExpertLane", lane(), False, clock.now)
    clock.now += 10
    assert resync.once() == []
    assert added == [Key("ExpertLane", NS, "lane-a")]


def test_an_object_delivered_after_the_list_began_is_kept() -> None:
    ledger = Ledger()
    ledger.begin_list(100.0)
    ledger.delivered("ExpertLane", lane(), False, 101.0)
    assert ledger.forget_absent("ExpertLane", NS, set()) == []
    ledger.begin_list(200.0)
    assert ledger.forget_absent("ExpertLane", NS, set()) == [("ExpertLane", NS, "lane-a")]


def test_versions_that_are_no_numbers_are_only_ever_equal() -> None:
    ledger = Ledger()
    odd = _with_version("x1")
    ledger.delivered("ExpertLane", odd, False, 1.0)
    assert ledger.suspect("ExpertLane", [odd]) == []
    assert len(ledger.suspect("ExpertLane", [_with_version("x0")])) == 1


def test_the_run_tells_of_a_stale_watch_in_one_line(api: FakeApi, kube: Kube) -> None:
    resync, _, _, _ = made(kube)
    api.put(LANE, lane())
    told: list[str] = []

    class Stop:
        waits = 0

        def is_set(self) -> bool:
            return False

        def wait(self, _seconds: float) -> bool:
            self.waits += 1
            return False

    stop: Any = Stop()
    resync.run(stop, told.append)
    assert stop.waits == 1
    assert told == [
        "the watch of ExpertLane missed 1 changes, the first of lanes/lane-a "
        f"(resourceVersion {api.version})"
    ]
