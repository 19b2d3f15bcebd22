"""One keyed work queue: a key is in it once, is worked on by one thread at a time, and comes back
after an error with a growing, jittered delay.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

BASE_DELAY = 1.0
MAX_DELAY = 300.0


class Key(NamedTuple):
    """An object to look at."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass
class _State:
    """What is known of one key; it is dropped when nothing is left to know."""

    due: float | None = None
    """When it is to be looked at; None: not queued."""
    working: bool = False
    failures: int = 0
    not_before: float = 0.0
    """After an error, events do not bring the key back sooner than this."""


@dataclass
class KeyedQueue:
    """The order of work. It knows no threads: the caller holds a lock and tells the time."""

    jitter: Callable[[], float] = random.random
    _states: dict[Key, _State] = field(default_factory=dict)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list)
    _sequence: int = 0

    def add(self, key: Key, now: float, delay: float = 0.0) -> None:
        """Have the key looked at after `delay`; the earlier of two wishes holds."""
        state = self._states.setdefault(key, _State())
        due = max(now + delay, state.not_before)
        if state.due is None or due < state.due:
            state.due = due
            self._push(due, key)

    def take(self, now: float) -> Key | None:
        """The next key that is due and that nobody works on."""
        waiting: list[Key] = []
        found: Key | None = None
        while self._heap and self._heap[0][0] <= now and found is None:
            due, _, key = heapq.heappop(self._heap)
            state = self._states.get(key)
            if state is None or state.due != due:
                continue  # An older wish, overtaken by an earlier one.
            if state.working:
                waiting.append(key)
                continue
            state.due, state.working = None, True
            found = key
        for key in waiting:
            # Not lost: `done` queues it again.
            self._states[key].due = now
        return found

    def done(self, key: Key, now: float, requeue_after: float | None) -> None:
        """The work on a key went well; `requeue_after` has it looked at again."""
        state = self._states[key]
        state.working, state.failures, state.not_before = False, 0, 0.0
        self._settle(key, state, now, requeue_after)

    def failed(self, key: Key, now: float) -> float:
        """The work on a key failed; returns the delay after which it is tried again."""
        state = self._states[key]
        grown = min(MAX_DELAY, BASE_DELAY * 2.0 ** min(state.failures, 30))
        delay = grown * (0.5 + 0.5 * self.jitter())
        state.working, state.failures = False, state.failures + 1
        state.not_before = now + min(delay, BASE_DELAY)
        self._settle(key, state, now, delay)
        return delay

    def next_due(self) -> float | None:
        """When the next key may be due (never later than it is)."""
        return self._heap[0][0] if self._heap else None

    def depth(self, now: float) -> int:
        """Keys that are due or worked on."""
        return sum(
            state.working or (state.due is not None and state.due <= now)
            for state in self._states.values()
        )

    def _settle(self, key: Key, state: _State, now: float, delay: float | None) -> None:
        wanted = None if delay is None else now + delay
        if state.due is not None:  # It was added while it was worked on.
            added = max(state.due, state.not_before)
            wanted = added if wanted is None else min(wanted, added)
        state.due = None
        if wanted is None:
            del self._states[key]
            return
        state.due = wanted
        self._push(wanted, key)

    def _push(self, due: float, key: Key) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))


class WorkQueue:
    """A KeyedQueue with threads. The worker returns seconds until the key is wanted again, or None;
    what it raises is logged, and the key comes back later.
    """

    def __init__(
        self,
        worker: Callable[[Key], float | None],
        threads: int,
        clock: Callable[[], float] = time.monotonic,
        on_depth: Callable[[int], None] = lambda _depth: None,
        queue: KeyedQueue | None = None,
    ) -> None:
        self._worker, self._clock, self._on_depth = worker, clock, on_depth
        self._queue = queue or KeyedQueue()
        self._wake = threading.Condition()
        self._stopping = False
        self._began: dict[int, float] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"worker-{index}", daemon=True)
            for index in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Have the key looked at. Any thread may call it, and it never waits for work."""
        with self._wake:
            if not self._stopping:
                now = self._clock()
                self._queue.add(key, now, delay)
                self._on_depth(self._queue.depth(now))
                self._wake.notify()

    def stop(self, timeout: float) -> bool:
        """Take no further key; True when every thread ended within `timeout` seconds."""
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def longest_turn(self) -> float:
        """Seconds that the oldest turn under way has taken."""
        with self._wake:
            began = list(self._began.values())
        return self._clock() - min(began) if began else 0.0

    def alive(self) -> bool:
        """Whether every thread runs."""
        return all(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (key := self._next()) is not None:
            requeue_after: float | None = None
            failed = False
            try:
                requeue_after = self._worker(key)
            except Exception as error:
                failed = True
                level = logging.INFO if getattr(error, "expected", False) else logging.ERROR
                log.log(level, "%s: %s", key, told(error))
            self._finish(key, failed, requeue_after)

    def _next(self) -> Key | None:
        with self._wake:
            while not self._stopping:
                now = self._clock()
                key = self._queue.take(now)
                if key is not None:
                    self._began[threading.get_ident()] = now
                    return key
                due = self._queue.next_due()
                self._wake.wait(None if due is None else max(0.0, due - now))
            return None

    def _finish(self, key: Key, failed: bool, requeue_after: float | None) -> None:
        with self._wake:
            self._began.pop(threading.get_ident(), None)
            now = self._clock()
            if failed:
                delay = self._queue.failed(key, now)
                log.info("%s: tried again in %.1f s", key, delay)
            else:
                self._queue.done(key, now, requeue_after)
            self._on_depth(self._queue.depth(now))
            self._wake.notify_all()


def told(error: Exception) -> str:
    """An error for the log. Only errors that say so are quoted: any other message may hold values
    of the object that was worked on, so of those the type and the place are told.
    """
    if getattr(error, "loggable", False):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"InternalError: {type(error).__name__} at {place}"
