"""Deleting our resources, or all of us, never costs a lane: it serves on, or gets its own back."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rowmap_jobs.formats import names
from tests.demo import deploy
from tests.demo.kube import Kube, condition
from tests.demo.settings import Settings
from tests.e2e import stubs
from tests.e2e.watching import engine_started, untouched

OPERATOR = "deployment/expertmaps-operator"
SERVING = ("stub-a", "True/LaneServing", "Verified")


@pytest.fixture
def serving(lane: Kube) -> Kube:
    """The lane serves with the map of `stub-a`, whatever was deleted before."""
    stubs.apply(lane, *stubs.resources())
    for name in stubs.TEXTS:
        lane.kubectl(
            "wait", "--for=condition=Ready", f"em/{stubs.LANE}.stub-{name}", "--timeout=300s"
        )
    stubs.switch(lane, "a")
    stubs.until(lane, SERVING)
    return lane


@pytest.fixture
def down(serving: Kube) -> Iterator[Kube]:
    """No operator runs until it is scaled up again."""
    with no_operator(serving):
        yield serving


@contextmanager
def no_operator(kube: Kube) -> Iterator[None]:
    """None runs in the body; there is one again afterwards, whatever happened."""
    kube.kubectl("scale", OPERATOR, "--replicas=0")
    gone = ("pod", "-l", "app.kubernetes.io/component=operator", "--timeout=60s")
    kube.kubectl("wait", "--for=delete", *gone)
    try:
        yield
    finally:
        operator_up(kube)


def operator_up(kube: Kube) -> None:
    kube.kubectl("scale", OPERATOR, "--replicas=1")
    kube.kubectl("rollout", "status", OPERATOR, "--timeout=120s")


def reported_digest(kube: Kube, pod: str) -> str:
    """What the hook in a pod says it serves with."""
    with kube.forward(f"pod/{pod}", 9477) as url, urllib.request.urlopen(f"{url}/status") as answer:
        return str(json.load(answer)["mapDigest"])


def own_template(kube: Kube) -> bool:
    """Whether nothing of a lane is in the pod template, and no pod has anything of it."""
    item = kube.get("deployment", stubs.WORKLOAD) or {}
    template = item["spec"]["template"]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    return (
        volumes == {"stub", "faults"}
        and "env" not in template["spec"]["containers"][0]
        and set(stubs.pods(kube).values()) == {""}
        and item["status"].get("readyReplicas") == stubs.REPLICAS
        and item["status"].get("updatedReplicas") == stubs.REPLICAS
    )


def until_noted(kube: Kube) -> None:
    """Until the workload says what a deletion of its lane means."""

    def look() -> tuple[bool, str]:
        item = kube.get("deployment", stubs.WORKLOAD) or {}
        found = item["metadata"]["annotations"].get(names.ANNOTATION_DELETION_POLICY)
        return found == "Restore", str(found)

    kube.until("the workload knows the policy", look, 60, every=0.5)


def test_60_seconds_after_a_map_is_deleted_in_its_run_nothing_of_it_is_left(serving: Kube) -> None:
    name = f"{stubs.LANE}.short"
    stubs.apply(serving, stubs.config_map("faults", {"counting": "never-ready"}))
    stubs.apply(
        serving, stubs.traffic_class("short", "stub-a/"), stubs.expert_map(stubs.LANE, "short")
    )

    def boots() -> tuple[bool, str]:
        return engine_started(serving, name), "the engine did not start yet"

    serving.until("the run's engine starts", boots, 120, every=0.5)
    with untouched(serving):
        serving.kubectl("delete", f"em/{name}")

        def left() -> tuple[bool, str]:
            by_class = ("-l", "expertmaps.dev/traffic-class=short", "-o", "name")
            by_map = ("-l", f"expertmaps.dev/map={name}", "-o", "name")
            found = serving.kubectl("get", "jobs,pods,configmaps", *by_class)
            found += serving.kubectl("get", "jobs,pods", *by_map)
            return not found.strip(), found

        serving.until("nothing of it is left", left, 60, every=1)
    serving.kubectl("delete", "tc/short")
    stubs.mend(serving)


def test_the_map_of_a_deleted_class_is_collected_when_no_template_names_it(serving: Kube) -> None:
    digest = stubs.digest(serving, "q")
    config_map = names.map_configmap(stubs.LANE, digest)
    item = serving.get("deployment", stubs.WORKLOAD) or {}
    sets = serving.list("replicasets", f"app={stubs.WORKLOAD}")
    named = any(config_map in json.dumps(one["spec"]) for one in (item, *sets))
    with untouched(serving):
        serving.kubectl("delete", f"em/{stubs.LANE}.stub-q")

        def left() -> tuple[bool, str]:
            there = serving.get("configmap", config_map) is not None
            return there == named, f"there: {there}, named by a template: {named}"

        serving.until("the map's ConfigMap is gone", left, 60, every=1)


def test_a_lane_that_was_deleted_serves_on_without_operator_and_resources(down: Kube) -> None:
    digest = stubs.digest(down, "a")
    with untouched(down):
        maps = [f"em/{stubs.LANE}.stub-{name}" for name in stubs.TEXTS]
        down.kubectl("delete", f"lane/{stubs.LANE}", *maps, "--ignore-not-found")
    pod = sorted(stubs.pods(down))[0]
    down.kubectl("delete", "pod", pod)
    down.kubectl("rollout", "status", f"deployment/{stubs.WORKLOAD}", "--timeout=120s")
    for name, mounted in stubs.pods(down).items():
        assert mounted == digest
        assert reported_digest(down, name) == digest
    with untouched(down):
        operator_up(down)
        # By the time it has measured a map it has looked at every workload.
        stubs.apply(down, *stubs.resources())
        down.kubectl("wait", "--for=condition=Ready", f"em/{stubs.LANE}.stub-a", "--timeout=300s")


def test_restore_gives_the_workload_its_own_template_back(serving: Kube) -> None:
    stubs.edit(serving, deletionPolicy="Restore")

    with untouched(serving):
        until_noted(serving)
    serving.kubectl("delete", f"lane/{stubs.LANE}")
    serving.until("the own template is back", lambda: (own_template(serving), ""), 120, every=1)
    item = serving.get("deployment", stubs.WORKLOAD) or {}
    assert names.LABEL_LANE not in item["metadata"]["labels"]
    events = serving.kubectl("get", "events", "--field-selector", "reason=TemplateRestored")
    assert stubs.WORKLOAD in events


def test_restore_holds_when_no_operator_ran_at_the_deletion(serving: Kube) -> None:
    stubs.edit(serving, deletionPolicy="Restore")
    until_noted(serving)
    with no_operator(serving):
        serving.kubectl("delete", f"lane/{stubs.LANE}")
        assert set(stubs.pods(serving).values()) == {stubs.digest(serving, "a")}
    serving.until("the own template is back", lambda: (own_template(serving), ""), 180, every=1)


def test_uninstalling_leaves_lanes_serving(serving: Kube, settings: Settings) -> None:
    with untouched(serving):
        serving.run("helm", "uninstall", "expertmaps", "-n", serving.namespace, "--wait")
        assert serving.get("lane", stubs.LANE) is not None
        assert set(stubs.pods(serving).values()) == {stubs.digest(serving, "a")}
        deploy.operator(serving, settings)
        # Only the new operator can look at this generation of the lane.
        stubs.edit(serving, rollback={"holdDuration": "3h"})
        stubs.until(serving, SERVING)
        assert condition(serving.get("lane", stubs.LANE), "Verified")["status"] == "True"
