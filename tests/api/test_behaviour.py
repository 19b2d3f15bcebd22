"""What users and managers of the objects can rely on, on a real API server."""

from __future__ import annotations

import subprocess
import threading
import time
from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException
from pydantic import BaseModel

from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.api.expertmap import ExpertMap
from expertmaps_operator.api.trafficclass import TrafficClass
from tests.api.apiserver import ApiServer, wait_for
from tests.api.conftest import CRDS, PLURALS
from tests.api.objects import NAMES, PLURAL, Objects, minimal

pytestmark = pytest.mark.api

MODELS: dict[str, Any] = {
    "TrafficClass": TrafficClass,
    "ExpertLane": ExpertLane,
    "ExpertMap": ExpertMap,
}
SAMPLES = sorted((CRDS / "samples").glob("*.yaml"))
NOW = "2026-01-01T00:00:00Z"
DIGEST = "sha256:" + "a" * 64
IN_FORCE = {"trafficClass": "agent", "digest": DIGEST, "hookDigest": DIGEST}


def condition(kind: str, status: str, reason: str, message: str = "A sentence.") -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": 1,
        "lastTransitionTime": NOW,
    }


@pytest.fixture
def objects(crds: ApiServer, namespace: str) -> Objects:
    return Objects(crds.client(), namespace)


def test_the_definitions_are_accepted_whole(crds: ApiServer) -> None:
    for plural in PLURALS:
        done = crds.kubectl("get", "crd", f"{plural}.expertmaps.dev", "-o", "json")
        definition = yaml.safe_load(done.stdout)
        found = {one["type"]: one["status"] for one in definition["status"]["conditions"]}
        # NonStructuralSchema would be a third one.
        assert found == {"NamesAccepted": "True", "Established": "True"}


@pytest.mark.parametrize("kind", MODELS)
def test_defaults_are_those_of_the_models(objects: Objects, kind: str) -> None:
    created = objects.create(minimal(kind))
    own = MODELS[kind].model_fields["spec"].annotation.model_validate(minimal(kind)["spec"])
    assert created["spec"] == own.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_the_defaults_of_a_lane(objects: Objects) -> None:
    spec = objects.create(minimal("ExpertLane"))["spec"]
    assert spec["workloadRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "vllm-lane-a",
    }
    assert spec["hook"] == {"statusPort": 9477}
    assert spec["server"] == {"port": 8000}
    assert spec["paused"] is False
    assert spec["store"]["s3"]["checksumMode"] == "WhenRequired"


@pytest.mark.parametrize("path", SAMPLES, ids=[path.name for path in SAMPLES])
def test_a_sample_applies_as_it_is(crds: ApiServer, namespace: str, path: Any) -> None:
    crds.kubectl("-n", namespace, "apply", f"-f={path}")
    again = crds.kubectl("-n", namespace, "apply", f"-f={path}").stdout
    changed = [line for line in again.splitlines() if not line.endswith(" unchanged")]
    # kubectl writes stringData every time.
    assert all(line.startswith("secret/") for line in changed), changed
    crds.kubectl("-n", namespace, "apply", "--server-side", "--force-conflicts", f"-f={path}")


def test_there_is_a_sample_of_each_kind() -> None:
    kinds = {yaml.safe_load(one.read_text())["kind"] for one in SAMPLES if one.stem != "full"}
    assert kinds == set(MODELS)
    full = [one["kind"] for one in yaml.safe_load_all((CRDS / "samples/full.yaml").read_text())]
    assert set(MODELS) < set(full)


@pytest.mark.parametrize("kind", MODELS)
def test_explain_has_a_sentence_for_every_field(crds: ApiServer, kind: str) -> None:
    def walk(node: dict[str, Any], path: str) -> list[str]:
        lines = [path]
        for name, child in node.get("properties", {}).items():
            lines += walk(child.get("items", child), f"{path}.{name}")
        return lines

    text = (CRDS / f"{PLURAL[kind]}.yaml").read_text()
    schema = yaml.safe_load(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    resource = PLURAL[kind]
    # One call for the whole tree, and the full text of what users look up most.
    tree = crds.kubectl("explain", resource, "--recursive").stdout
    for part in ("spec", "status"):
        for path in walk(schema["properties"][part], part):
            assert f"{path.rsplit('.', 1)[-1]}\t<" in tree, path
    for part in ("spec", "status"):
        lines = crds.kubectl("explain", f"{resource}.{part}").stdout.splitlines()
        for number, line in enumerate(lines):
            if line.startswith("  ") and "\t<" in line:
                assert len(lines[number + 1].split()) > 1, line
        assert "<no description>" not in "\n".join(lines)


def test_short_names_and_category(crds: ApiServer, namespace: str, objects: Objects) -> None:
    for kind in MODELS:
        objects.create(minimal(kind))
    for short, kind in (("tc", "TrafficClass"), ("lane", "ExpertLane"), ("em", "ExpertMap")):
        done = crds.kubectl("-n", namespace, "get", short, "-o", "name")
        assert done.stdout.strip().endswith(f"/{NAMES[kind]}")
    # A category of the same name would make this show all kinds.
    done = crds.kubectl("-n", namespace, "get", "expertmaps", "-o", "name")
    assert done.stdout.split() == ["expertmap.expertmaps.dev/lane-a.agent"]
    done = crds.kubectl("-n", namespace, "get", "expertmaps-all", "-o", "name")
    assert len(done.stdout.split()) == len(MODELS)


def _table(text: str) -> dict[str, str]:
    """Header and first row of a table, split where the header's columns start."""
    header, row = text.splitlines()[:2]
    starts = [at for at, one in enumerate(header) if one != " " and header[at - 1] in " "]
    starts = [0, *(start for start in starts if start)]
    ends = [*starts[1:], None]
    return {
        header[one:two].strip(): row[one:two].strip() for one, two in zip(starts, ends, strict=True)
    }


def test_columns_of_a_lane(crds: ApiServer, namespace: str, objects: Objects) -> None:
    objects.create(minimal("ExpertLane"))
    status = {
        "observedGeneration": 1,
        "conditions": [
            condition("Ready", "True", "LaneServing", "All pods serve."),
            condition("Progressing", "False", "RolloutComplete"),
        ],
        "active": IN_FORCE,
        "effectiveTrafficClass": "prose",
        "replicas": 2,
        "updatedReplicas": 1,
    }
    objects.apply_status("ExpertLane", status, "operator")
    narrow = _table(crds.kubectl("-n", namespace, "get", "lane").stdout)
    assert list(narrow) == [
        *("NAME", "WANTED", "CLASS", "READY", "REASON", "PROGRESSING", "REPLICAS", "AGE"),
    ]
    assert list(narrow.values())[:-1] == [
        *("lane-a", "prose", "agent", "True", "LaneServing", "RolloutComplete", "2"),
    ]
    wide = _table(crds.kubectl("-n", namespace, "get", "lane", "-o", "wide").stdout)
    assert wide["DIGEST"] == DIGEST
    assert wide["UPDATED"] == "1"
    assert wide["MESSAGE"] == "All pods serve."


def test_columns_of_a_map_and_a_class(crds: ApiServer, namespace: str, objects: Objects) -> None:
    objects.create(minimal("ExpertMap"))
    objects.create(minimal("TrafficClass"))
    accepted = {"digest": DIGEST, "rowSetDigest": DIGEST, "run": "r", "acceptedAt": NOW}
    status = {
        "conditions": [
            condition("Ready", "True", "MapAccepted"),
            condition("Profiling", "False", "ProfileSucceeded"),
        ],
        "accepted": {**accepted, "coldSharePercent": "1.55"},
    }
    objects.apply_status("ExpertMap", status, "operator")
    table = _table(crds.kubectl("-n", namespace, "get", "em").stdout)
    assert list(table.items())[:-1] == [
        ("NAME", "lane-a.agent"),
        ("LANE", "lane-a"),
        ("CLASS", "agent"),
        ("READY", "True"),
        ("REASON", "MapAccepted"),
        ("PROFILING", "ProfileSucceeded"),
        ("COLD%", "1.55"),
    ]
    found = [condition("Ready", "True", "TranscriptsFound")]
    objects.apply_status("TrafficClass", {"conditions": found, "sessions": 30}, "operator")
    table = _table(crds.kubectl("-n", namespace, "get", "tc").stdout)
    assert list(table.items())[:-1] == [
        ("NAME", "agent"),
        ("WINDOW", "168h"),
        ("SESSIONS", "30"),
        ("READY", "True"),
        ("REASON", "TranscriptsFound"),
    ]


@pytest.mark.parametrize(
    "waiting_for",
    ["--for=jsonpath={.status.active.trafficClass}=agent", "--for=condition=Ready"],
)
def test_kubectl_wait(crds: ApiServer, namespace: str, objects: Objects, waiting_for: str) -> None:
    objects.create(minimal("ExpertLane"))
    arguments = ("-n", namespace, "wait", "lane/lane-a", waiting_for)
    early = crds.kubectl(*arguments, "--timeout=1s", check=False)
    assert "timed out" in early.stderr
    result: list[subprocess.CompletedProcess[str]] = []
    waiter = threading.Thread(
        target=lambda: result.append(crds.kubectl(*arguments, "--timeout=30s", check=False))
    )
    waiter.start()
    time.sleep(0.3)
    ready = [condition("Ready", "True", "LaneServing")]
    objects.apply_status("ExpertLane", {"conditions": ready, "active": IN_FORCE}, "operator")
    waiter.join()
    assert result[0].returncode == 0, result[0].stderr


def _types(found: dict[str, Any]) -> dict[str, str]:
    return {one["type"]: one["reason"] for one in found["status"]["conditions"]}


def test_two_managers_of_conditions(objects: Objects) -> None:
    objects.create(minimal("ExpertLane"))
    ours = [condition("Ready", "False", "Rolling"), condition("Paused", "True", "Paused")]
    objects.apply_status("ExpertLane", {"conditions": ours}, "operator")
    theirs = [condition("Audited", "True", "Audited")]
    found = objects.apply_status("ExpertLane", {"conditions": theirs}, "auditor")
    assert _types(found) == {"Ready": "Rolling", "Paused": "Paused", "Audited": "Audited"}
    # What a manager leaves out goes, if nobody else has it; what others have stays.
    ours = [condition("Ready", "True", "LaneServing")]
    found = objects.apply_status("ExpertLane", {"conditions": ours}, "operator")
    assert _types(found) == {"Ready": "LaneServing", "Audited": "Audited"}
    twice = [*ours, condition("Ready", "False", "Rolling")]
    with pytest.raises(ApiException) as caught:
        objects.apply_status("ExpertLane", {"conditions": twice}, "operator")
    assert "duplicate" in str(caught.value).lower()


def test_the_status_is_a_subresource(objects: Objects) -> None:
    body = {**minimal("ExpertLane"), "status": {"replicas": 3}}
    created = objects.create(body)
    assert "status" not in created
    found = objects.apply_status("ExpertLane", {"replicas": 3}, "operator")
    assert found["status"] == {"replicas": 3}
    assert found["metadata"]["generation"] == created["metadata"]["generation"]
    changed = objects.patch("ExpertLane", {"spec": {"paused": True}, "status": {"replicas": 4}})
    assert changed["status"] == {"replicas": 3}
    assert changed["metadata"]["generation"] == created["metadata"]["generation"] + 1


def _filled(node: dict[str, Any]) -> Any:
    """A value with every field of a schema."""
    if "properties" in node:
        return {name: _filled(child) for name, child in node["properties"].items()}
    if "additionalProperties" in node:
        return {"key": _filled(node["additionalProperties"])}
    if node["type"] == "array":
        return [_filled(node["items"])]
    if node["type"] == "string":
        text = DIGEST if "sha256" in node.get("pattern", "") else "Text"
        return NOW if node.get("format") == "date-time" else node.get("enum", [text])[0]
    return {"integer": 1, "boolean": True}[node["type"]]


def _fields(model: type[BaseModel]) -> set[str]:
    return set(model.model_json_schema(by_alias=True)["properties"])


@pytest.mark.parametrize("kind", MODELS)
def test_a_status_of_the_models_is_kept_whole(objects: Objects, kind: str) -> None:
    objects.create(minimal(kind))
    text = (CRDS / f"{PLURAL[kind]}.yaml").read_text()
    schema = yaml.safe_load(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    status = _filled(schema["properties"]["status"])
    assert set(status) == _fields(MODELS[kind].model_fields["status"].annotation)
    found = objects.apply_status(kind, status, "operator")
    assert found["status"] == status
    assert MODELS[kind].model_validate(found).status.to_wire() == status


def test_a_switch_by_patch(crds: ApiServer, namespace: str, objects: Objects) -> None:
    objects.create(minimal("ExpertLane"))
    patch = '{"spec":{"activeTrafficClass":"prose"}}'
    crds.kubectl("-n", namespace, "patch", "lane", "lane-a", "--type=merge", "-p", patch)
    assert objects.get("ExpertLane")["spec"]["activeTrafficClass"] == "prose"
    # A manifest that leaves the field out does not take the switch back.
    text = yaml.safe_dump(minimal("ExpertLane"))
    crds.kubectl("-n", namespace, "apply", "--server-side", "-f-", stdin=text)
    assert objects.get("ExpertLane")["spec"]["activeTrafficClass"] == "prose"


def test_dry_run_says_what_a_create_would_say(crds: ApiServer, namespace: str) -> None:
    text = yaml.safe_dump(minimal("ExpertMap", {"metadata.name": "wrong"}))
    done = crds.kubectl(
        *("-n", namespace, "create", "--dry-run=server", "-f-"), stdin=text, check=False
    )
    assert "metadata.name: write lane-a.agent" in done.stderr


def test_the_controllers_run(
    crds: ApiServer, controller_manager: ApiServer, namespace: str
) -> None:
    assert controller_manager is crds
    crds.kubectl("-n", namespace, "apply", f"-f={CRDS}/samples/full.yaml")
    pods = ("-n", namespace, "get", "pods", "-o", "name")
    wait_for("the sample's pod is there", lambda: "pod/" in crds.kubectl(*pods).stdout, 30, 0.3)
