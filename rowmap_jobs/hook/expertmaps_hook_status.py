"""What the hook says of itself: status.json, GET /status and GET /metrics. Standard library only.

`Status` is the one place that holds it; threads of the engine change it, the publisher reads it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_env as env
    from . import expertmaps_hook_ranks as ranks
    from .expertmaps_hook_files import make_folder, write_atomic
    from .expertmaps_hook_version import VERSION
else:
    import expertmaps_hook_env as env
    import expertmaps_hook_ranks as ranks
    from expertmaps_hook_files import make_folder, write_atomic
    from expertmaps_hook_version import VERSION

STATUS_FILE = ranks.file_name(0)
REFRESH_SECONDS = 1.0
CLOSE_SECONDS = 3.0
"""vLLM gives its workers 5 seconds to end."""
STALE_SECONDS = 10.0
"""An unchanged status is written again after this, so that updatedAt shows life."""

BOOT_MARK = "EXPERTMAPS_PRIVATE_BOOT"
"""Start time of the first engine process; handed down to its children."""


class Status:
    """State of one worker, with the wire form of rowmap_jobs.formats.status.HookStatus."""

    def __init__(
        self, settings: env.Settings, engine_version: str, rank: int = 0, pod_ranks: int = 1
    ) -> None:
        self.rank, self._pod_ranks, self._directory = rank, pod_ranks, settings.directory
        self._lock = threading.RLock()
        self._providers: dict[str, Callable[[], dict[str, Any] | None]] = {}
        self.steps = 0
        self._fields: dict[str, Any] = {
            "version": 1,
            "hookVersion": VERSION,
            "hookDigest": env.hook_digest(),
            "engine": "vLLM",
            "engineVersion": engine_version,
            "runner": "unknown",
            "mode": settings.mode,
            "phase": "Loading",
            "generation": 0,
            "rank": rank,
            "pid": os.getpid(),
            "startedAt": int(time.time()),
        }
        self._started = boot_time()

    def set(self, **fields: Any) -> None:
        """Set wire fields (camelCase); None removes one."""
        with self._lock:
            for name, value in fields.items():
                if value is None:
                    self._fields.pop(name, None)
                else:
                    self._fields[name] = value

    def provide(self, name: str, provider: Callable[[], dict[str, Any] | None]) -> None:
        """Have a field computed whenever the status is read."""
        with self._lock:
            self._providers[name] = provider

    @property
    def phase(self) -> str:
        with self._lock:
            return str(self._fields["phase"])

    def fail(self, failure: env.HookError) -> None:
        """The hook gave up. The first reason stays: later ones follow from it."""
        with self._lock:
            if self._fields["phase"] != "Failed":
                self.set(phase="Failed", error=_wire_error(failure))

    def warn(self, failure: env.HookError) -> None:
        """An error beside the work itself: reported, rows and counts stay."""
        with self._lock:
            self._fields.setdefault("error", _wire_error(failure))

    def add(self, failure: env.HookError) -> None:
        """What else went wrong after the error that stands: appended to its message."""
        with self._lock:
            error = self._fields.get("error")
            if error is None:
                self._fields["error"] = _wire_error(failure)
            else:
                # The end is what is new: a long first message gives way.
                text = f"; {failure}"[: env.MAX_MESSAGE]
                kept = error["message"][: env.MAX_MESSAGE - len(text)]
                self._fields["error"] = {**error, "message": kept + text}

    def ready(self) -> None:
        """Weights are in place and the engine has warmed up."""
        with self._lock:
            if self._fields["phase"] == "Loading":
                self._fields["phase"] = "Ready"
            elapsed = time.time() - self._started
            self._fields.setdefault("bootSeconds", round(max(0.0, elapsed), 3))

    def stepped(self) -> None:
        """One real step of the model. Called on the engine's thread: as little as possible."""
        self.steps += 1
        if self.steps == 1:
            with self._lock:
                if self._fields["phase"] in ("Loading", "Ready"):
                    self._fields["phase"] = "Serving"

    def wire(self) -> dict[str, Any]:
        """The status as it is now."""
        with self._lock:
            fields = {**self._fields, "steps": self.steps, "updatedAt": int(time.time())}
            providers = dict(self._providers)
        for name, provider in providers.items():
            value = provider()
            if value is not None:
                fields[name] = value
        if self.rank == 0 and self._pod_ranks > 1:
            others = ranks.read(self._directory, self._pod_ranks, self._started)
            return ranks.of_pod(fields, others, self._pod_ranks)
        return fields

    def to_bytes(self) -> bytes:
        """The status as one line of JSON."""
        return json.dumps(self.wire(), sort_keys=True).encode() + b"\n"


def _wire_error(failure: env.HookError) -> dict[str, str]:
    return {"reason": failure.reason, "message": failure.message}


def boot_time() -> float:
    """Start of the engine's first process, as far as it is known."""
    try:
        return float(os.environ[BOOT_MARK])
    except (KeyError, ValueError):
        return time.time()


def mark_boot() -> None:
    """Remember the start of the first process that loads the plugin; children inherit it."""
    if BOOT_MARK not in os.environ:
        try:
            os.environ[BOOT_MARK] = f"{env.process_start():.3f}"
        except (OSError, ValueError, IndexError):
            os.environ[BOOT_MARK] = f"{time.time():.3f}"


def compile_evidence() -> dict[str, Any]:
    """What the compilers of this process loaded and compiled; reads counters, imports nothing."""
    hits = misses = 0
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        inductor = dynamo.counters.get("inductor", {})
        hits = int(inductor.get("fxgraph_cache_hit", 0))
        # A bypass is a graph that cannot be cached: it was compiled in this boot as well.
        misses = sum(
            int(inductor.get(name, 0)) for name in ("fxgraph_cache_miss", "fxgraph_cache_bypass")
        )
    loaded = compiled = 0
    module = sys.modules.get("vllm.compilation.counter")
    if module is not None:
        counter = module.compilation_counter
        loaded, compiled = counter.num_aot_artifacts_loaded, counter.num_aot_compiles
        hits += counter.num_compiled_artifacts_loaded
    return {
        "cacheHits": hits, "cacheMisses": misses, "aotLoaded": loaded, "aotCompiled": compiled,
    }  # fmt: skip


class Publisher:
    """Writes a rank's status file when it changes, from a thread of its own."""

    def __init__(self, status: Status, directory: Path) -> None:
        self._status, self._directory = status, directory
        self._name = ranks.file_name(status.rank)
        self._wake, self._stop = threading.Event(), threading.Event()
        self._written: tuple[dict[str, Any], float] | None = None
        self._complained = False
        self._write_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="expertmaps-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def changed(self) -> None:
        """Have it written soon, from this thread's own: a volume may hang."""
        self._wake.set()

    def write(self) -> None:
        """Write now. A folder that cannot be written is logged once; GET /status still works."""
        with self._write_lock:
            try:
                wire = self._status.wire()
                stable = {key: value for key, value in wire.items() if key != "updatedAt"}
                now = time.monotonic()
                if self._written is not None:
                    before, when = self._written
                    if before == stable and now - when < STALE_SECONDS:
                        return
                make_folder(self._directory)
                data = json.dumps(wire, sort_keys=True).encode() + b"\n"
                write_atomic(self._directory / self._name, data)
                self._written = (stable, now)
            except Exception as error:
                if not self._complained:
                    self._complained = True
                    env.logger.warning("expertmaps: %s not written: %s", self._name, error)

    def close(self) -> None:
        """Write once more and stop, for a bounded time."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        env.leave_bound_cpu()
        while True:
            self._wake.clear()
            ending = self._stop.is_set()
            self.write()
            if ending:
                return
            self._wake.wait(REFRESH_SECONDS)
