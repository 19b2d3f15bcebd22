"""What the chart renders."""

from __future__ import annotations

from typing import Any

import pytest

from expertmaps_operator import settings
from expertmaps_operator.act.permissions import PERMISSIONS
from tests.chart.helm import CHART, ROOT, Manifest, helm, pick, template

pytestmark = pytest.mark.api  # helm comes from the same build as the API server

KOPF: frozenset[tuple[str, str, str]] = frozenset()
"""What kopf asks for besides: nothing, when scanning and peering are off."""


def _rules(role: Manifest) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_lint() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("watched", "expected"), [([], ["ops"]), (["b", "a"], ["a", "b"])], ids=["own", "others"]
)
def test_the_role_has_what_the_code_calls(watched: list[str], expected: list[str]) -> None:
    manifests = template({"watchNamespaces": watched})
    roles = pick(manifests, "Role", "-operator")
    assert [role["metadata"]["namespace"] for role in roles] == expected
    called = {(one.group, one.resource, verb) for one in PERMISSIONS for verb in one.verbs} | KOPF
    for role in roles:
        assert _rules(role) == called
    for binding in pick(manifests, "RoleBinding", "-operator"):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "expertmaps-operator", "namespace": "ops"}
        ]


def test_there_are_no_rights_beyond_namespaces() -> None:
    kinds = {one["kind"] for one in template({"watchNamespaces": ["a"]})}
    assert kinds == {
        *("CustomResourceDefinition", "Deployment", "Role", "RoleBinding", "Service"),
        "ServiceAccount",
    }


def test_the_runner_may_create_config_maps_and_nothing_else() -> None:
    manifests = template(
        {
            "watchNamespaces": ["a", "b"],
            "serviceAccounts": {"runner": {"bindAlso": ["writer"], "annotations": {"k": "v"}}},
            "image": {"pullSecrets": ["registry"]},
        }
    )
    roles = pick(manifests, "Role", "-runner")
    assert [_rules(role) for role in roles] == [{("", "configmaps", "create")}] * 2
    accounts = pick(manifests, "ServiceAccount", "-runner")
    assert [one["metadata"]["namespace"] for one in accounts] == ["a", "b"]
    assert all(one["imagePullSecrets"] == [{"name": "registry"}] for one in accounts)
    assert all(one["metadata"]["annotations"] == {"k": "v"} for one in accounts)
    for binding in pick(manifests, "RoleBinding", "-runner"):
        place = binding["metadata"]["namespace"]
        names = [(one["name"], one["namespace"]) for one in binding["subjects"]]
        assert names == [("expertmaps-runner", place), ("writer", place)]


def _container(manifests: list[Manifest]) -> Any:
    (deployment,) = pick(manifests, "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container


def test_the_flags_are_those_of_the_operator() -> None:
    values = {
        "watchNamespaces": ["b", "a"],
        "image": {
            "operator": {"tag": "dev"},
            "runner": {"digest": "sha256:" + "0" * 64, "pullPolicy": "Never"},
        },
        "operator": {
            "maxConcurrentProfiles": 2,
            "maxConcurrentRollouts": 3,
            "paused": True,
            "logFormat": "text",
        },
        "serviceAccounts": {"runner": {"name": "other"}},
        "metrics": {"port": 9090},
    }
    container = _container(template(values))
    assert container["image"] == "docker.io/expertmaps/expertmaps-operator:dev"
    assert settings.parse(container["args"], {}) == settings.Options(
        namespaces=("a", "b"),
        runner_image="docker.io/expertmaps/expertmaps-runner@sha256:" + "0" * 64,
        runner_service_account="other",
        runner_pull_policy="Never",
        max_concurrent_profiles=2,
        max_concurrent_rollouts=3,
        paused=True,
        metrics_port=9090,
        log_format="text",
    )
    assert container["ports"] == [{"name": "metrics", "containerPort": 9090}]


def test_defaults_are_those_of_the_operator() -> None:
    container = _container(template())
    given = settings.parse(container["args"], {})
    image = "docker.io/expertmaps/expertmaps-runner:0.1.0"
    assert given == settings.parse(["--namespace=ops", f"--runner-image={image}"], {})


def test_the_pod_is_confined() -> None:
    (deployment,) = pick(template(), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    container = pod["containers"][0]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
    }
    assert container["resources"]["limits"] == {"memory": "512Mi"}
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "metrics"
    selector = deployment["spec"]["selector"]["matchLabels"].items()
    assert selector <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_the_definitions_are_kept() -> None:
    definitions = pick(template(), "CustomResourceDefinition")
    assert len(definitions) == len(list((ROOT / "crds").glob("*.yaml")))
    for one in definitions:
        assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not pick(template({"crds": {"install": False}}), "CustomResourceDefinition")


def test_network_policies() -> None:
    assert not pick(template(), "NetworkPolicy")
    values = {
        "watchNamespaces": ["a"],
        "networkPolicy": {
            "enabled": True,
            "statusPort": 9500,
            "lanePodSelector": {"matchLabels": {"app": "vllm"}},
        },
    }
    manifests = template(values)
    (status,) = pick(manifests, "NetworkPolicy", "-status")
    assert status["metadata"]["namespace"] == "a"
    assert status["spec"]["podSelector"] == {"matchLabels": {"app": "vllm"}}
    (rule,) = status["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 9500}]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "ops"}
    (deployment,) = pick(manifests, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()


def test_a_wrong_value_is_named() -> None:
    done = helm("template", "x", str(CHART), "--set", "image.operator.pullPolicy=Sometimes")
    assert done.returncode != 0
    assert "pullPolicy" in done.stderr
