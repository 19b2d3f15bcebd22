"""Which fed rows belong to what: pure bookkeeping by absolute position. Standard library only.

A forced count feeds prompt and recorded response as one prompt. Every row of the model's input is
one position of one request; the request says which positions are the response. A position that
was fed before (after a preemption) is a recompute and counts nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

XARG_TRANSCRIPT = "expertmaps_t"
XARG_SEGMENTS = "expertmaps_seg"

_ID = re.compile(r"[0-9a-zA-Z_-]{1,64}")
# vLLM names the children of a request with n > 1 `<index>_<request id>`.
_CHILD = re.compile(r"[0-9]+_")
# Its beam search is a new request for every beam and token, without the tag of the first one.
_BEAM = re.compile(r"-beam-[0-9]+(-[0-9a-f]+)?$")

PREFILL, DECODE = 0, 1
DROPPED = -1
"""Bucket of rows that are in no transcript."""


@dataclass
class Tag:
    """What a request asks to have counted."""

    transcript: str
    segments: tuple[tuple[int, int], ...] | None
    """Half-open ranges of positions that are response; None: all after the prompt."""


@dataclass
class Tracked:
    """A request that the engine is working on."""

    prompt_len: int
    tag: Tag | None = None
    slot: int | None = None
    fed: int = 0
    """First position that was never fed."""
    replay: int = 0
    """After a preemption: positions below are fed once more, generated ones included."""
    prefill: int = 0
    decode: int = 0
    recomputed: int = 0


@dataclass
class Totals:
    """Rows over all requests."""

    prefill: int = 0
    decode: int = 0
    recomputed: int = 0
    verify: int = 0
    """Rows of drafts, accepted or not: they read weights, and are no one's decode."""


@dataclass
class Step:
    """One step's rows: runs of (slot and phase, rows) in the order of the batch."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    """(bucket, rows): bucket is slot * 2 + phase, or DROPPED."""
    complete: list[str] = field(default_factory=list)
    """Requests whose prompt is now fed whole."""


class TagError(ValueError):
    """A tag that cannot be honoured; carries the transcript id when that much is valid."""

    def __init__(self, reason: str, transcript: str | None = None) -> None:
        self.reason, self.transcript = reason, transcript
        super().__init__(reason)


def read_tag(extra_args: Mapping[str, Any] | None, prompt_len: int) -> Tag | None:
    """The tag of a request, from its `vllm_xargs`. Raises TagError."""
    if not extra_args or XARG_TRANSCRIPT not in extra_args:
        return None
    transcript = extra_args[XARG_TRANSCRIPT]
    if not isinstance(transcript, str) or not _ID.fullmatch(transcript):
        raise TagError("TranscriptIdInvalid")
    segments = extra_args.get(XARG_SEGMENTS)
    if segments is None:
        return Tag(transcript, None)
    return Tag(transcript, _segments(segments, prompt_len, transcript))


def _segments(value: object, prompt_len: int, transcript: str) -> tuple[tuple[int, int], ...]:
    failure = TagError("SegmentsInvalid", transcript)
    if not isinstance(value, list | tuple) or len(value) % 2:
        raise failure
    if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        raise failure
    pairs = tuple(zip(value[::2], value[1::2], strict=True))
    position = 0
    for start, end in pairs:
        if not position <= start < end <= prompt_len:
            raise failure
        position = end
    return pairs


def is_child(request_id: str) -> bool:
    """Whether a request is one of several samples of the same prompt."""
    return _CHILD.match(request_id) is not None


def is_beam(request_id: str) -> bool:
    """Whether a request is one step of one beam of a beam search."""
    return _BEAM.search(request_id) is not None


def phase_runs(
    tracked: Tracked, start: int, count: int, slots_base: int | None
) -> tuple[list[tuple[int, int]], int, int, int]:
    """Split positions start..start+count of a request into runs of one bucket each.

    Returns the runs, and the rows of prefill, of decode and recomputed.
    """
    runs: list[tuple[int, int]] = []
    prefill = decode = recomputed = 0
    end = start + count
    # A prompt position below the mark was fed before. A generated one below it may come from a
    # plan that took drafts for accepted (asynchronous scheduling): only a preemption replays it.
    replayed = max(min(tracked.fed, tracked.prompt_len), tracked.replay)
    cut = min(max(start, replayed), end)
    if cut > start:
        recomputed = cut - start
        runs.append((DROPPED, recomputed))
    for begin, stop, phase in _phases(tracked, cut, end):
        rows = stop - begin
        if phase == DECODE:
            decode += rows
        else:
            prefill += rows
        runs.append((DROPPED if slots_base is None else slots_base + phase, rows))
    return runs, prefill, decode, recomputed


def _phases(tracked: Tracked, start: int, end: int) -> Iterable[tuple[int, int, int]]:
    """(begin, end, phase) pieces of a range of positions, in order."""
    segments: Iterable[tuple[int, int]] = ()
    if tracked.tag is not None and tracked.tag.segments is not None:
        segments = tracked.tag.segments
    # What lies after the prompt was generated by this request itself.
    for low, high in [*segments, (tracked.prompt_len, max(end, tracked.prompt_len))]:
        low, high = max(low, start), min(high, end)
        if low >= high:
            continue
        if start < low:
            yield start, low, PREFILL
        yield low, high, DECODE
        start = high
    if start < end:
        yield start, end, PREFILL


class Ledger:
    """All requests in flight and the totals. Not thread-safe: the engine's thread owns it."""

    def __init__(self) -> None:
        self.requests: dict[str, Tracked] = {}
        self.totals = Totals()
        self.replayed = 0
        """Tokens at the end of a prefix-cache hit that are fed once more."""

    def add(self, request_id: str, prompt_len: int, replay_start: int = 0) -> Tracked:
        """A request seen for the first time, or one that V2 adds again after a preemption.

        `replay_start` is where vLLM rewound a prefix-cache hit to; the rows from there to the
        hit's end were counted when the cached request was fed.
        """
        tracked = self.requests.get(request_id)
        if tracked is None:
            tracked = self.requests.setdefault(request_id, Tracked(prompt_len))
        else:
            self.resume(request_id)
            tracked.prompt_len = prompt_len  # grows when a client streams its prompt
        if replay_start:
            tracked.replay = max(tracked.replay, replay_start + self.replayed)
        return tracked

    def resume(self, request_id: str) -> None:
        """A preempted request starts over: what it was fed is fed again."""
        tracked = self.requests.get(request_id)
        if tracked is not None:
            tracked.replay = max(tracked.replay, tracked.fed)

    def remove(self, request_id: str) -> Tracked | None:
        """A request that is finished or aborted."""
        return self.requests.pop(request_id, None)

    def step(self, batch: Iterable[tuple[str, int, int, int]]) -> Step:
        """Account one step of (request, first position, rows, drafts), in the order of the batch.

        The last `drafts` rows verify drafted tokens. Which of them the model accepts is known only
        after the step, and with asynchronous scheduling not even when the next one is planned; so
        they are a class of their own, and no position of theirs counts as fed.
        """
        step = Step()
        for request_id, start, rows, drafts in batch:
            tracked = self.requests.get(request_id)
            if tracked is None:
                # Began before counting did: which of its rows are prompt is not known.
                step.runs.append((DROPPED, rows))
                continue
            count = rows - drafts
            base = None if tracked.slot is None else tracked.slot * 2
            runs, prefill, decode, recomputed = phase_runs(tracked, start, count, base)
            step.runs.extend(runs)
            if drafts:
                step.runs.append((DROPPED, drafts))
                self.totals.verify += drafts
            self.totals.prefill += prefill
            self.totals.decode += decode
            self.totals.recomputed += recomputed
            tracked.prefill += prefill
            tracked.decode += decode
            tracked.recomputed += recomputed
            was = tracked.fed
            tracked.fed = max(was, start + count)
            if was < tracked.prompt_len <= tracked.fed:
                step.complete.append(request_id)
        return step
