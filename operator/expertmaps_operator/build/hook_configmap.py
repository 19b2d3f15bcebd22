"""The ConfigMap that holds the hook's files for one lane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rowmap_jobs.formats import names

from ..snapshot import HookFiles, Manifest


def owner_reference(workload: Manifest) -> dict[str, str]:
    """A plain (not controlling) reference to the workload.

    What a pod template names must live as long as the workload and no shorter: a lane's resources
    may be deleted while its pods still have to restart.
    """
    return {
        "apiVersion": str(workload.get("apiVersion") or "apps/v1"),
        "kind": str(workload.get("kind") or "Deployment"),
        "name": str(workload["metadata"]["name"]),
        "uid": str(workload["metadata"]["uid"]),
    }


def hook_config_map(
    lane_name: str, namespace: str, workload: Mapping[str, Any], hook: HookFiles
) -> Manifest:
    """The immutable ConfigMap with the hook's files, named by their digest."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names.hook_configmap(lane_name, hook.digest),
            "namespace": namespace,
            "labels": {
                names.LABEL_LANE: lane_name,
                names.LABEL_ROLE: names.ROLE_HOOK,
                names.LABEL_DIGEST: names.hex16(hook.digest),
            },
            "annotations": {names.ANNOTATION_HOOK_DIGEST: hook.digest},
            "ownerReferences": [owner_reference(workload)],
        },
        "immutable": True,
        "data": dict(hook.data),
    }
