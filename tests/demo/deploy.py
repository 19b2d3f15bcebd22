"""What the demo puts into the cluster, and how it reads the object store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import yaml
from botocore.client import BaseClient
from botocore.config import Config

from tests.demo import lanes
from tests.demo.kube import Kube
from tests.demo.settings import (
    CLASSES,
    HOT_EXPERTS,
    LANE,
    LOCAL_IMAGE,
    MODEL,
    ROOT,
    WORKLOAD,
    DemoError,
    Settings,
)
from tests.model import fixture

S3_MANIFEST = ROOT / "tests/cluster/s3.yaml"
CHART = ROOT / "charts/expertmaps"
REPORTS = ROOT / ".work/demo"
BUCKETS = ("transcripts", "expertmaps", "models")
STORE = {"bucket": "expertmaps", "prefix": "demo/"}
KEYS = ("demo", "demo-secret")


def namespace(kube: Kube, settings: Settings) -> None:
    """The demo's namespace."""
    name = settings.namespace
    kube.run(
        "kubectl",
        "apply",
        "-f",
        "-",
        stdin=yaml.safe_dump({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}),
    )


def nothing_stands(kube: Kube, settings: Settings) -> None:
    """Every run is a whole one: on the local cluster an earlier demo is removed first.

    Raises DemoError on a cluster of the user's, where nothing is removed unasked.
    """
    there = kube.run("kubectl", "get", "namespace", settings.namespace, "--ignore-not-found")
    if not there.strip():
        return
    if settings.local:
        kube.say(f"an earlier demo is removed: namespace {settings.namespace}")
        kube.run("kubectl", "delete", "namespace", settings.namespace, "--wait")
    elif kube.kubectl("get", "deployment", WORKLOAD, "--ignore-not-found").strip():
        raise DemoError(
            f"namespace {settings.namespace}: found Deployment {WORKLOAD} of an earlier demo, "
            "expected none: make demo-down (with the same CLUSTER and NAMESPACE)"
        )


def object_store(kube: Kube, settings: Settings) -> None:
    """SeaweedFS in the namespace, with its two buckets."""
    text = S3_MANIFEST.read_text(encoding="utf-8")
    kube.apply(text.replace(f"{LOCAL_IMAGE}-s3:dev", f"{settings.image}-s3:{settings.tag}"))
    kube.kubectl("rollout", "status", "deployment/s3", "--timeout=300s")
    with s3(kube) as client:
        there = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}
        for bucket in set(BUCKETS) - there:
            client.create_bucket(Bucket=bucket)


@contextmanager
def s3(kube: Kube) -> Iterator[BaseClient]:
    """An S3 client on a port-forward to the demo's object store."""
    with kube.forward("service/s3", 8333) as url:
        yield boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id=KEYS[0],
            aws_secret_access_key=KEYS[1],
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )


def upload_transcripts(kube: Kube, now: float) -> dict[str, int]:
    """Upload the committed transcripts, dated to end an hour before `now`; objects by class."""
    counts: dict[str, int] = {}
    moment = datetime.fromtimestamp(now, UTC)
    with s3(kube) as client:
        for name in CLASSES:
            objects = fixture.lines(name, moment)
            for key, body in objects:
                client.put_object(Bucket="transcripts", Key=key, Body=body)
            counts[name] = len(objects)
    return counts


def upload_model(kube: Kube) -> None:
    """Upload the demo model, for a cluster whose nodes do not have this checkout."""
    with s3(kube) as client:
        for path in sorted(MODEL.iterdir()):
            client.put_object(Bucket="models", Key=path.name, Body=path.read_bytes())


def operator(kube: Kube, settings: Settings) -> None:
    """The operator from its Helm chart, watching the demo's namespace alone."""
    there = "expertlanes.expertmaps.dev" in kube.run("kubectl", "get", "crd", "-o", "name")
    if not settings.local and not there:
        raise DemoError(
            "CustomResourceDefinitions of expertmaps.dev: found none, expected an administrator to "
            "have installed them: kubectl apply -f crds/"
        )
    if settings.local and there:
        # Of an earlier release: Helm does not take over what another release or a person made.
        kube.run("kubectl", "apply", "-f", str(ROOT / "crds"))
    values = {
        "image.operator.repository": f"{settings.image}-operator",
        "image.operator.tag": settings.tag,
        "image.runner.repository": f"{settings.image}-runner",
        "image.runner.tag": settings.tag,
    }
    sets = [word for key, value in values.items() for word in ("--set-string", f"{key}={value}")]
    sets += ["--set", f"crds.install={str(not there).lower()}"]
    kube.run(
        "helm", "upgrade", "--install", "expertmaps", str(CHART), "-n", settings.namespace,
        *sets, "--wait", "--timeout", "300s",
    )  # fmt: skip


def lane(kube: Kube, settings: Settings) -> None:
    """The lane's own Deployment and Service, without anything of ours."""
    kube.apply(json.dumps(lanes.manifests(kube, settings)))


def s3_location(bucket: str, prefix: str) -> dict[str, Any]:
    """An S3Location in the demo's object store."""
    return {
        "s3": {
            "bucket": bucket,
            "prefix": prefix,
            "endpointURL": "http://s3:8333",
            "credentialsSecretRef": {"name": "s3"},
        }
    }


def resources(kube: Kube, settings: Settings) -> None:
    """TrafficClasses, ExpertLane and ExpertMaps; the lane has no active class yet."""
    kube.apply(yaml.safe_dump_all(list(resource_manifests())))


def resource_manifests() -> Iterator[dict[str, Any]]:
    """The five objects of the demo."""
    for name in CLASSES:
        spec: dict[str, Any] = {"transcripts": s3_location("transcripts", f"{name}/")}
        yield _object("TrafficClass", name, spec)
    yield _object(
        "ExpertLane",
        LANE,
        {
            "workloadRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": WORKLOAD},
            "containerName": "vllm",
            "residency": {"hotExpertsPerLayer": HOT_EXPERTS},
            "store": s3_location(STORE["bucket"], STORE["prefix"]),
        },
    )
    for name in CLASSES:
        refs = {"laneRef": {"name": LANE}, "trafficClassRef": {"name": name}}
        yield _object("ExpertMap", f"{LANE}.{name}", refs)


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "expertmaps.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }


def patch_class(kube: Kube, traffic_class: str) -> None:
    """THE switch."""
    patch = json.dumps({"spec": {"activeTrafficClass": traffic_class}})
    kube.kubectl("patch", "lane", LANE, "--type", "merge", "-p", patch)


def fetch_reports(kube: Kube) -> list[Path]:
    """Copy every report from the object store; paths below .work/demo."""
    paths = []
    with s3(kube) as client:
        prefix = f"{STORE['prefix']}reports/"
        for item in client.list_objects_v2(Bucket=STORE["bucket"], Prefix=prefix).get(
            "Contents", []
        ):
            path = REPORTS / item["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(get(client, item["Key"]))
            paths.append(path.relative_to(ROOT))
    return sorted(paths)


def get(client: BaseClient, key: str) -> bytes:
    """Bytes of an object in the store."""
    body: bytes = client.get_object(Bucket=STORE["bucket"], Key=key)["Body"].read()
    return body


def remove(kube: Kube) -> None:
    """Remove everything of the demo from a cluster that is not ours."""
    kube.run("helm", "uninstall", "expertmaps", "-n", kube.namespace, check=False)
    kube.run("kubectl", "delete", "namespace", kube.namespace, "--ignore-not-found", "--wait")
