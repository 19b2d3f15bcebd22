"""From events to keys."""

from __future__ import annotations

from typing import Any

from expertmaps_operator.observe.index import Index, workload_of_pod
from expertmaps_operator.observe.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    EXPERT_LANE,
    EXPERT_MAP,
    JOB,
    POD,
    TRAFFIC_CLASS,
    Resource,
)
from expertmaps_operator.queue import Key
from rowmap_jobs.formats import names
from tests.operator_edges.objects import (
    NS,
    deployment,
    expert_map,
    job,
    lane,
    map_config_map,
    owned_by,
    pod,
    traffic_class,
)

LANE = Key("ExpertLane", NS, "lane-a")
AGENT = Key("ExpertMap", NS, "lane-a.agent")
PROSE = Key("ExpertMap", NS, "lane-a.prose")
OTHER = Key("ExpertMap", NS, "lane-b.agent")
CLASS = Key("TrafficClass", NS, "agent")


def filled() -> Index:
    index = Index()
    index.keys(EXPERT_LANE, lane(), deleted=False)
    for name in ("lane-a.agent", "lane-a.prose", "lane-b.agent"):
        index.keys(EXPERT_MAP, expert_map(name), deleted=False)
    return index


def keys(resource: Resource, manifest: dict[str, Any], deleted: bool = False) -> set[Key]:
    return filled().keys(resource, manifest, deleted)


def test_a_lane_looks_at_itself_and_its_maps() -> None:
    assert keys(EXPERT_LANE, lane()) == {LANE, AGENT, PROSE}


def test_a_map_looks_at_itself_its_lane_and_its_class() -> None:
    assert keys(EXPERT_MAP, expert_map()) == {LANE, AGENT, CLASS}


def test_a_class_looks_at_all_that_name_it() -> None:
    assert keys(TRAFFIC_CLASS, traffic_class()) == {CLASS, LANE, AGENT, OTHER}


def test_a_workload_is_found_by_reference_and_by_label() -> None:
    known = {**deployment(), "status": {"observedGeneration": 1}}
    assert keys(DEPLOYMENT, known) == {LANE}
    assert keys(DEPLOYMENT, deployment()) == {LANE, AGENT, PROSE}
    claimed = {**deployment("another"), "status": {"observedGeneration": 1}}
    claimed["metadata"]["labels"] = {names.LABEL_LANE: "lane-b"}
    left = Key("Deployment", NS, "another")
    assert keys(DEPLOYMENT, claimed) == {Key("ExpertLane", NS, "lane-b"), left}
    ours = {**deployment(), "status": {"observedGeneration": 1}}
    ours["metadata"]["labels"] = {names.LABEL_LANE: "lane-a"}
    assert keys(DEPLOYMENT, ours) == {LANE}
    assert keys(DEPLOYMENT, {**deployment("foreign"), "status": {"observedGeneration": 1}}) == set()


def test_pods_are_found_through_their_replica_set_or_our_labels() -> None:
    assert keys(POD, pod("server-5d4f-x")) == {LANE}
    stray = pod("stray")
    stray["metadata"]["ownerReferences"] = owned_by("StatefulSet", "server")
    assert keys(POD, stray) == set()
    measured = pod("p")
    measured["metadata"]["labels"] = {names.LABEL_MAP: "lane-a.agent", names.LABEL_LANE: "lane-a"}
    assert keys(POD, measured) == {AGENT}
    fetched = pod("f")
    fetched["metadata"]["labels"] = {names.LABEL_ROLE: "fetch", names.LABEL_LANE: "lane-a"}
    assert keys(POD, fetched) == {LANE}


def test_workload_of_pod_wants_the_hash_in_the_name() -> None:
    assert workload_of_pod(pod("x")) == "server"
    odd = pod("x")
    odd["metadata"]["labels"]["pod-template-hash"] = "other"
    assert workload_of_pod(odd) == ""
    assert workload_of_pod({"metadata": {}}) == ""


def test_a_finished_profile_wakes_every_map_that_may_wait_for_its_slot() -> None:
    running = job("j", "profile", {names.LABEL_MAP: "lane-a.agent", names.LABEL_LANE: "lane-a"})
    running["metadata"]["namespace"] = NS
    assert keys(JOB, running) == {AGENT}
    assert keys(JOB, running, deleted=True) == {AGENT, PROSE, OTHER}
    done = {**running, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    assert keys(JOB, done) == {AGENT, PROSE, OTHER}


def test_a_config_map_of_ours_looks_at_its_lane() -> None:
    ours = map_config_map()
    ours["metadata"]["namespace"] = NS
    assert keys(CONFIG_MAP, ours) == {LANE, AGENT, PROSE}
    assert keys(CONFIG_MAP, {"metadata": {"name": "x", "namespace": NS}}) == set()


def test_what_a_lane_left_is_found_through_the_workload() -> None:
    index = filled()
    left = Key("Deployment", NS, "server")
    assert left in index.keys(EXPERT_LANE, lane(), deleted=True)
    ours = map_config_map()
    ours["metadata"]["namespace"] = NS
    ours["metadata"]["ownerReferences"] = owned_by("Deployment", "server")
    assert left in index.keys(CONFIG_MAP, ours, deleted=False)


def test_what_is_deleted_is_forgotten() -> None:
    index = filled()
    assert LANE in index.keys(EXPERT_LANE, lane(), deleted=True)
    assert index.keys(POD, pod("x"), deleted=False) == set()
    index.keys(EXPERT_MAP, expert_map("lane-a.prose"), deleted=True)
    assert index.keys(EXPERT_LANE, lane(), deleted=False) == {LANE, AGENT}


def test_nonsense_is_no_error() -> None:
    index = Index()
    broken = {"metadata": {"name": "x", "namespace": NS}, "spec": "text"}
    assert index.keys(EXPERT_MAP, broken, deleted=False) == {Key("ExpertMap", NS, "x")}
    assert index.keys(EXPERT_LANE, broken, deleted=False) == {Key("ExpertLane", NS, "x")}
