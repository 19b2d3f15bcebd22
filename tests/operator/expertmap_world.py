"""Objects for decisions on ExpertMaps: the resources, a lane's workload, Jobs and their pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.api.expertmap import ExpertMap
from expertmaps_operator.api.trafficclass import TrafficClass
from expertmaps_operator.decide.conditions import timestamp
from expertmaps_operator.plan import Plan
from expertmaps_operator.snapshot import (
    HookFiles,
    MapObject,
    MapSnapshot,
    Settings,
    Slots,
)
from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.rowmap import Fingerprint, Geometry, RowMap
from rowmap_jobs.formats.run import ColdShares, Counted, Verdict

START = datetime(2026, 1, 5, 12, 0, 0, tzinfo=UTC)
NAMESPACE = "models"
MAP_UID = "00000000-0000-0000-0000-00000000000a"
LANE_UID = "00000000-0000-0000-0000-00000000000b"
WORKLOAD_UID = "00000000-0000-0000-0000-00000000000c"
HOOK_DIGEST = "sha256:" + "5" * 64
FIRST_RUN = f"lane-a.agent-{int(START.timestamp()) // 60}"


def s3(bucket: str, **more: Any) -> dict[str, Any]:
    return {
        "s3": {
            "bucket": bucket,
            "prefix": "p/",
            "endpointURL": "http://s3:8333",
            "credentialsSecretRef": {"name": f"{bucket}-keys"},
            **more,
        }
    }


def lane(**spec: Any) -> ExpertLane:
    return ExpertLane.model_validate(
        {
            "metadata": {
                "name": "lane-a",
                "namespace": NAMESPACE,
                "uid": LANE_UID,
                "generation": 1,
            },
            "spec": {
                "workloadRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm-a"},
                "containerName": "vllm",
                "residency": {"hotExpertsPerLayer": 2},
                "store": s3("store"),
                **spec,
            },
        }
    )


def traffic_class(**spec: Any) -> TrafficClass:
    return TrafficClass.model_validate(
        {
            "metadata": {"name": "agent", "namespace": NAMESPACE, "generation": 1},
            "spec": {"transcripts": s3("transcripts"), **spec},
        }
    )


def expert_map(status: Mapping[str, Any] | None = None, **spec: Any) -> ExpertMap:
    generation = spec.pop("generation", 1)
    return ExpertMap.model_validate(
        {
            "metadata": {
                "name": "lane-a.agent",
                "namespace": NAMESPACE,
                "uid": MAP_UID,
                "generation": generation,
                "creationTimestamp": timestamp(START),
            },
            "spec": {
                "laneRef": {"name": "lane-a"},
                "trafficClassRef": {"name": "agent"},
                **spec,
            },
            "status": status or {},
        }
    )


def workload() -> dict[str, Any]:
    """A lane's Deployment with everything that a copy must not carry on."""
    container = {
        "name": "vllm",
        "image": "vllm:1",
        "command": ["/bin/sh", "-c", "exec vllm serve /models/m"],
        "env": [
            {"name": "VLLM_CACHE_ROOT", "value": "/cache/vllm"},
            {"name": "TRITON_CACHE_DIR", "value": "/cache/triton"},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
        ],
        "ports": [{"name": "http", "containerPort": 8000, "hostPort": 8000}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 2,
            "successThreshold": 2,
        },
        "livenessProbe": {"httpGet": {"path": "/health", "port": "http"}},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "60"]}}},
        "resources": {"requests": {"memory": "8Gi"}, "limits": {"nvidia.com/gpu": "1"}},
        "volumeMounts": [
            {"name": "venv", "mountPath": "/opt/vllm", "readOnly": True},
            {"name": "models", "mountPath": "/models"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "vllm-a", "namespace": NAMESPACE, "uid": WORKLOAD_UID},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm-a"}},
            "template": {
                "metadata": {
                    "labels": {"app": "vllm-a", "team": "x"},
                    "annotations": {"prometheus.io/scrape": "true"},
                },
                "spec": {
                    "serviceAccountName": "lane-account",
                    "priorityClassName": "production",
                    "terminationGracePeriodSeconds": 3600,
                    "shareProcessNamespace": True,
                    "nodeSelector": {"gpu": "h200"},
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                    "runtimeClassName": "nvidia",
                    "imagePullSecrets": [{"name": "registry"}],
                    "affinity": {
                        "nodeAffinity": {
                            "preferredDuringSchedulingIgnoredDuringExecution": [
                                {
                                    "weight": 1,
                                    "preference": {
                                        "matchExpressions": [{"key": "zone", "operator": "Exists"}]
                                    },
                                }
                            ]
                        },
                        "podAntiAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": [
                                {
                                    "topologyKey": "kubernetes.io/hostname",
                                    "labelSelector": {"matchLabels": {"app": "vllm-a"}},
                                }
                            ]
                        },
                    },
                    "topologySpreadConstraints": [
                        {
                            "maxSkew": 1,
                            "topologyKey": "zone",
                            "whenUnsatisfiable": "DoNotSchedule",
                            "labelSelector": {"matchLabels": {"app": "vllm-a"}},
                        }
                    ],
                    "initContainers": [
                        {
                            "name": "fetch-model",
                            "image": "fetch:1",
                            "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                        },
                        {"name": "logs", "image": "logs:1", "restartPolicy": "Always"},
                    ],
                    "containers": [container, {"name": "exporter", "image": "exporter:1"}],
                    "volumes": [
                        {"name": "venv", "hostPath": {"path": "/opt/vllm"}},
                        {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
                        {"name": "cache", "hostPath": {"path": "/var/lib/cache"}},
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                        {"name": "unused", "hostPath": {"path": "/"}},
                    ],
                },
            },
        },
    }


def engine_of(deployment: dict[str, Any]) -> dict[str, Any]:
    """The serving container of a Deployment, to be changed by a test."""
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def settings(**more: Any) -> Settings:
    hook = HookFiles(
        digest=HOOK_DIGEST,
        data={"expertmaps_hook.py": "pass\n"},
        items=({"key": "expertmaps_hook.py", "path": "expertmaps_hook.py"},),
        version="0.1.0",
    )
    base = Settings(
        runner_image="runner:1",
        runner_service_account="expertmaps-runner",
        runner_pull_policy="IfNotPresent",
        max_concurrent_profiles=1,
        max_concurrent_rollouts=1,
        hook=hook,
    )
    return replace(base, **more)


def row_map(hot: int = 2, first: int = 0) -> RowMap:
    """A map of two layers with four experts."""
    digest = "sha256:" + "1" * 64
    geometry = Geometry(
        experts=4, top_k=1, hot_rows=hot, moe_layers=(0, 1), row_bytes=64, expert_parallel=None
    )
    order = [(first + step) % 4 for step in range(4)]
    rows = (order[:hot], order[hot:])
    fingerprint = Fingerprint(shape=digest, router=digest, quant="bf16", tokenizer=digest)
    return rowmap.build(fingerprint, geometry, {0: rows, 1: rows})


def map_object(found: RowMap, error: str | None = None) -> MapObject:
    return MapObject(
        name="lane-a-map",
        digest=found.digest,
        row_map=None if error else found,
        error=error,
    )


def verdict(run: str, outcome: str = "Accepted", reason: str = "", **more: Any) -> Verdict:
    """What a runner says; an accepted one names `row_map()`."""
    fields: dict[str, Any] = {"message": f"{outcome} for a reason", **more}
    if outcome in ("Accepted", "Rejected"):
        made = row_map()
        fields = {
            "digest": made.digest,
            "row_set_digest": made.row_set_digest,
            "fingerprint": made.fingerprint,
            "geometry": made.geometry,
            "cold": ColdShares(own=0.0155, in_sample=0.01, positional=0.23),
            "counted": Counted(
                sessions=20,
                transcripts=40,
                decode_tokens=9000,
                prefill_tokens=100,
                considered=50,
            ),
            "engine_seconds": 12.34,
            "count_seconds": 5.0,
            "report_key": "reports/x/report.json",
            **fields,
        }
    return Verdict(run=run, outcome=outcome, reason=reason or outcome, **fields)


def ended(code: int = 0, message: str | None = None, reason: str = "") -> dict[str, Any]:
    """A container's terminated state."""
    state = {"exitCode": code, "reason": reason or ("Completed" if code == 0 else "Error")}
    return {"terminated": {**state, **({"message": message} if message else {})}}


def container_status(name: str, state: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "state": state or {}, "restartCount": 0, **more}


def pod(
    job: Mapping[str, Any],
    *,
    name: str = "pod-1",
    at: datetime = START,
    inits: tuple[dict[str, Any], ...] = (),
    mains: tuple[dict[str, Any], ...] = (),
    **status: Any,
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": timestamp(at),
            "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
        },
        "status": {
            "phase": "Pending",
            "initContainerStatuses": list(inits),
            "containerStatuses": list(mains),
            **status,
        },
    }


def job(name: str = FIRST_RUN, at: datetime = START, **status: Any) -> dict[str, Any]:
    """A profile Job as the API server returns it."""
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": timestamp(at),
            "ownerReferences": [{"uid": MAP_UID, "controller": True}],
        },
        "spec": {
            "template": {
                "spec": {
                    "initContainers": [
                        {"name": "probe"},
                        {"name": "vllm", "restartPolicy": "Always"},
                    ]
                }
            }
        },
        "status": status,
    }


def finished(
    kind: str = "Complete", reason: str = "", at: datetime = START, message: str = ""
) -> dict[str, Any]:
    """Status of a Job that ended."""
    condition = {
        "type": kind,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": timestamp(at),
    }
    return {"conditions": [condition]}


def running(name: str = FIRST_RUN, at: datetime = START, **more: Any) -> dict[str, Any]:
    """A status with an unfinished run."""
    run = {"name": name, "generation": 1, "startedAt": timestamp(at), "jobUid": f"uid-{name}"}
    return {"run": {**run, **more}}


def snapshot(map_: Any = None, **more: Any) -> MapSnapshot:
    fields: dict[str, Any] = {
        "map": expert_map() if map_ is None else map_,
        "lane": lane(),
        "traffic_class": traffic_class(),
        "sibling_maps": (),
        "workload": workload(),
        "jobs": (),
        "pods": (),
        "map_objects": {},
        "slots": Slots(profiles=0, rollouts=0),
        "settings": settings(),
        **more,
    }
    return MapSnapshot(**fields)


def conditions(plan: Plan) -> dict[str, tuple[str, str]]:
    """Type to (status, reason)."""
    assert plan.status is not None
    return {
        item["type"]: (item["status"], item["reason"]) for item in plan.status.get("conditions", [])
    }
