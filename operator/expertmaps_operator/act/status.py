"""Status by server-side apply: fenced by the version that the decision saw, and only when changed.

`conditions` is a list-map, so conditions of other managers stay: only types of ours are applied,
compared and released.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rowmap_jobs.formats.names import FIELD_MANAGER

from ..api.reasons import ConditionType
from ..observe.kube import APPLY, Kube
from ..observe.resources import Resource
from ..observe.snapshots import Observed

_OURS = frozenset(str(item.value) for item in ConditionType)


def wanted(status: Mapping[str, Any]) -> dict[str, Any]:
    """What to apply: no unset fields and no conditions of others (applying them would own them)."""
    plain: dict[str, Any] = _without_none(status)
    if "conditions" in plain:
        plain["conditions"] = [item for item in plain["conditions"] if item.get("type") in _OURS]
    return plain


def differs(current: Mapping[str, Any], status: Mapping[str, Any]) -> bool:
    """Whether applying a `wanted` status would change anything of ours."""
    return _comparable(current) != _comparable(status)


def apply(kube: Kube, observed: Observed, status: Mapping[str, Any]) -> None:
    """Apply a `wanted` status. Raises ApiError: 409 when the object has changed since the snapshot,
    404 when it is gone.
    """
    resource: Resource = observed.resource
    metadata = observed.manifest["metadata"]
    body = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {
            "name": observed.name,
            "namespace": observed.namespace,
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "status": dict(status),
    }
    kube.request(
        "PATCH",
        resource.path(observed.namespace, observed.name, "status"),
        {"fieldManager": FIELD_MANAGER, "force": "true"},
        body,
        APPLY,
    )


def _comparable(status: Mapping[str, Any]) -> dict[str, Any]:
    conditions = status.get("conditions") or []
    return {
        **{key: value for key, value in status.items() if key != "conditions"},
        "conditions": {item.get("type"): item for item in conditions if item.get("type") in _OURS},
    }


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
