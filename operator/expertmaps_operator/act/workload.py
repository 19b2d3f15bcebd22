"""Our fields on a user's workload, by server-side apply. A user's value is never forced over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..build.workload_fields import GATE_DEFAULTS, only_ours
from ..observe.kube import APPLY, ApiError, Cause, Kube, Manifest
from ..observe.resources import DEPLOYMENT
from ..plan import ApplyWorkload

_CONFLICT = "FieldManagerConflict"
_MANAGER = re.compile(r'^conflict with "([^"]*)"')


class WorkloadConflictError(Exception):
    """Somebody else holds fields that we would have to write."""

    loggable = True

    def __init__(self, workload: str, conflicts: tuple[str, ...]) -> None:
        self.conflicts = conflicts
        super().__init__(f"Deployment {workload}: {'; '.join(conflicts)}"[:1024])


def dry_run(kube: Kube, namespace: str, name: str, manager: str, patch: Any) -> tuple[str, ...]:
    """What an apply would conflict with, as `field: manager`; nothing is written.

    A patch that the API server finds invalid (a container that was renamed) is told as
    `field: invalid: message`. Raises ApiError for anything else.
    """
    try:
        _apply(kube, namespace, name, manager, patch, {"dryRun": "All"})
    except ApiError as error:
        if error.status == 404:
            return ()
        if error.status == 409 and _field_conflicts(error):
            return tuple(_spoken(cause) for cause in _field_conflicts(error))
        if error.status == 422 and error.causes:
            return tuple(f"{cause.field}: invalid: {cause.message}" for cause in error.causes)
        raise
    return ()


def apply(kube: Kube, namespace: str, action: ApplyWorkload, uid: str) -> None:
    """Apply the fields of one manager. Raises WorkloadConflictError and ApiError."""
    try:
        _apply(kube, namespace, action.name, action.manager, action.patch, {}, {"uid": uid})
        return
    except ApiError as error:
        conflicts = _field_conflicts(error)
        if error.status != 409 or not conflicts:
            raise
    spoken = tuple(_spoken(cause) for cause in conflicts)
    foreign = tuple(cause for cause in conflicts if not only_ours(cause.field))
    if not action.may_force_gate or any(cause.field not in GATE_DEFAULTS for cause in foreign):
        raise WorkloadConflictError(action.name, spoken)
    current = kube.get(DEPLOYMENT, namespace, action.name)
    if current is None or not _hold_defaults(current, foreign):
        raise WorkloadConflictError(action.name, spoken)
    # Fenced by the version in which the defaults were seen: a value set since then is kept.
    fence = {"uid": uid, "resourceVersion": current["metadata"]["resourceVersion"]}
    _apply(kube, namespace, action.name, action.manager, action.patch, {"force": "true"}, fence)


def _apply(
    kube: Kube,
    namespace: str,
    name: str,
    manager: str,
    patch: Mapping[str, Any],
    query: Mapping[str, str],
    fence: Mapping[str, str] | None = None,
) -> None:
    own = {key: value for key, value in (patch.get("metadata") or {}).items() if key != "namespace"}
    body = {
        **patch,
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.kind,
        # The UID keeps an apply from making a workload that was deleted meanwhile.
        "metadata": {**own, "name": name, **{k: v for k, v in (fence or {}).items() if v}},
    }
    kube.request(
        "PATCH",
        DEPLOYMENT.path(namespace, name),
        {"fieldManager": manager, **query},
        body,
        APPLY,
    )


def _field_conflicts(error: ApiError) -> tuple[Cause, ...]:
    return tuple(cause for cause in error.causes if cause.reason == _CONFLICT)


def _spoken(cause: Cause) -> str:
    match = _MANAGER.match(cause.message)
    return f"{cause.field}: {match.group(1) if match else cause.message}"


def _hold_defaults(workload: Manifest, conflicts: tuple[Cause, ...]) -> bool:
    spec = workload.get("spec") or {}
    for cause in conflicts:
        key, default = GATE_DEFAULTS[cause.field]
        if spec.get(key, default) != default:
            return False
    return True
