"""Failed rollouts against a real API server and its Deployment controller: a broken pod is replaced
first, and no second one is taken while it is not ready.
"""

from __future__ import annotations

import pytest

from expertmaps_operator.build import workload_fields as fields
from rowmap_jobs.formats import names
from tests.api.apiserver import (  # noqa: F401
    ApiServer,
    api_server,
    controller_manager,
    namespace,
)
from tests.operator.lane_cluster import Cluster, adopted, booted
from tests.operator.lane_objects import AGENT, HOOK, PROSE

pytestmark = pytest.mark.api


def rolled_back(cluster: Cluster) -> bool:
    condition = cluster.said().get("RolledBack", ("", "", ""))[0]
    return cluster.state() == "RolledBack" and condition == "True" and cluster.unproven() == 0


@pytest.mark.parametrize("how", ["hook", "crash"])
@pytest.mark.parametrize(("replicas", "position"), [(1, 1), (3, 1), (3, 2)])
def test_a_failing_pod_brings_the_last_map_back(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
    replicas: int,
    position: int,
    how: str,
) -> None:
    cluster = adopted(controller_manager, namespace, replicas)
    before = set(cluster.serving())
    cluster.bad[(PROSE.digest, position)] = how
    cluster.switch("prose")
    cluster.until("rolled back", lambda: rolled_back(cluster))
    cluster.until("held", lambda: cluster.said()["Progressing"][1] == "DigestHeld")
    assert cluster.most_not_ready <= 1
    untouched = before & set(cluster.serving())
    assert len(untouched) == replicas - position, "only pods that took the new map were replaced"
    workload = cluster.workload()
    assert fields.in_template(workload) == (AGENT.digest, HOOK.digest)
    assert not fields.gate_in_use(workload) and "minReadySeconds" not in workload["spec"]
    assert cluster.ready() and cluster.lane.status.active is not None
    assert cluster.lane.status.active.traffic_class == "agent"


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_failed_first_adoption_gives_the_own_template_back(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
    replicas: int,
) -> None:
    cluster = booted(controller_manager, namespace, replicas)
    before, template = set(cluster.serving()), cluster.workload()["spec"]["template"]
    cluster.bad[(AGENT.digest, 1)] = "crash"
    cluster.until("rolled back", lambda: rolled_back(cluster))
    assert cluster.most_not_ready <= 1
    assert len(before & set(cluster.serving())) == replicas - 1
    workload = cluster.workload()
    assert workload["spec"]["template"] == template
    assert workload["metadata"]["labels"][names.LABEL_LANE] == "lane-a"
    assert not fields.gate_in_use(workload) and "minReadySeconds" not in workload["spec"]
    assert cluster.said()["Ready"][:2] == ("False", "ServingUnhooked")
    cluster.bad.clear()
    cluster.edit(rollback={"holdDuration": "2h"})
    cluster.until("adopted", cluster.ready)


def test_paused_freezes_the_way_back(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = adopted(controller_manager, namespace, 3)
    cluster.bad[(PROSE.digest, 2)] = "crash"
    cluster.switch("prose")
    cluster.until("rolling back", lambda: cluster.state() == "RollingBack")
    cluster.turn()
    cluster.edit(paused=True)
    seen: list[frozenset[str]] = []

    def still() -> bool:
        seen.append(frozenset(cluster.serving()))
        return len(seen) >= 40 and len(set(seen[-40:])) == 1

    cluster.until("nothing moves any more", still)
    assert fields.gate_closed(cluster.workload())
    assert cluster.state() == "RollingBack" and len(cluster.serving()) >= 2
    cluster.edit(paused=False)
    cluster.until("rolled back", lambda: rolled_back(cluster))
    assert cluster.most_not_ready <= 1


def test_the_controller_alone_replaces_the_broken_pod_first_and_then_waits(
    controller_manager: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
) -> None:
    cluster = adopted(controller_manager, namespace, 3)
    cluster.bad.update({(PROSE.digest, 2): "crash", (AGENT.digest, 4): "stuck"})
    cluster.switch("prose")

    def opened_or_replaced() -> bool:
        # With the gate still closed the controller may replace a pod that is not ready at once.
        workload = cluster.workload()
        opened = fields.gate_in_use(workload) and not fields.gate_closed(workload)
        replaced = len(cluster.order[AGENT.digest]) == 4
        return cluster.state() == "RollingBack" and (opened or replaced)

    cluster.until("gate opened, or the broken pod replaced", opened_or_replaced)
    serving = set(cluster.serving())
    assert len(serving) == 2
    # From here on there is no operator.
    for _ in range(150):
        cluster.kubelet()
        cluster.unproven()
    assert set(cluster.serving()) == serving and cluster.most_not_ready == 1
    assert len(cluster.order[AGENT.digest]) == 4, "the broken pod was replaced, and no other"
