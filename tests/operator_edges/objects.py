"""Objects that the tests of the operator's edges share."""

from __future__ import annotations

from typing import Any

from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import sha256_digest
from rowmap_jobs.formats.rowmap import Fingerprint, Geometry, RowMap, build

NS = "lanes"
CUSTOM = f"/apis/expertmaps.dev/v1alpha1/namespaces/{NS}"
APPS = f"/apis/apps/v1/namespaces/{NS}"
BATCH = f"/apis/batch/v1/namespaces/{NS}"
CORE = f"/api/v1/namespaces/{NS}"
DIGEST = "sha256:" + "ab" * 32


def lane(name: str = "lane-a", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ExpertLane",
        "metadata": {
            "name": name, "namespace": NS, "uid": f"uid-{name}", "generation": 1,
            "resourceVersion": "7",
        },
        "spec": {
            "workloadRef": {"name": "server"},
            "containerName": "vllm",
            "residency": {"hotExpertsPerLayer": 2},
            "activeTrafficClass": "agent",
            "store": {"s3": {"bucket": "expertmaps"}},
            **spec,
        },
    }  # fmt: skip


def expert_map(name: str = "lane-a.agent", **spec: Any) -> dict[str, Any]:
    lane_name, _, traffic_class = name.partition(".")
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ExpertMap",
        "metadata": {
            "name": name, "namespace": NS, "uid": f"uid-{name}", "generation": 1,
            "resourceVersion": "8",
        },
        "spec": {
            "laneRef": {"name": lane_name},
            "trafficClassRef": {"name": traffic_class},
            **spec,
        },
    }  # fmt: skip


def traffic_class(name: str = "agent") -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": "TrafficClass",
        "metadata": {"name": name, "namespace": NS, "uid": f"uid-{name}", "generation": 1},
        "spec": {"transcripts": {"s3": {"bucket": "transcripts"}}},
    }


def deployment(name: str = "server") -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": NS, "uid": f"uid-{name}"},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"spec": {"containers": [{"name": "vllm", "image": "vllm"}]}},
        },
    }


def owned_by(kind: str, name: str) -> list[dict[str, Any]]:
    return [{"kind": kind, "name": name, "uid": f"uid-{name}", "controller": True}]


def replica_set(name: str = "server-5d4f") -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "labels": {"app": "server", "pod-template-hash": "5d4f"},
            "ownerReferences": owned_by("Deployment", "server"),
        }
    }


def pod(name: str, ip: str = "", hooked: bool = True) -> dict[str, Any]:
    volumes = [{"name": names.VOLUME_HOOK}] if hooked else []
    return {
        "metadata": {
            "name": name,
            "namespace": NS,
            "labels": {"app": "server", "pod-template-hash": "5d4f"},
            "ownerReferences": owned_by("ReplicaSet", "server-5d4f"),
        },
        "spec": {"containers": [{"name": "vllm"}], "volumes": volumes},
        "status": {"phase": "Running", **({"podIP": ip} if ip else {})},
    }


def job(name: str, role: str, labels: dict[str, str], finished: bool = False) -> dict[str, Any]:
    conditions = [{"type": "Complete", "status": "True"}] if finished else []
    return {
        "metadata": {"name": name, "labels": {names.LABEL_ROLE: role, **labels}},
        "status": {"conditions": conditions},
    }


def row_map() -> RowMap:
    some = sha256_digest(b"x")
    fingerprint = Fingerprint(shape=some, router=some, quant="bf16", tokenizer=some)
    geometry = Geometry(experts=4, top_k=2, hot_rows=2, moe_layers=(0,), row_bytes=8)
    return build(fingerprint, geometry, {0: ([1, 2], [0, 3])})


def map_config_map(lane_name: str = "lane-a", digest: str = "") -> dict[str, Any]:
    made = row_map()
    claimed = digest or made.digest
    return {
        "metadata": {
            "name": names.map_configmap(lane_name, claimed),
            "labels": {names.LABEL_ROLE: names.ROLE_MAP, names.LABEL_LANE: lane_name},
            "annotations": {names.ANNOTATION_MAP_DIGEST: claimed},
        },
        "data": {names.MAP_FILE: made.to_bytes().decode()},
    }
