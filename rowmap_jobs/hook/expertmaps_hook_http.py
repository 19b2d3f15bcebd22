"""Read-only HTTP server of the hook: GET /status and GET /metrics. Standard library only.

Metric names are part of the product's interface:
expertmaps_hook_info, expertmaps_hook_phase, expertmaps_hook_error, expertmaps_generation,
expertmaps_hot_rows, expertmaps_cold_rows, expertmaps_hot_bytes, expertmaps_cold_bytes,
expertmaps_locked_bytes, expertmaps_steps_total, expertmaps_boot_seconds,
expertmaps_compile_cache_hits, expertmaps_compile_cache_misses, expertmaps_aot_loaded,
expertmaps_aot_compiled, expertmaps_counted_rows_total, expertmaps_recomputed_rows_total,
expertmaps_verify_rows_total, expertmaps_missed_rows_total, expertmaps_transcripts_total,
expertmaps_skipped_total, expertmaps_major_faults_total.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_env as env
    from .expertmaps_hook_status import Publisher, Status
else:
    import expertmaps_hook_env as env
    from expertmaps_hook_status import Publisher, Status

PHASES = ("Loading", "Ready", "Serving", "Failed", "Stopped")
MAX_CONNECTIONS = 8
TIMEOUT_SECONDS = 5

Sample = tuple[str, str, str, dict[str, str], float | int]
"""Name, type, help, labels, value."""


class StatusServer(ThreadingHTTPServer):
    """A few short connections at a time; more are closed at once."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, port: int, status: Status) -> None:
        self.status = status
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
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

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

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


def start_server(port: int, status: Status) -> StatusServer:
    """Serve a status from a daemon thread. Raises HookError (StatusPortInUse, ...)."""
    try:
        server = StatusServer(port, status)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        reason = "StatusPortInUse" if in_use else "StatusPortUnusable"
        raise env.HookError(reason, f"port {port}: {error.strerror}") from None
    threading.Thread(target=server.serve_forever, name="expertmaps-http", daemon=True).start()
    return server


class Published:
    """A status on its port and in its file."""

    def __init__(self, publisher: Publisher, server: StatusServer | None) -> None:
        self._publisher, self._server = publisher, server

    def write(self) -> None:
        """Write the file now."""
        self._publisher.write()

    def close(self) -> None:
        """Write once more, then give the port back."""
        self._publisher.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def publish(status: Status, settings: env.Settings) -> Published:
    """Serve a status by port and file; a port that is taken is an error beside the work."""
    server = None
    if settings.status_port is not None:
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
    return publish(status, settings)


def render_metrics(wire: dict[str, Any]) -> str:
    """A status in Prometheus text format."""
    lines: list[str] = []
    last = ""
    for name, kind, text, labels, value in _samples(wire):
        if name != last:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            last = name
        shown = ",".join(f'{key}="{_escape(item)}"' for key, item in labels.items())
        lines.append(f"{name}{'{' + shown + '}' if shown else ''} {value!r}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _samples(wire: dict[str, Any]) -> Iterator[Sample]:
    info = {
        "mode": wire["mode"], "runner": wire["runner"], "engine_version": wire["engineVersion"],
        "hook_version": wire["hookVersion"], "hook_digest": wire["hookDigest"],
        "map_digest": wire.get("mapDigest", ""), "rank": str(wire["rank"]),
    }  # fmt: skip
    yield "expertmaps_hook_info", "gauge", "What this hook is.", info, 1
    for phase in PHASES:
        label = {"phase": phase}
        yield "expertmaps_hook_phase", "gauge", "Phase.", label, int(wire["phase"] == phase)
    if "error" in wire:
        label = {"reason": wire["error"]["reason"]}
        yield "expertmaps_hook_error", "gauge", "Why the hook gave up.", label, 1
    yield "expertmaps_generation", "gauge", "Re-homings.", {}, wire["generation"]
    yield "expertmaps_steps_total", "counter", "Steps of the model.", {}, wire["steps"]
    if "bootSeconds" in wire:
        yield "expertmaps_boot_seconds", "gauge", "Start to ready.", {}, wire["bootSeconds"]
    yield from _residency_samples(wire.get("residency"))
    yield from _compile_samples(wire.get("compile"))
    yield from _counting_samples(wire.get("counting"))
    faults = major_faults()
    if faults is not None:
        yield "expertmaps_major_faults_total", "counter", "Pages read from disk.", {}, faults


def _residency_samples(residency: dict[str, Any] | None) -> Iterator[Sample]:
    if residency is None:
        return
    for name, key, text in (
        ("expertmaps_hot_rows", "hotRows", "Expert rows in fast memory."),
        ("expertmaps_cold_rows", "coldRows", "Expert rows in slow memory."),
        ("expertmaps_hot_bytes", "hotBytes", "Bytes of the hot rows."),
        ("expertmaps_cold_bytes", "coldBytes", "Bytes of the cold rows."),
        ("expertmaps_locked_bytes", "lockedBytes", "Bytes locked in memory."),
    ):
        yield name, "gauge", text, {"tier": residency["tier"]}, residency[key]


def _compile_samples(evidence: dict[str, Any] | None) -> Iterator[Sample]:
    if evidence is None:
        return
    for name, key, text in (
        ("expertmaps_compile_cache_hits", "cacheHits", "Graphs loaded from the cache."),
        ("expertmaps_compile_cache_misses", "cacheMisses", "Graphs compiled."),
        ("expertmaps_aot_loaded", "aotLoaded", "AOT artifacts loaded."),
        ("expertmaps_aot_compiled", "aotCompiled", "AOT artifacts compiled."),
    ):
        yield name, "gauge", text, {}, evidence[key]


def _counting_samples(counting: dict[str, Any] | None) -> Iterator[Sample]:
    if counting is None:
        return
    for phase in ("prefill", "decode"):
        rows = counting[f"{phase}Rows"]
        yield "expertmaps_counted_rows_total", "counter", "Rows.", {"phase": phase}, rows
    for name, key, text in (
        ("expertmaps_recomputed_rows_total", "recomputedRows", "Rows fed once more."),
        ("expertmaps_verify_rows_total", "verifyRows", "Rows of drafted tokens."),
        ("expertmaps_missed_rows_total", "missed", "Rows with a selection that is not whole."),
        ("expertmaps_transcripts_total", "transcripts", "Transcripts counted."),
    ):
        yield name, "counter", text, {}, counting[key]
    for reason, count in sorted(counting["skipped"].items()):
        label = {"reason": reason}
        yield "expertmaps_skipped_total", "counter", "Transcripts skipped.", label, count


def major_faults() -> int | None:
    """Major page faults of this process: reads that memory did not have."""
    try:
        text = Path("/proc/self/stat").read_text("ascii", "replace")
        return int(text.rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return None
