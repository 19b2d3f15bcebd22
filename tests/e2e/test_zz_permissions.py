"""What the operator and the runners asked the API server for in this whole run (its audit log)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from expertmaps_operator.act.permissions import PERMISSIONS
from tests.demo.kube import Kube
from tests.e2e.conftest import NAMESPACE

Call = tuple[str, str, str]
"""API group, resource with its subresource, verb."""


@pytest.fixture(scope="module")
def calls(ground: Kube) -> dict[str, set[Call]]:
    """Every answered request of the namespace's ServiceAccounts, by account."""
    state = Path(os.environ.get("EXPERTMAPS_STATE", "/var/lib/expertmaps-cluster"))
    found: dict[str, set[Call]] = {}
    prefix = f"system:serviceaccount:{NAMESPACE}:"
    for path in sorted((state / "log").glob("audit*.log")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if prefix not in line:
                    continue
                event = json.loads(line)
                name = event["user"]["username"]
                if name.startswith(prefix) and event.get("objectRef"):
                    assert in_namespace(event), line
                    found.setdefault(name.removeprefix(prefix), set()).add(call(event))
    return found


def in_namespace(event: Any) -> bool:
    """The request was about the one namespace."""
    return bool(event["objectRef"].get("namespace") == NAMESPACE)


def call(event: Any) -> Call:
    ref = event["objectRef"]
    resource = "/".join(part for part in (ref["resource"], ref.get("subresource")) if part)
    return ref.get("apiGroup", ""), resource, event["verb"]


ALLOWED = {(one.group, one.resource, verb) for one in PERMISSIONS for verb in one.verbs}


def test_the_operator_asked_for_nothing_that_its_role_does_not_list(
    calls: dict[str, set[Call]],
) -> None:
    assert calls["expertmaps-operator"] - ALLOWED == set()


def test_every_rule_of_the_role_was_used(calls: dict[str, set[Call]]) -> None:
    assert ALLOWED - calls["expertmaps-operator"] == set()


def test_a_runner_creates_config_maps_and_nothing_else(calls: dict[str, set[Call]]) -> None:
    assert calls["expertmaps-runner"] == {("", "configmaps", "create")}


def test_no_other_account_asked_for_anything(calls: dict[str, set[Call]]) -> None:
    assert set(calls) == {"expertmaps-operator", "expertmaps-runner"}
