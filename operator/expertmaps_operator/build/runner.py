"""What all Jobs with our runner share: its container, its volumes and its identity.

The runner alone sees credentials: the Secrets, the certificates and the ServiceAccount token are
volumes that only its containers mount.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import canonical_json, sha256_digest
from rowmap_jobs.formats.run import EXIT_FINAL, RunSpec
from rowmap_jobs.formats.s3 import S3Location

from ..api.reasons import Reason
from ..snapshot import Manifest, Settings

RUNNER = "runner"
PROBE = "probe"
UID = 65532
"""User of the runner's image."""

S3_MOUNT = names.S3_MOUNT
TOKEN_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - a place, no secret
TOKEN_SECONDS = 3607
VOLUME_TOKEN = "expertmaps-token"  # noqa: S105 - a name, no secret
VOLUME_TMP = "expertmaps-tmp"

# A pod of the runner's must not get a proxy: it never ends by itself and hides the engine's port.
NO_MESH_LABELS = {
    "sidecar.istio.io/inject": "false",
    "istio.io/dataplane-mode": "none",
    "kuma.io/sidecar-injection": "disabled",
}
NO_MESH_ANNOTATIONS = {
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
    "consul.hashicorp.com/connect-inject": "false",
}


@dataclass(frozen=True)
class Refusal:
    """Why an object cannot be built, and what to write so that it can."""

    reason: Reason
    message: str


def run_spec_json(spec: RunSpec) -> str:
    """The value of EXPERTMAPS_RUN."""
    return canonical_json(spec.to_wire()).decode("utf-8").rstrip("\n")


def run_spec_hash(spec: RunSpec) -> str:
    """Hash of a run's specification, for its annotation."""
    return sha256_digest(run_spec_json(spec).encode("utf-8"))


def service_account(locations: Mapping[str, S3Location], settings: Settings) -> str | Refusal:
    """The ServiceAccount whose identity the runner has: the locations' own or the operator's.

    A pod has one, so two different ones are refused.
    """
    wanted = {
        name: location.service_account_name
        for name, location in locations.items()
        if location.service_account_name is not None
    }
    if len(set(wanted.values())) > 1:
        found = ", ".join(f"{account} ({name})" for name, account in wanted.items())
        return Refusal(
            Reason.INVALID_SPEC,
            f"serviceAccountName: found {found}, expected one: a run is one pod; give one of the "
            "locations a credentialsSecretRef",
        )
    return next(iter(wanted.values()), settings.runner_service_account)


def runner_container(
    name: str,
    spec: RunSpec,
    locations: Mapping[str, S3Location],
    settings: Settings,
    extra_mounts: Sequence[Manifest] = (),
    role: str | None = None,
) -> dict[str, Any]:
    """One container of the runner's image; `role` is its argument (default: the container's name).

    Its root file system is read-only, it has no privilege and it answers by termination message.
    """
    mounts: list[Manifest] = [
        {"name": VOLUME_TMP, "mountPath": "/tmp"},  # noqa: S108 - an emptyDir of the pod
        {"name": VOLUME_TOKEN, "mountPath": TOKEN_MOUNT, "readOnly": True},
    ]
    for volume in s3_volumes(locations):
        place = str(volume["name"]).removeprefix("expertmaps-s3-")
        mounts.append(
            {"name": volume["name"], "mountPath": f"{S3_MOUNT}/{place}", "readOnly": True}
        )
    return {
        "name": name,
        "image": settings.runner_image,
        "imagePullPolicy": settings.runner_pull_policy,
        "args": [role or name],
        "env": [
            # Kubernetes expands $(NAME) in values and reads $$ as one dollar.
            {"name": names.ENV_RUN, "value": run_spec_json(spec).replace("$", "$$")},
            {"name": names.ENV_DIR, "value": names.RUN_DIR},
        ],
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}},
        "terminationMessagePath": names.TERMINATION_LOG,
        "terminationMessagePolicy": "File",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "privileged": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [*mounts, *extra_mounts],
    }


def runner_volumes(locations: Mapping[str, S3Location]) -> list[dict[str, Any]]:
    """Volumes of a runner container: credentials, certificates, its token and a /tmp."""
    token = {
        "defaultMode": 0o444,
        "sources": [
            {"serviceAccountToken": {"path": "token", "expirationSeconds": TOKEN_SECONDS}},
            {
                "configMap": {
                    "name": "kube-root-ca.crt",
                    "items": [{"key": "ca.crt", "path": "ca.crt"}],
                }
            },
            {
                "downwardAPI": {
                    "items": [
                        {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
                    ]
                }
            },
        ],
    }
    return [
        *s3_volumes(locations),
        {"name": VOLUME_TOKEN, "projected": token},
        {"name": VOLUME_TMP, "emptyDir": {}},
    ]


def s3_volumes(locations: Mapping[str, S3Location]) -> list[dict[str, Any]]:
    """One volume per Secret and certificate bundle of the named locations.

    0444: the runner's user is neither the owner nor in the group of the files, and no other
    container mounts them.
    """
    volumes: list[dict[str, Any]] = []
    for name, location in locations.items():
        if location.credentials_secret_ref is not None:
            # Optional: where it is missing the runner says so at once; the kubelet would only wait.
            secret = {
                "secretName": location.credentials_secret_ref.name,
                "defaultMode": 0o444,
                "optional": True,
            }
            volumes.append({"name": f"expertmaps-s3-{name}", "secret": secret})
        if location.ca_bundle_config_map_ref is not None:
            bundle = {
                "name": location.ca_bundle_config_map_ref.name,
                "defaultMode": 0o444,
                "items": [{"key": "ca.crt", "path": "ca.crt"}],
                "optional": True,
            }
            volumes.append({"name": f"expertmaps-s3-{name}-ca", "configMap": bundle})
    return volumes


def failure_policy(containers: Sequence[str]) -> dict[str, Any]:
    """End the Job at a verdict that another try would not change; evictions are no failure."""
    final: list[Manifest] = [
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": name, "operator": "In", "values": [EXIT_FINAL]},
        }
        for name in containers
    ]
    disrupted = {"type": "DisruptionTarget", "status": "True"}
    return {"rules": [*final, {"action": "Ignore", "onPodConditions": [disrupted]}]}
