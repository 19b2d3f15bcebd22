"""Read-only HTTP server of the hook: GET /status and GET /metrics. Standard library only."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_env as env
    from .expertmaps_hook_metrics import render_metrics
    from .expertmaps_hook_status import Publisher, Status
else:
    import expertmaps_hook_env as env
    from expertmaps_hook_metrics import render_metrics
    from expertmaps_hook_status import Publisher, Status

MAX_CONNECTIONS = 8
TIMEOUT_SECONDS = 5
"""For one read."""
ACCEPT_PAUSE_SECONDS = 0.5
LIFE_SECONDS = 10.0
"""For a whole connection."""


class StatusServer(ThreadingHTTPServer):
    """A few short connections at a time; more are closed at once."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, port: int, status: Status) -> None:
        self.status = status
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._open: dict[Any, float] = {}
        self._lock = threading.Lock()
        # One dual-stack socket, so that pods with either address family are reached.
        self.address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer.server_bind looks its own name up in DNS; nothing here needs it.
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "expertmaps", self.server_address[1]

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # The connection stays in the backlog: without a pause this thread would spin on it.
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread: a limit of processes
            self._gone(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._gone(request)

    def _gone(self, request: Any) -> None:
        with self._lock:
            del self._open[request]
        self._slots.release()

    def service_actions(self) -> None:
        """Twice a second: end connections that dribble, or a few could keep the port for good."""
        limit = time.monotonic() - LIFE_SECONDS
        with self._lock:
            for request in [item for item, since in self._open.items() if since < limit]:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        env.logger.debug("expertmaps: a status connection ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = TIMEOUT_SECONDS
    server_version = "expertmaps"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/status":
            self._answer(200, "application/json", self.server.status.to_bytes())
        elif path == "/metrics":
            text = render_metrics(self.server.status.wire())
            self._answer(200, "text/plain; version=0.0.4; charset=utf-8", text.encode())
        else:
            self._answer(404, "text/plain; charset=utf-8", b"GET /status or /metrics\n")

    def _refuse(self) -> None:
        self._answer(405, "text/plain; charset=utf-8", b"read only\n", allow="GET")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = _refuse  # noqa: N815

    def _answer(self, code: int, kind: str, body: bytes, allow: str | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if allow:
            self.send_header("Allow", allow)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds; the engine's log is not theirs."""


def _serve(server: StatusServer) -> None:
    env.leave_bound_cpu()
    server.serve_forever()


def start_server(port: int, status: Status) -> StatusServer:
    """Serve a status from a daemon thread. Raises HookError (StatusPortInUse, ...)."""
    try:
        server = StatusServer(port, status)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "StatusPortInUse" if in_use else "StatusPortUnusable"
        raise env.HookError(reason, f"port {port}: {error.strerror}") from None
    threading.Thread(target=_serve, args=[server], name="expertmaps-http", daemon=True).start()
    return server


class Published:
    """A status on its port and in its file."""

    def __init__(self, publisher: Publisher, server: StatusServer | None) -> None:
        self._publisher, self._server, self._pid = publisher, server, os.getpid()

    def changed(self) -> None:
        """Have the file written soon; the caller does not wait for a disk."""
        self._publisher.changed()

    def close(self) -> None:
        """Write once more, then give the port back. A forked child has neither thread."""
        if os.getpid() != self._pid:
            return
        self._publisher.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def publish(status: Status, settings: env.Settings) -> Published:
    """Serve a status by port and file; a port that is taken is an error beside the work.

    Ranks above 0 have a file alone, of their own name: rank 0 reads it and speaks for the pod.
    """
    server = None
    if settings.status_port is not None and status.rank == 0:
        try:
            server = start_server(settings.status_port, status)
        except env.HookError as failure:
            env.logger.error("expertmaps: %s", failure)
            status.warn(failure)
    publisher = Publisher(status, settings.directory)
    publisher.start()
    return Published(publisher, server)


def report_failure(error: BaseException) -> Published:
    """Publish a failure of a process that has no worker of its own."""
    failure = env.as_failure(error)
    env.logger.error("expertmaps: serving without the hook: %s", failure)
    settings = env.settings()
    try:
        version = env.engine_version()
    except Exception:
        version = "unknown"
    status = Status(settings, version)
    status.fail(failure)
    published = publish(status, settings)
    atexit.register(published.close)  # a process may end before its thread has written
    return published
