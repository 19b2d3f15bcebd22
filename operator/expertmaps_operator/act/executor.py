"""Carries out a plan: the status first (fenced), then the actions in order, then the events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rowmap_jobs.formats.names import FIELD_MANAGER

from ..observe.kube import MERGE, ApiError, Kube
from ..observe.resources import CONFIG_MAP, JOB, Resource
from ..observe.snapshots import Observed
from ..plan import (
    Action,
    ApplyWorkload,
    Create,
    DeleteConfigMap,
    DeleteJob,
    PatchJob,
    Plan,
)
from ..snapshot import LaneSnapshot, OrphanSnapshot
from . import status, workload
from .events import Recorder

log = logging.getLogger(__name__)

Guard = Callable[[], None]
"""Called before every write; raises when this process may not write any more."""

_CREATABLE = {resource.kind: resource for resource in (JOB, CONFIG_MAP)}


@dataclass(frozen=True)
class Result:
    """How a turn ended."""

    look_again: bool = False
    """The object changed since the snapshot: the plan was dropped."""
    status: Mapping[str, Any] | None = None
    """The status that is there now, when it was written."""


class Executor:
    """Carries out plans."""

    def __init__(self, kube: Kube, recorder: Recorder, guard: Guard) -> None:
        self._kube, self._recorder, self._guard = kube, recorder, guard

    def execute(self, observed: Observed, plan: Plan) -> Result:
        """One turn. Raises ApiError, WorkloadConflictError, or what the guard raises."""
        written: Mapping[str, Any] | None = None
        if plan.status is not None:
            wanted = status.wanted(plan.status)
            if status.differs(observed.manifest.get("status") or {}, wanted):
                self._guard()
                try:
                    status.apply(self._kube, observed, wanted)
                except ApiError as error:
                    if error.status not in (404, 409):
                        raise
                    return Result(look_again=error.status == 409)
                self._recorder.status_changed(str(observed.manifest["metadata"]["uid"]))
                written = wanted
        for action in plan.actions:
            self._guard()
            log.info("%s %s: %s", observed.resource.kind, observed.name, describe(action))
            self._act(observed, action)
        for event in plan.events:
            self._guard()
            self._recorder.post(observed, event)
        return Result(status=written)

    def _act(self, observed: Observed, action: Action) -> None:
        namespace = observed.namespace
        match action:
            case Create(manifest):
                self._create(namespace, manifest)
            case ApplyWorkload():
                workload.apply(self._kube, namespace, action, _workload_uid(observed))
            case DeleteJob(name, uid):
                self._delete(JOB, namespace, name, uid)
            case DeleteConfigMap(name, uid):
                self._delete(CONFIG_MAP, namespace, name, uid)
            case PatchJob(name, patch):
                self._patch_job(namespace, name, patch)

    def _create(self, namespace: str, manifest: Mapping[str, Any]) -> None:
        kind = str(manifest.get("kind"))
        resource = _CREATABLE[kind]
        metadata = {**manifest["metadata"]}
        if metadata.setdefault("namespace", namespace) != namespace:
            raise ValueError(f"{kind} {metadata.get('name')}: not in namespace {namespace}")
        body = {**manifest, "apiVersion": resource.api_version, "metadata": metadata}
        try:
            self._kube.request(
                "POST", resource.path(namespace), {"fieldManager": FIELD_MANAGER}, body
            )
        except ApiError as error:
            # Names of children are deterministic, so one that exists is the one we want.
            if error.status != 409 or error.reason != "AlreadyExists":
                raise

    def _delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            self._kube.request("DELETE", resource.path(namespace, name), None, options)
        except ApiError as error:
            # Gone, or another object of that name: either way the one we meant is not there.
            if error.status not in (404, 409):
                raise

    def _patch_job(self, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        try:
            self._kube.request(
                "PATCH", JOB.path(namespace, name), {"fieldManager": FIELD_MANAGER}, patch, MERGE
            )
        except ApiError as error:
            if error.status != 404:
                raise


def _workload_uid(observed: Observed) -> str:
    snapshot = observed.snapshot
    if not isinstance(snapshot, LaneSnapshot | OrphanSnapshot) or snapshot.workload is None:
        raise ValueError(f"{observed.resource.kind} {observed.name}: no workload to apply to")
    return str(snapshot.workload["metadata"]["uid"])


def describe(action: Action) -> str:
    """An action for the log: what and on which object, never its contents."""
    match action:
        case Create(manifest):
            return f"create {manifest.get('kind')} {manifest['metadata'].get('name')}"
        case ApplyWorkload(name, manager):
            return f"apply Deployment {name} as {manager}"
        case DeleteJob(name):
            return f"delete Job {name}"
        case PatchJob(name):
            return f"patch Job {name}"
        case DeleteConfigMap(name):
            return f"delete ConfigMap {name}"
