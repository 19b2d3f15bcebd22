"""The fields that a lane owns on its workload, as one server-side apply.

An apply holds all of them: what it leaves out is released. Nothing that differs from map to map is
in the environment, because the environment is part of what compile caches are keyed by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import canonical_json, sha256_digest

from ..api.expertlane import ExpertLane, MapInForce
from ..snapshot import Manifest
from . import workload_fields as fields

PYTHONPATH = "PYTHONPATH"


class Gate(StrEnum):
    """Whether the rollout may take its next pod."""

    CLOSED = "Closed"
    OPEN = "Open"
    RELEASED = "Released"


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
    holder = fields.container(workload, lane.spec.container_name) or {}
    env = lane_env(status_port or str(lane.spec.hook.status_port))
    if own_python_path(holder):
        del env[PYTHONPATH]
    spec: dict[str, Any] = dict(_gate_fields(lane, gate))
    if in_force is not None:
        spec["template"] = _template(lane, env, in_force, items)
    patch = {
        "apiVersion": lane.spec.workload_ref.api_version,
        "kind": lane.spec.workload_ref.kind,
        "metadata": {
            "name": lane.spec.workload_ref.name,
            "namespace": lane.metadata.namespace,
            "labels": {names.LABEL_LANE: lane.metadata.name},
            # On the workload: it must be known when the lane is deleted while no operator runs.
            "annotations": {names.ANNOTATION_DELETION_POLICY: lane.spec.deletion_policy},
        },
    }
    return {**patch, "spec": spec} if spec else patch


def _gate_fields(lane: ExpertLane, gate: Gate) -> dict[str, int]:
    if gate is Gate.RELEASED:
        return {}
    closed = gate is Gate.CLOSED
    return {
        "minReadySeconds": fields.GATE_MIN_READY if closed else lane.spec.update.min_ready_seconds,
        "progressDeadlineSeconds": fields.GATE_DEADLINE,
    }


def _template(
    lane: ExpertLane,
    env: Mapping[str, str],
    in_force: MapInForce,
    items: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    name = lane.metadata.name
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
                    "name": lane.spec.container_name,
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
    found = fields.in_template(workload)
    holder = fields.container(workload, lane.spec.container_name)
    if found is None or holder is None:
        return None
    in_force = MapInForce(traffic_class="", digest=found[0], hook_digest=found[1])
    config_map = names.hook_configmap(lane.metadata.name, in_force.hook_digest)
    items = fields.hook_items_in_template(workload, config_map)
    port = fields.env_value(holder, names.ENV_STATUS_PORT)
    if items is None or port is None:
        return None
    patch = workload_patch(lane, workload, in_force, items, Gate.CLOSED, port)
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
