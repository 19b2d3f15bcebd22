"""The operator is killed once in every state of a profile and of a rollout: the end is the same.

The engine is a stand-in pod that speaks our status contract; test_kills_vllm.py has the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.demo.kube import Kube
from tests.e2e import killing, stubs
from tests.e2e.killing import kill_operator

pytestmark = pytest.mark.full

SERVING = "True/LaneServing"
Seen = Callable[[Kube], bool]


@pytest.mark.parametrize("state", killing.PROFILE)
def test_a_profile_ends_alike_wherever_the_operator_is_killed(lane: Kube, state: str) -> None:
    name = f"{stubs.LANE}.kill-{state}"
    stubs.apply(
        lane,
        stubs.traffic_class(f"kill-{state}", "stub-q/"),
        stubs.expert_map(stubs.LANE, f"kill-{state}"),
    )
    reached = killing.PROFILE[state]
    lane.until(f"{name} is {state}", lambda: (reached(lane, name), ""), 120, every=0.1)
    kill_operator(lane)
    same = killing.end_of_a_profile(lane, name, 240) == stubs.digest(lane, "q")
    assert same, "the same traffic, the same map"
    lane.kubectl("delete", f"em/{name}", f"tc/kill-{state}")


def rollout(kube: Kube) -> Any:
    return ((kube.get("lane", stubs.LANE) or {}).get("status") or {}).get("rollout") or {}


def to_q(kube: Kube, state: str) -> bool:
    found = rollout(kube)
    return found.get("state") == state and found["to"]["trafficClass"] == "stub-q"


def gate(kube: Kube) -> int:
    item = kube.get("deployment", stubs.WORKLOAD) or {}
    return int(item["spec"].get("minReadySeconds", 0))


def new_pods(kube: Kube) -> int:
    return sum(digest == stubs.digest(kube, "q") for digest in stubs.pods(kube).values())


ROLLOUT: list[tuple[str, Seen]] = [
    ("intended", lambda kube: to_q(kube, "Canary")),
    ("gate closed", lambda kube: to_q(kube, "Canary") and gate(kube) > 3),
    ("canary there", lambda kube: to_q(kube, "Canary") and new_pods(kube) == 1),
    ("rolling", lambda kube: to_q(kube, "Rolling")),
    ("second pod", lambda kube: to_q(kube, "Rolling") and new_pods(kube) == 2),
    ("verified", lambda kube: to_q(kube, "Verified")),
]


@pytest.mark.parametrize(("state", "reached"), ROLLOUT, ids=[state for state, _ in ROLLOUT])
def test_a_rollout_ends_alike_wherever_the_operator_is_killed(
    lane: Kube, state: str, reached: Seen
) -> None:
    stubs.switch(lane, "a")
    stubs.until(lane, ("stub-a", SERVING, "Verified"), 240)
    stubs.switch(lane, "q")
    lane.until(f"the rollout is: {state}", lambda: (reached(lane), ""), 120, every=0.05)
    kill_operator(lane)
    stubs.until(lane, ("stub-q", SERVING, "Verified"), 240)
    end_of_a_rollout(lane, "q")


BACK: list[tuple[str, Seen]] = [
    ("failing", lambda kube: to_q(kube, "Canary") and new_pods(kube) == 1),
    ("rolling back", lambda kube: to_q(kube, "RollingBack")),
    ("old template", lambda kube: to_q(kube, "RollingBack") and new_pods(kube) == 0),
    ("rolled back", lambda kube: to_q(kube, "RolledBack")),
]


@pytest.mark.parametrize(("state", "reached"), BACK, ids=[state for state, _ in BACK])
def test_a_way_back_ends_alike_wherever_the_operator_is_killed(
    lane: Kube, state: str, reached: Seen
) -> None:
    stubs.switch(lane, "a")

    def serves_a() -> tuple[bool, str]:
        seen = stubs.state(lane)
        return seen in [("stub-a", SERVING, end) for end in ("Verified", "RolledBack")], str(seen)

    lane.until("the lane serves stub-a", serves_a, 240, every=0.5)
    stubs.edit(lane, rollback={"holdDuration": f"{1 + BACK.index((state, reached))}h"})
    stubs.break_map(lane, "q", "hook-error")
    stubs.switch(lane, "q")
    lane.until(f"the way back is: {state}", lambda: (reached(lane), ""), 180, every=0.05)
    kill_operator(lane)
    stubs.until(lane, ("stub-a", SERVING, "RolledBack"), 300)
    assert stubs.said(lane, "RolledBack") == "True/HookFailed"
    stubs.until_said(lane, "Progressing", "False/DigestHeld")
    end_of_a_rollout(lane, "a")
    stubs.mend(lane)


def end_of_a_rollout(kube: Kube, name: str) -> None:
    """All pods with the map, no gate, nothing twice in the history."""
    assert set(stubs.pods(kube).values()) == {stubs.digest(kube, name)}
    assert len(stubs.pods(kube)) == stubs.REPLICAS
    kube.until("the gate is given back", lambda: (gate(kube) == 0, str(gate(kube))), 120)
    history = (kube.get("lane", stubs.LANE) or {})["status"]["history"]
    ids = [item["id"] for item in history]
    assert len(set(ids)) == len(ids)
