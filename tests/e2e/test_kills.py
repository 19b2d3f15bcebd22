"""The operator is killed once in every state of a profile and of a rollout: the end is the same.

SIGKILL to the process, then a new pod: its restart is not held up by the kubelet's back-off.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.demo.kube import Kube
from tests.e2e import stubs

pytestmark = pytest.mark.full

SERVING = "True/LaneServing"
Seen = Callable[[Kube], bool]


def kill_operator(kube: Kube) -> None:
    """SIGKILL, without a chance to give the Lease back."""
    killed = 0
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = f"--namespace={kube.namespace}".encode() in words
        if ours and words[1:3] == [b"-m", b"expertmaps_operator"] and in_a_pod(folder):
            os.kill(int(folder.name), signal.SIGKILL)
            killed += 1
    assert killed == 1
    kube.kubectl(
        "delete", "pod", "-l", "app.kubernetes.io/component=operator",
        "--grace-period=0", "--force",
    )  # fmt: skip


def in_a_pod(folder: Path) -> bool:
    return "kubepods" in (folder / "cgroup").read_text(encoding="utf-8")


def run_pod(kube: Kube, name: str) -> Any:
    pods = kube.list("pods", f"expertmaps.dev/map={name}")
    return pods[0] if pods else {"status": {}}


def container(kube: Kube, name: str, which: str) -> Any:
    """State of a container of the run's pod."""
    status = run_pod(kube, name)["status"]
    found = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    return next((one["state"] for one in found if one["name"] == which), {})


def run_of(kube: Kube, name: str) -> Any:
    return ((kube.get("em", name) or {}).get("status") or {}).get("run") or {}


def job_ended(kube: Kube, name: str) -> bool:
    jobs = kube.list("jobs", f"expertmaps.dev/map={name}")
    return any(job["status"].get("succeeded") for job in jobs)


PROFILE: list[tuple[str, Callable[[Kube, str], bool]]] = [
    ("written", lambda kube, name: bool(run_of(kube, name))),
    ("job", lambda kube, name: bool(kube.list("jobs", f"expertmaps.dev/map={name}"))),
    ("probing", lambda kube, name: "running" in container(kube, name, "probe")),
    ("booting", lambda kube, name: "running" in container(kube, name, "engine")),
    ("counting", lambda kube, name: "running" in container(kube, name, "runner")),
    ("ended", job_ended),
    ("accepted", lambda kube, name: run_of(kube, name).get("outcome") == "Accepted"),
]


@pytest.mark.parametrize(("state", "reached"), PROFILE, ids=[state for state, _ in PROFILE])
def test_a_profile_ends_alike_wherever_the_operator_is_killed(
    lane: Kube, state: str, reached: Callable[[Kube, str], bool]
) -> None:
    name = f"{stubs.LANE}.kill-{state}"
    stubs.apply(
        lane,
        stubs.traffic_class(f"kill-{state}", "stub-q/"),
        stubs.expert_map(stubs.LANE, f"kill-{state}"),
    )
    lane.until(f"{name} is {state}", lambda: (reached(lane, name), ""), 120, every=0.1)
    kill_operator(lane)

    def accepted() -> tuple[bool, str]:
        item = lane.get("em", name) or {}
        status = item.get("status") or {}
        ready = {c["type"]: c["status"] for c in status.get("conditions", [])}
        return ready.get("Ready") == "True" and ready.get("Profiling") == "False", str(status)

    lane.until(f"{name} is accepted", accepted, 240, every=0.5)
    status = (lane.get("em", name) or {})["status"]
    assert status["accepted"]["digest"] == stubs.digest(lane, "q"), "the same traffic, the same map"
    assert status["run"]["outcome"] == "Accepted"
    jobs = lane.list("jobs", f"expertmaps.dev/map={name}")
    assert [job["metadata"]["name"] for job in jobs] == [status["run"]["name"]], "one run, one Job"
    assert jobs[0]["spec"].get("ttlSecondsAfterFinished") is not None
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
    stubs.until(lane, ("stub-a", SERVING, rollout(lane).get("state", "Verified")), 240)
    stubs.edit(lane, rollback={"holdDuration": f"{1 + BACK.index((state, reached))}h"})
    stubs.break_map(lane, "q", "hook-error")
    stubs.switch(lane, "q")
    lane.until(f"the way back is: {state}", lambda: (reached(lane), ""), 180, every=0.05)
    kill_operator(lane)
    stubs.until(lane, ("stub-a", SERVING, "RolledBack"), 300)
    assert stubs.said(lane, "RolledBack") == "True/HookFailed"
    assert stubs.said(lane, "Progressing") == "False/DigestHeld"
    end_of_a_rollout(lane, "a")
    stubs.mend(lane)


def end_of_a_rollout(kube: Kube, name: str) -> None:
    """All pods with the map, no gate, nothing twice in the history."""
    assert set(stubs.pods(kube).values()) == {stubs.digest(kube, name)}
    assert len(stubs.pods(kube)) == stubs.REPLICAS
    assert gate(kube) == 0
    history = (kube.get("lane", stubs.LANE) or {})["status"]["history"]
    ids = [item["id"] for item in history]
    assert len(set(ids)) == len(ids)
