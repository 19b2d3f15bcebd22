"""Rollouts of a lane with three pods on a real cluster; its engines are stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.demo.kube import Kube, condition
from tests.e2e import stubs
from tests.e2e.killing import lose_operator

REPLICAS = stubs.REPLICAS
SERVING = "True/LaneServing"


@contextmanager
def fewest_ready(kube: Kube) -> Iterator[list[int]]:
    """Numbers of ready pods seen while the body runs."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.2):
            item = kube.get("deployment", stubs.WORKLOAD) or {}
            seen.append((item.get("status") or {}).get("readyReplicas", 0))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield seen
        finally:
            stop.set()
        watching.result()  # a watch that broke off has seen nothing


def test_a_lane_without_a_class_is_left_alone(lane: Kube) -> None:
    item = lane.get("lane", stubs.LANE)
    assert condition(item, "Ready")["reason"] == "NoTrafficClass"
    assert set(stubs.pods(lane).values()) == {""}


def test_a_failed_first_adoption_gives_the_own_template_back(lane: Kube) -> None:
    before = stubs.pods(lane)
    stubs.break_map(lane, "a", "crash")
    with fewest_ready(lane) as ready:
        stubs.switch(lane, "a")
        stubs.until(lane, ("", "False/ServingUnhooked", "RolledBack"), 240)
    assert min(ready) >= REPLICAS - 1
    after = stubs.pods(lane)
    assert set(after.values()) == {""} and len(before.keys() & after.keys()) == REPLICAS - 1
    assert stubs.said(lane, "RolledBack") == "True/PodFailed"
    stubs.until_said(lane, "Progressing", "False/DigestHeld")
    workload = lane.get("deployment", stubs.WORKLOAD) or {}
    template = workload["spec"]["template"]
    assert "annotations" not in template["metadata"]
    assert {item["name"] for item in template["spec"]["volumes"]} == {"stub", "faults"}
    (container,) = template["spec"]["containers"]
    assert "env" not in container and len(container["volumeMounts"]) == 2
    assert workload["metadata"]["labels"]["expertmaps.dev/lane"] == stubs.LANE
    assert workload["spec"]["progressDeadlineSeconds"] == 600


def test_adoption_goes_pod_by_pod_once_a_change_of_the_spec_ends_the_hold(lane: Kube) -> None:
    stubs.mend(lane)
    with fewest_ready(lane) as ready:
        stubs.edit(lane, rollback={"holdDuration": "2h"})
        stubs.until(lane, ("stub-a", SERVING, "Verified"))
    assert min(ready) >= REPLICAS - 1
    assert len(set(stubs.pods(lane).values()) - {""}) == 1
    assert stubs.said(lane, "RolledBack") == "False/NotRolledBack"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("hook-error", "HookFailed"),
        ("crash", "PodFailed"),
        ("wrong-digest", "MapDigestMismatch"),
        ("never-ready", "ProgressDeadlineExceeded"),
    ],
)
def test_a_failing_pod_brings_the_last_map_back(lane: Kube, fault: str, reason: str) -> None:
    before, last = stubs.pods(lane), stubs.last_rollout(lane)
    stubs.break_map(lane, "q", fault)
    with fewest_ready(lane) as ready:
        stubs.switch(lane, "q")
        stubs.until(lane, ("stub-a", SERVING, "RolledBack"), 300, after=last)
    assert min(ready) >= REPLICAS - 1
    after = stubs.pods(lane)
    assert set(after.values()) == {stubs.digest(lane, "a")}
    assert len(before.keys() & after.keys()) == REPLICAS - 1, "one pod was taken, no more"
    assert stubs.said(lane, "RolledBack") == f"True/{reason}"
    stubs.until_said(lane, "Progressing", "False/DigestHeld")
    message = condition(lane.get("lane", stubs.LANE), "RolledBack")["message"]
    assert stubs.digest(lane, "q") in message and stubs.digest(lane, "a") in message
    assert f"pod {stubs.WORKLOAD}-" in message and "held until" in message
    for event in ("RollingBack", "RolledBack"):
        assert lane.kubectl("get", "events", "--field-selector", f"reason={event}", "-o", "name")
    stubs.mend(lane)
    stubs.switch(lane, "a")
    stubs.until(lane, ("stub-a", SERVING, "RolledBack"))
    assert stubs.pods(lane) == after, "the class that serves already moves no pod"


def test_the_map_is_tried_again_when_the_hold_is_over(lane: Kube) -> None:
    stubs.edit(lane, rollback={"holdDuration": "20s"})
    stubs.break_map(lane, "q", "hook-error")
    last = stubs.last_rollout(lane)
    stubs.switch(lane, "q")
    stubs.until(lane, ("stub-a", SERVING, "RolledBack"), after=last)
    stubs.mend(lane)
    stubs.until(lane, ("stub-q", SERVING, "Verified"))
    states = [one["state"] for one in (lane.get("lane", stubs.LANE) or {})["status"]["history"]]
    assert states[:2] == ["Verified", "RolledBack"]
    stubs.switch(lane, "a")
    stubs.until(lane, ("stub-a", SERVING, "Verified"))


def test_without_rollback_a_failing_pod_stops_the_rollout(lane: Kube) -> None:
    stubs.edit(lane, rollback={"enabled": False, "holdDuration": "1h"})
    before = stubs.pods(lane)
    stubs.break_map(lane, "q", "hook-error")
    with fewest_ready(lane) as ready:
        stubs.switch(lane, "q")
        stubs.until(lane, ("stub-a", "False/HookFailed", "Stopped"))
    assert min(ready) >= REPLICAS - 1
    after = stubs.pods(lane)
    assert len(before.keys() & after.keys()) == REPLICAS - 1, "one pod was taken, no more"
    item = lane.get("lane", stubs.LANE)
    assert "FingerprintMismatch" in condition(item, "Ready")["message"]
    stubs.until_said(lane, "Progressing", "False/RolloutStopped")
    events = lane.kubectl("get", "events", "--field-selector", "reason=RolloutStopped")
    assert "HookFailed" in events


def test_switching_back_leads_out_of_a_stopped_rollout(lane: Kube) -> None:
    stubs.mend(lane)
    stubs.switch(lane, "a")
    stubs.until(lane, ("stub-a", SERVING, "Verified"))
    assert len(set(stubs.pods(lane).values())) == 1
    stubs.edit(lane, rollback={"enabled": True})


def test_an_operator_killed_on_the_way_back_goes_on_where_it_was(lane: Kube) -> None:
    stubs.break_map(lane, "q", "crash")
    with fewest_ready(lane) as ready:
        stubs.switch(lane, "q")
        stubs.until(lane, ("stub-a", "False/RollingBack", "RollingBack"))
        lose_operator(lane)
        stubs.until(lane, ("stub-a", SERVING, "RolledBack"), 240)
    assert min(ready) >= REPLICAS - 1
    assert set(stubs.pods(lane).values()) == {stubs.digest(lane, "a")}
    stubs.mend(lane)
    stubs.switch(lane, "a")


def test_an_operator_killed_in_a_rollout_goes_on_where_it_was(lane: Kube) -> None:
    with fewest_ready(lane) as ready:
        stubs.switch(lane, "q")
        stubs.until(lane, ("stub-a", "False/Canary", "Canary"))
        lose_operator(lane)
        stubs.until(lane, ("stub-q", SERVING, "Verified"), 240)
    assert min(ready) >= REPLICAS - 1
    item = lane.get("lane", stubs.LANE) or {}
    to_q = [r for r in item["status"]["history"] if r["to"]["trafficClass"] == "stub-q"]
    assert to_q[0]["state"] == "Verified"


def test_a_second_lane_cannot_claim_the_workload(lane: Kube) -> None:
    generation = (lane.get("deployment", stubs.WORKLOAD) or {})["metadata"]["generation"]
    second = stubs.lane("second")
    second["spec"]["activeTrafficClass"] = "stub-a"
    second_map = stubs.resources()[-2]
    second_map["metadata"]["name"] = "second.stub-a"
    second_map["spec"]["laneRef"]["name"] = "second"
    stubs.apply(lane, second, second_map)

    def look() -> tuple[bool, str]:
        found = condition(lane.get("lane", "second"), "Ready")
        return found.get("reason") == "WorkloadClaimed", str(found)

    lane.until("the second lane is refused", look, 180)
    assert (lane.get("deployment", stubs.WORKLOAD) or {})["metadata"]["generation"] == generation
    lane.kubectl("delete", "em/second.stub-a", "lane/second")


def test_an_unsafe_workload_is_not_touched_and_the_patch_to_apply_is_printed(lane: Kube) -> None:
    surge = stubs.workload(1, "surging", strategy={"type": "RollingUpdate"})
    other = stubs.lane("surging", "surging")
    other["spec"]["activeTrafficClass"] = "stub-a"
    other_map = stubs.resources()[-2]
    other_map["metadata"]["name"] = "surging.stub-a"
    other_map["spec"]["laneRef"]["name"] = "surging"
    stubs.apply(lane, surge, other, other_map)

    def look() -> tuple[bool, str]:
        found = condition(lane.get("lane", "surging"), "Ready")
        return found.get("reason") == "UnsafeStrategy", str(found)

    lane.until("the surging lane is refused", look, 180)
    message = condition(lane.get("lane", "surging"), "Ready")["message"]
    assert "maxSurge" in message
    assert (lane.get("deployment", "surging") or {})["metadata"]["generation"] == 1
    lane.kubectl("delete", "em/surging.stub-a", "lane/surging", "deployment/surging")
