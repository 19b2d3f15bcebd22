"""Rollouts against a real API server and its Deployment controller; only kubelets are played."""

from __future__ import annotations

import pytest
import yaml

from expertmaps_operator.build import workload_fields as fields
from rowmap_jobs.formats import names
from tests.api.apiserver import (  # noqa: F401
    ApiServer,
    api_server,
    controller_manager,
    namespace,
)
from tests.operator.lane_cluster import Cluster, adopted
from tests.operator.lane_objects import PROSE, lane

pytestmark = pytest.mark.api


@pytest.mark.parametrize("replicas", [1, 3])
def test_adopt_and_switch(controller_manager: ApiServer, namespace: str, replicas: int) -> None:  # noqa: F811
    cluster = adopted(controller_manager, namespace, replicas)
    assert cluster.lane.status.active is not None
    cluster.switch("prose")
    cluster.turn()
    cluster.until("switched", cluster.ready)
    assert cluster.lane.status.active.traffic_class == "prose"
    assert cluster.most_unproven <= 1
    spec = cluster.workload()["spec"]
    assert spec["progressDeadlineSeconds"] == 600 and "minReadySeconds" not in spec
    name = names.workload_manager("lane-a")
    managers = [item["manager"] for item in cluster.workload()["metadata"]["managedFields"]]
    assert name in managers


def test_a_bad_second_pod_stops_and_the_way_back_works(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = adopted(controller_manager, namespace, 4, rollback={"enabled": False})
    cluster.bad[(PROSE.digest, 2)] = "hook"
    cluster.switch("prose")
    cluster.until("stopped", lambda: cluster.state() == "Stopped")
    assert fields.gate_closed(cluster.workload())
    for _ in range(10):
        cluster.kubelet()
        cluster.turn()
        assert cluster.unproven() <= 1
    cluster.switch("agent")
    cluster.turn()
    cluster.until("back", cluster.ready)
    assert cluster.most_unproven <= 1
    assert cluster.lane.status.active is not None
    assert cluster.lane.status.active.traffic_class == "agent"


def test_a_second_lane_is_told_that_the_workload_is_taken(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = adopted(controller_manager, namespace, 1)
    other = lane()
    meta = other.metadata.model_copy(update={"namespace": namespace, "name": "lane-b"})
    cluster.lane = other.model_copy(update={"metadata": meta})
    cluster.turn()
    assert cluster.said()["Ready"][:2] == ("False", "WorkloadClaimed")


def test_an_own_value_in_the_gate_is_never_forced_over(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = Cluster(controller_manager, namespace, 1)
    own = yaml.safe_load(cluster.manifest)
    own["spec"]["minReadySeconds"] = 3
    manifest = yaml.safe_dump(own)
    controller_manager.kubectl("-n", namespace, "apply", "-f", "-", stdin=manifest)
    cluster.until("booted", lambda: cluster.unproven() == 0, watch=False)
    for _ in range(3):
        cluster.turn()
    assert cluster.said()["Ready"][:2] == ("False", "UnsafeStrategy")
    assert "found 3 set by kubectl-client-side-apply" in cluster.said()["Ready"][2]
    assert cluster.workload()["spec"]["minReadySeconds"] == 3


def test_the_printed_patches_are_accepted(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = Cluster(controller_manager, namespace, 1)
    bad = yaml.safe_load(cluster.manifest)
    del bad["spec"]["strategy"]
    container = bad["spec"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "PYTHONPATH", "value": "/mine"}]
    controller_manager.kubectl("-n", namespace, "delete", "deployment", "vllm")
    manifest = yaml.safe_dump(bad)
    controller_manager.kubectl("-n", namespace, "apply", "-f", "-", stdin=manifest)
    cluster.until("booted", lambda: cluster.unproven() == 0, watch=False)
    for reason in ("UnsafeStrategy", "EnvConflict"):
        cluster.turn()
        status, found, message = cluster.said()["Ready"]
        assert (status, found) == ("False", reason)
        _, _, command = message.partition("kubectl ")
        head, _, body = command.partition(" -p ")
        controller_manager.kubectl(*head.split(), "-p", body.strip("'"))
    cluster.until("adopted", cluster.ready)
