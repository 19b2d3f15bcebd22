"""A census's map judged from files: what a run of a lane says, without the lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ... import assemble
from ...assemble import Facts
from ...evaluation import Evaluation, Speed, by_session, evaluate, evidence, interval
from ...evaluation.shares import cold_under, share
from ...formats.base import FormatError
from ...formats.census import DECODE, FIDELITY, PREFILL, Census
from ...formats.evidence import Evidence
from ...formats.report import Report
from ...formats.rowmap import RowMap
from ...formats.run import Acceptance, Counted
from ...judgement import decide, flat, improves, word
from ...placement import hot_mask, map_mask, place
from ...reasons import Reason

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

FROM_ELSEWHERE = (
    "The map was not placed from this census and is judged as it is: if it has seen these "
    "transcripts, that flatters it."
)


@dataclass(frozen=True)
class Case:
    """What is judged, and against what."""

    census: Census
    census_digest: str
    rows: RowMap
    prior: F64 | None = None
    """Pseudo-counts [L,E] that the map was placed with."""
    active: RowMap | None = None
    other_censuses: Mapping[str, Census] = field(default_factory=dict)
    other_maps: Mapping[str, RowMap] = field(default_factory=dict)
    """By class; a class without a map of its own gets that of its census."""
    speed: Speed | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    seed: int = 0


def maps_of_others(case: Case) -> dict[str, RowMap]:
    """A map for every other class: its own, or the one that its census gives."""
    geometry = case.rows.geometry
    out = {
        name: place(census.decode(), census.header.fingerprint, geometry)
        for name, census in case.other_censuses.items()
        if census.rows[:, DECODE].any()
    }
    return {**out, **case.other_maps}


def judged(case: Case, others: Mapping[str, RowMap]) -> Evaluation:
    """The deciding shares of the case's map, left out by session where the census gave it.

    A map from elsewhere is judged as it is. Raises FormatError: a census without decode rows, or
    of other layers.
    """
    census, geometry = case.census, case.rows.geometry
    if not census.rows[:, DECODE].any():
        raise FormatError("census", "rows", "no decode row", "one to judge a map by")
    evaluation = evaluate(census, geometry, others, case.seed, case.prior)
    if from_census(case):
        return evaluation
    counts = by_session(census)
    cold = cold_under(counts, map_mask(case.rows, counts.shape[2]))
    total = counts.sum(axis=0)
    own = cold.sum(axis=0) / np.maximum(total.sum(axis=1), 1)
    layers = tuple(
        layer.model_copy(update={"own": float(own[index])})
        for index, layer in enumerate(evaluation.layers)
    )
    whole = share(cold, total)
    between = interval(cold.sum(axis=1), counts.sum(axis=(1, 2)), case.seed)
    return replace(evaluation, own=whole, in_sample=whole, interval=between, layers=layers)


def from_census(case: Case) -> bool:
    """The map's hot rows are those that the census (with the prior) gives."""
    total = by_session(case.census).sum(axis=0)
    wanted = hot_mask(total if case.prior is None else total + case.prior, case.rows.geometry)
    return bool(np.array_equal(wanted, map_mask(case.rows, total.shape[1])))


def found(case: Case, others: Mapping[str, RowMap]) -> Evidence:
    """Everything beyond the deciding shares. Raises FormatError."""
    return evidence(
        case.census,
        case.rows.geometry,
        case.rows,
        case.active,
        others,
        case.other_censuses,
        case.speed,
        case.seed,
        case.prior,
    )


def decision(evaluation: Evaluation, seen: Evidence, acceptance: Acceptance) -> tuple[Reason, str]:
    """Accepted, or the first reason against it; an active map has to be beaten, too."""
    reason, message = decide(evaluation, acceptance, seen)
    if reason is not Reason.ACCEPTED or seen.change is None:
        return reason, message
    better, numbers = improves(seen.change, acceptance.min_improvement_points)
    if better:
        return reason, f"{message}; {numbers}"
    return Reason.NOT_BETTER_THAN_CURRENT, numbers


def counted(census: Census) -> Counted:
    """What a census counts, from the census alone; fidelity is by sequence."""
    words = Counter(FIDELITY[value] for value in census.fidelity.tolist())
    selection = census.header.selection
    return Counted(
        sessions=len(np.unique(census.session)),
        transcripts=max(selection.used, len(census.created)),
        decode_tokens=int(census.rows[:, DECODE].sum()),
        prefill_tokens=int(census.rows[:, PREFILL].sum()),
        considered=selection.considered,
        skipped=selection.skipped,
        fidelity=dict(sorted(words.items())),
    )


def report(case: Case, evaluation: Evaluation, seen: Evidence, created: int) -> Report:
    """report.json of files: no run, no lane. `created` is in Unix seconds."""
    census, rows = case.census, case.rows
    header = census.header
    reason, message = decision(evaluation, seen, case.acceptance)
    numbers = counted(census)
    facts = Facts(header.window, header.selection.considered, off_policy=header.off_policy)
    if not from_census(case):
        facts.notes.append(FROM_ELSEWHERE)
    verdict = word(evaluation, seen)
    if verdict == "no_skew" and reason is not Reason.NO_SKEW:
        # Another reason came first; the word needs its own.
        facts.notes.append(f"no_skew: {flat(evaluation, seen)}.")
    return Report(
        traffic_class=header.traffic_class,
        created=created,
        window=header.window,
        digest=rows.digest,
        row_set_digest=rows.row_set_digest,
        census_digest=case.census_digest,
        verdict=verdict,
        accepted=reason is Reason.ACCEPTED,
        reason=str(reason),
        message=message,
        fingerprint=rows.fingerprint,
        geometry=rows.geometry,
        capture=header.capture,
        selection=header.selection,
        off_policy=header.off_policy,
        counted=numbers,
        cold=evaluation.shares(),
        own_interval=evaluation.interval,
        headroom=evaluation.headroom,
        notes=tuple(assemble.notes(evaluation, numbers, facts, rows.geometry)),
        layers=evaluation.layers,
        evidence=seen,
    )
