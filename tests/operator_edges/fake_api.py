"""A stand-in for the API server, in this process: it keeps objects by path and records requests.

It knows no server-side apply, no validation and no watches: what depends on them is tried in the
test_api_*.py files against a real API server.
"""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kubernetes import client

from expertmaps_operator.act.permissions import PERMISSIONS
from expertmaps_operator.observe.kube import Kube


@dataclass(frozen=True)
class Request:
    """One request as the stand-in saw it."""

    method: str
    path: str
    query: dict[str, str]
    content_type: str
    body: Any

    @property
    def is_read(self) -> bool:
        return self.method == "GET"


@dataclass
class FakeApi:
    """Objects by path, scripted answers, and what was asked."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    scripted: dict[tuple[str, str], list[tuple[int, Any]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: int = 100

    def put(self, path: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """Have an object there; metadata that the server would fill in is filled in."""
        self.version += 1
        metadata = manifest.setdefault("metadata", {})
        metadata.setdefault("name", path.rsplit("/", 1)[-1])
        metadata.setdefault("namespace", path.split("/namespaces/")[1].split("/")[0])
        metadata.setdefault("uid", f"uid-{metadata['name']}")
        metadata["resourceVersion"] = str(self.version)
        self.objects[path] = manifest
        return manifest

    def answer(self, method: str, path: str, status: int, body: Any) -> None:
        """Answer the next such request so."""
        self.scripted.setdefault((method, path), []).append((status, body))

    def writes(self) -> list[Request]:
        return [request for request in self.requests if not request.is_read]

    def handle(self, request: Request) -> tuple[int, Any]:
        with self.lock:
            self.requests.append(request)
            script = self.scripted.get((request.method, request.path))
            if script:
                return script.pop(0)
            found = self.objects.get(request.path)
            if request.method == "GET":
                return self._read(request, found)
            if request.method == "POST":
                path = f"{request.path}/{request.body['metadata']['name']}"
                if path in self.objects:
                    return failure(409, "AlreadyExists")
                return 201, self.put(path, copy.deepcopy(request.body))
            main = request.path.removesuffix("/status")
            if main not in self.objects:
                return failure(404, "NotFound")
            if request.method == "DELETE":
                return 200, self.objects.pop(main)
            return 200, self.objects[main]

    def _read(self, request: Request, found: dict[str, Any] | None) -> tuple[int, Any]:
        if found is not None:
            return 200, found
        plural = request.path.rsplit("/", 1)[-1]
        if plural not in {one.resource for one in PERMISSIONS}:
            return failure(404, "NotFound")
        items = [
            item
            for path, item in sorted(self.objects.items())
            if path.rsplit("/", 1)[0] == request.path
            and _selected(item, request.query.get("labelSelector", ""))
        ]
        return 200, {"items": items, "metadata": {"resourceVersion": str(self.version)}}


def failure(status: int, reason: str, *causes: tuple[str, str, str]) -> tuple[int, Any]:
    """A Status; causes are (reason, field, message)."""
    listed = [{"reason": why, "field": place, "message": text} for why, place, text in causes]
    body = {"kind": "Status", "reason": reason, "message": reason, "code": status}
    return status, {**body, "details": {"causes": listed}}


def conflict(field_path: str, manager: str) -> tuple[str, str, str]:
    """The cause that a conflicting apply is refused with."""
    return "FieldManagerConflict", field_path, f'conflict with "{manager}" using apps/v1'


def _selected(item: dict[str, Any], selector: str) -> bool:
    labels = item["metadata"].get("labels") or {}
    for term in filter(None, selector.split(",")):
        key, equals, value = term.partition("=")
        if (equals and labels.get(key) != value) or key not in labels:
            return False
    return True


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # One packet per answer: else each waits for a delayed ACK.
    api: FakeApi

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        parts = urlsplit(self.path)
        status, body = self.api.handle(
            Request(
                self.command,
                parts.path,
                dict(parse_qsl(parts.query)),
                self.headers.get("Content-Type", ""),
                json.loads(raw) if raw else None,
            )
        )
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def serve(api: FakeApi) -> tuple[ThreadingHTTPServer, Kube]:
    """Serve it on a free port; the caller shuts it down."""
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    settings = client.Configuration(host=f"http://127.0.0.1:{server.server_address[1]}")
    settings.proxy = None
    return server, Kube(client.ApiClient(settings))
