"""The demo's lane: a vLLM Deployment as its owner would write it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.demo.kube import Kube
from tests.demo.settings import CLUSTER_TOOL, MODEL, ROOT, WORKLOAD, Settings

SCRIPT = ROOT / "tests/cluster/lane.py"
USER = 10001
FETCH = """
import boto3, os, pathlib
client = boto3.client("s3", endpoint_url="http://s3:8333", region_name="us-east-1")
for item in client.list_objects_v2(Bucket="models")["Contents"]:
    client.download_file("models", item["Key"], "/models/moe/" + item["Key"])
"""


def manifests(kube: Kube, settings: Settings) -> dict[str, Any]:
    """A List of the lane's objects."""
    if settings.local:
        return _printed(settings, *local_folders(), host_venv())
    listed = _printed(settings, "/unused", "/unused", settings.lane_venv or "/unused")
    deployment = listed["items"][0]
    _make_portable(deployment["spec"]["template"]["spec"], settings)
    listed["items"].append(_claim())
    for item in listed["items"]:
        item["metadata"]["namespace"] = kube.namespace
    return listed


def _printed(settings: Settings, model: str, cache: str, venv: str) -> dict[str, Any]:
    words = [sys.executable, str(SCRIPT), WORKLOAD, "--model", model, "--cache", cache]
    words += ["--venv", venv, "--namespace", settings.namespace]
    words += ["--replicas", str(settings.replicas)]
    words += ["--image", settings.lane_image or f"{settings.image}-vllm-base:{settings.tag}"]
    loaded: dict[str, Any] = json.loads(
        subprocess.run(words, capture_output=True, check=True).stdout
    )
    return loaded


def local_folders() -> tuple[str, str]:
    """Folders of the local cluster's node for the model and the compile caches, made anew."""
    state = Path(os.environ.get("EXPERTMAPS_STATE", "/var/lib/expertmaps-cluster")) / "lane"
    model, cache = state / "model", state / "cache"
    shutil.rmtree(state, ignore_errors=True)
    shutil.copytree(MODEL, model)
    cache.mkdir()
    os.chown(cache, USER, USER)
    return str(model), str(cache)


def host_venv() -> str:
    """The vLLM environment of the local cluster's node."""
    paths = subprocess.run(
        [str(CLUSTER_TOOL), "vllm-paths"], capture_output=True, text=True, check=True
    ).stdout.split()
    return paths[0]


def _make_portable(pod: dict[str, Any], settings: Settings) -> None:
    """No folder of a node: the model comes from the object store, the caches lie on a claim."""
    engine = pod["containers"][0]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    volumes["model"] = {"name": "model", "emptyDir": {}}
    volumes["cache"] = {"name": "cache", "persistentVolumeClaim": {"claimName": WORKLOAD}}
    if settings.lane_venv is None:
        engine["command"][0] = "python3"
        engine["volumeMounts"] = [m for m in engine["volumeMounts"] if m["name"] != "host-0"]
        del volumes["host-0"]
    pod["volumes"] = list(volumes.values())
    pod["initContainers"] = [
        {
            "name": "model",
            "image": f"{settings.image}-runner:{settings.tag}",
            "command": ["python3", "-c", FETCH],
            "envFrom": [{"secretRef": {"name": "s3"}}],
            "securityContext": engine["securityContext"],
            "volumeMounts": [{"name": "model", "mountPath": "/models/moe"}],
        }
    ]


def _claim() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": WORKLOAD},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "2Gi"}},
        },
    }
