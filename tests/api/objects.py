"""Smallest valid objects, and a client for them."""

from __future__ import annotations

import copy
import json
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

GROUP, VERSION = "expertmaps.dev", "v1alpha1"
PLURAL = {
    "TrafficClass": "trafficclasses",
    "ExpertLane": "expertlanes",
    "ExpertMap": "expertmaps",
}
NAMES = {"TrafficClass": "agent", "ExpertLane": "lane-a", "ExpertMap": "lane-a.agent"}
SPECS: dict[str, dict[str, Any]] = {
    "TrafficClass": {"transcripts": {"s3": {"bucket": "transcripts"}}},
    "ExpertLane": {
        "workloadRef": {"name": "vllm-lane-a"},
        "containerName": "vllm",
        "residency": {"hotExpertsPerLayer": 4},
        "store": {"s3": {"bucket": "expertmaps"}},
    },
    "ExpertMap": {"laneRef": {"name": "lane-a"}, "trafficClassRef": {"name": "agent"}},
}


class _Absent:
    """Removes the field it is set to."""


ABSENT = _Absent()


def minimal(kind: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The smallest valid object, with values set at dotted paths."""
    body: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": kind,
        "metadata": {"name": NAMES[kind]},
        "spec": copy.deepcopy(SPECS[kind]),
    }
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        node = body
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ABSENT:
            del node[last]
        else:
            node[last] = value
    return body


class Objects:
    """Custom objects of one namespace; every write is checked as strictly as kubectl has it."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._custom = client.CustomObjectsApi(api)
        self._namespace = namespace

    def _place(self, kind: str) -> tuple[str, str, str, str]:
        return GROUP, VERSION, self._namespace, PLURAL[kind]

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        place = self._place(body["kind"])
        return dict(
            self._custom.create_namespaced_custom_object(*place, body, field_validation="Strict")
        )

    def patch(self, kind: str, patch: dict[str, Any]) -> dict[str, Any]:
        place = self._place(kind)
        return dict(
            self._custom.patch_namespaced_custom_object(
                *place, NAMES[kind], patch, _content_type="application/merge-patch+json"
            )
        )

    def get(self, kind: str) -> dict[str, Any]:
        return dict(self._custom.get_namespaced_custom_object(*self._place(kind), NAMES[kind]))

    def apply_status(self, kind: str, status: dict[str, Any], manager: str) -> dict[str, Any]:
        """Server-side apply of the status subresource."""
        body = minimal(kind)
        del body["spec"]
        return dict(
            self._custom.patch_namespaced_custom_object_status(
                *self._place(kind),
                NAMES[kind],
                {**body, "status": status},
                field_manager=manager,
                force=True,
                _content_type="application/apply-patch+yaml",
            )
        )


def refusals(error: ApiException) -> list[tuple[str, str]]:
    """(field, message) of every cause of a refusal."""
    status = json.loads(error.body)
    causes = status.get("details", {}).get("causes", [])
    return [(cause.get("field", ""), cause["message"]) for cause in causes]
