"""The pods of a lane, each judged against the map and the hook that it should run with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rowmap_jobs.formats import names
from rowmap_jobs.formats.rowmap import Fingerprint, RowMap
from rowmap_jobs.formats.status import HookStatus

from ..api.expertlane import MapInForce
from ..api.reasons import Reason
from ..build.workload_fields import annotations_of, named, pod_template
from ..snapshot import LanePod, Manifest, PodReport

REVISION = "deployment.kubernetes.io/revision"
HASH_LABEL = "pod-template-hash"

_NEVER_STARTS = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_MANY_RESTARTS = 2


class Standing(Enum):
    """What is known of a pod."""

    GOOD = "good"
    WAITING = "waiting"
    UNSCHEDULABLE = "unschedulable"
    UNKNOWN = "unknown"
    BAD = "bad"


@dataclass(frozen=True)
class Judgement:
    """A pod's standing; the reason and the sentence say why it is not good."""

    standing: Standing
    reason: str
    message: str


@dataclass(frozen=True)
class PodView:
    """What decisions look at in a pod that is not finished."""

    name: str
    updated: bool
    """Whether it was made from the workload's newest template."""
    map_digest: str | None
    hook_digest: str | None
    """As the template said when it was made."""
    ready: bool
    terminating: bool
    unschedulable: str | None
    failure: str | None
    """Why its container cannot run."""
    report: PodReport | None


def newest_replica_set(workload: Manifest, replica_sets: Sequence[Manifest]) -> Manifest | None:
    """The ReplicaSet of the workload's present template, as its controller finds it."""
    wanted = _comparable(pod_template(workload))
    for item in sorted(replica_sets, key=lambda one: str(one["metadata"].get("name"))):
        if _comparable(pod_template(item)) == wanted:
            return item
    observed = (workload.get("status") or {}).get("observedGeneration")
    if observed is None or observed != workload["metadata"].get("generation"):
        return None
    revision = annotations_of(workload).get(REVISION)
    same = (item for item in replica_sets if annotations_of(item).get(REVISION) == revision)
    return next(same, None) if revision else None


def _comparable(template: Manifest) -> Mapping[str, Any]:
    metadata = dict(template.get("metadata") or {})
    labels = dict(metadata.pop("labels", None) or {})
    labels.pop(HASH_LABEL, None)
    metadata.pop("creationTimestamp", None)
    return {"labels": labels, **metadata, "spec": template.get("spec")}


def views(
    pods: Sequence[LanePod], newest: Manifest | None, container_name: str
) -> tuple[PodView, ...]:
    """The pods that are not finished, by name."""
    uid = newest["metadata"].get("uid") if newest is not None else None
    found = [
        _view(pod, uid, container_name)
        for pod in pods
        if (pod.manifest.get("status") or {}).get("phase") not in ("Failed", "Succeeded")
    ]
    return tuple(sorted(found, key=lambda item: item.name))


def _view(pod: LanePod, newest_uid: str | None, container_name: str) -> PodView:
    manifest = pod.manifest
    owners = manifest["metadata"].get("ownerReferences") or ()
    own = annotations_of(manifest)
    return PodView(
        name=str(manifest["metadata"]["name"]),
        updated=newest_uid is not None and any(o.get("uid") == newest_uid for o in owners),
        map_digest=own.get(names.ANNOTATION_MAP_DIGEST),
        hook_digest=own.get(names.ANNOTATION_HOOK_DIGEST),
        ready=(_condition(manifest, "Ready") or {}).get("status") == "True",
        terminating=manifest["metadata"].get("deletionTimestamp") is not None,
        unschedulable=_unschedulable(manifest),
        failure=_failure(manifest, container_name),
        report=pod.report,
    )


def _condition(manifest: Manifest, type: str) -> Manifest | None:
    conditions = (manifest.get("status") or {}).get("conditions") or ()
    return next((item for item in conditions if item.get("type") == type), None)


def _unschedulable(manifest: Manifest) -> str | None:
    scheduled = _condition(manifest, "PodScheduled") or {}
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    return str(scheduled.get("message") or "no node fits")


def _failure(manifest: Manifest, container_name: str) -> str | None:
    status = manifest.get("status") or {}
    own = named(status.get("containerStatuses"), container_name)
    statuses = [*(status.get("initContainerStatuses") or ()), *([own] if own else [])]
    return next((why for item in statuses if (why := _container_failure(item))), None)


def _container_failure(status: Manifest) -> str | None:
    name = status.get("name")
    waiting = (status.get("state") or {}).get("waiting") or {}
    last = (status.get("lastState") or {}).get("terminated") or {}
    if waiting.get("reason") in _NEVER_STARTS:
        return f"container {name}: {waiting['reason']}: {waiting.get('message', '')}"
    how = f"exit code {last.get('exitCode')}, {last.get('reason')}"
    if waiting.get("reason") == "CrashLoopBackOff":
        return f"container {name} exits again and again ({how})"
    # One kill for memory is borne: caches of the first start may make the second one fit.
    again = int(status.get("restartCount") or 0) >= _MANY_RESTARTS
    if last.get("reason") == "OOMKilled" and again and not status.get("ready"):
        return f"container {name} was killed for memory more than once ({how})"
    return None


def judge(pod: PodView, expected: MapInForce | None, row_map: RowMap | None) -> Judgement:
    """A pod against the map and the hook that it should run with (None: without both)."""
    if pod.terminating:
        return _waiting(pod, "is being deleted")
    if pod.failure is not None:
        return Judgement(Standing.BAD, Reason.POD_FAILED, f"pod {pod.name}: {pod.failure}")
    if pod.unschedulable is not None:
        text = f"pod {pod.name} cannot be scheduled: {pod.unschedulable}"
        return Judgement(Standing.UNSCHEDULABLE, Reason.POD_UNSCHEDULABLE, text)
    if expected is None:
        return _unhooked(pod)
    if (pod.map_digest, pod.hook_digest) != (expected.digest, expected.hook_digest):
        return _waiting(pod, f"was made with map {pod.map_digest or 'none'}, not {expected.digest}")
    report = pod.report
    status = report.status if report is not None else None
    if status is not None and (status.error is not None or status.phase == "Failed"):
        return _bad(pod, Reason.HOOK_FAILED, _error(status))
    if not pod.ready:
        return _waiting(pod, "is not ready")
    if report is None or status is None:
        return _unknown(pod, report)
    if status.phase in ("Loading", "Stopped"):
        return _waiting(pod, f"reports phase {status.phase}")
    wrong = _mismatch(status, expected, row_map)
    if wrong is not None:
        return _bad(pod, *wrong)
    return Judgement(Standing.GOOD, Reason.ALL_PODS_REPORT_DIGEST, f"pod {pod.name} is good")


def _unhooked(pod: PodView) -> Judgement:
    if pod.map_digest is not None or pod.hook_digest is not None:
        return _waiting(pod, f"was made with map {pod.map_digest or 'none'}, not without one")
    if not pod.ready:
        return _waiting(pod, "is not ready")
    return Judgement(Standing.GOOD, Reason.SERVING_UNHOOKED, f"pod {pod.name} is good")


def _waiting(pod: PodView, text: str) -> Judgement:
    return Judgement(Standing.WAITING, Reason.PODS_NOT_READY, f"pod {pod.name} {text}")


def _bad(pod: PodView, reason: Reason, text: str) -> Judgement:
    return Judgement(Standing.BAD, reason, f"pod {pod.name}: {text}")


def _unknown(pod: PodView, report: PodReport | None) -> Judgement:
    why = "it was not asked yet" if report is None else report.error or "no answer"
    if report is not None and report.reachable:
        text = f"pod {pod.name} is ready, but its status cannot be read: {why}"
        return Judgement(Standing.UNKNOWN, Reason.STATUS_INVALID, text)
    text = (
        f"pod {pod.name} is ready, but its status port does not answer: {why}; let the operator "
        "reach spec.hook.statusPort (NetworkPolicy, service mesh); where it can, the engine has "
        "not loaded the hook"
    )
    return Judgement(Standing.UNKNOWN, Reason.STATUS_UNREACHABLE, text)


def _error(status: HookStatus) -> str:
    if status.error is None:
        return "the hook failed without a reason; the pod serves without a map"
    return f"the hook reports {status.error.reason}: {status.error.message}"


def _mismatch(
    status: HookStatus, expected: MapInForce, row_map: RowMap | None
) -> tuple[Reason, str] | None:
    """How a report of a hook without an error differs from what is expected."""
    if status.hook_digest != expected.hook_digest:
        found = f"reports hook {status.hook_digest}, expected {expected.hook_digest}"
        return Reason.MAP_DIGEST_MISMATCH, found
    if status.mode != names.MODE_SERVE or (status.generation == 0 and status.map_digest is None):
        found = f"the hook is in mode {status.mode} and has moved no rows, expected mode serve"
        return Reason.HOOK_NOT_LOADED, found
    if status.map_digest != expected.digest:
        found = f"reports map {status.map_digest}, expected {expected.digest}"
        return Reason.MAP_DIGEST_MISMATCH, found
    if status.residency is None or status.residency.hot_rows == 0:
        return Reason.HOOK_NOT_LOADED, "reports the map but no hot rows, expected at least one"
    return _other_model(status, row_map)


def _other_model(status: HookStatus, row_map: RowMap | None) -> tuple[Reason, str] | None:
    if row_map is None:
        return None
    parts = _differing(status.fingerprint, row_map.fingerprint)
    if parts:
        text = f"its model differs from the map's in {', '.join(parts)}; measure this model"
        return Reason.MAP_DIGEST_MISMATCH, text
    model, wanted = status.geometry, row_map.geometry
    if model is not None and (model.experts, model.top_k, model.moe_layers) != (
        wanted.experts,
        wanted.top_k,
        wanted.moe_layers,
    ):
        text = "its experts, topK or MoE layers differ from the map's; measure this model"
        return Reason.GEOMETRY_MISMATCH, text
    return None


def _differing(found: Fingerprint | None, wanted: Fingerprint) -> list[str]:
    if found is None:
        return ["fingerprint (it reports none)"]
    fields = ("shape", "router", "quant", "tokenizer")
    return [name for name in fields if getattr(found, name) != getattr(wanted, name)]
