"""Small facts about raw objects that several readers need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rowmap_jobs.formats.names import (
    ENV_STATUS_PORT,
    LABEL_LANE,
    LABEL_MAP,
    LABEL_ROLE,
    ROLE_FETCH,
    ROLE_PROFILE,
    VOLUME_HOOK,
)

from ..api.reasons import RolloutState
from .kube import Manifest

_MOVING = {
    RolloutState.CANARY.value,
    RolloutState.ROLLING.value,
    RolloutState.ROLLING_BACK.value,
}


def name_of(manifest: Mapping[str, Any]) -> str:
    return str((manifest.get("metadata") or {}).get("name", ""))


def uid_of(manifest: Mapping[str, Any]) -> str:
    return str((manifest.get("metadata") or {}).get("uid", ""))


def labels_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    return dict((manifest.get("metadata") or {}).get("labels") or {})


def controller_of(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The owner reference of the object's controller."""
    owners = (manifest.get("metadata") or {}).get("ownerReferences") or []
    return next((owner for owner in owners if owner.get("controller")), None)


def controlled_by(manifests: Iterable[Manifest], uids: set[str]) -> tuple[Manifest, ...]:
    """Those whose controller has one of the UIDs, oldest name first."""
    found = (item for item in manifests if str((controller_of(item) or {}).get("uid", "")) in uids)
    return tuple(sorted(found, key=name_of))


def selector_of(workload: Mapping[str, Any]) -> str:
    """A workload's spec.selector as the query parameter labelSelector."""
    selector = (workload.get("spec") or {}).get("selector") or {}
    terms = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    for term in selector.get("matchExpressions") or []:
        key, operator = term.get("key", ""), term.get("operator", "")
        values = ",".join(term.get("values") or [])
        terms.append(
            {
                "In": f"{key} in ({values})",
                "NotIn": f"{key} notin ({values})",
                "Exists": f"{key}",
                "DoesNotExist": f"!{key}",
            }[operator]
        )
    return ",".join(sorted(terms))


def workload_name(lane: Mapping[str, Any]) -> str:
    """The workload that an ExpertLane names, read without trust in its spec."""
    ref = (lane.get("spec") or {}).get("workloadRef") or {}
    return str(ref.get("name", "")) if isinstance(ref, Mapping) else ""


def config_maps_of_template(manifest: Mapping[str, Any]) -> set[str]:
    """ConfigMaps that the pod template of a workload, ReplicaSet or Job mounts."""
    template = (manifest.get("spec") or {}).get("template") or {}
    return config_maps_of_pod(template)


def config_maps_of_pod(pod: Mapping[str, Any]) -> set[str]:
    """ConfigMaps that a pod mounts."""
    volumes = (pod.get("spec") or {}).get("volumes") or []
    sources = (volume.get("configMap") or {} for volume in volumes)
    return {str(source["name"]) for source in sources if source.get("name")}


def finished(job: Mapping[str, Any]) -> bool:
    """Whether a Job is complete or has failed."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(
        item.get("type") in {"Complete", "Failed"} and item.get("status") == "True"
        for item in conditions
    )


def is_profile(job: Mapping[str, Any]) -> bool:
    return labels_of(job).get(LABEL_ROLE) == ROLE_PROFILE


def is_profile_of(job: Mapping[str, Any], expert_map: str) -> bool:
    return is_profile(job) and labels_of(job).get(LABEL_MAP) == expert_map


def is_fetch_of(job: Mapping[str, Any], lane: str) -> bool:
    labels = labels_of(job)
    return labels.get(LABEL_ROLE) == ROLE_FETCH and labels.get(LABEL_LANE) == lane


def is_moving(lane: Mapping[str, Any]) -> bool:
    """Whether a lane's rollout, or its way back, is under way."""
    rollout = (lane.get("status") or {}).get("rollout")
    return isinstance(rollout, dict) and rollout.get("state") in _MOVING


def status_address(pod: Mapping[str, Any], default_port: int) -> tuple[str, str, int] | None:
    """Where to ask a pod for its hook's status; None when there is nobody to ask.

    The port is the one in the pod's own environment: the lane's spec may be newer than the pod.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    ip = status.get("podIP")
    if not ip or status.get("phase") in {"Succeeded", "Failed"}:
        return None
    if not any(volume.get("name") == VOLUME_HOOK for volume in spec.get("volumes") or []):
        return None
    return name_of(pod), str(ip), _own_port(spec, default_port)


def _own_port(spec: Mapping[str, Any], default: int) -> int:
    for container in spec.get("containers") or []:
        for item in container.get("env") or []:
            text = str(item.get("value", ""))
            if item.get("name") == ENV_STATUS_PORT and text.isdecimal() and 0 < int(text) < 65536:
                return int(text)
    return default
