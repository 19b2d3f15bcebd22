"""Forced counting of sequences: feed each once, wait for its counts, check them, try once more."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from .counts import Counts, Shape, fault, take
from .engine import Engine, RefusedError, forced
from .log import say
from .reasons import Reason, RunError
from .sequences import Sequence

ATTEMPTS = 2
GIVE_UP_AFTER = 4
"""Sequences without any count file, none with one, after which the hook is not counting."""
SAY_EVERY = 50

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Replayed:
    """Counts of sequences (those that passed, in the order given) and the rest by reason."""

    sequences: list[Sequence] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    retried: int = 0


@dataclass(frozen=True)
class ForcedCounter:
    """Counts single sequences with one engine."""

    engine: Engine
    model: str
    folder: Path
    shape: Shape

    def count(self, sequence: Sequence) -> tuple[Counts | str, int]:
        """The counts, or a word why not after two tries; and the tries made."""
        outcome: Counts | str = "CountsMissing"
        for attempt in range(1, ATTEMPTS + 1):
            outcome = self.once(
                sequence.tokens.tolist(), sequence.flat_segments, sequence.decode_rows
            )
            if not isinstance(outcome, str) or outcome == "RequestRefused":
                return outcome, attempt
        return outcome, ATTEMPTS

    def once(self, tokens: list[int], segments: list[int], decode_rows: int) -> Counts | str:
        """One forced count under a fresh id and salt. Raises RunError when the engine is gone."""
        count_id = fresh_id()
        try:
            self.engine.complete(forced(self.model, tokens, count_id, fresh_id(), segments))
        except RefusedError:
            return "RequestRefused"
        counts = self.wait(count_id)
        if isinstance(counts, str):
            return counts
        return fault(counts, len(tokens), decode_rows, self.shape) or counts

    def wait(self, count_id: str, seconds: float | None = None) -> Counts | str:
        """The hook's answer for an id; CountsMissing when the deadline passes without one."""
        deadlines = self.engine.deadlines
        end = time.monotonic() + min(deadlines.counts, seconds or deadlines.counts)
        while (found := take(self.folder, count_id, self.shape)) is None:
            if time.monotonic() >= end:
                return "CountsMissing"
            time.sleep(deadlines.counts_poll)
        return found


def fresh_id() -> str:
    """An id or salt that was never used: 128 random bits as hex."""
    return secrets.token_hex(16)


def in_parallel(do: Callable[[T], R], items: Ordered[T], workers: int) -> list[R]:
    """`do` of every item, in order. The first exception ends it and is raised."""
    pool = ThreadPoolExecutor(max_workers=max(1, min(workers, len(items) or 1)))
    futures: list[Future[R]] = [pool.submit(do, item) for item in items]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return [future.result() for future in futures]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def replay(counter: ForcedCounter, sequences: list[Sequence], concurrency: int) -> Replayed:
    """Count sequences, `concurrency` at a time.

    Raises RunError: EngineFailed; CountingFailed when the hook writes no counts at all.
    """
    out = Replayed()
    tally: Counter[str] = Counter()
    lock = threading.Lock()

    def one(sequence: Sequence) -> tuple[Counts | str, int]:
        outcome, attempts = counter.count(sequence)
        with lock:
            tally["missing" if outcome == "CountsMissing" else "answered"] += 1
            missing, answered = tally["missing"], tally["answered"]
        if not answered and missing >= min(GIVE_UP_AFTER, len(sequences)):
            raise RunError(
                Reason.COUNTING_FAILED,
                f"{counter.folder}: found no counts of {missing} sequences, expected a file for "
                "each from the hook: read the engine's log in this pod",
            )
        done = missing + answered
        if done % SAY_EVERY == 0:
            say(f"counted {done} of {len(sequences)} sequences")
        return outcome, attempts

    for sequence, (outcome, attempts) in zip(
        sequences, in_parallel(one, sequences, concurrency), strict=True
    ):
        out.retried += attempts - 1
        if isinstance(outcome, str):
            out.dropped[outcome] += sequence.turns
        else:
            out.sequences.append(sequence)
            out.counts.append(outcome)
    return out
