"""A stand-in for an engine's boot in rollout tests: speaks the status contract, has no model.

It runs in the runner's image with the files of this folder and of `tests/jobs` mounted at /stub. In
count mode it is the fake engine of the runner's tests; in serve mode it reports the mounted map as
the hook would. /faults/mode (a ConfigMap, read at start) makes it misbehave with the map whose
digest is in /faults/digest: hook-error, crash, never-ready, wrong-digest; and in count mode with
/faults/counting: crash, memory, never-ready.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOOK = Path("/opt/expertmaps/hook")
MAP = Path("/etc/expertmaps/rowmap.json")
FAULTS = Path("/faults")


def hook_digest() -> str:
    """Digest of the mounted hook, as the hook's own module computes it."""
    sys.path.insert(0, str(HOOK))
    import expertmaps_hook_env

    digest: str = expertmaps_hook_env.hook_digest()
    return digest


def planned_fault() -> str:
    """How to misbehave with the mounted map; empty: not at all."""
    if not (FAULTS / "mode").exists() or not MAP.exists():
        return ""
    digest = "sha256:" + hashlib.sha256(MAP.read_bytes()).hexdigest()
    if (FAULTS / "digest").read_text(encoding="utf-8").strip() != digest:
        return ""
    return (FAULTS / "mode").read_text(encoding="utf-8").strip()


def counting_fault() -> str:
    """How to misbehave in count mode; empty: not at all."""
    path = FAULTS / "counting"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def run_out_of_memory() -> None:
    """Touch more memory than any limit of a test."""
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 32)


def status(fault: str) -> dict[str, Any]:
    """A HookStatus for the mounted map."""
    raw = MAP.read_bytes()
    row_map = json.loads(raw)
    geometry = row_map["geometry"]
    hot = sum(len(rows["hot"]) for rows in row_map["layers"].values())
    cold = sum(len(rows["cold"]) for rows in row_map["layers"].values())
    report = {
        "version": 1,
        "hookVersion": "stub",
        "hookDigest": hook_digest(),
        "engine": "vLLM",
        "engineVersion": "0.32.0",
        "runner": "v1",
        "mode": "serve",
        "phase": "Ready",
        "generation": 1,
        "rank": 0,
        "pid": os.getpid(),
        "startedAt": int(time.time()),
        "updatedAt": int(time.time()),
        "mapDigest": "sha256:" + hashlib.sha256(raw).hexdigest(),
        "rowSetDigest": row_map["rowSetDigest"],
        "fingerprint": row_map["fingerprint"],
        "geometry": {
            "experts": geometry["experts"],
            "topK": geometry["topK"],
            "moeLayers": geometry["moeLayers"],
            "rowBytes": geometry["rowBytes"],
        },
        "residency": {
            "hotRows": hot,
            "coldRows": cold,
            "hotBytes": hot,
            "coldBytes": cold,
            "lockedBytes": 0,
            "tier": "overlay",
        },
        "compile": {"cacheHits": 1, "cacheMisses": 0, "aotLoaded": 0, "aotCompiled": 0},
    }
    if fault == "wrong-digest":
        report["mapDigest"] = "sha256:" + "0" * 64
    if fault == "hook-error":
        report.update(phase="Failed", generation=0)
        report["error"] = {
            "reason": "FingerprintMismatch",
            "message": "router: found another model",
        }
        del report["mapDigest"], report["residency"]
    return report


def serve(port: int, answers: dict[str, bytes]) -> None:
    """Answer GETs on a port, from a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.do_GET()

        def do_GET(self) -> None:
            body = answers.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    fault = planned_fault()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if os.environ.get("EXPERTMAPS_MODE") == "count":
        planned = counting_fault()
        if planned == "crash":
            sys.exit(3)
        if planned == "memory":
            run_out_of_memory()
        if planned == "never-ready":
            stop.wait()
            return
        sys.path.insert(0, "/stub")
        from fake_engine import FakeEngine

        engine = FakeEngine(Path("/var/run/expertmaps/transcripts"), ("0.0.0.0", 8000))
        engine.status["hookDigest"] = hook_digest()
        serve(9477, {"/status": json.dumps(engine.status).encode()})
        stop.wait()
        return
    if MAP.exists():
        if fault == "crash":
            sys.exit(3)
        serve(9477, {"/status": json.dumps(status(fault)).encode()})
    if fault != "never-ready":
        answer = json.dumps({"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]})
        serve(8000, {"/health": b"ok", "/v1/completions": answer.encode()})
    stop.wait()


if __name__ == "__main__":
    main()
