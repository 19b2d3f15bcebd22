"""/healthz and /metrics on one port, served from a thread of its own: a busy or stuck event loop
does not keep the kubelet from hearing so.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

Check = Callable[[], str | None]
"""None when all is well, else why not in one line."""


class Health:
    """Named checks and facts about the process."""

    def __init__(self, checks: Mapping[str, Check], facts: Callable[[], Mapping[str, Any]]) -> None:
        self._checks, self._facts = dict(checks), facts

    def look(self) -> tuple[bool, dict[str, Any]]:
        """Whether the process is well, and what it says of itself."""
        problems = {name: problem for name, check in self._checks.items() if (problem := check())}
        return not problems, {"ok": not problems, "problems": problems, **self._facts()}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Probes must be answered while a scraper is slow, but a flood must not pile up threads.
    request_queue_size = 16

    def __init__(self, port: int, health: Health, render: Callable[[], bytes]) -> None:
        self.health, self.render = health, render
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # Pods have IPv4, IPv6 or both, and the kubelet probes either.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 5
    server_version = "expertmaps-operator"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, CONTENT_TYPE_LATEST, self.server.render())
        elif path == "/healthz":
            well, said = self.server.health.look()
            body = json.dumps(said, sort_keys=True).encode() + b"\n"
            self._answer(200 if well else 503, "application/json", body)
        else:
            self._answer(404, "text/plain", b"/healthz or /metrics\n")

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes and scrapes are not logged."""


class HealthServer:
    """The HTTP server."""

    def __init__(self, port: int, health: Health, render: Callable[[], bytes]) -> None:
        self._server = _Server(port, health, render)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="health", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
