"""The operator is killed in every state of a profile and of a rollout of a real vLLM lane.

A boot takes minutes here, so that one run is killed in several states, one after the other. With
one replica a rollout has no state Rolling: the canary is the lane.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from rowmap_jobs.formats import names, rowmap
from tests.demo import deploy
from tests.demo.job import BOOT_SECONDS, PROFILE_SECONDS, Demo, is_hit
from tests.demo.kube import condition
from tests.demo.settings import LANE, WORKLOAD
from tests.e2e import killing, stubs

pytestmark = pytest.mark.full

SERVING = "True/LaneServing"


def hot_rows(demo: Demo, digest: str) -> set[tuple[int, int]]:
    """(layer, expert) of the hot rows of a map in the store."""
    with deploy.s3(demo.kube) as client:
        raw = deploy.get(client, names.map_key(deploy.STORE["prefix"], digest))
    layers = rowmap.parse(raw, digest, digest).layers
    return {(layer, expert) for layer, tiers in layers.items() for expert in tiers.hot}


@pytest.mark.parametrize(
    "states", [("written", "job", "booting", "ended"), ("probing", "counting", "accepted")]
)
def test_a_profile_is_accepted_wherever_the_operator_is_killed(
    demo: Demo, states: tuple[str, ...]
) -> None:
    class_ = f"kill-{states[0]}"
    name = f"{LANE}.{class_}"
    pods = demo.kube.list("pods", f"app={WORKLOAD}")
    stubs.apply(demo.kube, stubs.traffic_class(class_, "prose/"), stubs.expert_map(LANE, class_))
    for state in states:
        look = functools.partial(killing.PROFILE[state], demo.kube, name)
        demo.kube.until(f"{name} is {state}", lambda look=look: (look(), ""), PROFILE_SECONDS, 0.1)
        killing.kill_operator(demo.kube)
    digest = killing.end_of_a_profile(demo.kube, name, PROFILE_SECONDS)
    again, before = hot_rows(demo, digest), hot_rows(demo, demo.digest("prose"))
    # Which requests share a batch is chance, and with it a rounding at the border.
    assert len(again) == len(before)
    assert len(again & before) >= 0.97 * len(before), "the same traffic, the same rows"
    assert [pod["metadata"]["uid"] for pod in pods] == [
        pod["metadata"]["uid"] for pod in demo.kube.list("pods", f"app={WORKLOAD}")
    ], "a profile moves no pod of the lane"
    demo.kube.kubectl("delete", f"em/{name}", f"tc/{class_}")


def rollout(demo: Demo) -> Any:
    return ((demo.kube.get("lane", LANE) or {}).get("status") or {}).get("rollout") or {}


def to_prose(demo: Demo, state: str) -> bool:
    found = rollout(demo)
    return found.get("state") == state and found["to"]["trafficClass"] == "prose"


def hooked_with(demo: Demo, name: str) -> int:
    """Living pods of the lane whose template names the map of a class."""
    found = stubs.pods(demo.kube, WORKLOAD)
    return list(found.values()).count(demo.digest(name))


def kill_in(demo: Demo, what: str, reached: Callable[[Demo], bool]) -> None:
    demo.kube.until(what, lambda: (reached(demo), str(rollout(demo))), BOOT_SECONDS, 0.05)
    killing.kill_operator(demo.kube)


def gate(demo: Demo) -> int:
    workload = demo.kube.get("deployment", WORKLOAD) or {}
    return int(workload["spec"].get("minReadySeconds", 0))


def settled(demo: Demo, class_: str, state: str) -> None:
    """The lane serves a class, with one pod, no gate, and nothing twice in its history."""

    def look() -> tuple[bool, str]:
        seen = stubs.state(demo.kube, LANE)
        return seen == (class_, SERVING, state), str(seen)

    demo.kube.until(f"{LANE} serves {class_}: {state}", look, BOOT_SECONDS, 0.5)
    assert hooked_with(demo, class_) == 1
    demo.kube.until("the gate is given back", lambda: (not gate(demo), str(gate(demo))), 120)
    history = (demo.kube.get("lane", LANE) or {})["status"]["history"]
    assert len({item["id"] for item in history}) == len(history)
    report = demo.status()
    assert report["mapDigest"] == demo.digest(class_)
    assert is_hit(report["compile"])


def patch(demo: Demo, **spec: Any) -> None:
    demo.kube.kubectl("patch", "lane", LANE, "--type", "merge", "-p", json.dumps({"spec": spec}))


def test_a_rollout_ends_verified_wherever_the_operator_is_killed(demo: Demo) -> None:
    deploy.patch_class(demo.kube, "prose")
    kill_in(demo, "intended", lambda demo: to_prose(demo, "Canary"))
    kill_in(
        demo,
        "canary there",
        lambda demo: to_prose(demo, "Canary") and hooked_with(demo, "prose") == 1,
    )
    kill_in(demo, "verified", lambda demo: to_prose(demo, "Verified"))
    settled(demo, "prose", "Verified")
    deploy.patch_class(demo.kube, "code")
    settled(demo, "code", "Verified")


def test_a_way_back_ends_on_the_old_map_wherever_the_operator_is_killed(demo: Demo) -> None:
    # No engine boots in so short a time; above minReadySeconds, as the API wants it. Until it has
    # failed, the rollout is in states of the test above.
    patch(demo, update={"progressDeadlineSeconds": 15})
    deploy.patch_class(demo.kube, "prose")
    demo.kube.until("rolling back", lambda: (to_prose(demo, "RollingBack"), ""), BOOT_SECONDS, 0.05)
    patch(demo, update={"progressDeadlineSeconds": BOOT_SECONDS})
    killing.kill_operator(demo.kube)
    kill_in(
        demo,
        "old template",
        lambda demo: to_prose(demo, "RollingBack") and hooked_with(demo, "code") == 1,
    )
    kill_in(demo, "rolled back", lambda demo: to_prose(demo, "RolledBack"))
    settled(demo, "code", "RolledBack")
    item = demo.kube.get("lane", LANE)
    assert condition(item, "RolledBack")["reason"] == "ProgressDeadlineExceeded"
    assert condition(item, "Progressing")["reason"] == "DigestHeld"
    deploy.patch_class(demo.kube, "code")
