"""The chart on a real API server: what is there afterwards, and what its accounts may do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from kubernetes import client

from expertmaps_operator.act.permissions import PERMISSIONS, Permission
from tests.api.apiserver import ApiServer, wait_for
from tests.api.objects import Objects, minimal
from tests.chart.helm import CHART, ROOT, helm
from tests.ports import free_ports

pytestmark = pytest.mark.api

WATCHER = """
import json, sys
import kopf

@kopf.on.startup()
def configure(settings, **_):
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.peering.standalone = True

for group, plural in json.loads(sys.argv[1]):
    @kopf.on.event(group, "v1" if group in ("", "apps", "batch") else "v1alpha1", plural)
    def seen(event, body, resource, **_):
        print("SEEN", resource.plural, body["metadata"]["name"], flush=True)

kopf.configure(verbose=True)
kopf.run(namespaces=[sys.argv[2]], standalone=True)
"""


@dataclass(frozen=True)
class Release:
    """An installed chart."""

    server: ApiServer
    namespace: str
    watched: str

    def may(self, account: str, namespace: str, verb: str, group: str, resource: str) -> bool:
        """Whether a ServiceAccount has a right, by the server's own word."""
        place = self.namespace if account.endswith("operator") else self.watched
        api = self.server.client(user=f"system:serviceaccount:{place}:{account}")
        name, _, subresource = resource.partition("/")
        attributes = client.V1ResourceAttributes(
            namespace=namespace, verb=verb, group=group, resource=name, subresource=subresource
        )
        body = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
        )
        review = client.AuthorizationV1Api(api).create_self_subject_access_review(body)
        return bool(review.status.allowed)


def _namespace(server: ApiServer) -> str:
    body = client.V1Namespace(metadata=client.V1ObjectMeta(generate_name="chart-"))
    return str(client.CoreV1Api(server.client()).create_namespace(body).metadata.name)


@pytest.fixture(scope="module")
def release(crds: ApiServer) -> Iterator[Release]:
    own, watched = _namespace(crds), _namespace(crds)
    done = helm(
        *("install", "expertmaps", str(CHART), "-n", own, "--take-ownership"),
        *("--set", f"watchNamespaces={{{watched}}}", "--set", "networkPolicy.enabled=true"),
        kubeconfig=crds.kubeconfig,
    )
    assert done.returncode == 0, done.stderr
    assert f"The operator watches: {watched}" in done.stdout
    yield Release(crds, own, watched)
    done = helm("uninstall", "expertmaps", "-n", own, kubeconfig=crds.kubeconfig)
    assert done.returncode == 0, done.stderr
    left = crds.kubectl("get", "crd", "-o", "name").stdout
    assert left.count(".expertmaps.dev") == 3


def test_the_objects_are_there(release: Release) -> None:
    names = release.server.kubectl(
        *("-n", release.namespace, "get", "deployments,services,networkpolicies", "-o", "name")
    ).stdout.split()
    assert names == [
        "deployment.apps/expertmaps-operator",
        "service/expertmaps-metrics",
        "networkpolicy.networking.k8s.io/expertmaps-operator",
    ]


def test_an_upgrade_changes_nothing_by_itself(release: Release) -> None:
    crd = ("get", "crd", "expertlanes.expertmaps.dev", "-o", "jsonpath={.metadata.generation}")
    before = release.server.kubectl(*crd).stdout
    done = helm(
        *("upgrade", "expertmaps", str(CHART), "-n", release.namespace, "--reuse-values"),
        kubeconfig=release.server.kubeconfig,
    )
    assert done.returncode == 0, done.stderr
    assert release.server.kubectl(*crd).stdout == before


@pytest.mark.parametrize("permission", PERMISSIONS, ids=lambda one: one.resource)
def test_the_operator_may_do_what_it_calls(release: Release, permission: Permission) -> None:
    for verb in permission.verbs:
        right = (verb, permission.group, permission.resource)
        assert release.may("expertmaps-operator", release.watched, *right), right
        assert not release.may("expertmaps-operator", "default", *right), right


@pytest.mark.parametrize(
    ("verb", "group", "resource"),
    [
        ("get", "", "secrets"),
        ("list", "", "secrets"),
        ("create", "", "serviceaccounts/token"),
        ("create", "", "pods"),
        ("delete", "", "pods"),
        ("create", "", "pods/exec"),
        ("update", "", "configmaps"),
        ("delete", "apps", "deployments"),
        ("patch", "expertmaps.dev", "expertlanes"),
        ("create", "rbac.authorization.k8s.io", "rolebindings"),
    ],
)
def test_the_operator_may_not(release: Release, verb: str, group: str, resource: str) -> None:
    for namespace in (release.watched, release.namespace):
        assert not release.may("expertmaps-operator", namespace, verb, group, resource)


def test_the_runner_may_only_create_config_maps(release: Release) -> None:
    def may(verb: str, resource: str, namespace: str = release.watched) -> bool:
        return release.may("expertmaps-runner", namespace, verb, "", resource)

    assert may("create", "configmaps")
    assert not may("create", "configmaps", release.namespace)
    for verb in ("get", "list", "update", "patch", "delete"):
        assert not may(verb, "configmaps")
    assert not may("get", "secrets")


@contextmanager
def _as_operator(release: Release, folder: Path, *command: str) -> Iterator[Path]:
    """Run Python with the token of the operator's ServiceAccount; yields its log."""
    server = release.server
    token = server.kubectl("-n", release.namespace, "create", "token", "expertmaps-operator").stdout
    kubeconfig = yaml.safe_load(server.kubeconfig.read_text())
    kubeconfig["users"][0]["user"] = {"token": token.strip()}
    (folder / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    environment = {"KUBECONFIG": str(folder / "kubeconfig"), "HOME": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "operator"), str(ROOT)])
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield log
        assert process.poll() is None, log.read_text()
    finally:
        process.kill()
        process.wait()


def _assert_nothing_was_refused(log: Path) -> None:
    text = log.read_text()
    for word in ("orbidden", "Not enough permissions"):
        assert word not in text, text


@pytest.fixture(scope="module")
def lane(release: Release) -> Objects:
    objects = Objects(release.server.client(), release.watched)
    objects.create(minimal("ExpertLane"))
    return objects


def test_kopf_needs_nothing_besides(release: Release, lane: Objects, tmp_path: Path) -> None:
    """It watches with the operator's own token, and asks for nothing that is refused."""
    assert lane.get("ExpertLane")
    (tmp_path / "watcher.py").write_text(WATCHER)
    watched = [(one.group, one.resource) for one in PERMISSIONS if "watch" in one.verbs]
    arguments = (json.dumps(watched), release.watched)
    with _as_operator(release, tmp_path, "watcher.py", *arguments) as log:
        seen = "SEEN expertlanes lane-a"
        wait_for("kopf sees the lane", lambda: seen in log.read_text(), 120)
        # A watch that is refused says so when it starts; all start together.
        time.sleep(1)
    _assert_nothing_was_refused(log)


def test_the_operator_runs_with_its_flags_and_rights(
    release: Release, lane: Objects, tmp_path: Path
) -> None:
    """It holds the Lease and writes the status of a lane that serves nothing yet."""
    path = "jsonpath={.spec.template.spec.containers[0].args}"
    deployment = ("-n", release.namespace, "get", "deployment", "expertmaps-operator", "-o", path)
    flags = json.loads(release.server.kubectl(*deployment).stdout)
    flags.append(f"--metrics-port={free_ports(1)[0]}")

    def reported() -> bool:
        return bool(lane.get("ExpertLane").get("status", {}).get("conditions"))

    with _as_operator(release, tmp_path, "-m", "expertmaps_operator", *flags) as log:
        wait_for("the lane has conditions", reported, 180, 0.2)
    (ready,) = [
        one for one in lane.get("ExpertLane")["status"]["conditions"] if one["type"] == "Ready"
    ]
    assert ready["status"] == "False", ready
    lease = release.server.kubectl("-n", release.watched, "get", "lease", "-o", "name").stdout
    assert lease.split() == ["lease.coordination.k8s.io/expertmaps-operator"]
    _assert_nothing_was_refused(log)
