"""One run of the main job for the whole suite, and helpers for lanes of stand-in pods.

The suite speaks to the local cluster as a user speaks to theirs: through a kubeconfig, in one
namespace, with the CustomResourceDefinitions and the volume that an administrator provides.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.demo import deploy
from tests.demo.job import Demo
from tests.demo.kube import Kube, cluster_environment
from tests.demo.lanes import host_venv
from tests.demo.settings import LOCAL_IMAGE, ROOT, WORKLOAD, Settings
from tests.e2e import stubs

NAMESPACE = "expertmaps-e2e"
CLUSTER_KINDS = ("namespaces", "crd", "clusterroles", "clusterrolebindings", "storageclasses")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def kube() -> Kube:
    """The local cluster, through its kubeconfig."""
    return Kube(NAMESPACE, cluster_environment(), lambda text: print(text, flush=True))


@pytest.fixture(scope="session")
def administrator(kube: Kube) -> Iterator[None]:
    """What an administrator does once: CustomResourceDefinitions and a volume for the caches."""
    kube.run("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait")
    kube.run("kubectl", "delete", "pv", NAMESPACE, "--ignore-not-found", "--wait")
    kube.run("kubectl", "apply", "-f", str(ROOT / "crds"))
    kube.run("kubectl", "wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    folder = Path(os.environ.get("EXPERTMAPS_STATE", "/var/lib/expertmaps-cluster")) / "e2e-cache"
    subprocess.run(["install", "-d", "-o", "10001", "-g", "10001", str(folder)], check=True)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": NAMESPACE},
        "spec": {
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(folder)},
            "claimRef": {"namespace": NAMESPACE, "name": WORKLOAD},
        },
    }
    kube.run("kubectl", "apply", "-f", "-", stdin=yaml.safe_dump(volume))
    yield
    kube.run("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait")
    kube.run("kubectl", "delete", "pv", NAMESPACE, "--ignore-not-found", "--wait")


def outside(kube: Kube) -> dict[str, Any]:
    """Names of what is outside the suite's namespace: cluster-wide objects, others' workloads."""
    found: dict[str, Any] = {}
    for kind in CLUSTER_KINDS:
        names = kube.run("kubectl", "get", kind, "-o", "name").split()
        found[kind] = sorted(set(names) - {f"namespace/{NAMESPACE}"})
    for kind in ("deployments", "configmaps", "secrets", "serviceaccounts", "roles"):
        items = json.loads(kube.run("kubectl", "get", kind, "-A", "-o", "json"))["items"]
        found[kind] = sorted(
            f"{i['metadata']['namespace']}/{i['metadata']['name']}"
            for i in items
            if i["metadata"]["namespace"] != NAMESPACE
        )
    return found


@pytest.fixture(scope="session")
def before(kube: Kube, administrator: None) -> dict[str, Any]:
    """What was there before the main job."""
    return outside(kube)


@pytest.fixture(scope="session")
def settings() -> Settings:
    return Settings(
        local=False,
        namespace=NAMESPACE,
        image=LOCAL_IMAGE,
        tag="dev",
        lane_image=f"{LOCAL_IMAGE}-vllm-base:dev",
        lane_venv=host_venv(),
    )


@pytest.fixture(scope="session")
def ground(kube: Kube, before: dict[str, Any], settings: Settings) -> Kube:
    """Namespace, object store and operator: what lanes of stand-in pods need."""
    deploy.namespace(kube, settings)
    deploy.object_store(kube, settings)
    deploy.operator(kube, settings)
    return kube


@pytest.fixture(scope="module")
def lane(ground: Kube) -> Iterator[Kube]:
    """Three stand-in pods with two accepted maps; no class is active yet."""
    try:
        stubs.bring_up(ground, stubs.REPLICAS)
        yield ground
    finally:
        stubs.take_down(ground)


@pytest.fixture(scope="session")
def demo(ground: Kube, settings: Settings) -> Demo:
    """The main job, run once: adopted `code`, switched to `prose` and back."""
    done = Demo(settings, ground, ground.say)
    done.run()
    return done
