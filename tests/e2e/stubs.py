"""A lane of stand-in pods (see stub_engine.py) and the transcripts that its profiles count."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.demo import deploy
from tests.demo.kube import Kube, Object, condition
from tests.demo.settings import LOCAL_IMAGE, ROOT

LANE, WORKLOAD = "stub", "stub-server"
REPLICAS = 3
DEMO = ("lane-a", "code", "prose")
"""Lane and classes of the main job, which live in the same namespace."""
TEXTS = {"a": "aaaa bbbb aabb", "q": "qqqq xxxx qqxx"}
"""Letters of each class: the stand-in's experts are a function of them."""
FILES = (ROOT / "tests/e2e/stub_engine.py", ROOT / "tests/jobs/fake_engine.py")


def now() -> datetime:
    return datetime.now(UTC)


def transcripts(name: str, now: datetime) -> bytes:
    """Fourteen sessions of one completion each."""
    lines = []
    for number in range(14):
        text = f" {TEXTS[name]} {number}" * 6
        record = {
            "v": 1,
            "id": f"{name}-{number}",
            "session": f"{name}-{number}",
            "created": (now - timedelta(hours=1)).isoformat(),
            "endpoint": "/v1/completions",
            "request": {"model": "fake", "prompt": f"{TEXTS[name]}:"},
            "response": {"choices": [{"index": 0, "text": text, "finish_reason": "length"}]},
            "finish_reason": "length",
        }
        lines.append(json.dumps(record))
    return ("\n".join(lines) + "\n").encode()


def workload(replicas: int, name: str = WORKLOAD, **spec: Any) -> Object:
    """The Deployment; `spec` overrides fields of its spec."""
    health = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1}
    health |= {"timeoutSeconds": 5, "failureThreshold": 5}  # the two cores are often busy
    labels = {"app": name}
    container = {
        "name": "engine",
        "image": f"{LOCAL_IMAGE}-runner:dev",
        "command": ["python3", "/stub/stub_engine.py"],
        "readinessProbe": health,
        "resources": {
            "requests": {"cpu": "10m", "memory": "64Mi"},
            "limits": {"memory": "256Mi"},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "stub", "mountPath": "/stub"},
            {"name": "faults", "mountPath": "/faults"},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
            },
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": 5,
                    "containers": [container],
                    "volumes": [
                        {"name": "stub", "configMap": {"name": "stub"}},
                        {"name": "faults", "configMap": {"name": "faults", "optional": True}},
                    ],
                },
            },
            **spec,
        },
    }


def config_map(name: str, data: dict[str, str]) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def lane(name: str = LANE, target: str = WORKLOAD) -> Object:
    """The ExpertLane, without an active class."""
    return custom(
        "ExpertLane",
        name,
        {
            "workloadRef": {"name": target},
            "containerName": "engine",
            "residency": {"hotExpertsPerLayer": 4},
            "update": {"minReadySeconds": 3, "progressDeadlineSeconds": 60},
            "store": deploy.s3_location("expertmaps", "stub/"),
        },
    )


def traffic_class(name: str, prefix: str, **location: Any) -> Object:
    """A TrafficClass whose transcripts are below a prefix; `location` changes its S3Location."""
    place = deploy.s3_location("transcripts", prefix)
    place["s3"].update(location)
    return custom("TrafficClass", name, {"transcripts": place})


def expert_map(lane_name: str, class_name: str, **spec: Any) -> Object:
    """An ExpertMap that accepts the little that stand-ins count."""
    refs = {"laneRef": {"name": lane_name}, "trafficClassRef": {"name": class_name}}
    loose = {"minDecodeTokens": 100, "maxColdShareVsPositional": "10"}
    return custom("ExpertMap", f"{lane_name}.{class_name}", {**refs, "acceptance": loose, **spec})


def resources() -> list[Object]:
    """Classes, lane and maps."""
    found = [traffic_class(f"stub-{name}", f"stub-{name}/") for name in TEXTS]
    found.append(lane())
    return found + [expert_map(LANE, f"stub-{name}") for name in TEXTS]


def custom(kind: str, name: str, spec: Object) -> Object:
    version = "expertmaps.dev/v1alpha1"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def bring_up(kube: Kube, replicas: int) -> None:
    """Transcripts, pods, resources; wait until both maps are accepted."""
    now = datetime.now(UTC)
    with deploy.s3(kube) as client:
        for name in TEXTS:
            key = f"stub-{name}/records.jsonl"
            client.put_object(Bucket="transcripts", Key=key, Body=transcripts(name, now))
    code = {path.name: path.read_text(encoding="utf-8") for path in FILES}
    apply(kube, config_map("stub", code), workload(replicas))
    ready = f"deployment/{WORKLOAD}"
    kube.kubectl("rollout", "status", ready, "--timeout=120s")
    apply(kube, *resources())
    for name in TEXTS:
        kube.kubectl("wait", "--for=condition=Ready", f"em/{LANE}.stub-{name}", "--timeout=300s")


def take_down(kube: Kube) -> None:
    """Everything of the stand-ins but their objects in the store; their pods are gone then."""
    there = kube.kubectl("get", "em,lane,tc", "-o", "name").split()
    ours = [item for item in there if item.rpartition("/")[2].split(".")[0] not in DEMO]
    if ours:
        kube.kubectl("delete", *ours, "--wait")
    kube.kubectl("delete", "deployment", WORKLOAD, "--ignore-not-found", "--wait")
    kube.kubectl("delete", "configmap", "stub", "faults", "--ignore-not-found")
    kube.kubectl("wait", "--for=delete", "pod", "-l", f"app={WORKLOAD}", "--timeout=120s")


def apply(kube: Kube, *items: Object) -> None:
    """kubectl apply, as most users do."""
    listed = {"apiVersion": "v1", "kind": "List", "items": list(items)}
    kube.kubectl("apply", "-f", "-", stdin=json.dumps(listed))


def switch(kube: Kube, name: str) -> None:
    """Patch the lane's active class."""
    patch = json.dumps({"spec": {"activeTrafficClass": f"stub-{name}"}})
    kube.kubectl("patch", "lane", LANE, "--type", "merge", "-p", patch)


def edit(kube: Kube, **spec: Any) -> None:
    """Patch other fields of the lane's spec."""
    kube.kubectl("patch", "lane", LANE, "--type", "merge", "-p", json.dumps({"spec": spec}))


def digest(kube: Kube, name: str) -> str:
    """Digest of the accepted map of a class."""
    item = kube.get("em", f"{LANE}.stub-{name}") or {}
    return str(item["status"]["accepted"]["digest"])


def break_map(kube: Kube, name: str, mode: str) -> None:
    """From now on, pods that start with the map of a class misbehave."""
    apply(kube, config_map("faults", {"mode": mode, "digest": digest(kube, name)}))


def mend(kube: Kube) -> None:
    """From now on, pods that start are good."""
    kube.kubectl("delete", "configmap", "faults", "--ignore-not-found")


def said(kube: Kube, kind: str) -> str:
    """A condition of the lane as status/reason."""
    found = condition(kube.get("lane", LANE), kind)
    return f"{found.get('status')}/{found.get('reason')}"


def until_said(kube: Kube, kind: str, wanted: str, seconds: float = 120) -> None:
    """Wait for a condition of the lane: what follows a state may be told a turn later."""

    def look() -> tuple[bool, str]:
        seen = said(kube, kind)
        return seen == wanted, seen

    kube.until(f"{kind} is {wanted}", look, seconds, every=0.5)


def state(kube: Kube, name: str = LANE) -> tuple[str, str, str]:
    """(active class, Ready as status/reason, rollout state), once the spec was looked at."""
    item = kube.get("lane", name) or {}
    status = item.get("status") or {}
    if status.get("observedGeneration") != (item.get("metadata") or {}).get("generation"):
        return "", "the spec was not looked at yet", ""
    ready = condition(item, "Ready")
    return (
        (status.get("active") or {}).get("trafficClass", ""),
        f"{ready.get('status')}/{ready.get('reason')}",
        (status.get("rollout") or {}).get("state", ""),
    )


def last_rollout(kube: Kube) -> str:
    """Id of the lane's newest rollout."""
    status = (kube.get("lane", LANE) or {}).get("status") or {}
    return str((status.get("rollout") or {}).get("id", ""))


def until(
    kube: Kube, wanted: tuple[str, str, str], seconds: float = 180, after: str | None = None
) -> None:
    """Wait for a state of the lane; where it is in that state now, by a rollout `after` this id."""

    def look() -> tuple[bool, str]:
        seen, newest = state(kube), last_rollout(kube)
        return seen == wanted and newest != after, f"{seen}, rollout {newest}"

    kube.until(f"lane {LANE} is {wanted}", look, seconds, every=0.5)


def pods(kube: Kube, workload: str = WORKLOAD) -> dict[str, str]:
    """Map digest in the template of each living pod, by pod name."""
    return {
        pod["metadata"]["name"]: (pod["metadata"].get("annotations") or {}).get(
            "expertmaps.dev/map-digest", ""
        )
        for pod in kube.list("pods", f"app={workload}")
        if "deletionTimestamp" not in pod["metadata"]
    }
