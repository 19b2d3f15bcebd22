"""Puts the parts together, watches over them, and ends the process when one of them is lost."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from kubernetes.config import ConfigException

from rowmap_jobs.formats.names import API_VERSION
from rowmap_jobs.hook import manifest as hook_manifest

from . import log as logs
from .act.events import Recorder
from .act.executor import Executor
from .act.turn import Reconciler
from .act.workload import dry_run
from .decide import expertmap, lane, orphan, trafficclass
from .decide.lane_probe import probe_patch
from .health import Health, HealthServer
from .lease import Lease
from .metrics import Metrics
from .observe.index import Index
from .observe.kube import ApiError, Kube, connect
from .observe.ledger import Ledger
from .observe.resources import (
    DEPLOYMENT,
    EXPERT_LANE,
    EXPERT_MAP,
    TRAFFIC_CLASS,
    WATCHED,
    Resource,
)
from .observe.resync import INTERVAL_SECONDS, Resync
from .observe.snapshots import Observer
from .observe.status_port import StatusPorts
from .observe.watch import Watches
from .plan import Plan
from .queue import WorkQueue
from .settings import Options, SettingsError, parse
from .snapshot import HookFiles, Settings

WORKERS = 4
STUCK_SECONDS = 300.0
STOP_SECONDS = 4.0
"""For the turns under way at SIGTERM; a request lasts longer only when the API server hangs."""

RELEASE_SECONDS = 2.0

DECIDE: dict[str, Callable[[Any, datetime], Plan]] = {
    EXPERT_MAP.kind: expertmap.decide,
    EXPERT_LANE.kind: lane.decide,
    TRAFFIC_CLASS.kind: trafficclass.decide,
    DEPLOYMENT.kind: orphan.decide,
}

log = logging.getLogger("expertmaps_operator")


class Ending:
    """Why the process ends: the first reason counts."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        # Of the thread again: a signal may come while the main thread holds it.
        self._lock = threading.RLock()
        self.code = 0

    def ask(self, code: int, why: str) -> None:
        """End the process in order."""
        with self._lock:
            if self.requested.is_set():
                return
            self.code = code
            self.requested.set()
        (log.error if code else log.info)("ending: %s", why)


class Operator:
    """All parts of a running operator."""

    def __init__(self, options: Options, kube: Kube, ending: Ending) -> None:
        self.options, self.kube, self.ending = options, kube, ending
        identity = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.metrics = Metrics()
        self.lease = Lease(kube, options.namespaces, identity)
        self.ports = StatusPorts()
        self.index, self.ledger = Index(), Ledger()
        observer = Observer(
            kube,
            decision_settings(options),
            options.namespaces,
            self.ports,
            probe_patch,
            lambda *what: dry_run(kube, *what),
            options.paused,
        )
        recorder = Recorder(kube, identity, lambda: datetime.now(UTC))
        executor = Executor(kube, recorder, self._guard)
        self.reconciler = Reconciler(observer, executor, DECIDE, self.metrics, options.paused)
        self.queue = WorkQueue(self.reconciler, WORKERS, on_depth=self.metrics.depth)
        self.resync = Resync(
            kube, options.namespaces, self.index, self.ledger, self.queue.add, time.monotonic
        )
        self.watches = Watches(options.namespaces, self.on_event)
        self.acting = False
        self.health = HealthServer(
            options.metrics_port, Health(self._checks(), self._facts), self.metrics.render
        )

    def on_event(self, resource: Resource, manifest: dict[str, Any], deleted: bool) -> None:
        """A watch delivered something."""
        self.metrics.delivered(resource.kind)
        for key in self.index.keys(resource, manifest, deleted):
            self.queue.add(key)
        # Last: what the ledger has, the queue has.
        self.ledger.delivered(resource.kind, manifest, deleted, time.monotonic())

    def run(self) -> None:
        """Run until the ending is asked for."""
        self.health.start()
        if not self.lease.acquire(self.ending.requested):
            return
        log.info("acting in %s", ", ".join(self.options.namespaces))
        stop, ask = self.ending.requested, self.ending.ask
        self._thread("lease", lambda: self.lease.renew(stop, self._lease_lost))
        self.resync.last_success = time.monotonic()
        self.acting = True
        self.queue.start()
        self.watches.start()
        self._thread("resync", lambda: self.resync.run(stop, lambda why: ask(1, why)))
        while not stop.wait(1.0):
            problem = self.watches.problem()
            if problem:
                ask(1, problem)

    def close(self) -> None:
        """End everything in order: no new turns, the turns under way, then the Lease."""
        self.watches.begin_stop()
        ended = self.queue.stop(STOP_SECONDS)
        if ended:
            # With a turn under way, the Lease runs out by itself instead.
            releasing = self._thread("release", self.lease.release)
            releasing.join(RELEASE_SECONDS)
        else:
            log.warning("a turn is still under way; it is looked at again after the start")
        self.ports.close()
        self.watches.join(1.0)
        self.health.stop()

    def _guard(self) -> None:
        if self.ending.requested.is_set():
            raise StoppingError("the process ends: the rest of the turn is left")
        self.lease.guard()

    def _lease_lost(self, why: str) -> None:
        # At once: another operator may act from here on, and so nothing here may.
        log.error("ending: %s", why)
        logging.shutdown()
        os._exit(1)

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _checks(self) -> dict[str, Callable[[], str | None]]:
        def queue() -> str | None:
            if self.acting and not self.ending.requested.is_set() and not self.queue.alive():
                return "a worker ended"
            turn = self.queue.longest_turn()
            return f"a turn takes {turn:.0f} s" if turn > STUCK_SECONDS else None

        def resync() -> str | None:
            age = time.monotonic() - self.resync.last_success
            stale = self.acting and age > 3 * INTERVAL_SECONDS
            return f"the last full list is {age:.0f} s old" if stale else None

        def watches() -> str | None:
            return self.watches.problem() if self.acting else None

        return {"queue": queue, "resync": resync, "watches": watches, "lease": self._lease_check}

    def _lease_check(self) -> str | None:
        return "not held" if self.acting and not self.lease.held() else None

    def _facts(self) -> dict[str, Any]:
        now = time.monotonic()
        ages = {kind: round(now - when, 1) for kind, when in self.ledger.last_event().items()}
        return {
            "acting": self.acting,
            "paused": self.options.paused,
            "leaseHeld": self.lease.held(),
            "lastWatchEventSecondsAgo": ages,
        }


class StoppingError(Exception):
    """The process ends between two steps of a turn."""

    loggable = True
    expected = True


def decision_settings(options: Options) -> Settings:
    """What decisions know of the process; with --paused no slot is free."""
    return Settings(
        runner_image=options.runner_image,
        runner_service_account=options.runner_service_account,
        runner_pull_policy=options.runner_pull_policy,
        max_concurrent_profiles=0 if options.paused else options.max_concurrent_profiles,
        max_concurrent_rollouts=0 if options.paused else options.max_concurrent_rollouts,
        hook=HookFiles(
            digest=hook_manifest.digest(),
            data=hook_manifest.files(),
            items=tuple(hook_manifest.items()),
            version=hook_manifest.VERSION,
        ),
    )


def check_server(kube: Kube, options: Options) -> str | None:
    """Why the operator cannot work with this API server, in one line; None when it can."""
    try:
        missing = kube.missing_kinds()
        if missing:
            return (
                f"CustomResourceDefinitions: found no {', '.join(missing)} in {API_VERSION}, "
                "expected the CRDs of this release; write: kubectl apply --server-side -f crds/"
            )
        for namespace in options.namespaces:
            for resource in WATCHED:
                query = {"limit": "1", "labelSelector": resource.selector}
                kube.request("GET", resource.path(namespace), query)
    except ApiError as error:
        return f"API server: {error}"
    return None


def run(argv: Sequence[str]) -> int:
    """Run the operator; the exit code."""
    try:
        options = parse(argv)
    except SettingsError as error:
        print(f"expertmaps-operator: {error}", file=sys.stderr)  # noqa: T201
        return 2
    logs.configure(options.log_format)
    ending = Ending()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: ending.ask(0, signal.Signals(got).name))
    try:
        kube = connect()
    except (ConfigException, OSError) as error:
        log.error("credentials: %s", " ".join(str(error).split())[:300])
        return 1
    problem = check_server(kube, options)
    if problem:
        log.error("%s", problem)
        return 1
    try:
        operator = Operator(options, kube, ending)
    except OSError as error:
        log.error("--metrics-port: port %d: %s", options.metrics_port, error.strerror)
        return 1
    try:
        operator.run()
    finally:
        operator.close()
    return ending.code
