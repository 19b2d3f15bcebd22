"""Creating the ConfigMap: the manifest, and what the API may answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes import client

from rowmap_jobs.edges import kube
from rowmap_jobs.formats import names, rowmap
from rowmap_jobs.formats.run import RunSpec
from rowmap_jobs.manifest import config_map
from rowmap_jobs.reasons import RunError
from tests.formats.samples import row_map


def spec(**over: Any) -> RunSpec:
    wire = {
        "kind": "Fetch",
        "namespace": "ns",
        "run": "r",
        "lane": "lane-a",
        "trafficClass": "agent",
        "store": {"bucket": "maps"},
        "owner": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm", "uid": "u-1"},
    }
    return RunSpec.from_wire({**wire, **over}, "x")


def test_the_manifest_of_a_map() -> None:
    rows = row_map()
    made = config_map(spec(), rows)
    sixteen = rows.digest[7:23]
    assert made["metadata"] == {
        "name": f"lane-a-map-{sixteen}",
        "namespace": "ns",
        "labels": {
            "expertmaps.dev/lane": "lane-a",
            "expertmaps.dev/role": "map",
            "expertmaps.dev/digest": sixteen,
            "expertmaps.dev/traffic-class": "agent",
        },
        "annotations": {
            "expertmaps.dev/map-digest": rows.digest,
            "expertmaps.dev/row-set-digest": rows.row_set_digest,
            "expertmaps.dev/traffic-class": "agent",
        },
        "ownerReferences": [
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "name": "vllm",
                "uid": "u-1",
                "controller": False,
            }
        ],
    }
    assert made["immutable"] is True
    assert rowmap.parse(made["data"]["rowmap.json"].encode(), "x", rows.digest) == rows


def test_without_a_class_there_is_no_class_label() -> None:
    made = config_map(spec(trafficClass=None), row_map())
    assert names.LABEL_CLASS not in made["metadata"]["labels"]


class Api:
    """Answers as the Kubernetes API does; it stores nothing."""

    def __init__(self) -> None:
        self.status = 201
        self.requests: list[tuple[str, str, Any]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.requests.append((self.command, self.path, body))
                data = json.dumps(body if api.status < 300 else {"kind": "Status"}).encode()
                self.send_response(api.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{self.server.server_address[1]}"
        settings.retries = False
        self.client = client.ApiClient(settings)


@pytest.fixture
def api() -> Iterator[Api]:
    one = Api()
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_a_config_map_is_created_by_one_request(api: Api) -> None:
    made = config_map(spec(), row_map())
    assert kube.create_config_map(api.client, made) is True
    assert api.requests == [("POST", "/api/v1/namespaces/ns/configmaps", made)]


def test_one_that_exists_is_success(api: Api) -> None:
    api.status = 409
    assert kube.create_config_map(api.client, config_map(spec(), row_map())) is False


@pytest.mark.parametrize(
    ("status", "reason", "final"),
    [
        (403, "ConfigMapForbidden", True),
        (404, "ConfigMapForbidden", True),
        (422, "ConfigMapForbidden", True),
        (500, "ConfigMapFailed", False),
    ],
)
def test_refusals(api: Api, status: int, reason: str, final: bool) -> None:
    api.status = status
    with pytest.raises(RunError) as refused:
        kube.create_config_map(api.client, config_map(spec(), row_map()))
    assert (refused.value.reason, refused.value.final) == (reason, final)
    assert f"ConfigMap ns/lane-a-map-{row_map().digest[7:23]}: found HTTP {status}" in str(
        refused.value
    )


def test_an_api_that_is_not_there(api: Api) -> None:
    api.server.shutdown()
    api.server.server_close()
    with pytest.raises(RunError) as refused:
        kube.create_config_map(api.client, config_map(spec(), row_map()))
    assert refused.value.reason == "ConfigMapFailed" and not refused.value.final


def test_outside_a_cluster_there_is_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(RunError) as refused:
        kube.in_cluster()
    assert refused.value.reason == "ConfigMapForbidden"
