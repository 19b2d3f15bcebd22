"""Resources, maps and reports of one lane, for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.api.expertmap import ExpertMap
from expertmaps_operator.build.workload import lane_env
from expertmaps_operator.snapshot import HookFiles, MapObject, PodReport, Settings
from rowmap_jobs.formats import names, rowmap
from rowmap_jobs.formats.base import sha256_digest
from rowmap_jobs.formats.rowmap import Fingerprint, Geometry, RowMap
from rowmap_jobs.formats.status import CompileEvidence, HookStatus, ModelGeometry, Residency

NOW = datetime(2026, 1, 5, 12, 0, 0, tzinfo=UTC)


def sha(text: str) -> str:
    return sha256_digest(text.encode())


FINGERPRINT = Fingerprint(
    shape=sha("shape"), router=sha("router"), quant="bf16", tokenizer=sha("tok")
)
GEOMETRY = Geometry(experts=4, top_k=1, hot_rows=2, moe_layers=(0, 1), row_bytes=64)
HOOK = HookFiles(
    digest=sha("hook"),
    data={"expertmaps_hook.py": "x", "entry_points.txt": "y"},
    items=(
        {"key": "expertmaps_hook.py", "path": "expertmaps_hook.py"},
        {"key": "entry_points.txt", "path": "expertmaps_hook-1.dist-info/entry_points.txt"},
    ),
    version="1",
)
SETTINGS = Settings(
    runner_image="runner@sha256:0",
    runner_service_account="expertmaps-runner",
    runner_pull_policy="IfNotPresent",
    max_concurrent_profiles=1,
    max_concurrent_rollouts=1,
    hook=HOOK,
)


def row_map(hot: tuple[int, int], order: bool = False, geometry: Geometry = GEOMETRY) -> RowMap:
    """A map with these hot rows in both layers; `order` swaps them (another digest, same rows)."""
    rows = list(reversed(hot)) if order else list(hot)
    cold = [row for row in range(4) if row not in hot]
    return rowmap.build(FINGERPRINT, geometry, {0: (rows, cold), 1: (rows, cold)})


AGENT = row_map((0, 1))
PROSE = row_map((2, 3))
CODE = row_map((0, 3))
MAPS = {"agent": AGENT, "prose": PROSE, "code": CODE}


def lane(**spec: Any) -> ExpertLane:
    """An ExpertLane whose spec is changed by `spec`."""
    base: dict[str, Any] = {
        "workloadRef": {"name": "vllm"},
        "containerName": "vllm",
        "residency": {"hotExpertsPerLayer": 2},
        "activeTrafficClass": "agent",
        "store": {"s3": {"bucket": "expertmaps", "prefix": "prod/"}},
    }
    return ExpertLane.model_validate(
        {
            "metadata": {"name": "lane-a", "namespace": "ns", "uid": "lane-uid", "generation": 1},
            "spec": {**base, **spec},
        }
    )


def expert_map(traffic_class: str, found: RowMap | None) -> ExpertMap:
    """An ExpertMap, accepted when there is a map."""
    status: dict[str, Any] = {}
    if found is not None:
        status["accepted"] = {
            "digest": found.digest,
            "rowSetDigest": found.row_set_digest,
            "run": "run",
            "acceptedAt": "2026-01-05T11:00:00Z",
        }
    return ExpertMap.model_validate(
        {
            "metadata": {"name": f"lane-a.{traffic_class}", "namespace": "ns"},
            "spec": {
                "laneRef": {"name": "lane-a"},
                "trafficClassRef": {"name": traffic_class},
            },
            "status": status,
        }
    )


def deployment(replicas: int = 2, **container: Any) -> dict[str, Any]:
    """A Deployment as the API server returns it, before any lane."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "vllm",
            "namespace": "ns",
            "uid": "dep-uid",
            "generation": 1,
            "labels": {"app": "vllm"},
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "vllm"}},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "progressDeadlineSeconds": 600,
            "template": {
                "metadata": {"labels": {"app": "vllm"}},
                "spec": {
                    "containers": [
                        {
                            "name": "vllm",
                            "image": "vllm:1",
                            "resources": {"requests": {"memory": "8Gi"}},
                            **container,
                        }
                    ]
                },
            },
        },
        "status": {"observedGeneration": 1},
    }


def hook_status(found: RowMap, **more: Any) -> HookStatus:
    """What a good pod reports."""
    base: dict[str, Any] = {
        "hook_version": "1",
        "hook_digest": HOOK.digest,
        "engine": "vLLM",
        "engine_version": "0.32.0",
        "runner": "v1",
        "mode": "serve",
        "phase": "Serving",
        "generation": 1,
        "rank": 0,
        "pid": 1,
        "started_at": 1,
        "updated_at": 2,
        "map_digest": found.digest,
        "row_set_digest": found.row_set_digest,
        "fingerprint": FINGERPRINT,
        "geometry": ModelGeometry(experts=4, top_k=1, moe_layers=(0, 1), row_bytes=64),
        "residency": Residency(
            hot_rows=4, cold_rows=4, hot_bytes=256, cold_bytes=256, locked_bytes=0, tier="overlay"
        ),
        "compile": CompileEvidence(cache_hits=3, cache_misses=0),
    }
    return HookStatus(**{**base, **more})


def report(found: RowMap, **more: Any) -> PodReport:
    return PodReport(hook_status(found, **more), None, reachable=True)


HOOK_ERROR = {
    "phase": "Failed",
    "generation": 0,
    "map_digest": None,
    "residency": None,
    "error": {"reason": "HookUnsupported", "message": "no such engine"},
}


def map_object(found: RowMap, digest: str) -> MapObject:
    return MapObject(names.map_configmap("lane-a", digest), digest, found, None)


def release(template: dict[str, Any]) -> None:
    """Take the lane's fields out of a template: nobody else owns them."""
    (container,) = template["spec"]["containers"]
    ours = ("env", "name"), ("volumeMounts", "mountPath")
    owned = {*names_of_lane(), names.HOOK_MOUNT, names.MAP_MOUNT, names.RUN_DIR}
    for key, merge_key in ours:
        left = [item for item in container.pop(key, ()) if item[merge_key] not in owned]
        container.update({key: left} if left else {})
    volumes = [item for item in template["spec"].pop("volumes", ()) if item["name"] not in owned]
    template["spec"].update({"volumes": volumes} if volumes else {})
    annotations = template["metadata"].pop("annotations", {})
    left = {key: value for key, value in annotations.items() if "expertmaps.dev/" not in key}
    template["metadata"].update({"annotations": left} if left else {})


def names_of_lane() -> set[str]:
    """Names of the lane's variables and volumes."""
    return {*lane_env("9477"), names.VOLUME_HOOK, names.VOLUME_MAP, names.VOLUME_RUN}
