"""The Job that makes a missing map ConfigMap again."""

from __future__ import annotations

import json

from expertmaps_operator.build.fetch_job import fetch_job
from rowmap_jobs.formats import names
from rowmap_jobs.formats.run import RunSpec
from tests.operator import expertmap_world as world

DIGEST = world.row_map().digest


def test_fetch_job() -> None:
    job = fetch_job(world.lane(), world.workload(), DIGEST, world.settings())
    json.dumps(job)
    assert job["metadata"]["name"] == f"lane-a-fetch-{names.hex16(DIGEST)}"
    assert job == fetch_job(world.lane(), world.workload(), DIGEST, world.settings())
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == (
        "ExpertLane",
        world.LANE_UID,
        True,
    )
    assert job["spec"]["ttlSecondsAfterFinished"] == 600
    assert job["metadata"]["labels"][names.LABEL_ROLE] == names.ROLE_FETCH


def test_only_the_runner_runs() -> None:
    pod = fetch_job(world.lane(), world.workload(), DIGEST, world.settings())["spec"]["template"][
        "spec"
    ]
    (runner,) = pod["containers"]
    assert "initContainers" not in pod
    assert runner["args"] == ["fetch"]
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert "/etc/expertmaps/s3/store" in {mount["mountPath"] for mount in runner["volumeMounts"]}
    raw = next(item["value"] for item in runner["env"] if item["name"] == names.ENV_RUN)
    spec = RunSpec.from_bytes(raw.encode(), "env")
    assert (spec.kind, spec.digest, spec.owner.uid) == ("Fetch", DIGEST, world.WORKLOAD_UID)
    assert spec.run == f"lane-a-fetch-{names.hex16(DIGEST)}"


def test_identity_of_the_store() -> None:
    lane = world.lane(store=world.s3("store", credentialsSecretRef=None, serviceAccountName="aws"))
    pod = fetch_job(lane, world.workload(), DIGEST, world.settings())["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "aws"
    assert not any("secret" in volume for volume in pod["volumes"])
