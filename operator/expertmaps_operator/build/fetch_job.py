"""The Job that makes a missing map ConfigMap again from the store: the runner without an engine."""

from __future__ import annotations

from typing import Any

from rowmap_jobs.formats import names
from rowmap_jobs.formats.run import Owner, RunSpec

from ..api.expertlane import ExpertLane
from ..snapshot import Manifest, Settings
from . import runner
from .hook_configmap import owner_reference

DEADLINE_SECONDS = 600
TTL_SECONDS = 600
BACKOFF_LIMIT = 2
RUNNER = runner.RUNNER


def workload_owner(workload: Manifest) -> Owner:
    """The workload as the owner of the ConfigMap that a run creates."""
    return Owner.model_validate(owner_reference(workload))


def fetch_job(
    lane: ExpertLane, workload: Manifest, digest: str, settings: Settings
) -> dict[str, Any]:
    """The Job for one digest; its name is fixed by lane and digest, so there is only one."""
    name = names.fetch_job(lane.metadata.name, digest)
    locations = {"store": lane.spec.store.s3}
    spec = RunSpec(
        kind="Fetch",
        namespace=lane.metadata.namespace,
        run=name,
        lane=lane.metadata.name,
        store=lane.spec.store.s3,
        owner=workload_owner(workload),
        digest=digest,
    )
    labels = {
        names.LABEL_LANE: lane.metadata.name,
        names.LABEL_DIGEST: names.hex16(digest),
        names.LABEL_ROLE: names.ROLE_FETCH,
    }
    annotations = {
        names.ANNOTATION_MAP_DIGEST: digest,
        names.ANNOTATION_RUN_SPEC_HASH: runner.run_spec_hash(spec),
    }
    template = (workload.get("spec") or {}).get("template") or {}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": lane.spec.store.s3.service_account_name
        or settings.runner_service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [
            runner.runner_container(RUNNER, spec, locations, settings, role="fetch"),
        ],
        "volumes": runner.runner_volumes(locations),
    }
    if secrets := (template.get("spec") or {}).get("imagePullSecrets"):
        pod["imagePullSecrets"] = secrets
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": lane.metadata.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": "ExpertLane",
                    "name": lane.metadata.name,
                    "uid": lane.metadata.uid,
                    "controller": True,
                }
            ],
        },
        "spec": {
            "backoffLimit": BACKOFF_LIMIT,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "podFailurePolicy": runner.failure_policy([RUNNER]),
            "template": {
                "metadata": {
                    "labels": {**labels, **runner.NO_MESH_LABELS},
                    "annotations": dict(runner.NO_MESH_ANNOTATIONS),
                },
                "spec": pod,
            },
        },
    }
