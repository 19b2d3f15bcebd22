"""The Job of one profile run: a copy of the lane's pod in count mode with the runner beside it.

Order in the pod: the user's init containers, `probe` (proves that results can be stored before an
engine boots), the engine as a native sidecar, and `runner`, the only container that has to end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import refusal
from rowmap_jobs.formats.rowmap import Geometry
from rowmap_jobs.formats.run import Acceptance, Replay, RunSpec

from ..api.expertlane import ExpertLane
from ..api.expertmap import ExpertMap
from ..api.meta import S3Location, duration_seconds, quantity_bytes
from ..api.reasons import Reason
from ..api.trafficclass import TrafficClass
from ..snapshot import Manifest, Settings
from . import runner
from .engine_copy import (
    CACHE_MOUNT,
    OUR_VOLUMES,
    VOLUME_CACHE,
    engine_container,
    init_container,
    volume_copy,
)
from .fetch_job import workload_owner
from .runner import PROBE, RUNNER, Refusal

__all__ = ["CACHE_MOUNT", "ProfileParts", "Refusal", "engine_name", "profile_job", "run_spec"]

GRACE_SECONDS = 30

# What of the lane's pod says where it can run. Left out on purpose: hostNetwork (its ports are the
# lane's), hostPID and shareProcessNamespace (they show the runner's files to the engine),
# topologySpreadConstraints, priorityClassName, serviceAccountName and termination grace.
KEPT_POD_FIELDS = (
    "nodeSelector",
    "nodeName",
    "tolerations",
    "runtimeClassName",
    "schedulerName",
    "imagePullSecrets",
    "securityContext",
    "hostIPC",
    "hostUsers",
    "hostAliases",
    "dnsPolicy",
    "dnsConfig",
    "resourceClaims",
    "os",
)
KEEP_ON_NODE = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


@dataclass(frozen=True)
class ProfileParts:
    """What a profile is made of."""

    map: ExpertMap
    lane: ExpertLane
    traffic_class: TrafficClass
    workload: Manifest
    settings: Settings
    other_map_digests: Mapping[str, str]
    """Accepted maps of the lane's other classes, by class."""
    frozen_geometry: Geometry | None
    """The lane's geometry, once a map has set it."""

    @property
    def locations(self) -> dict[str, S3Location]:
        return {
            "store": self.lane.spec.store.s3,
            "transcripts": self.traffic_class.spec.transcripts.s3,
        }


def engine_name(container_name: str) -> str:
    """Name of the engine's container in a run: the lane's, unless our containers have it."""
    return f"lane-{container_name}" if container_name in (RUNNER, PROBE) else container_name


def profile_job(parts: ProfileParts, run: str) -> dict[str, Any] | Refusal:
    """The Job named `run`, or why the lane's pod cannot be copied."""
    spec = run_spec(parts, run)
    if isinstance(spec, Refusal):
        return spec
    pod = _pod(parts, spec)
    if isinstance(pod, Refusal):
        return pod
    map_ = parts.map
    profile = map_.spec.profile
    labels = {
        names.LABEL_LANE: parts.lane.metadata.name,
        names.LABEL_MAP: map_.metadata.name,
        names.LABEL_CLASS: parts.traffic_class.metadata.name,
        names.LABEL_ROLE: names.ROLE_PROFILE,
    }
    # No ttlSecondsAfterFinished: the Job has to stay until its result is recorded.
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": run,
            "namespace": map_.metadata.namespace,
            "labels": labels,
            "annotations": {names.ANNOTATION_RUN_SPEC_HASH: runner.run_spec_hash(spec)},
            "ownerReferences": [
                {
                    "apiVersion": names.API_VERSION,
                    "kind": "ExpertMap",
                    "name": map_.metadata.name,
                    "uid": map_.metadata.uid,
                    "controller": True,
                }
            ],
        },
        "spec": {
            "backoffLimit": profile.backoff_limit,
            "activeDeadlineSeconds": profile.pending_deadline_seconds
            + profile.active_deadline_seconds,
            "podFailurePolicy": runner.failure_policy([RUNNER, PROBE]),
            "template": {
                "metadata": {
                    "labels": {**labels, **runner.NO_MESH_LABELS},
                    "annotations": {**runner.NO_MESH_ANNOTATIONS, **KEEP_ON_NODE, **_identity(pod)},
                },
                "spec": pod,
            },
        },
    }


def run_spec(parts: ProfileParts, run: str) -> RunSpec | Refusal:
    """What the runner is told; refused (InvalidSpec) when the specs do not make a run."""
    lane, tc, map_ = parts.lane, parts.traffic_class, parts.map
    residency, replay, accept = lane.spec.residency, tc.spec.replay, map_.spec.acceptance
    accepted = map_.status.accepted
    if (residency.hot_experts_per_layer is None) == (residency.hot_bytes is None):
        return Refusal(
            Reason.INVALID_SPEC,
            f"ExpertLane {lane.metadata.name}: spec.residency: set hotExpertsPerLayer or hotBytes, "
            "exactly one",
        )
    hot_bytes = residency.hot_bytes
    try:
        return RunSpec(
            kind="Profile",
            namespace=map_.metadata.namespace,
            run=run,
            lane=lane.metadata.name,
            map=map_.metadata.name,
            traffic_class=tc.metadata.name,
            store=lane.spec.store.s3,
            owner=workload_owner(parts.workload),
            transcripts=tc.spec.transcripts.s3,
            window_seconds=duration_seconds(tc.spec.window),
            min_transcripts=tc.spec.min_transcripts,
            replay=Replay(**replay.model_dump()),
            acceptance=Acceptance(
                min_decode_tokens=accept.min_decode_tokens,
                max_cold_share_percent=_number(accept.max_cold_share_percent),
                max_cold_share_vs_positional=_number(accept.max_cold_share_vs_positional),
                min_improvement_points=float(accept.min_improvement_points),
            ),
            hot_experts_per_layer=residency.hot_experts_per_layer,
            hot_bytes=None if hot_bytes is None else quantity_bytes(hot_bytes),
            frozen_geometry=parts.frozen_geometry,
            active_map_digest=accepted.digest if accepted is not None else None,
            other_map_digests=dict(parts.other_map_digests),
            server_url=f"http://127.0.0.1:{lane.spec.server.port}",
            status_url=f"http://127.0.0.1:{lane.spec.hook.status_port}/status",
            pending_seconds=map_.spec.profile.pending_deadline_seconds,
        )
    except ValidationError as error:
        return Refusal(Reason.INVALID_SPEC, str(refusal(f"run of {map_.metadata.name}", error)))
    except ValueError as error:
        return Refusal(Reason.INVALID_SPEC, f"run of {map_.metadata.name}: {error}")


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


def _pod(parts: ProfileParts, spec: RunSpec) -> dict[str, Any] | Refusal:
    lane, settings = parts.lane, parts.settings
    template = parts.workload["spec"]["template"].get("spec") or {}
    account = runner.service_account(parts.locations, settings)
    if isinstance(account, Refusal):
        return account
    source = _container(template, lane.spec.container_name)
    if isinstance(source, Refusal):
        return source
    volumes = {str(volume["name"]): volume for volume in template.get("volumes") or []}
    profile, slots = parts.map.spec.profile, 4 * parts.traffic_class.spec.replay.concurrency
    engine = engine_container(source, lane, volumes, profile.pending_deadline_seconds, slots)
    if isinstance(engine, Refusal):
        return engine
    engine["name"] = engine_name(lane.spec.container_name)
    inits = [
        {**init_container(init, volumes), "name": engine_name(str(init["name"]))}
        for init in template.get("initContainers") or []
        if init.get("restartPolicy") != "Always"
    ]
    counts = {"name": names.VOLUME_RUN, "mountPath": names.RUN_DIR, "readOnly": True}
    used = {mount["name"] for part in (engine, *inits) for mount in part.get("volumeMounts") or []}
    pod = _placement(template)
    if profile.priority_class_name:
        pod["priorityClassName"] = profile.priority_class_name
    return {
        **pod,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "serviceAccountName": account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "initContainers": [
            *inits,
            runner.runner_container(PROBE, spec, parts.locations, settings),
            engine,
        ],
        "containers": [
            runner.runner_container(RUNNER, spec, parts.locations, settings, [counts], "profile")
        ],
        "volumes": [
            *(volume_copy(v) for n, v in volumes.items() if n in used - OUR_VOLUMES),
            *_own_volumes(parts),
            *runner.runner_volumes(parts.locations),
        ],
    }


def _own_volumes(parts: ProfileParts) -> list[dict[str, Any]]:
    hook = parts.settings.hook
    config_map = {
        "name": names.hook_configmap(parts.lane.metadata.name, hook.digest),
        # Without the hook a run would count nothing: let the pod wait for its files instead.
        "optional": False,
        "items": [dict(item) for item in hook.items],
    }
    return [
        {"name": names.VOLUME_HOOK, "configMap": config_map},
        {"name": names.VOLUME_RUN, "emptyDir": {}},
        {"name": VOLUME_CACHE, "emptyDir": {}},
    ]


def _container(template: Manifest, name: str) -> Manifest | Refusal:
    containers = {str(item.get("name")): item for item in template.get("containers") or []}
    found: Manifest | None = containers.get(name)
    if found is None:
        return Refusal(
            Reason.CONTAINER_NOT_FOUND,
            f"spec.containerName: found {name!r}, expected a container of the workload: "
            f"{', '.join(sorted(containers))}",
        )
    if devices := found.get("volumeDevices"):
        blocks = ", ".join(sorted(str(device.get("name")) for device in devices))
        return Refusal(
            Reason.VOLUME_NOT_SHAREABLE,
            f"container {name}: block volumes {blocks} cannot be mounted read-only beside the "
            "lane; give the lane file system volumes",
        )
    return found


def _placement(template: Manifest) -> dict[str, Any]:
    pod = {key: copy.deepcopy(template[key]) for key in KEPT_POD_FIELDS if key in template}
    # A pod of its own must not be kept away from the lane's nodes.
    affinity = {
        key: copy.deepcopy(value)
        for key, value in (template.get("affinity") or {}).items()
        if key != "podAntiAffinity"
    }
    if affinity:
        pod["affinity"] = affinity
    return pod


def _identity(pod: Mapping[str, Any]) -> dict[str, str]:
    """Keeps the cloud identity of the ServiceAccount out of the user's containers."""
    others = [str(item["name"]) for item in pod["initContainers"] if str(item["name"]) != PROBE]
    return {"eks.amazonaws.com/skip-containers": ",".join(others)}
