"""What a Deployment's manifest says, read without surprises: absent parts are empty."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rowmap_jobs.formats import names

Manifest = Mapping[str, Any]

GATE_MIN_READY = 864000
"""Closed gate: a new pod counts as available only after ten days, so the rollout stops at one."""
GATE_DEADLINE = 864001
"""Must exceed minReadySeconds; on the workload it also tells that the gate is in use."""
DEFAULT_DEADLINE = 600
"""What the API server fills in where nobody set progressDeadlineSeconds."""
GATE_DEFAULTS: Mapping[str, tuple[str, int]] = {
    ".spec.minReadySeconds": ("minReadySeconds", 0),
    ".spec.progressDeadlineSeconds": ("progressDeadlineSeconds", DEFAULT_DEADLINE),
}
"""Gate fields by their path in a conflict: the name in the spec and what the API server fills in
for whoever made the object without naming them."""


def pod_template(workload: Manifest) -> Manifest:
    """The pod template."""
    template: Manifest = (workload.get("spec") or {}).get("template") or {}
    return template


def replicas(workload: Manifest) -> int:
    """Desired pods."""
    value = (workload.get("spec") or {}).get("replicas")
    return 1 if value is None else int(value)


def containers(workload: Manifest) -> Sequence[Manifest]:
    """Containers of the pod template."""
    found: Sequence[Manifest] = (pod_template(workload).get("spec") or {}).get("containers") or ()
    return found


def container(workload: Manifest, name: str) -> Manifest | None:
    """The named container of the pod template."""
    return named(containers(workload), name)


def named(items: Sequence[Manifest] | None, name: str) -> Manifest | None:
    """The item of a list whose `name` it is."""
    return next((item for item in items or () if item.get("name") == name), None)


def env_value(holder: Manifest, name: str) -> str | None:
    """Literal value of a container's variable; None when unset or taken from elsewhere."""
    entry = named(holder.get("env"), name)
    if entry is None or "valueFrom" in entry:
        return None
    return str(entry.get("value") or "")


def annotations_of(item: Manifest) -> Mapping[str, str]:
    """Annotations of an object or template."""
    found: Mapping[str, str] = (item.get("metadata") or {}).get("annotations") or {}
    return found


def in_template(workload: Manifest) -> tuple[str, str] | None:
    """The map's and the hook's digest that new pods start with; None: without us."""
    found = annotations_of(pod_template(workload))
    map_digest = found.get(names.ANNOTATION_MAP_DIGEST)
    hook_digest = found.get(names.ANNOTATION_HOOK_DIGEST)
    if not map_digest or not hook_digest:
        return None
    return map_digest, hook_digest


def hook_items_in_template(workload: Manifest, config_map: str) -> Sequence[Manifest] | None:
    """Files of the hook that the template mounts now, if it mounts this ConfigMap."""
    volumes = (pod_template(workload).get("spec") or {}).get("volumes")
    source = (named(volumes, names.VOLUME_HOOK) or {}).get("configMap") or {}
    items: Sequence[Manifest] | None = source.get("items")
    return items if source.get("name") == config_map and items else None


def gate_in_use(workload: Manifest) -> bool:
    """Whether the gate fields hold our values, closed or open."""
    return bool((workload.get("spec") or {}).get("progressDeadlineSeconds") == GATE_DEADLINE)


def gate_closed(workload: Manifest) -> bool:
    """Whether the rollout can take no further pod."""
    spec = workload.get("spec") or {}
    return gate_in_use(workload) and spec.get("minReadySeconds") == GATE_MIN_READY


_MERGE_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def holds(actual: Any, wanted: Any) -> bool:
    """Whether every field of an apply is in an object already (defaults beside it are fine)."""
    if isinstance(wanted, Mapping):
        if not isinstance(actual, Mapping):
            return False
        return all(_field_holds(actual, key, value) for key, value in wanted.items())
    return bool(actual == wanted)


def _field_holds(actual: Manifest, key: str, wanted: Any) -> bool:
    merge_key = _MERGE_KEYS.get(key)
    if merge_key is None:
        # The API server leaves integers that are 0 out.
        return holds(actual.get(key, 0) if wanted == 0 else actual.get(key), wanted)
    present = {item.get(merge_key): item for item in actual.get(key) or ()}
    return all(holds(present.get(item[merge_key]), item) for item in wanted)


_OURS = re.compile(
    r"""^\.spec\.template\.(metadata\.annotations\.expertmaps\.dev/|spec\.volumes\[name="expertmaps-)"""
)


def only_ours(field: str) -> bool:
    """Whether a field of the pod template differs from map to map and only a lane names it.

    `kubectl rollout undo` writes such fields as its own; taking them back overrides nobody.
    The label that claims a workload is none of them: there another lane may stand.
    """
    return _OURS.match(field) is not None
