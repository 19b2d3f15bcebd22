"""What a real API server refuses, and the words it refuses it with."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from kubernetes.client.exceptions import ApiException

from tests.api.apiserver import ApiServer
from tests.api.conftest import CRDS, PLURALS
from tests.api.objects import ABSENT, Objects, minimal, refusals

pytestmark = pytest.mark.api

LANE_S3 = "spec.store.s3"
NAME = "write a name: lower-case letters, digits, '-' and '.', with a letter or digit at both ends"
SHORT = (
    "metadata.name: write at most 25 characters, so that the names of what is made for the {} fit"
)
DOTLESS = "metadata.name: write a name without a dot, because an ExpertMap is named <lane>.<class>"
PERIOD = "write a duration in hours, minutes and seconds, such as 168h or 1h30m"
BYTES = "write whole bytes with an optional suffix, such as 180Gi"
SCHEDULE = (
    "write five fields (minute, hour, day of month, month, day of week) such as '0 3 * * 1', or "
    "@daily"
)
NUMBER = 'write a number of at most six digits before and after the dot, such as "0.5"'
PREFIX = "write a prefix that does not start with / and ends with /, such as prod/"
ADDRESS = "write an address such as https://host:9000, without query"
BUCKET = (
    "write the bucket's name: lower-case letters, digits, '-' and '.', with a letter or digit at "
    "both ends"
)
MAP_NAME = "metadata.name: write {} (<lane>.<class>), so that there is one map of a class on a lane"
ONE_RESIDENCY = "write exactly one of hotExpertsPerLayer and hotBytes"
LONG_REF = "name: write at most 25 characters, as the name of the {} has"
DOT_REF = "name: write a name without a dot, as the name of the {} has"
HOST_BUCKET = (
    "write addressingStyle: Path, because the name of a bucket with a dot matches no certificate "
    "when it is part of the host"
)

Case = tuple[str, dict[str, Any], str, str]
CREATED: list[Case] = [
    ("TrafficClass", {"metadata.name": "a" * 26}, "", SHORT.format("traffic class")),
    ("TrafficClass", {"metadata.name": "a.b"}, "", DOTLESS),
    ("TrafficClass", {"spec.window": "7d"}, "spec.window", PERIOD),
    ("TrafficClass", {"spec.window": "0h"}, "spec.window", "write more than 0, such as 168h"),
    ("ExpertLane", {"spec.rollback.holdDuration": "1d"}, "spec.rollback.holdDuration", PERIOD),
    (
        "ExpertLane",
        {"spec.rollback.holdDuration": "0s"},
        "spec.rollback.holdDuration",
        "write more than 0, such as 1h",
    ),
    ("ExpertLane", {"metadata.name": "a" * 26}, "", SHORT.format("lane")),
    ("ExpertLane", {"metadata.name": "a.b"}, "", DOTLESS),
    ("ExpertLane", {"spec.residency.hotBytes": "1Gi"}, "spec.residency", ONE_RESIDENCY),
    (
        "ExpertLane",
        {"spec.residency.hotExpertsPerLayer": ABSENT},
        "spec.residency",
        ONE_RESIDENCY,
    ),
    (
        "ExpertLane",
        {"spec.residency": {"hotBytes": "0Gi"}},
        "spec.residency.hotBytes",
        "write more than 0 bytes, such as 180Gi",
    ),
    ("ExpertLane", {"spec.residency": {"hotBytes": "1.5Gi"}}, "spec.residency.hotBytes", BYTES),
    (
        "ExpertLane",
        {"spec.hook.statusPort": 8000},
        "spec",
        "write a hook.statusPort that differs from server.port",
    ),
    (
        "ExpertLane",
        {"spec.update.progressDeadlineSeconds": 10},
        "spec.update",
        "write a progressDeadlineSeconds that is greater than minReadySeconds",
    ),
    (
        "ExpertLane",
        {"spec.activeTrafficClass": "a.b"},
        "spec.activeTrafficClass",
        "write a name without a dot, as the name of the TrafficClass has",
    ),
    ("ExpertLane", {"spec.workloadRef.name": "A_b"}, "spec.workloadRef.name", NAME),
    (
        "ExpertLane",
        {
            f"{LANE_S3}.credentialsSecretRef": {"name": "s3"},
            f"{LANE_S3}.serviceAccountName": "writer",
        },
        LANE_S3,
        "write credentialsSecretRef or serviceAccountName, not both",
    ),
    (
        "ExpertLane",
        {f"{LANE_S3}.bucket": "a.b", f"{LANE_S3}.addressingStyle": "Virtual"},
        LANE_S3,
        HOST_BUCKET,
    ),
    (
        "ExpertLane",
        {
            f"{LANE_S3}.endpointURL": "http://minio:9000",
            f"{LANE_S3}.caBundleConfigMapRef": {"name": "ca"},
        },
        LANE_S3,
        "write an endpointURL that starts with https://, or leave out caBundleConfigMapRef",
    ),
    ("ExpertLane", {f"{LANE_S3}.prefix": "/prod/"}, f"{LANE_S3}.prefix", PREFIX),
    ("ExpertLane", {f"{LANE_S3}.prefix": "prod"}, f"{LANE_S3}.prefix", PREFIX),
    ("ExpertLane", {f"{LANE_S3}.endpointURL": "minio:9000"}, f"{LANE_S3}.endpointURL", ADDRESS),
    ("ExpertLane", {f"{LANE_S3}.bucket": "Bucket"}, f"{LANE_S3}.bucket", BUCKET),
    ("ExpertMap", {"metadata.name": "agent"}, "", MAP_NAME.format("lane-a.agent")),
    (
        "ExpertMap",
        {"metadata.name": "b" * 26 + ".agent", "spec.laneRef.name": "b" * 26},
        "spec.laneRef",
        LONG_REF.format("ExpertLane"),
    ),
    (
        "ExpertMap",
        {"metadata.name": "lane-a." + "b" * 26, "spec.trafficClassRef.name": "b" * 26},
        "spec.trafficClassRef",
        LONG_REF.format("TrafficClass"),
    ),
    (
        "ExpertMap",
        {"metadata.name": "a.b.agent", "spec.laneRef.name": "a.b"},
        "spec.laneRef",
        DOT_REF.format("ExpertLane"),
    ),
    (
        "ExpertMap",
        {"metadata.name": "lane-a.b.c", "spec.trafficClassRef.name": "b.c"},
        "spec.trafficClassRef",
        DOT_REF.format("TrafficClass"),
    ),
    (
        "ExpertMap",
        {"spec.acceptance.maxColdSharePercent": "100.5"},
        "spec.acceptance.maxColdSharePercent",
        'write at most "100"',
    ),
    (
        "ExpertMap",
        {"spec.acceptance.maxColdSharePercent": "5%"},
        "spec.acceptance.maxColdSharePercent",
        NUMBER,
    ),
    (
        "ExpertMap",
        {"spec.acceptance.maxColdShareVsPositional": ".5"},
        "spec.acceptance.maxColdShareVsPositional",
        NUMBER,
    ),
    (
        "ExpertMap",
        {"spec.acceptance.minImprovementPoints": "-1"},
        "spec.acceptance.minImprovementPoints",
        NUMBER,
    ),
    (
        "ExpertMap",
        {"spec.schedule": "TZ=Europe/Berlin 0 3 * * 1"},
        "spec.schedule",
        "write the time zone in spec.timeZone, not in the schedule",
    ),
    ("ExpertMap", {"spec.schedule": "0 3 * *"}, "spec.schedule", SCHEDULE),
    ("ExpertMap", {"spec.schedule": "@reboot"}, "spec.schedule", SCHEDULE),
    (
        "ExpertMap",
        {"spec.timeZone": "Europe/Berlin"},
        "spec",
        "write a schedule beside timeZone, or leave timeZone out",
    ),
    (
        "ExpertMap",
        {"spec.startingDeadlineSeconds": 60},
        "spec",
        "write a schedule beside startingDeadlineSeconds, or leave that out",
    ),
]
CHANGED: list[Case] = [
    (
        "ExpertLane",
        {"spec": {"workloadRef": {"name": "other"}}},
        "spec.workloadRef",
        "immutable: create another ExpertLane for another workload",
    ),
    (
        "ExpertMap",
        {"spec": {"laneRef": {"name": "lane-b"}}},
        "spec.laneRef",
        "immutable: create another ExpertMap for another ExpertLane",
    ),
    (
        "ExpertMap",
        {"spec": {"trafficClassRef": {"name": "prose"}}},
        "spec.trafficClassRef",
        "immutable: create another ExpertMap for another TrafficClass",
    ),
]
BY_EXPRESSION = {
    "metadata.name: write <lane>.<class>, the names in spec.laneRef and spec.trafficClassRef with "
    "a dot between": MAP_NAME.format("lane-a.agent")
}
"""Messages that stand in for a messageExpression."""


def _id(case: Case) -> str:
    return f"{case[0]}-{'-'.join(case[1])}"


@pytest.fixture
def objects(crds: ApiServer, namespace: str) -> Objects:
    return Objects(crds.client(), namespace)


def _says(found: list[tuple[str, str]], field: str, message: str) -> bool:
    path = field or "<nil>"
    return any(
        where == path and text.startswith("Invalid value: ") and text.endswith(f": {message}")
        for where, text in found
    )


@pytest.mark.parametrize("case", CREATED, ids=map(_id, CREATED))
def test_a_refused_object(objects: Objects, case: Case) -> None:
    kind, changes, field, message = case
    with pytest.raises(ApiException) as caught:
        objects.create(minimal(kind, changes))
    found = refusals(caught.value)
    assert caught.value.status == 422
    assert _says(found, field, message), found
    assert len(found) == 1, found


@pytest.mark.parametrize("case", CHANGED, ids=map(_id, CHANGED))
def test_a_refused_change(objects: Objects, case: Case) -> None:
    kind, patch, field, message = case
    objects.create(minimal(kind))
    with pytest.raises(ApiException) as caught:
        objects.patch(kind, patch)
    assert _says(refusals(caught.value), field, message), refusals(caught.value)


def _messages(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(_messages, node))
    if not isinstance(node, dict):
        return set()
    rules = node.get("x-kubernetes-validations", [])
    return {rule["message"] for rule in rules}.union(*map(_messages, node.values()))


def test_every_message_is_tested_above() -> None:
    tested = {case[3] for case in (*CREATED, *CHANGED)}
    documents = [yaml.safe_load((CRDS / f"{one}.yaml").read_text()) for one in PLURALS]
    written = {BY_EXPRESSION.get(one, one) for one in _messages(documents)}
    assert written == tested


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("TrafficClass", "spec.minTranscript"),
        ("TrafficClass", "spec.transcripts.s3.endpointUrl"),
        ("ExpertLane", "spec.residency.hotExpertPerLayer"),
        ("ExpertLane", "spec.activeTrafficclass"),
        ("ExpertMap", "spec.profile.backofLimit"),
    ],
)
def test_a_typo_is_refused(crds: ApiServer, namespace: str, kind: str, field: str) -> None:
    text = yaml.safe_dump(minimal(kind, {field: 1}))
    done = crds.kubectl("-n", namespace, "create", "-f-", stdin=text, check=False)
    assert done.returncode != 0
    assert f'unknown field "{field}"' in done.stderr


@pytest.mark.parametrize(
    ("kind", "changes", "field", "words"),
    [
        ("ExpertLane", {"spec.engine": "SGLang"}, "spec.engine", 'supported values: "VLLM"'),
        (
            "ExpertLane",
            {"spec.activeTrafficClass": "a" * 26},
            "spec.activeTrafficClass",
            "may not be more than 25 bytes",
        ),
        (
            "ExpertLane",
            {"spec.residency.hotExpertsPerLayer": 0},
            "spec.residency.hotExpertsPerLayer",
            "should be greater than or equal to 1",
        ),
        ("ExpertLane", {"spec.store": ABSENT}, "spec.store", "Required value"),
        ("ExpertMap", {"spec.runAt": "now"}, "spec.runAt", "must be of type date-time"),
        (
            "ExpertMap",
            {"spec.acceptance.maxColdSharePercent": 5},
            "spec.acceptance.maxColdSharePercent",
            'must be of type string: "integer"',
        ),
    ],
)
def test_a_value_of_the_wrong_kind(
    objects: Objects, kind: str, changes: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ApiException) as caught:
        objects.create(minimal(kind, changes))
    found = refusals(caught.value)
    assert any(where == field and words in text for where, text in found), found


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata.name": "a" * 25},
        {"spec.residency": {"hotBytes": "180Gi"}},
        {f"{LANE_S3}.endpointURL": None, "spec.activeTrafficClass": None},
        {f"{LANE_S3}.bucket": "a.b", f"{LANE_S3}.addressingStyle": "Path"},
        {
            f"{LANE_S3}.endpointURL": "https://minio:9000",
            f"{LANE_S3}.caBundleConfigMapRef": {"name": "ca"},
        },
        {f"{LANE_S3}.caBundleConfigMapRef": {"name": "ca"}},
    ],
)
def test_an_accepted_lane(objects: Objects, changes: dict[str, Any]) -> None:
    objects.create(minimal("ExpertLane", changes))
