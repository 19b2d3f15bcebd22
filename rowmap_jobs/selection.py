"""Which transcripts a run counts: those in the window, sampled uniformly over sessions.

Sessions are ordered by sha256(seed, session name), which is uniform and does not depend on the
order in which objects are listed. The sessions first in that order are taken until
`max_transcripts` records are there; the last one gives its first turns. One pass over the bucket
suffices and memory holds little more than the sample.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

from .formats.base import FormatError
from .formats.transcript import TranscriptRecord, parse_line
from .lines import DamagedError, is_transcript, split
from .reasons import Reason, RunError

CLOCK_SKEW = timedelta(hours=1)


class Listed(Protocol):
    """An object as a bucket lists it."""

    @property
    def key(self) -> str:
        """The object's key."""

    @property
    def modified(self) -> datetime:
        """When it was written last."""


class Source(Protocol):
    """Where transcripts come from (a bucket)."""

    def list(self) -> Iterable[Listed]:
        """All objects below the prefix."""

    def stream(self, key: str) -> Iterator[bytes]:
        """An object's bytes in chunks."""

    def url(self, key: str) -> str:
        """How messages name an object."""


@dataclass
class Tally:
    """What reading a bucket found; `skipped` counts records by reason."""

    objects: int = 0
    other_objects: int = 0
    old_objects: int = 0
    readable: int = 0
    outside: int = 0
    broken: int = 0
    newest: datetime | None = None
    first_break: str = ""
    sessions: set[bytes] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def in_window(self) -> int:
        return self.readable - self.outside

    def spoil(self, message: str) -> None:
        """Count a line or object that cannot be read."""
        self.broken += 1
        self.skipped["Broken"] += 1
        self.first_break = self.first_break or message


@dataclass(frozen=True)
class Picked:
    """The sample, by session in sampling order, turns by time; and what was read for it."""

    sessions: tuple[tuple[TranscriptRecord, ...], ...]
    tally: Tally

    @property
    def records(self) -> int:
        return sum(len(turns) for turns in self.sessions)


def read(source: Source, since: datetime, tally: Tally) -> Iterator[TranscriptRecord]:
    """Every readable record created at or after `since`, each id of a session once."""
    seen: set[bytes] = set()
    for item in source.list():
        if not is_transcript(item.key):
            tally.other_objects += 1
            continue
        tally.objects += 1
        if item.modified < since - CLOCK_SKEW:
            # Nothing in it can be newer than its last write.
            tally.old_objects += 1
            continue
        for record in _records(source, item, tally):
            created = record.created or item.modified
            tally.newest = max(tally.newest or created, created)
            if created < since:
                tally.outside += 1
                tally.skipped["OutsideWindow"] += 1
                continue
            identity = _hash(record.session, record.id)
            if identity in seen:
                tally.skipped["Duplicate"] += 1
                continue
            seen.add(identity)
            tally.sessions.add(_hash(record.session))
            yield record


MOST_BROKEN_LINES = 10_000
"""After so many broken lines the rest of an object is not read: it holds something else."""


def _records(source: Source, item: Listed, tally: Tally) -> Iterator[TranscriptRecord]:
    url = source.url(item.key)
    number, before = 0, tally.broken
    try:
        for number, line in enumerate(split(source.stream(item.key)), start=1):
            try:
                record = parse_line(line, url, number, item.modified)
            except FormatError as error:
                tally.spoil(str(error))
                if tally.broken - before >= MOST_BROKEN_LINES:
                    return
                continue
            tally.readable += 1
            yield record
    except DamagedError as error:
        tally.spoil(f"{url}: after line {number}: found {error}, expected whole gzip data")


def check_enough(tally: Tally, place: str, since: datetime, minimum: int) -> None:
    """Refuse a window without transcripts, with broken ones only, or with too few sessions.

    Raises RunError: NoTranscripts, OnlyBrokenTranscripts or TooFewTranscripts.
    """
    window = f"created since {since.astimezone(UTC):%Y-%m-%dT%H:%MZ}"
    if not tally.objects:
        others = f"{tally.other_objects} objects of other names" if tally.other_objects else "none"
        raise RunError(
            Reason.NO_TRANSCRIPTS,
            f"{place}: found {others}, expected objects named *.jsonl or *.jsonl.gz: "
            "record traffic there or correct `prefix`",
        )
    if not tally.readable and tally.broken:
        raise RunError(
            Reason.ONLY_BROKEN_TRANSCRIPTS,
            f"{place}: found {tally.broken} lines that cannot be read and no other, expected "
            f"transcript lines; the first: {tally.first_break}",
        )
    if not tally.in_window:
        newest = f", the newest of {tally.newest:%Y-%m-%dT%H:%MZ}" if tally.newest else ""
        raise RunError(
            Reason.NO_TRANSCRIPTS,
            f"{place}: found {tally.objects} objects with no transcript {window}{newest}, "
            f"expected at least {minimum} sessions: record more or widen `window`",
        )
    if len(tally.sessions) < minimum:
        raise RunError(
            Reason.TOO_FEW_TRANSCRIPTS,
            f"{place}: found {len(tally.sessions)} sessions {window} ({tally.in_window} "
            f"transcripts, {tally.broken} broken lines), expected at least {minimum} "
            "(minTranscripts): record more, widen `window` or lower minTranscripts",
        )


def pick(records: Iterable[TranscriptRecord], seed: int, most: int, tally: Tally) -> Picked:
    """Sample sessions uniformly until `most` records are taken. Deterministic in `seed`."""
    kept: dict[bytes, list[TranscriptRecord]] = {}
    order: list[tuple[int, bytes]] = []  # a heap whose first is the last session in the order
    total, bound = 0, None
    for record in records:
        rank = _hash(str(seed), record.session)
        if bound is not None and rank >= bound:
            tally.skipped["NotSampled"] += 1
            continue
        if rank not in kept:
            kept[rank] = []
            heapq.heappush(order, (-int.from_bytes(rank, "big"), rank))
        kept[rank].append(record)
        total += 1
        while total - len(kept[order[0][1]]) >= most:
            bound = heapq.heappop(order)[1]
            dropped = kept.pop(bound)
            total -= len(dropped)
            tally.skipped["NotSampled"] += len(dropped)
    sessions = [sorted(kept[rank], key=_when) for rank in sorted(kept)]
    if total > most:
        cut = total - most
        sessions[-1] = sessions[-1][:-cut]
        tally.skipped["NotSampled"] += cut
    return Picked(tuple(tuple(turns) for turns in sessions), tally)


def _when(record: TranscriptRecord) -> tuple[datetime, str]:
    return record.created or datetime.fromtimestamp(0, UTC), record.id


def _hash(*parts: str) -> bytes:
    # Length prefixes keep ("ab", "c") and ("a", "bc") apart.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(text.encode("utf-8")).digest()


def window_start(now: datetime, seconds: int | None) -> datetime:
    """Start of the window that ends now; without a length, the beginning of time."""
    if seconds is None:
        return datetime.fromtimestamp(0, UTC)
    try:
        return now - timedelta(seconds=seconds)
    except OverflowError:
        return datetime.fromtimestamp(0, UTC)
