"""The words and numbers that page and terminal share: verdict, facts, what to do. Pure.

Everything here that is ours is plain ASCII; strings of the report are passed on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..formats.evidence import Interval
from ..formats.report import Report
from ..judgement import INSUFFICIENT_TOKENS, READY_SESSIONS, READY_TOKENS
from ..reasons import Reason

MOST = 1 << 80
"""More than anything that is counted or drawn: a report from outside may have any number."""

KEEP = "Keep what is active"


@dataclass(frozen=True)
class Fact:
    """One number of the summary: what it is, the number, and what one must know to read it."""

    label: str
    value: str
    detail: str = ""


def title(report: Report) -> str:
    """What the report is about."""
    lane = "" if report.lane is None else f" on lane {report.lane}"
    return f"Expert map of class {report.traffic_class}{lane}"


def decision(report: Report) -> str:
    """Whether the map was accepted, with the reason when not."""
    return "accepted" if report.accepted else f"rejected: {report.reason}"


def todo(report: Report) -> str:
    """One sentence: what to do now, by decision and verdict."""
    return _accepted(report) if report.accepted else _rejected(report)


def _accepted(report: Report) -> str:
    match report.verdict:
        case "ready":
            return "Switch to this map, and profile again when the traffic changes."
        case "provisional":
            return f"Switch to this map, and record more to make it firm: {_missing(report)}."
        case "insufficient":
            return (
                f"Record more traffic before you rely on this map: {_missing(report)}, and below "
                f"{INSUFFICIENT_TOKENS:,} decode tokens a map is made of noise."
            )
        case "no_skew":
            return "Do not deploy this map: the traffic has too little skew to gain from one."


def _rejected(report: Report) -> str:
    match report.reason:
        case Reason.TOO_FEW_DECODE_TOKENS:
            return f"{KEEP}, and record more traffic or widen the window: {_missing(report)}."
        case Reason.NO_SKEW:
            return (
                "Do not deploy a map for this class: its traffic has too little skew to gain "
                "from one."
            )
        case Reason.COLD_SHARE_TOO_HIGH:
            return f"{KEEP}, and keep more rows hot, split the class, or record more traffic."
        case Reason.NOT_BETTER_THAN_CURRENT:
            return "Keep the active map: on the same traffic this one is not surely better."
        case _:
            return f"{KEEP}: this map was rejected ({report.reason})."


def _missing(report: Report) -> str:
    counted = report.counted
    return (
        f"{counted.decode_tokens:,} of {READY_TOKENS:,} decode tokens "
        f"and {counted.sessions:,} of {READY_SESSIONS:,} sessions"
    )


def facts(report: Report) -> tuple[Fact, ...]:
    """The numbers on top, in order; what was not measured is left out."""
    found = (now(report), predicted(report), gain(report), speed(report), counted(report))
    return tuple(fact for fact in found if fact is not None)


def now(report: Report) -> Fact | None:
    """Cold share of this traffic today: under the active map, else by position."""
    label, evidence = "Cold share now", report.evidence
    if evidence is not None and evidence.change is not None:
        return Fact(label, percent(evidence.change.active), "active map")
    if evidence is not None and evidence.drift is not None:
        return Fact(label, percent(evidence.drift.active), "active map")
    if report.cold is None:
        return None
    return Fact(label, percent(report.cold.positional), "by position, without a map")


def predicted(report: Report) -> Fact | None:
    """Cold share with the new map, each session judged under the map of all others."""
    if report.cold is None:
        return None
    detail = "no interval: it needs two sessions or more"
    if report.own_interval is not None and report.counted.sessions > 1:
        low, high = report.own_interval
        detail = f"95% interval {percent(low)} to {percent(high)}, leave one session out"
    return Fact("Cold share predicted", percent(report.cold.own), detail)


def gain(report: Report) -> Fact | None:
    """Improvement over the active map."""
    change = None if report.evidence is None else report.evidence.change
    if change is None:
        return None
    return Fact(
        "Gain over the active map",
        f"{points(change.improvement)} points",
        f"95% interval {points(change.interval.low)} to {points(change.interval.high)}",
    )


def speed(report: Report) -> Fact | None:
    """Decode speed that the roofline predicts."""
    roof = None if report.evidence is None else report.evidence.roofline
    if roof is None:
        return None
    today = "" if roof.now is None else f"now {band(roof.now)}, "
    return Fact(
        "Decode speed predicted",
        f"{band(roof.predicted)} tok/s",
        f"{today}ceiling {number(roof.ceiling)}; one sequence at concurrency {roof.concurrency}",
    )


def counted(report: Report) -> Fact:
    """How much the numbers rest on."""
    numbers = report.counted
    return Fact(
        "Counted",
        f"{numbers.decode_tokens:,} tokens",
        f"decode, {numbers.sessions:,} sessions, {numbers.transcripts:,} transcripts",
    )


def percent(share: float) -> str:
    """A share from 0 to 1 in percent with two decimals."""
    return f"{share:.2%}"


def points(share: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{share * 100:+.2f}"


def regret(share: float) -> str:
    """A loss in percentage points; only a gain has a sign."""
    return f"{share * 100:.2f}"


def number(value: float) -> str:
    """A measured number with three digits or so."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def band(interval: Interval) -> str:
    """Both ends of an interval."""
    return f"{number(interval.low)} to {number(interval.high)}"


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves one or more of it."""
    count = min(count, MOST)
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count:,.0f} bytes"
