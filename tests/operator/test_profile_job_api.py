"""A real API server takes the Jobs as they are built."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from expertmaps_operator.build.fetch_job import fetch_job
from expertmaps_operator.build.profile_job import ProfileParts, profile_job
from tests.api.apiserver import ApiServer, api_server, namespace  # noqa: F401
from tests.operator import expertmap_world as world

pytestmark = pytest.mark.api


def create(server: ApiServer, space: str, manifest: Any) -> Any:
    """What the API server makes of a Job, with fields that it does not know refused."""
    body = {**manifest, "metadata": {**manifest["metadata"], "namespace": space}}
    api = client.BatchV1Api(server.client())
    return api.create_namespaced_job(space, body, field_validation="Strict")


def rich_workload() -> dict[str, Any]:
    """A lane with the unusual parts of a pod template."""
    workload = world.workload()
    spec = workload["spec"]["template"]["spec"]
    spec.update(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet", hostIPC=True)
    spec["securityContext"] = {"fsGroup": 1000, "runAsUser": 0}
    spec["volumes"].append(
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
    )
    engine = world.engine_of(workload)
    engine["volumeMounts"].append({"name": "token", "mountPath": "/token"})
    engine["readinessProbe"]["failureThreshold"] = 1
    engine["lifecycle"]["postStart"] = {"exec": {"command": ["true"]}}
    engine["name"] = "runner"
    return workload


@pytest.mark.parametrize(
    ("workload", "container"), [(world.workload(), "vllm"), (rich_workload(), "runner")]
)
def test_profile_job(
    api_server: ApiServer,  # noqa: F811
    namespace: str,  # noqa: F811
    workload: dict[str, Any],
    container: str,
) -> None:
    parts = ProfileParts(
        map=world.expert_map(),
        lane=world.lane(containerName=container),
        traffic_class=world.traffic_class(
            transcripts=world.s3("transcripts", caBundleConfigMapRef={"name": "ca"})
        ),
        workload=workload,
        settings=world.settings(),
        other_map_digests={"prose": world.row_map().digest},
        frozen_geometry=world.row_map().geometry,
    )
    job = create(api_server, namespace, profile_job(parts, world.FIRST_RUN))
    engine = job.spec.template.spec.init_containers[-1]
    assert engine.restart_policy == "Always"
    assert job.spec.pod_replacement_policy == "Failed"


def test_fetch_job(api_server: ApiServer, namespace: str) -> None:  # noqa: F811
    job = fetch_job(world.lane(), world.workload(), world.row_map().digest, world.settings())
    assert create(api_server, namespace, job).metadata.uid
