#!/usr/bin/env python3
"""Print the manifest of a vLLM lane, a Deployment and its Service, for `kubectl apply -f -`.

The pod runs the venv of the host (`cluster vllm-paths`) in the image expertmaps-vllm-base. It is
what a user's own workload would be before a lane claims it: it boots and serves by itself. The
cache folder must be writable by the pod's user: `install -d -o 10001 -g 10001 FOLDER`.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

IMAGE = "docker.io/expertmaps/expertmaps-vllm-base:dev"
PORT = 8000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--model", required=True, help="folder of the model on the host")
    parser.add_argument("--cache", required=True, help="folder of the compile caches on the host")
    parser.add_argument("--venv", required=True, help="the venv, mounted at the same path")
    parser.add_argument("--mount", action="append", default=[], help="one more such path")
    parser.add_argument("--image", default=IMAGE)
    parser.add_argument("--threads", type=int, default=2, help="threads of the engine")
    parser.add_argument("--cpu", default="400m", help="request")
    parser.add_argument("--memory", default="3Gi", help="request")
    parser.add_argument("--memory-limit", help="limit (none if not given)")
    parser.add_argument("--kv-space", type=int, default=1, help="GiB of key-value cache")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--user", type=int, default=10001)
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--arg", action="append", default=[], help="one more engine argument")
    return parser.parse_args()


def environment(args: argparse.Namespace) -> list[dict[str, str]]:
    values = {
        "HOME": "/home/vllm",
        "USER": "vllm",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(args.kv_space),
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CACHE_ROOT": "/cache/vllm",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
        "CXX": "/usr/bin/g++",
        # Without this the engine binds itself to one core, and all pods to the same one.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(args.threads),
        # Threads that wait sleep, so that pods on the same cores do not burn each other's time.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    values.update(item.split("=", 1) for item in args.env)
    return [{"name": name, "value": value} for name, value in values.items()]


def container(args: argparse.Namespace, paths: list[str]) -> dict[str, Any]:
    health = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    command = [f"{args.venv}/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", "/models/moe", "--served-model-name", "moe"]
    command += ["--max-model-len", str(args.max_model_len), "--port", str(PORT)]
    command += ["--shutdown-timeout", "15", *args.arg]
    resources: dict[str, Any] = {"requests": {"cpu": args.cpu, "memory": args.memory}}
    if args.memory_limit:
        resources["limits"] = {"memory": args.memory_limit}
    mounts: list[dict[str, Any]] = [
        {"name": "model", "mountPath": "/models/moe", "readOnly": True},
        {"name": "cache", "mountPath": "/cache"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "home", "mountPath": "/home/vllm"},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    mounts += [
        {"name": f"host-{i}", "mountPath": path, "readOnly": True} for i, path in enumerate(paths)
    ]
    return {
        "name": "vllm",
        "image": args.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": environment(args),
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": resources,
        "startupProbe": {**health, "periodSeconds": 2, "failureThreshold": 450},
        "readinessProbe": {**health, "periodSeconds": 2, "failureThreshold": 5},
        "lifecycle": {"preStop": {"sleep": {"seconds": 3}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def host_path(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}


def manifest(args: argparse.Namespace) -> dict[str, Any]:
    labels = {"app": args.name}
    meta = {"name": args.name, "namespace": args.namespace, "labels": labels}
    paths = [args.venv, *args.mount]
    volumes: list[dict[str, Any]] = [
        host_path("model", args.model),
        host_path("cache", args.cache),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        *(host_path(f"host-{i}", path) for i, path in enumerate(paths)),
    ]
    identity = {"runAsUser": args.user, "runAsGroup": args.user, "fsGroup": args.user}
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 40,
        "securityContext": {
            **identity,
            "runAsNonRoot": args.user != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container(args, paths)],
        "volumes": volumes,
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": args.replicas,
            # A second server beside the first would not fit: a pod goes, then its successor comes.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {"selector": labels, "ports": ports},
    }
    return {"apiVersion": "v1", "kind": "List", "items": [deployment, service]}


if __name__ == "__main__":
    print(json.dumps(manifest(parse()), indent=1))
