"""The Kubernetes API, for the one thing a runner may do there: create a map's ConfigMap."""

from __future__ import annotations

from typing import Any

import urllib3.exceptions
from kubernetes import client, config

from ..reasons import Reason, RunError, one_line

TIMEOUT_SECONDS = (10, 30)
ATTEMPTS = 3


def in_cluster() -> client.ApiClient:
    """A client with the pod's own ServiceAccount. Raises RunError when there is none."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException as error:
        raise RunError(
            Reason.CONFIG_MAP_FORBIDDEN,
            f"ServiceAccount token: found {one_line(str(error))}, expected one mounted into the "
            "runner's pod (automountServiceAccountToken)",
        ) from None
    settings.retries = ATTEMPTS - 1
    return client.ApiClient(settings)


def create_config_map(api: client.ApiClient, manifest: dict[str, Any]) -> bool:
    """Create a ConfigMap; True when it is new, False when one of that name exists.

    Raises RunError: ConfigMapForbidden when the API refuses it, ConfigMapFailed otherwise.
    """
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    place = f"ConfigMap {namespace}/{name}"
    try:
        client.CoreV1Api(api).create_namespaced_config_map(
            namespace, manifest, _request_timeout=TIMEOUT_SECONDS
        )
    except client.ApiException as error:
        if error.status == 409:
            return False
        found = f"HTTP {error.status} {error.reason}"
        if error.status in (401, 403, 404, 413, 422):
            raise RunError(
                Reason.CONFIG_MAP_FORBIDDEN,
                f"{place}: found {found}, expected to create it: allow the runner's "
                "ServiceAccount to create configmaps in this namespace",
            ) from None
        raise RunError(Reason.CONFIG_MAP_FAILED, f"{place}: found {found}") from None
    except urllib3.exceptions.HTTPError as error:
        raise RunError(
            Reason.CONFIG_MAP_FAILED,
            f"{place}: found {type(error).__name__}, expected an answer of the Kubernetes API: "
            "check the network policies of the namespace",
        ) from None
    return True
