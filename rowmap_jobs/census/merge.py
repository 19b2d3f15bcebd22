"""One census of several, and weights by age.

Merging is commutative and associative in everything that is counted: the same transcripts in any
order or grouping give the same transcripts, sessions, rows and selections, and the same inputs in
any order the same bytes.

Counts stay integers, whatever their age: a census says what was seen, so that every number in it
can be checked against rows x top-k and merged again without loss. Decay is a view of it for a
placement (`weighted`), made when the present moment is known.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError, sha256_digest
from ..formats.census import (
    DECODE,
    FIDELITY,
    MAX_TRANSCRIPTS,
    MAX_UNPACKED,
    PREFILL,
    Capture,
    Census,
    CensusHeader,
    OffPolicy,
    Selection,
    check,
)

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
Entry = tuple[int, int]
"""Index of a census and of a transcript in it."""

TWICE = "CountedTwice"
"""Word among the skipped for a transcript that another of the censuses has too."""


def merge(
    censuses: Sequence[Census], source: str = "merge", names: Sequence[str] | None = None
) -> Census:
    """The transcripts of all censuses in one.

    Fingerprint, class, layers, experts, top-k and capture method must agree. A transcript id that
    is there twice is taken once: the one created later; of equals the better fidelity (the order of
    FIDELITY), then the longer. Session numbers mean nothing outside their census, so sessions of
    two censuses stay apart, unless they share a transcript id: then they are one session, or
    leaving it out would leave its other half in. Transcripts are ordered by time and id, sessions
    numbered by their first transcript.

    Header: window from the earliest to the latest, numbers added (a transcript taken once leaves
    `used` and enters `skipped` as CountedTwice), off-policy means weighted by n, engine and runner
    as a list where they differ, the hook of the latest window, the least seed, speculation only
    where all say the same. steps and touched are added, with those of doubles: they are read as a
    ratio. Raises FormatError; `names` are what the censuses are called there.
    """
    if not censuses:
        raise FormatError(source, "censuses", "none", "at least one")
    called = [f"census {index}" for index in range(len(censuses))] if names is None else names
    for census, name in zip(censuses[1:], called[1:], strict=True):
        _check_alike(censuses[0], census, source, name, called[0])
    entries = _chosen(censuses, source)
    dropped = sum(len(census.created) for census in censuses) - len(entries)
    sessions = _sessions(censuses)
    numbers: dict[Entry, int] = {}
    session = [numbers.setdefault(sessions[entry], len(numbers)) for entry in entries]
    first = censuses[0]
    width = int(first.experts.max())
    _check_room(len(entries), len(first.layer_ids), width, source)
    counts = np.zeros((len(entries), 2, len(first.layer_ids), width), dtype=np.int64)
    for at, (c, t) in enumerate(entries):
        counts[at] = censuses[c].counts[t, :, :, :width]
    steps, touched = _touched(censuses)
    merged = Census(
        header=_header(censuses, dropped),
        counts=counts,
        rows=_gather(censuses, entries, "rows", (2,), np.int64),
        layer_ids=first.layer_ids.copy(),
        experts=first.experts.copy(),
        top_k=first.top_k.copy(),
        session=np.array(session, dtype=np.int32),
        transcript_id=_gather(censuses, entries, "transcript_id", (32,), np.uint8),
        fidelity=_gather(censuses, entries, "fidelity", (), np.uint8),
        prompt_len=_gather(censuses, entries, "prompt_len", (), np.int32),
        created=_gather(censuses, entries, "created", (), np.int64),
        steps=steps,
        touched=touched,
    )
    check(merged, source)
    return merged


def _check_alike(first: Census, other: Census, source: str, place: str, base: str) -> None:
    for name in ("shape", "router", "quant", "tokenizer"):
        found = getattr(other.header.fingerprint, name)
        expected = getattr(first.header.fingerprint, name)
        if found != expected:
            same = f"{expected} as in {base} (the same model)"
            raise FormatError(source, f"{place} fingerprint.{name}", found, same)
    if other.header.traffic_class != first.header.traffic_class:
        expected = f"class {first.header.traffic_class} as in {base}"
        raise FormatError(source, f"{place} class", other.header.traffic_class, expected)
    if other.header.capture.method != first.header.capture.method:
        expected = f"{first.header.capture.method} as in {base}"
        raise FormatError(source, f"{place} capture.method", other.header.capture.method, expected)
    for name in ("layer_ids", "experts", "top_k"):
        ours, theirs = getattr(first, name).tolist(), getattr(other, name).tolist()
        if ours != theirs:
            raise FormatError(source, f"{place} {name}", theirs, f"{ours} as in {base}")


def _check_room(transcripts: int, layers: int, width: int, source: str) -> None:
    size = transcripts * (2 * layers * width * 8 + 128)
    if transcripts > MAX_TRANSCRIPTS or size > MAX_UNPACKED - (1 << 20):
        found = f"{transcripts} transcripts, {size} bytes"
        expected = f"at most {MAX_TRANSCRIPTS} within {MAX_UNPACKED} bytes"
        raise FormatError(source, "transcripts", found, expected)


def _chosen(censuses: Sequence[Census], source: str) -> list[Entry]:
    """Each transcript id once, by time and id."""
    by_id: dict[bytes, list[Entry]] = {}
    for c, census in enumerate(censuses):
        for t in range(len(census.created)):
            by_id.setdefault(census.transcript_id[t].tobytes(), []).append((c, t))
    nameless = len(by_id.get(bytes(32), ()))
    if nameless > 1:
        found = f"{nameless} transcripts without an id (zeros)"
        raise FormatError(source, "transcript_id", found, "ids that tell transcripts apart")

    def age(item: tuple[bytes, Entry]) -> tuple[int, bytes]:
        name, (c, t) = item
        return int(censuses[c].created[t]), name

    best = {name: max(same, key=lambda e: _rank(censuses, e)) for name, same in by_id.items()}
    return [entry for _, entry in sorted(best.items(), key=age)]


def _rank(censuses: Sequence[Census], entry: Entry) -> tuple[int, int, int, int, str]:
    """Of two counts of one transcript the greater is kept. It speaks of the count alone, never of
    its census: or a merge of merges would choose otherwise than one merge of all."""
    census, t = censuses[entry[0]], entry[1]
    width = int(census.experts.max())
    body = census.counts[t, :, :, :width].tobytes() + census.prompt_len[t].tobytes()
    return (
        int(census.created[t]),
        len(FIDELITY) - int(census.fidelity[t]),
        int(census.rows[t, DECODE]),
        int(census.rows[t, PREFILL]),
        sha256_digest(body),
    )


def _sessions(censuses: Sequence[Census]) -> dict[Entry, Entry]:
    """The session of every transcript as the first transcript of it: joined by shared ids."""
    parent: dict[Entry, Entry] = {}

    def root(entry: Entry) -> Entry:
        while parent[entry] != entry:
            parent[entry] = parent[parent[entry]]
            entry = parent[entry]
        return entry

    by_session: dict[tuple[int, int], Entry] = {}
    by_id: dict[bytes, Entry] = {}
    for c, census in enumerate(censuses):
        for t, session in enumerate(census.session.tolist()):
            entry = parent[c, t] = (c, t)
            for other in (
                by_session.setdefault((c, session), entry),
                by_id.setdefault(census.transcript_id[t].tobytes(), entry),
            ):
                parent[root(entry)] = root(other)
    return {entry: root(entry) for entry in parent}


def _gather(
    censuses: Sequence[Census],
    entries: Iterable[Entry],
    name: str,
    shape: tuple[int, ...],
    dtype: type[np.integer],
) -> npt.NDArray[Any]:
    values = [getattr(censuses[c], name)[t] for c, t in entries]
    return np.array(values, dtype=dtype).reshape(-1, *shape)


def _touched(censuses: Sequence[Census]) -> tuple[I64 | None, I64 | None]:
    measured = [
        (c.steps, c.touched) for c in censuses if c.steps is not None and c.touched is not None
    ]
    if not measured:
        return None, None
    most = max(len(steps) for steps, _ in measured)
    steps = np.zeros(most, dtype=np.int64)
    touched = np.zeros((most, len(censuses[0].layer_ids)), dtype=np.int64)
    for own_steps, own_touched in measured:
        steps[: len(own_steps)] += own_steps
        touched[: len(own_steps)] += own_touched
    return steps, touched


def _header(censuses: Sequence[Census], dropped: int) -> CensusHeader:
    headers = [census.header for census in censuses]
    captures = [header.capture for header in headers]
    chosen = [header.selection for header in headers]
    newest = max(headers, key=lambda h: (*h.window[::-1], h.capture.hook_digest or ""))
    skipped: Counter[str] = Counter({TWICE: dropped})
    for selection in chosen:
        skipped.update(selection.skipped)
    speculation = headers[0].speculation
    return headers[0].model_copy(
        update={
            "window": (min(h.window[0] for h in headers), max(h.window[1] for h in headers)),
            "capture": Capture(
                method=captures[0].method,
                engine=_listed(capture.engine for capture in captures),
                engine_version=_listed(capture.engine_version for capture in captures),
                runner=_listed(capture.runner for capture in captures),
                hook_digest=newest.capture.hook_digest,
                missed=sum(capture.missed for capture in captures),
                recomputed=sum(capture.recomputed for capture in captures),
            ),
            "selection": Selection(
                seed=min(selection.seed for selection in chosen),
                considered=sum(selection.considered for selection in chosen),
                used=max(0, sum(selection.used for selection in chosen) - dropped),
                skipped={word: n for word, n in sorted(skipped.items()) if n},
            ),
            "off_policy": _off_policy([h.off_policy for h in headers if h.off_policy]),
            "speculation": speculation
            if all(h.speculation == speculation for h in headers)
            else None,
        }
    )


def _listed(values: Iterable[str]) -> str:
    """Distinct words in order; a list that was merged before is taken apart."""
    return ", ".join(sorted({word for value in values for word in value.split(", ")}))


def _off_policy(samples: Sequence[OffPolicy]) -> OffPolicy | None:
    total = sum(sample.n for sample in samples)
    if not total:
        return None
    # fsum rounds once, so the order of the inputs does not show.
    return OffPolicy(
        top1=math.fsum(sample.top1 * sample.n for sample in samples) / total,
        mean_logprob=math.fsum(sample.mean_logprob * sample.n for sample in samples) / total,
        n=total,
    )


def weights(census: Census, now: int, half_life_seconds: float) -> F64:
    """Weight of each transcript by age, float64[T]: 2 ** -(age / half-life), 1 from `now` on.

    `now` is in Unix seconds like `created`. Raises FormatError for a half-life that is not above
    zero, and when all transcripts are so old that no weight is left.
    """
    if not (half_life_seconds > 0 and math.isfinite(half_life_seconds)):
        raise FormatError("weights", "half-life", half_life_seconds, "seconds above 0")
    age = np.maximum(float(now) - census.created.astype(np.float64), 0.0)
    with np.errstate(over="ignore", under="ignore"):
        out = np.exp2(-(age / half_life_seconds))
    if out.size and not out.any():
        found = f"the newest transcript {age.min():.0f} seconds old"
        expected = f"one within 1,000 half-lives of {half_life_seconds:g} seconds"
        raise FormatError("weights", "created", found, expected)
    return np.asarray(out, dtype=np.float64)


def weighted(census: Census, weights: F64) -> F64:
    """Decode counts float64[L,E] with transcript t counting `weights[t]` times, for a placement.

    Transcripts of one weight are added as integers first and weights in ascending order, so that
    the order of transcripts does not show and equal weights give exactly the census's own totals
    times that weight (ties stay ties). Raises FormatError for weights that are negative, not finite
    or all zero.
    """
    transcripts, _, layers, width = census.counts.shape
    if weights.shape != (transcripts,):
        raise FormatError("weights", "shape", list(weights.shape), f"[{transcripts}]")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise FormatError("weights", "values", "a negative or no number", "numbers of 0 or more")
    if not weights.any():
        raise FormatError("weights", "values", "no weight above 0", "at least one")
    out = np.zeros((layers, width), dtype=np.float64)
    order = np.argsort(weights, kind="stable")
    _, starts = np.unique(weights[order], return_index=True)
    for group in np.split(order, starts[1:]):
        total = census.counts[group, DECODE].sum(axis=0, dtype=np.int64)
        out += weights[group[0]] * total
    return out
