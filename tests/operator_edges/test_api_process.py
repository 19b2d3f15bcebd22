"""The whole process against a real API server, with exactly the rights that it asks for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertmaps_operator.act.permissions import PERMISSIONS
from expertmaps_operator.observe.kube import ApiError, Kube
from expertmaps_operator.observe.resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    EXPERT_LANE,
    EXPERT_MAP,
    TRAFFIC_CLASS,
    Resource,
)
from expertmaps_operator.observe.resources import LEASE as LEASES
from rowmap_jobs.formats import names
from tests.api.apiserver import ApiServer, wait_for
from tests.api.objects import NAMES, minimal
from tests.operator_edges.test_api_act import workload

pytestmark = pytest.mark.api

ROOT = Path(__file__).resolve().parents[2]
ACCOUNT = "expertmaps-operator"
CUSTOM = (TRAFFIC_CLASS, EXPERT_LANE, EXPERT_MAP)


@pytest.fixture
def real(crds: ApiServer) -> Kube:
    return Kube(crds.client())


@pytest.fixture
def kubeconfig(crds: ApiServer, real: Kube, namespace: str, tmp_path: Path) -> Path:
    """Of a ServiceAccount with a Role of exactly PERMISSIONS."""
    core = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    real.request("POST", core, None, {"metadata": {"name": ACCOUNT}})
    rules = [one.rule() for one in PERMISSIONS]
    real.request("POST", f"{rbac}/roles", None, {"metadata": {"name": ACCOUNT}, "rules": rules})
    binding = {
        "metadata": {"name": ACCOUNT},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}],
    }
    real.request("POST", f"{rbac}/rolebindings", None, binding)
    request = {"spec": {"audiences": ["https://kubernetes.default.svc"]}}
    token = real.request("POST", f"{core}/{ACCOUNT}/token", None, request)["status"]["token"]
    config = yaml.safe_load(crds.kubeconfig.read_text())
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class Process:
    """A running operator."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str) -> tuple[int, bytes]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            assert self.process.poll() is None, self.log.read_text()
            return 0, b"{}"

    def health(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/healthz")[1]))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def start(kubeconfig: Path, namespace: str, tmp_path: Path, *flags: str) -> Process:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / f"operator-{port}.log"
    command = [
        *(sys.executable, "-m", "expertmaps_operator", "--namespace", namespace),
        *("--runner-image", "runner", "--metrics-port", str(port), *flags),
    ]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "KUBECONFIG": str(kubeconfig),
        "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}",
    }
    with log.open("wb") as to:
        process = subprocess.Popen(command, stderr=to, stdout=to, env=env, cwd=tmp_path)
    return Process(process, port, log)


@pytest.fixture
def operator(kubeconfig: Path, namespace: str, tmp_path: Path) -> Iterator[Process]:
    running = start(kubeconfig, namespace, tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def fill(real: Kube, namespace: str) -> None:
    real.request("POST", DEPLOYMENT.path(namespace), None, workload())
    for resource in CUSTOM:
        real.request("POST", resource.path(namespace), None, minimal(resource.kind))


def conditions(real: Kube, resource: Resource, namespace: str) -> list[dict[str, Any]]:
    there = real.get(resource, namespace, NAMES[resource.kind]) or {}
    return list((there.get("status") or {}).get("conditions") or [])


def test_it_looks_acts_and_ends(
    real: Kube, namespace: str, operator: Process, kubeconfig: Path
) -> None:
    wait_for("it acts", lambda: operator.health().get("acting") is True, 30)
    fill(real, namespace)
    for resource in CUSTOM:
        wait_for(resource.kind, lambda r=resource: bool(conditions(real, r, namespace)), 30)  # type: ignore[misc]
    for resource in CUSTOM:
        there = real.get(resource, namespace, NAMES[resource.kind])
        assert there is not None
        assert "finalizers" not in there["metadata"]
        assert "annotations" not in there["metadata"]
        managers = {one["manager"] for one in there["metadata"]["managedFields"]}
        assert "expertmaps-operator" in managers

    kinds = {"TrafficClass", "ExpertLane", "ExpertMap", "Deployment"}
    wait_for("all watches", lambda: kinds <= set(operator.health()["lastWatchEventSecondsAgo"]), 60)
    ours = {"metadata": {"name": "ours", "labels": {names.LABEL_ROLE: names.ROLE_MAP}}}
    real.request("POST", CONFIG_MAP.path(namespace), None, {"metadata": {"name": "foreign"}})
    real.request("POST", CONFIG_MAP.path(namespace), None, ours)
    wait_for(
        "the ConfigMap", lambda: "ConfigMap" in operator.health()["lastWatchEventSecondsAgo"], 60
    )
    code, text = operator.get("/metrics")
    assert code == 200
    assert b'expertmaps_reconcile_total{kind="ExpertLane"' in text
    assert b'result="error"' not in text
    assert operator.health()["ok"] is True

    operator.process.send_signal(signal.SIGTERM)
    assert operator.process.wait(60) == 0
    problems = [line for line in operator.lines() if line["level"] in {"warning", "error"}]
    assert problems == []
    lease = real.get(LEASES, namespace, "expertmaps-operator")
    assert lease is not None
    assert not lease["spec"].get("holderIdentity")


def test_a_second_one_waits_and_one_that_loses_its_lease_exits(
    real: Kube, namespace: str, operator: Process, kubeconfig: Path, tmp_path: Path
) -> None:
    wait_for("it acts", lambda: operator.health().get("acting") is True, 30)
    second = start(kubeconfig, namespace, tmp_path)
    try:
        wait_for("it stands by", lambda: second.health().get("acting") is False, 30)
        wait_for("it has looked", lambda: "waiting for the Lease" in second.log.read_text(), 30)
        assert second.get("/healthz")[0] == 200
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(60) == 0
    finally:
        second.process.kill()
        second.process.wait()

    def take_over() -> bool:
        lease = real.get(LEASES, namespace, "expertmaps-operator")
        assert lease is not None
        lease["spec"]["holderIdentity"] = "another"
        try:
            real.request("PUT", LEASES.path(namespace, "expertmaps-operator"), None, lease)
        except ApiError as error:
            assert error.status == 409
            return False
        return True

    wait_for("it is taken over", take_over, 60)
    assert operator.process.wait(20) == 1
    assert "another operator holds the Lease" in operator.log.read_text()


def test_without_rights_it_says_so_in_one_line(
    real: Kube, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    foreign = start(kubeconfig, "default", tmp_path)
    assert foreign.process.wait(30) == 1
    lines = foreign.lines()
    assert len(lines) == 1
    assert "HTTP 403" in lines[0]["message"]
    assert "trafficclasses" in lines[0]["message"]


def test_wrong_flags_are_one_line(tmp_path: Path) -> None:
    wrong = start(tmp_path / "none", "lanes", tmp_path, "--log-format", "xml")
    assert wrong.process.wait(30) == 2
    assert wrong.log.read_text() == (
        "expertmaps-operator: --log-format: found 'xml', expected one of json, text\n"
    )
