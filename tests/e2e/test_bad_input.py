"""Whatever is wrong has a name that says what to do, and no pod of a serving lane is touched.

A lane of three stand-in pods serves with a map while each thing is tried (see watching.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import canonical_json
from tests.demo import deploy
from tests.demo.kube import Kube, condition
from tests.demo.kube import Object as Manifest
from tests.e2e import stubs
from tests.e2e.watching import engine_started, untouched

STORE = "stub/"


@pytest.fixture(scope="module")
def serving(lane: Kube) -> Kube:
    """The lane serves with the map of `stub-a`."""
    stubs.switch(lane, "a")
    stubs.until(lane, ("stub-a", "True/LaneServing", "Verified"))
    return lane


@pytest.fixture
def watched(serving: Kube) -> Iterator[Kube]:
    with untouched(serving):
        yield serving


def until_said(kube: Kube, kind: str, name: str, type: str, wanted: str, seconds: float) -> str:
    """Wait for a condition's reason; its message."""

    def look() -> tuple[bool, str]:
        found = condition(kube.get(kind, name), type)
        return found.get("reason") == wanted, str(found)

    kube.until(f"{kind} {name} says {type} {wanted}", look, seconds, every=0.5)
    return str(condition(kube.get(kind, name), type)["message"])


@dataclass(frozen=True)
class Case:
    """A class or a store that cannot be used, and what is said of it."""

    name: str
    reason: str
    says: str
    transcripts: dict[str, Any] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    """Transcripts to upload below <name>/."""


def some(number: int) -> bytes:
    whole = stubs.transcripts("a", stubs.now())
    return b"\n".join(whole.split(b"\n")[:number]) + b"\n"


STORES = [
    Case("nobucket", "BucketNotFound", "nowhere", {"bucket": "nowhere"}),
    Case("nostore", "BucketNotFound", "nowhere", store={"bucket": "nowhere"}),
    Case(
        "badkeys",
        "InvalidCredentials",
        "credentials",
        {"credentialsSecretRef": {"name": "bad-keys"}},
    ),
    Case(
        "badstore", "InvalidCredentials", "", store={"credentialsSecretRef": {"name": "bad-keys"}}
    ),
    Case("nosecret", "CredentialsMissing", "Secret", {"credentialsSecretRef": {"name": "no-such"}}),
    Case("down", "EndpointUnreachable", "s3:1", {"endpointURL": "http://s3:1"}),
    Case("nothing", "NoTranscripts", "nothing/"),
    Case("few", "TooFewTranscripts", "12", body=some(3)),
    Case("broken", "OnlyBrokenTranscripts", "line 1", body=b'{"half": \n' * 20),
]


@pytest.fixture(scope="module")
def bad_stores(serving: Kube) -> Kube:
    """All of them at once: they wait for each other by themselves."""
    keys = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "wrong"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bad-keys"}}
    objects: list[Manifest] = [{**secret, "stringData": keys}]
    with deploy.s3(serving) as client:
        for case in STORES:
            if case.body is not None:
                key = f"{case.name}/records.jsonl"
                client.put_object(Bucket="transcripts", Key=key, Body=case.body)
    for case in STORES:
        lane_name = stubs.LANE
        if case.store:
            lane_name = f"lane-{case.name}"
            other = stubs.lane(lane_name)
            other["spec"]["store"]["s3"].update(case.store)
            objects.append(other)
        prefix = "stub-a/" if case.store else f"{case.name}/"
        objects.append(stubs.traffic_class(case.name, prefix, **case.transcripts))
        once = {"backoffLimit": 0}
        objects.append(stubs.expert_map(lane_name, case.name, profile=once))
    with untouched(serving):
        stubs.apply(serving, *objects)
        for case in STORES:
            name = f"{lane_name_of(case)}.{case.name}"
            until_said(serving, "em", name, "Profiling", case.reason, 300)
            # What failed is tried again after a while, and would take the slot of the tests below.
            kube_patch(serving, f"em/{name}", {"spec": {"suspend": True}})
    return serving


def lane_name_of(case: Case) -> str:
    return f"lane-{case.name}" if case.store else stubs.LANE


@pytest.mark.parametrize("case", STORES, ids=lambda case: case.name)
def test_a_store_or_transcripts_that_cannot_be_used_end_before_an_engine_boots(
    bad_stores: Kube, case: Case
) -> None:
    name = f"{lane_name_of(case)}.{case.name}"
    item = bad_stores.get("em", name)
    found = condition(item, "Profiling")
    assert (found["status"], found["reason"]) == ("False", case.reason)
    assert case.says in found["message"]
    assert condition(item, "Ready")["status"] == "False"
    assert not engine_started(bad_stores, name)


def test_a_missing_workload_is_named(watched: Kube) -> None:
    stubs.apply(watched, stubs.lane("noserver", "no-such"), stubs.expert_map("noserver", "stub-a"))
    text = until_said(watched, "em", "noserver.stub-a", "Profiling", "WorkloadNotFound", 60)
    assert "no-such" in text
    watched.kubectl("delete", "em/noserver.stub-a", "lane/noserver")


def active(name: str, target: str, **more: Any) -> dict[str, Any]:
    """A lane's spec with an active class."""
    spec: dict[str, Any] = stubs.lane(name, target)["spec"]
    return {**spec, "activeTrafficClass": "stub-a", **more}


def test_a_missing_container_is_named(watched: Kube) -> None:
    other = stubs.lane("nocontainer")
    other["spec"]["containerName"] = "no-such"
    stubs.apply(watched, other, stubs.expert_map("nocontainer", "stub-a"))
    text = until_said(watched, "em", "nocontainer.stub-a", "Profiling", "ContainerNotFound", 60)
    assert "no-such" in text and "engine" in text
    watched.kubectl("delete", "em/nocontainer.stub-a", "lane/nocontainer")


COUNTING = [
    ("crash", "EnginePodFailed", "exit code 3"),
    ("memory", "EngineOutOfMemory", "memory"),
    ("never-ready", "ProfileDeadlineExceeded", "pendingDeadlineSeconds"),
]


@pytest.mark.parametrize(("fault", "reason", "says"), COUNTING)
def test_an_engine_that_fails_in_a_profile_ends_the_run(
    watched: Kube, fault: str, reason: str, says: str
) -> None:
    stubs.apply(watched, stubs.config_map("faults", {"counting": fault}))
    quick = {"backoffLimit": 0, "pendingDeadlineSeconds": 25 if fault == "never-ready" else 300}
    class_ = f"fail-{fault}"
    stubs.apply(
        watched,
        stubs.traffic_class(class_, "stub-a/"),
        stubs.expert_map(stubs.LANE, class_, profile=quick),
    )
    name = f"{stubs.LANE}.{class_}"
    text = until_said(watched, "em", name, "Profiling", reason, 300)
    assert says in text

    def gone() -> tuple[bool, str]:
        left = watched.kubectl("get", "pods", "-l", f"expertmaps.dev/map={name}", "-o", "name")
        return not left.strip(), left

    watched.until("the run's pod is gone", gone, 120, every=1)
    watched.kubectl("delete", f"em/{name}", f"tc/{class_}")
    stubs.mend(watched)


OWN = [
    ("PYTHONPATH", "/mine", f"{names.HOOK_MOUNT}:/mine"),
    ("VLLM_PLUGINS", "mine", "expertmaps"),
]


@pytest.fixture(scope="module")
def second(serving: Kube) -> Iterator[Kube]:
    """A second lane with an accepted map and no active class."""
    stubs.apply(serving, stubs.workload(1, "second"), stubs.lane("second", "second"))
    stubs.apply(serving, stubs.expert_map("second", "stub-a"))
    serving.kubectl("wait", "--for=condition=Ready", "em/second.stub-a", "--timeout=300s")
    yield serving
    serving.kubectl("delete", "em/second.stub-a", "lane/second", "deployment/second")


@pytest.mark.parametrize(("variable", "value", "says"), OWN)
def test_an_own_variable_in_the_way_is_named_with_the_value_to_write(
    second: Kube, variable: str, value: str, says: str
) -> None:
    with untouched(second):
        own = stubs.workload(1, "second")
        (holder,) = own["spec"]["template"]["spec"]["containers"]
        holder["env"] = [{"name": variable, "value": value}]
        stubs.apply(second, own)
        second.kubectl("rollout", "status", "deployment/second", "--timeout=120s")
        stubs.apply(second, stubs.custom("ExpertLane", "second", active("second", "second")))
        assert says in until_said(second, "lane", "second", "Ready", "EnvConflict", 60)
        assert template_annotations(second, "second") == {}
        stubs.apply(second, stubs.lane("second", "second"))
        kube_patch(second, "lane/second", {"spec": {"activeTrafficClass": None}})
        until_said(second, "lane", "second", "Ready", "NoTrafficClass", 60)
        stubs.apply(second, stubs.workload(1, "second"))


def test_a_workload_scaled_to_zero_is_left_alone(second: Kube) -> None:
    with untouched(second):
        second.kubectl("scale", "deployment/second", "--replicas=0")
        kube_patch(second, "lane/second", {"spec": {"activeTrafficClass": "stub-a"}})
        assert "replicas" in until_said(second, "lane", "second", "Ready", "ScaledToZero", 60)
        assert template_annotations(second, "second") == {}
        kube_patch(second, "lane/second", {"spec": {"activeTrafficClass": None}})


def template_annotations(kube: Kube, workload: str) -> dict[str, str]:
    """Of the pod template."""
    item = kube.get("deployment", workload) or {}
    found: dict[str, str] = item["spec"]["template"]["metadata"].get("annotations") or {}
    return found


def kube_patch(kube: Kube, target: str, patch: dict[str, Any], *more: str) -> None:
    kube.kubectl("patch", target, "--type", "merge", "-p", json.dumps(patch), *more)


def map_config_map(kube: Kube, name: str) -> Manifest:
    """The ConfigMap of a class's accepted map, without what the API server set."""
    found = kube.get("configmap", names.map_configmap(stubs.LANE, stubs.digest(kube, name)))
    assert found is not None
    for key in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
        found["metadata"].pop(key, None)
    return found


def replace(kube: Kube, manifest: Manifest) -> None:
    """Delete and make anew, as somebody would who edits an immutable ConfigMap."""
    kube.kubectl("delete", "configmap", manifest["metadata"]["name"])
    kube.kubectl("create", "-f", "-", stdin=json.dumps(manifest))


def test_a_config_map_made_again_with_other_bytes_is_not_used(watched: Kube) -> None:
    whole = map_config_map(watched, "q")
    other = json.loads(json.dumps(whole))
    other["data"][names.MAP_FILE] = map_config_map(watched, "a")["data"][names.MAP_FILE]
    replace(watched, other)
    stubs.switch(watched, "q")
    text = until_said(watched, "lane", stubs.LANE, "Ready", "ChecksumMismatch", 60)
    assert "kubectl" in text and whole["metadata"]["name"] in text
    replace(watched, whole)
    stubs.switch(watched, "a")
    stubs.until(watched, ("stub-a", "True/LaneServing", "Verified"))


@pytest.mark.parametrize("damage", [lambda raw: raw[:-40], lambda raw: raw.replace(b"0", b"1", 1)])
def test_a_map_object_that_was_changed_or_cut_off_is_not_fetched(
    watched: Kube, damage: Callable[[bytes], bytes]
) -> None:
    digest = stubs.digest(watched, "q")
    whole = map_config_map(watched, "q")
    key = names.map_key(STORE, digest)
    with deploy.s3(watched) as client:
        raw = deploy.get(client, key)
        client.put_object(Bucket="expertmaps", Key=key, Body=damage(raw))
        watched.kubectl("delete", "configmap", whole["metadata"]["name"])
        stubs.switch(watched, "q")
        try:
            text = until_said(watched, "lane", stubs.LANE, "Ready", "ChecksumMismatch", 120)
            assert "sha256" in text and "runAt" in text
        finally:
            client.put_object(Bucket="expertmaps", Key=key, Body=raw)
            stubs.switch(watched, "a")
            watched.kubectl("delete", "job", names.fetch_job(stubs.LANE, digest))
            watched.kubectl("create", "-f", "-", stdin=json.dumps(whole))
    stubs.until(watched, ("stub-a", "True/LaneServing", "Verified"))


def without_layer(row_map: Any) -> None:
    del row_map["layers"][sorted(row_map["layers"])[0]]


def with_an_expert_twice(row_map: Any) -> None:
    rows = row_map["layers"][sorted(row_map["layers"])[0]]
    rows["hot"][0] = rows["hot"][1]


def with_an_expert_missing(row_map: Any) -> None:
    row_map["layers"][sorted(row_map["layers"])[0]]["cold"].pop()


def of_a_fine_tune(row_map: Any) -> None:
    row_map["fingerprint"]["router"] = "sha256:" + "7" * 64


MAPS = [
    (without_layer, "ChecksumMismatch", "layers"),
    (with_an_expert_twice, "ChecksumMismatch", "row twice"),
    (with_an_expert_missing, "ChecksumMismatch", "rows"),
    (of_a_fine_tune, "FingerprintMismatch", "router"),
]


@pytest.mark.parametrize(("change", "reason", "says"), MAPS)
def test_a_map_that_is_none_for_this_lane_is_tried_on_no_pod(
    watched: Kube, change: Callable[[Any], None], reason: str, says: str
) -> None:
    whole = map_config_map(watched, "q")
    made = json.loads(json.dumps(whole))
    row_map = json.loads(made["data"][names.MAP_FILE])
    change(row_map)
    raw = canonical_json(row_map)
    digest = "sha256:" + hashlib.sha256(raw).hexdigest()
    made["metadata"]["name"] = names.map_configmap(stubs.LANE, digest)
    made["metadata"]["labels"][names.LABEL_DIGEST] = names.hex16(digest)
    made["metadata"]["annotations"][names.ANNOTATION_MAP_DIGEST] = digest
    made["data"][names.MAP_FILE] = raw.decode()
    before = (watched.get("em", f"{stubs.LANE}.stub-q") or {})["status"]["accepted"]
    accept(watched, digest)
    watched.kubectl("create", "-f", "-", stdin=json.dumps(made))
    stubs.switch(watched, "q")
    assert says in until_said(watched, "lane", stubs.LANE, "Ready", reason, 60)
    stubs.switch(watched, "a")
    accept(watched, before["digest"])
    # While nobody named it, it may have been collected.
    watched.kubectl("create", "-f", "-", stdin=json.dumps(whole), check=False)
    stubs.until(watched, ("stub-a", "True/LaneServing", "Verified"))


def accept(kube: Kube, digest: str) -> None:
    """As if a run had accepted the digest: no run of ours could be made to."""
    patch = {"status": {"accepted": {"digest": digest}}}
    kube_patch(kube, f"em/{stubs.LANE}.stub-q", patch, "--subresource=status")
