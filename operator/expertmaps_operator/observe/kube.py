"""The Kubernetes API in raw JSON: the official client's configuration, TLS and credentials, without
its generated models (a snapshot holds objects as the API server returns them).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import client, config

from rowmap_jobs.formats.names import API_VERSION

from .resources import CUSTOM, Resource

Manifest = dict[str, Any]

CONNECT_SECONDS = 3.0
READ_SECONDS = 7.0
REQUEST_SECONDS = CONNECT_SECONDS + READ_SECONDS
"""Longest request. The Lease relies on it: a write begun while it was held ends in time."""
PAGE_SIZE = 500

USER_AGENT = "expertmaps-operator"
JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


@dataclass(frozen=True)
class Cause:
    """One entry of a Status' details.causes."""

    reason: str
    field: str
    message: str


class ApiError(Exception):
    """The API server refused a request; `status` 0 means that it did not answer."""

    loggable = True

    def __init__(
        self, request: str, status: int, reason: str, message: str, causes: tuple[Cause, ...] = ()
    ) -> None:
        self.request, self.status, self.reason, self.message = request, status, reason, message
        self.causes = causes
        text = f"{request}: HTTP {status} {reason}: {message}" if status else f"{request}: {reason}"
        super().__init__(" ".join(text.split())[:1024])


class Kube:
    """A thread-safe client."""

    def __init__(self, api: client.ApiClient) -> None:
        self._api = api
        self._pool = api.rest_client.pool_manager

    def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = JSON,
    ) -> Manifest:
        """One request, never repeated and never redirected. Raises ApiError."""
        headers = {**self._api.default_headers, "Accept": JSON, "User-Agent": USER_AGENT}
        self._api.update_params_for_auth(headers, [], ["BearerToken"])
        data: bytes | None = None
        if body is not None:
            data = json.dumps(body, allow_nan=False).encode()
            headers["Content-Type"] = content_type
        url = self._api.configuration.host.rstrip("/") + path
        what = f"{method} {path}"
        try:
            answer = self._pool.request(
                method,
                f"{url}?{urlencode(query)}" if query else url,
                body=data,
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
                retries=False,
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise ApiError(what, 0, type(error).__name__, "no answer") from None
        if not 200 <= answer.status <= 299:
            raise _refusal(what, answer.status, answer.data)
        try:
            decoded = json.loads(answer.data)
        except ValueError:
            raise ApiError(what, 0, "InvalidAnswer", "not JSON") from None
        if not isinstance(decoded, dict):
            raise ApiError(what, 0, "InvalidAnswer", "not a JSON object")
        return decoded

    def get(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """An object, or None when there is none. Raises ApiError."""
        try:
            return self.request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list_all(self, resource: Resource, namespace: str, selector: str = "") -> list[Manifest]:
        """All objects of a namespace that match a label selector, in pages. Raises ApiError."""
        query = {"limit": str(PAGE_SIZE)}
        if selector:
            query["labelSelector"] = selector
        found: list[Manifest] = []
        while True:
            page = self.request("GET", resource.path(namespace), query)
            for item in page.get("items") or []:
                # Items of a list carry neither; owners and conflicts need both.
                found.append({"apiVersion": resource.api_version, "kind": resource.kind, **item})
            rest = (page.get("metadata") or {}).get("continue")
            if not rest:
                return found
            query["continue"] = rest

    def missing_kinds(self) -> list[str]:
        """Custom kinds that the API server does not serve in our version. Raises ApiError."""
        try:
            served = self.request("GET", f"/apis/{API_VERSION}")
        except ApiError as error:
            if error.status != 404:
                raise
            served = {}
        names = {item.get("name") for item in served.get("resources") or []}
        return [
            resource.plural
            for resource in CUSTOM
            if not {resource.plural, f"{resource.plural}/status"} <= names
        ]


def _refusal(what: str, status: int, data: bytes) -> ApiError:
    try:
        answer = json.loads(data)
    except ValueError:
        answer = {}
    if not isinstance(answer, dict):
        answer = {}
    details = answer.get("details") or {}
    causes = tuple(
        Cause(str(item.get("reason", "")), str(item.get("field", "")), str(item.get("message", "")))
        for item in (details.get("causes") or [])
        if isinstance(item, dict)
    )
    reason, message = str(answer.get("reason", "")), str(answer.get("message", ""))
    return ApiError(what, status, reason, message, causes)


def connect() -> Kube:
    """A client with $KUBECONFIG when set, else the pod's ServiceAccount, else ~/.kube/config.

    Raises kubernetes.config.ConfigException when there is none of them.
    """
    settings = client.Configuration()
    if os.environ.get("KUBECONFIG") or not os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_kube_config(client_configuration=settings)
    else:
        config.load_incluster_config(client_configuration=settings)
    settings.connection_pool_maxsize = 16
    return Kube(client.ApiClient(settings))
