"""The fields that a lane owns on its workload, as one server-side apply.

An apply holds all of them: what it leaves out is released. Nothing that differs from map to map is
in the environment, because the environment is part of what compile caches are keyed by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import canonical_json, sha256_digest

from ..api.expertlane import ExpertLane, MapInForce
from ..snapshot import Manifest
from . import workload_fields as fields

PYTHONPATH = "PYTHONPATH"
_MARK = names.ENV_MODE
"""The variable that tells the container of the model server."""


class Gate(StrEnum):
    """Whether the rollout may take its next pod."""

    CLOSED = "Closed"
    OPEN = "Open"
    RELEASED = "Released"


@dataclass(frozen=True)
class Claim:
    """Whose fields they are, and on what."""

    lane: str
    namespace: str
    workload: str
    container: str
    policy: str
    """What the deletion of the lane means."""
    min_ready_seconds: int
    """While the gate is open."""


def claim_of(lane: ExpertLane) -> Claim:
    """A lane's claim on its workload."""
    spec = lane.spec
    return Claim(
        lane=lane.metadata.name,
        namespace=lane.metadata.namespace,
        workload=spec.workload_ref.name,
        container=spec.container_name,
        policy=spec.deletion_policy,
        min_ready_seconds=spec.update.min_ready_seconds,
    )


def lane_env(status_port: str) -> dict[str, str]:
    """Variables of the hook; constant once a lane is adopted."""
    return {
        PYTHONPATH: names.HOOK_MOUNT,
        names.ENV_MODE: names.MODE_SERVE,
        names.ENV_MAP: names.MAP_PATH,
        names.ENV_DIR: names.RUN_DIR,
        names.ENV_STATUS_PORT: status_port,
    }


def own_python_path(holder: Manifest) -> bool:
    """Whether the user's own PYTHONPATH has the hook first, so that ours is not needed."""
    value = fields.env_value(holder, PYTHONPATH)
    return value is not None and value.startswith(names.HOOK_MOUNT + ":")


def workload_patch(
    lane: ExpertLane,
    workload: Manifest,
    in_force: MapInForce | None,
    items: Sequence[Mapping[str, str]],
    gate: Gate,
    status_port: str | None = None,
) -> Manifest:
    """All fields of the lane on its workload, for a map, a hook (its files: `items`) and a gate.

    Without a map the template is the user's own again; the claim of the workload stays.
    """
    port = status_port or str(lane.spec.hook.status_port)
    return _patch(claim_of(lane), workload, in_force, items, gate, port)


def _patch(
    claim: Claim,
    workload: Manifest,
    in_force: MapInForce | None,
    items: Sequence[Mapping[str, str]],
    gate: Gate,
    status_port: str,
) -> Manifest:
    holder = fields.container(workload, claim.container) or {}
    env = lane_env(status_port)
    if own_python_path(holder):
        del env[PYTHONPATH]
    spec: dict[str, Any] = dict(_gate_fields(claim, gate))
    if in_force is not None:
        spec["template"] = _template(claim, env, in_force, items)
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": claim.workload,
            "namespace": claim.namespace,
            "labels": {names.LABEL_LANE: claim.lane},
            # On the workload: it must be known when the lane is deleted while no operator runs.
            "annotations": {names.ANNOTATION_DELETION_POLICY: claim.policy},
        },
    }
    return {**patch, "spec": spec} if spec else patch


def _gate_fields(claim: Claim, gate: Gate) -> dict[str, int]:
    if gate is Gate.RELEASED:
        return {}
    closed = gate is Gate.CLOSED
    return {
        "minReadySeconds": fields.GATE_MIN_READY if closed else claim.min_ready_seconds,
        "progressDeadlineSeconds": fields.GATE_DEADLINE,
    }


def _template(
    claim: Claim,
    env: Mapping[str, str],
    in_force: MapInForce,
    items: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    name = claim.lane
    hook_source = {
        "name": names.hook_configmap(name, in_force.hook_digest),
        "optional": True,
        "items": [dict(item) for item in items],
    }
    map_source = {"name": names.map_configmap(name, in_force.digest), "optional": True}
    mounts = [
        {"name": names.VOLUME_HOOK, "mountPath": names.HOOK_MOUNT, "readOnly": True},
        {"name": names.VOLUME_MAP, "mountPath": names.MAP_MOUNT, "readOnly": True},
        {"name": names.VOLUME_RUN, "mountPath": names.RUN_DIR},
    ]
    return {
        "metadata": {
            "annotations": {
                names.ANNOTATION_MAP_DIGEST: in_force.digest,
                names.ANNOTATION_HOOK_DIGEST: in_force.hook_digest,
            }
        },
        "spec": {
            "containers": [
                {
                    "name": claim.container,
                    "env": [{"name": key, "value": value} for key, value in env.items()],
                    "volumeMounts": mounts,
                }
            ],
            "volumes": [
                {"name": names.VOLUME_HOOK, "configMap": hook_source},
                {"name": names.VOLUME_MAP, "configMap": map_source},
                {"name": names.VOLUME_RUN, "emptyDir": {}},
            ],
        },
    }


def closing_patch(lane: ExpertLane, workload: Manifest) -> Manifest | None:
    """The fields that are there now, with the gate closed; no pod is replaced by it.

    None when the template does not have all of them.
    """
    return _present(claim_of(lane), workload, Gate.CLOSED)


def opened_patch(lane: str, workload: Manifest) -> Manifest | None:
    """The fields that a lane which is gone left, without its gate; no pod is replaced by it.

    None when the template does not have all of them.
    """
    metadata = workload.get("metadata") or {}
    holders = (one for one in fields.containers(workload) if fields.named(one.get("env"), _MARK))
    claim = Claim(
        lane=lane,
        namespace=str(metadata.get("namespace")),
        workload=str(metadata.get("name")),
        container=str(next(holders, {}).get("name")),
        policy=str(fields.annotations_of(workload).get(names.ANNOTATION_DELETION_POLICY)),
        min_ready_seconds=0,
    )
    return _present(claim, workload, Gate.RELEASED)


def _present(claim: Claim, workload: Manifest, gate: Gate) -> Manifest | None:
    """The fields of a claim as the template has them, with this gate."""
    found = fields.in_template(workload)
    holder = fields.container(workload, claim.container)
    if found is None or holder is None:
        return None
    in_force = MapInForce(traffic_class="", digest=found[0], hook_digest=found[1])
    config_map = names.hook_configmap(claim.lane, in_force.hook_digest)
    items = fields.hook_items_in_template(workload, config_map)
    port = fields.env_value(holder, names.ENV_STATUS_PORT)
    if items is None or port is None:
        return None
    patch = _patch(claim, workload, in_force, items, gate, port)
    return patch if template_holds(workload, patch) else None


def template_holds(workload: Manifest, patch: Manifest) -> bool:
    """Whether the workload's pod template has the patch's fields already (and, for a patch without
    a template, no others of the lane).
    """
    wanted = (patch.get("spec") or {}).get("template")
    if wanted is None:
        return template_released(workload)
    return fields.holds(fields.pod_template(workload), wanted)


def template_released(workload: Manifest) -> bool:
    """Whether nothing of a lane is in the pod template."""
    template = fields.pod_template(workload)
    volumes = (template.get("spec") or {}).get("volumes") or ()
    return not (
        any(key in fields.annotations_of(template) for key in _OUR_ANNOTATIONS)
        or any(item.get("name") in _OUR_VOLUMES for item in volumes)
        or any(
            entry.get("name") in _OUR_ENV
            for holder in fields.containers(workload)
            for entry in holder.get("env") or ()
        )
    )


def gate_holds(workload: Manifest, patch: Manifest) -> bool:
    """Whether label, annotation and gate are as in the patch (one without gate fields releases
    them).
    """
    own = {key: patch["metadata"][key] for key in ("labels", "annotations")}
    if not fields.holds(workload.get("metadata"), own):
        return False
    gate = {key: value for key, value in (patch.get("spec") or {}).items() if key != "template"}
    if not gate:
        return not fields.gate_in_use(workload)
    return fields.holds(workload.get("spec"), gate)


def template_hash(workload: Manifest) -> str:
    """Hash of the pod template without the lane's fields: it changes when its user changes it."""
    return sha256_digest(canonical_json(_users(fields.pod_template(workload))))


_OUR_VOLUMES = (names.VOLUME_HOOK, names.VOLUME_MAP, names.VOLUME_RUN)
_OUR_ANNOTATIONS = (names.ANNOTATION_MAP_DIGEST, names.ANNOTATION_HOOK_DIGEST)
_OUR_ENV = (names.ENV_MODE, names.ENV_MAP, names.ENV_DIR, names.ENV_STATUS_PORT)


def _users(template: Manifest) -> Manifest:
    metadata = dict(template.get("metadata") or {})
    metadata.pop("creationTimestamp", None)
    metadata["annotations"] = {
        key: value
        for key, value in (metadata.get("annotations") or {}).items()
        if key not in _OUR_ANNOTATIONS
    }
    spec = dict(template.get("spec") or {})
    spec["volumes"] = [
        item for item in spec.get("volumes") or () if item.get("name") not in _OUR_VOLUMES
    ]
    spec["containers"] = [_users_container(item) for item in spec.get("containers") or ()]
    return {"metadata": _without_empty(metadata), "spec": _without_empty(spec)}


def _users_container(item: Manifest) -> Manifest:
    out = dict(item)
    out["env"] = [entry for entry in item.get("env") or () if not _our_env(entry)]
    out["volumeMounts"] = [
        mount for mount in item.get("volumeMounts") or () if mount.get("name") not in _OUR_VOLUMES
    ]
    return _without_empty(out)


def _our_env(entry: Manifest) -> bool:
    if entry.get("name") == PYTHONPATH:
        return entry.get("value") == names.HOOK_MOUNT
    return entry.get("name") in _OUR_ENV


def _without_empty(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value not in ({}, [], None)}
