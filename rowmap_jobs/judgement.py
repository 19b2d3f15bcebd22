"""The word for a census and whether its map is accepted. Pure."""

from __future__ import annotations

from .evaluation import Evaluation
from .formats.report import VerdictWord
from .formats.run import Acceptance
from .reasons import Reason

INSUFFICIENT_TOKENS = 1000
READY_TOKENS = 8000
READY_SESSIONS = 12
NO_SKEW_SHARE = 0.9
"""A map that still leaves this part of what a map drawn by lot leaves cold gains nothing."""


def word(evaluation: Evaluation) -> VerdictWord:
    """insufficient: under 1,000 decode tokens (in-sample shares of such censuses are fiction).
    no_skew: the traffic uses all experts alike. ready: 8,000 tokens of 12 sessions or more.
    """
    if evaluation.decode_tokens < INSUFFICIENT_TOKENS:
        return "insufficient"
    if evaluation.random > 0 and evaluation.own >= NO_SKEW_SHARE * evaluation.random:
        return "no_skew"
    if evaluation.decode_tokens < READY_TOKENS or evaluation.sessions < READY_SESSIONS:
        return "provisional"
    return "ready"


def decide(evaluation: Evaluation, acceptance: Acceptance) -> tuple[Reason, str]:
    """Accepted, or the first reason to reject the map, with one line of numbers."""
    own, positional = evaluation.own, evaluation.positional
    shares = (
        f"cold share {own:.2%} (leave one session out), {positional:.2%} by position, "
        f"{evaluation.random:.2%} by lot"
    )
    tokens, sessions = evaluation.decode_tokens, evaluation.sessions
    if tokens < acceptance.min_decode_tokens:
        return Reason.TOO_FEW_DECODE_TOKENS, (
            f"decode tokens: found {tokens} of {sessions} sessions, expected at least "
            f"{acceptance.min_decode_tokens} (acceptance.minDecodeTokens): record more traffic, "
            "raise replay.maxTranscripts or widen `window`"
        )
    if word(evaluation) == "no_skew":
        return Reason.NO_SKEW, (
            f"{shares}: expected the map well below {NO_SKEW_SHARE:.0%} of a map by lot: this "
            "traffic uses all experts alike and gains nothing from a map"
        )
    limit = acceptance.max_cold_share_percent
    if limit is not None and own * 100 > limit:
        return Reason.COLD_SHARE_TOO_HIGH, (
            f"{shares}: expected at most {limit:g}% (acceptance.maxColdSharePercent): keep more "
            "rows hot, split the class, or record more traffic"
        )
    ratio = acceptance.max_cold_share_vs_positional
    if ratio is not None and own > ratio * positional:
        return Reason.COLD_SHARE_TOO_HIGH, (
            f"{shares}: expected at most {ratio:g} of the positional share "
            "(acceptance.maxColdShareVsPositional): record more traffic or split the class"
        )
    return Reason.ACCEPTED, f"{shares}, {tokens} decode tokens of {sessions} sessions"
