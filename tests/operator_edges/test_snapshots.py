"""Snapshots read from the stand-in API server."""

from __future__ import annotations

from collections import Counter
from typing import Any

from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.observe.facts import selector_of, status_address
from expertmaps_operator.observe.kube import Kube
from expertmaps_operator.observe.snapshots import Observer
from expertmaps_operator.observe.status_port import StatusPorts
from expertmaps_operator.snapshot import (
    ClassSnapshot,
    HookFiles,
    Invalid,
    LaneSnapshot,
    MapSnapshot,
    OrphanSnapshot,
    PodReport,
    Settings,
)
from rowmap_jobs.formats import names
from tests.operator_edges.fake_api import FakeApi
from tests.operator_edges.objects import (
    APPS,
    BATCH,
    CORE,
    CUSTOM,
    NS,
    deployment,
    expert_map,
    job,
    lane,
    map_config_map,
    owned_by,
    pod,
    replica_set,
    row_map,
    traffic_class,
)

SETTINGS = Settings("runner", "account", "Always", 1, 1, HookFiles("d", {}, (), "1"))


def observer(kube: Kube, **more: Any) -> Observer:
    def reader(name: str, ip: str, port: int) -> PodReport:
        return PodReport(None, f"{name}@{ip}:{port}", reachable=False)

    given: dict[str, Any] = {"probe": lambda _: None, "dry_run": lambda *_: (), **more}
    return Observer(kube, SETTINGS, [NS, "second"], StatusPorts(reader), **given)


def fill(api: FakeApi) -> None:
    api.put(f"{CUSTOM}/expertlanes/lane-a", lane())
    api.put(f"{CUSTOM}/expertmaps/lane-a.agent", expert_map())
    api.put(f"{CUSTOM}/expertmaps/lane-a.prose", expert_map("lane-a.prose"))
    api.put(f"{CUSTOM}/expertmaps/lane-b.agent", expert_map("lane-b.agent"))
    api.put(f"{CUSTOM}/trafficclasses/agent", traffic_class())
    api.put(f"{APPS}/deployments/server", deployment())
    api.put(f"{APPS}/replicasets/server-5d4f", replica_set())
    api.put(f"{CORE}/pods/server-5d4f-a", pod("server-5d4f-a", "10.0.0.1"))
    api.put(f"{CORE}/pods/server-5d4f-b", pod("server-5d4f-b"))
    api.put(f"{CORE}/pods/server-5d4f-c", pod("server-5d4f-c", "10.0.0.3", hooked=False))
    stray = pod("stray", "10.0.0.4")
    stray["metadata"]["ownerReferences"] = []
    api.put(f"{CORE}/pods/stray", stray)
    ours = map_config_map()
    api.put(f"{CORE}/configmaps/{ours['metadata']['name']}", ours)
    hook = {"metadata": {"labels": {names.LABEL_ROLE: "hook", names.LABEL_LANE: "lane-a"}}}
    api.put(f"{CORE}/configmaps/lane-a-hook", hook)
    api.put(f"{CORE}/configmaps/foreign", {"data": {"x": "y"}})
    mine = {names.LABEL_MAP: "lane-a.agent", names.LABEL_LANE: "lane-a"}
    other = {names.LABEL_MAP: "lane-a.prose", names.LABEL_LANE: "lane-a"}
    api.put(f"{BATCH}/jobs/run", job("run", "profile", mine))
    api.put(f"{BATCH}/jobs/old", job("old", "profile", mine, finished=True))
    api.put(f"{BATCH}/jobs/prose", job("prose", "profile", other))
    api.put(f"{BATCH}/jobs/fetch", job("fetch", "fetch", {names.LABEL_LANE: "lane-a"}))
    for owner in ("run", "prose", "fetch"):
        there = {"metadata": {"labels": {names.LABEL_ROLE: "x"}}}
        there["metadata"]["ownerReferences"] = owned_by("Job", owner)  # type: ignore[assignment]
        api.put(f"{CORE}/pods/{owner}-pod", there)
    elsewhere = "/apis/batch/v1/namespaces/second/jobs/far"
    api.put(elsewhere, job("far", "profile", {names.LABEL_MAP: "x.y"}))
    moving = {**lane("far"), "status": {"rollout": {"state": "RollingBack"}}}
    moving["metadata"]["namespace"] = "second"
    api.put("/apis/expertmaps.dev/v1alpha1/namespaces/second/expertlanes/far", moving)


def name_list(manifests: Any) -> list[str]:
    return [item["metadata"]["name"] for item in manifests]


def test_a_map(api: FakeApi, kube: Kube) -> None:
    fill(api)
    seen = observer(kube).observe("ExpertMap", NS, "lane-a.agent")
    assert seen is not None
    found = seen.snapshot
    assert isinstance(found, MapSnapshot)
    assert isinstance(found.lane, ExpertLane)
    assert found.traffic_class is not None
    assert [one.metadata.name for one in found.sibling_maps] == ["lane-a.prose"]
    assert found.workload is not None
    assert name_list(found.jobs) == ["old", "run"]
    assert name_list(found.pods) == ["run-pod"]
    assert list(found.map_objects) == [row_map().digest]
    assert (found.slots.profiles, found.slots.rollouts) == (3, 1)
    assert found.lane_profiles == 2


def test_a_lane(api: FakeApi, kube: Kube) -> None:
    fill(api)
    seen = observer(kube).observe("ExpertLane", NS, "lane-a")
    assert seen is not None
    found = seen.snapshot
    assert isinstance(found, LaneSnapshot)
    assert [one.metadata.name for one in found.maps] == ["lane-a.agent", "lane-a.prose"]
    assert found.traffic_class_exists
    assert name_list(found.replica_sets) == ["server-5d4f"]
    reports = {
        item.manifest["metadata"]["name"]: item.report and item.report.error for item in found.pods
    }
    assert reports == {
        "server-5d4f-a": "server-5d4f-a@10.0.0.1:9477",
        "server-5d4f-b": None,
        "server-5d4f-c": None,
    }
    assert found.hook_config_maps == {"lane-a-hook"}
    assert name_list(found.jobs) == ["fetch"]
    assert name_list(found.job_pods) == ["fetch-pod"]
    assert found.dry_run_conflicts == ()


def test_each_list_is_asked_for_once(api: FakeApi, kube: Kube) -> None:
    fill(api)
    observer(kube).observe("ExpertLane", NS, "lane-a")
    asked = Counter((one.path, one.query.get("labelSelector")) for one in api.requests)
    assert max(asked.values()) == 1
    assert api.writes() == []


def test_a_class(api: FakeApi, kube: Kube) -> None:
    fill(api)
    seen = observer(kube).observe("TrafficClass", NS, "agent")
    assert seen is not None
    assert isinstance(seen.snapshot, ClassSnapshot)
    assert [one.metadata.name for one in seen.snapshot.maps] == ["lane-a.agent", "lane-b.agent"]


def test_what_is_gone_is_none(api: FakeApi, kube: Kube) -> None:
    assert observer(kube).observe("ExpertLane", NS, "lane-a") is None


def test_what_is_missing_or_unreadable_is_said(api: FakeApi, kube: Kube) -> None:
    api.put(f"{CUSTOM}/expertmaps/lane-a.agent", expert_map())
    seen = observer(kube).observe("ExpertMap", NS, "lane-a.agent")
    assert seen is not None
    assert isinstance(seen.snapshot, MapSnapshot)
    assert seen.snapshot.lane is None
    assert seen.snapshot.traffic_class is None
    api.put(f"{CUSTOM}/expertlanes/lane-a", lane(engine="SGLang"))
    broken = observer(kube).observe("ExpertLane", NS, "lane-a")
    assert broken is not None
    assert isinstance(broken.snapshot, LaneSnapshot)
    assert isinstance(broken.snapshot.lane, Invalid)
    again = observer(kube).observe("ExpertMap", NS, "lane-a.agent")
    assert again is not None
    assert isinstance(again.snapshot, MapSnapshot)
    assert isinstance(again.snapshot.lane, Invalid)


def test_the_probe_is_tried_as_it_says(api: FakeApi, kube: Kube) -> None:
    fill(api)
    tried: list[tuple[Any, ...]] = []

    def dry_run(*what: Any) -> tuple[str, ...]:
        tried.append(what)
        return ("a: b",)

    looking = observer(kube, probe=lambda _: ("server", "m", {"x": 1}), dry_run=dry_run)
    seen = looking.observe("ExpertLane", NS, "lane-a")
    assert seen is not None
    assert isinstance(seen.snapshot, LaneSnapshot)
    assert seen.snapshot.dry_run_conflicts == ("a: b",)
    assert tried == [(NS, "server", "m", {"x": 1})]


def test_a_paused_operator_sees_paused_lanes(api: FakeApi, kube: Kube) -> None:
    fill(api)
    seen = observer(kube, paused=True).observe("ExpertLane", NS, "lane-a")
    assert seen is not None
    assert isinstance(seen.snapshot, LaneSnapshot)
    assert isinstance(seen.snapshot.lane, ExpertLane)
    assert seen.snapshot.lane.spec.paused


def test_lists_come_in_pages(api: FakeApi, kube: Kube) -> None:
    path = f"{CORE}/pods"
    first = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "more"}}
    api.answer("GET", path, 200, first)
    api.answer("GET", path, 200, {"items": [{"metadata": {"name": "b"}}], "metadata": {}})
    from expertmaps_operator.observe.resources import POD

    found = kube.list_all(POD, NS)
    assert name_list(found) == ["a", "b"]
    assert found[0]["kind"] == "Pod"
    assert api.requests[1].query["continue"] == "more"


def test_selectors_of_workloads() -> None:
    selector = {
        "matchLabels": {"app": "x"},
        "matchExpressions": [
            {"key": "a", "operator": "In", "values": ["1", "2"]},
            {"key": "b", "operator": "NotIn", "values": ["3"]},
            {"key": "c", "operator": "Exists"},
            {"key": "d", "operator": "DoesNotExist"},
        ],
    }
    assert selector_of({"spec": {"selector": selector}}) == "!d,a in (1,2),app=x,b notin (3),c"


def test_the_port_is_the_pods_own() -> None:
    there = pod("p", "10.0.0.1")
    assert status_address(there, 9477) == ("p", "10.0.0.1", 9477)
    there["spec"]["containers"][0]["env"] = [{"name": names.ENV_STATUS_PORT, "value": "9500"}]
    assert status_address(there, 9477) == ("p", "10.0.0.1", 9500)
    there["spec"]["containers"][0]["env"] = [{"name": names.ENV_STATUS_PORT, "value": "99999"}]
    assert status_address(there, 9477) == ("p", "10.0.0.1", 9477)
    there["status"]["phase"] = "Failed"
    assert status_address(there, 9477) is None


def claimed(**annotations: str) -> dict[str, Any]:
    found = deployment()
    found["metadata"]["labels"] = {names.LABEL_LANE: "lane-a"}
    found["metadata"]["annotations"] = annotations
    return found


def test_a_workload_of_a_lane_that_is_gone(api: FakeApi, kube: Kube) -> None:
    fill(api)
    api.put(f"{APPS}/deployments/server", claimed())
    assert observer(kube).observe("Deployment", NS, "server") is None, "its lane is there"
    del api.objects[f"{CUSTOM}/expertlanes/lane-a"]
    ours = map_config_map()
    ours["metadata"]["ownerReferences"] = owned_by("Deployment", "server")
    api.put(f"{CORE}/configmaps/{ours['metadata']['name']}", ours)
    seen = observer(kube).observe("Deployment", NS, "server")
    assert seen is not None
    found = seen.snapshot
    assert isinstance(found, OrphanSnapshot)
    assert found.lane == "lane-a"
    # The hook's ConfigMap of the fixture has no owner: it is another workload's.
    assert [child.name for child in found.children] == [ours["metadata"]["name"]]


def test_a_workload_that_its_lane_does_not_name_any_more(api: FakeApi, kube: Kube) -> None:
    fill(api)
    api.put(f"{APPS}/deployments/server", claimed())
    api.put(f"{CUSTOM}/expertlanes/lane-a", lane(workloadRef={"name": "another"}))
    seen = observer(kube).observe("Deployment", NS, "server")
    assert seen is not None
    assert isinstance(seen.snapshot, OrphanSnapshot)
    assert observer(kube).observe("Deployment", NS, "nowhere") is None
