"""One look at one object: observe, decide, act, and show in the metrics what came of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from ..metrics import Metrics
from ..observe import facts
from ..observe.resources import CUSTOM, JOB
from ..observe.snapshots import Observed, Observer, Snapshot
from ..plan import Create, Plan
from ..queue import Key
from ..snapshot import LaneSnapshot, MapSnapshot
from .executor import Executor
from .workload import WorkloadConflictError

Decide = Callable[[Snapshot, datetime], Plan]

SOON_SECONDS = 0.5
"""When an object changed under a decision, or another turn took a slot: look again."""

log = logging.getLogger(__name__)


class Slot(StrEnum):
    """What there is a limited number of per operator."""

    PROFILE = "Profile"
    ROLLOUT = "Rollout"


class Turnstile:
    """Keeps two turns from taking the last slot together.

    A turn notes the count before its snapshot. It may take a slot only if no other turn has taken
    one since: then the snapshot knows of every taken slot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passed = 0

    def ticket(self) -> int:
        """To be drawn before the snapshot."""
        with self._lock:
            return self._passed

    @contextmanager
    def passing(self, ticket: int) -> Iterator[bool]:
        """Holds others off while a slot is taken; False when the ticket is too old."""
        with self._lock:
            if ticket != self._passed:
                yield False
                return
            try:
                yield True
            finally:
                self._passed += 1


class Reconciler:
    """The worker of the queue."""

    def __init__(
        self,
        observer: Observer,
        executor: Executor,
        decide: Mapping[str, Callable[[Any, datetime], Plan]],
        metrics: Metrics,
        paused: bool = False,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._observer, self._executor, self._decide = observer, executor, decide
        self._metrics, self._paused, self._clock = metrics, paused, clock
        self._turnstiles = {slot: Turnstile() for slot in Slot}

    def __call__(self, key: Key) -> float | None:
        """Seconds until the key is wanted again, or None. Raises what the turn could not do."""
        began = time.monotonic()
        result = "error"
        try:
            result, requeue_after = self._turn(key)
        except WorkloadConflictError:
            result = "conflict"
            raise
        finally:
            self._metrics.reconciled(key.kind, result, time.monotonic() - began)
        return requeue_after

    def _turn(self, key: Key) -> tuple[str, float | None]:
        tickets = {slot: one.ticket() for slot, one in self._turnstiles.items()}
        observed = self._observer.observe(*key)
        if observed is None:
            self._metrics.forget(key)
            return "gone", None
        # A workload's status is its controller's: neither shown here nor written.
        ours = observed.resource in CUSTOM
        before = (observed.manifest.get("status") or {}) if ours else {}
        if ours:
            self._metrics.state(key, before)
        if observed.manifest["metadata"].get("deletionTimestamp"):
            return "gone", None
        plan = self._decide[key.kind](observed.snapshot, self._clock())
        if self._paused and plan.actions:
            log.info("%s: paused, %d actions not done", key, len(plan.actions))
            return "paused", plan.requeue_after
        slot = takes_slot(observed, plan)
        if slot is None:
            return self._act(key, observed, plan, before)
        with self._turnstiles[slot].passing(tickets[slot]) as passed:
            if passed:
                return self._act(key, observed, plan, before)
        return "again", SOON_SECONDS

    def _act(
        self, key: Key, observed: Observed, plan: Plan, before: Mapping[str, Any]
    ) -> tuple[str, float | None]:
        done = self._executor.execute(observed, plan)
        if done.look_again:
            return "again", SOON_SECONDS
        if done.status is not None:
            self._metrics.state(key, done.status)
            self._metrics.moved(key, before, done.status)
        return "acted" if plan.actions else "looked", plan.requeue_after


def takes_slot(observed: Observed, plan: Plan) -> Slot | None:
    """The slot that the plan takes: it starts a profile, or begins a rollout."""
    if isinstance(observed.snapshot, MapSnapshot):
        starts = any(
            isinstance(action, Create) and action.manifest.get("kind") == JOB.kind
            for action in plan.actions
        )
        return Slot.PROFILE if starts else None
    if not isinstance(observed.snapshot, LaneSnapshot) or plan.status is None:
        return None
    begins = facts.is_moving({"status": plan.status}) and not facts.is_moving(observed.manifest)
    return Slot.ROLLOUT if begins else None
