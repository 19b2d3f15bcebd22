"""Parts of a census: by phase, window, session, fidelity and prompt length.

Whole transcripts are taken or left, never rows: rows of one transcript resemble each other, and a
map judged on the odd rows of what its even rows chose looks steadier than it is.

What is left keeps its session numbers and ids. `selection.skipped` says how many were taken out and
why. steps and touched speak of all transcripts together and go as soon as one is left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from ..formats.census import DECODE, FIDELITY, PREFILL, Census

I64 = npt.NDArray[np.int64]
Phase = Literal["prefill", "decode"]
_PHASES = {"prefill": PREFILL, "decode": DECODE}


def totals(census: Census, phase: Phase | Literal["all"] = "decode") -> I64:
    """Selections int64[L,E] that a placement ranks by: of one phase, or both added.

    Decode is what a lane of long answers waits for; prefill reads nearly every expert anyway, and
    its order matters only where prompts are short or the lane prefills in small chunks.
    """
    counts = census.counts.sum(axis=0, dtype=np.int64)
    part = counts.sum(axis=0) if phase == "all" else counts[_phase(phase)]
    return np.asarray(part, dtype=np.int64)


def by_phase(census: Census, phase: Phase) -> Census:
    """The census with the other phase's rows and counts zero. Raises FormatError if none is left.

    `steps` and `touched` are of decode and go with it.
    """
    keep = _phase(phase)
    counts, rows = np.zeros_like(census.counts), np.zeros_like(census.rows)
    counts[:, keep], rows[:, keep] = census.counts[:, keep], census.rows[:, keep]
    if not rows.any():
        raise FormatError("census", f"phase {phase}", "no rows", "at least one")
    if keep == DECODE:
        return replace(census, counts=counts, rows=rows)
    return replace(census, counts=counts, rows=rows, steps=None, touched=None)


def by_window(census: Census, start: int | None = None, end: int | None = None) -> Census:
    """Transcripts created in [start, end), Unix seconds; None leaves that side open."""
    keep = np.ones(len(census.created), dtype=np.bool_)
    if start is not None:
        keep &= census.created >= start
    if end is not None:
        keep &= census.created < end
    place = f"window [{'' if start is None else start}, {'' if end is None else end})"
    chosen = _take(census, keep, place, "OutsideWindow", _span(census.created, "created"))
    low, high = census.header.window
    low = low if start is None else max(low, start)
    high = high if end is None else min(high, end)
    # A record may carry a time outside the window that was asked of the store.
    window = (min(low, int(chosen.created.min())), max(high, int(chosen.created.max())))
    return replace(chosen, header=chosen.header.model_copy(update={"window": window}))


def by_session(census: Census, sessions: Collection[int]) -> Census:
    """Transcripts of these sessions. Raises FormatError for one that the census does not have."""
    present = set(census.session.tolist())
    for session in sorted(sessions):
        if session not in present:
            expected = f"one of the {len(present)} sessions{_span(census.session, '')}"
            raise FormatError("census", "session", session, expected)
    keep = np.isin(census.session, np.array(sorted(sessions), dtype=np.int64))
    return _take(census, keep, f"sessions {sorted(sessions)}", "OtherSession", "")


def by_fidelity(census: Census, names: Collection[str]) -> Census:
    """Transcripts whose ids were come by in one of these ways (names of FIDELITY)."""
    for name in sorted(names):
        if name not in FIDELITY:
            raise FormatError("census", "fidelity", name, f"one of {', '.join(FIDELITY)}")
    wanted = np.array([FIDELITY.index(name) for name in sorted(names)], dtype=np.uint8)
    keep = np.isin(census.fidelity, wanted)
    present = ", ".join(FIDELITY[i] for i in np.unique(census.fidelity).tolist())
    place = f"fidelity {', '.join(sorted(names))}"
    return _take(census, keep, place, "OtherFidelity", f" (it has {present})")


def by_prompt_length(
    census: Census, from_tokens: int | None = None, to_tokens: int | None = None
) -> Census:
    """Transcripts whose prompt has [from, to) tokens; None leaves that side open."""
    keep = np.ones(len(census.created), dtype=np.bool_)
    if from_tokens is not None:
        keep &= census.prompt_len >= from_tokens
    if to_tokens is not None:
        keep &= census.prompt_len < to_tokens
    ends = ("" if side is None else str(side) for side in (from_tokens, to_tokens))
    place = f"prompt length [{', '.join(ends)})"
    return _take(census, keep, place, "OtherPromptLength", _span(census.prompt_len, "tokens"))


def _phase(phase: str) -> int:
    if phase not in _PHASES:
        raise FormatError("census", "phase", phase, "prefill or decode")
    return _PHASES[phase]


def _span(values: npt.NDArray[np.integer], unit: str) -> str:
    if not values.size:
        return ""
    return f" ({unit} {int(values.min())} to {int(values.max())})".replace("( ", "(")


def _take(
    census: Census, keep: npt.NDArray[np.bool_], place: str, word: str, present: str
) -> Census:
    """The transcripts where `keep` is True. Raises FormatError, naming the filter, for none."""
    left = int(keep.sum())
    if not left:
        found = f"0 of {len(keep)} transcripts"
        raise FormatError("census", place, found, f"at least one{present}")
    out = len(keep) - left
    if not out:
        return census
    selection = census.header.selection
    skipped = {**selection.skipped, word: selection.skipped.get(word, 0) + out}
    used = max(0, selection.used - out)
    chosen = selection.model_copy(update={"used": used, "skipped": dict(sorted(skipped.items()))})
    return replace(
        census,
        header=census.header.model_copy(update={"selection": chosen}),
        counts=census.counts[keep],
        rows=census.rows[keep],
        session=census.session[keep],
        transcript_id=census.transcript_id[keep],
        fidelity=census.fidelity[keep],
        prompt_len=census.prompt_len[keep],
        created=census.created[keep],
        steps=None,
        touched=None,
    )
