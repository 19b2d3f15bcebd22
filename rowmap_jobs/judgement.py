"""The word for a census, and whether its map is accepted and better than the active one. Pure."""

from __future__ import annotations

from .evaluation import Evaluation
from .formats.evidence import Change, Evidence
from .formats.report import VerdictWord
from .formats.run import Acceptance
from .reasons import Reason

INSUFFICIENT_TOKENS = 1000
READY_TOKENS = 8000
READY_SESSIONS = 12
NO_SKEW_SHARE = 0.9
"""A map that still leaves this part of what a map drawn by lot leaves cold gains nothing."""


ROUNDING = 1e-9
"""Points by which a product of floats may miss the number that was typed."""
NO_SKEW_GAIN = 0.03
"""A predicted gain of speed that is not worth a map, over one drawn by lot."""


def word(evaluation: Evaluation, evidence: Evidence | None = None) -> VerdictWord:
    """insufficient: under 1,000 decode tokens (in-sample shares of such censuses are fiction).
    no_skew: nothing that a map could exploit (`flat`). ready: 8,000 tokens of 12 sessions or more.
    """
    if evaluation.decode_tokens < INSUFFICIENT_TOKENS:
        return "insufficient"
    if flat(evaluation, evidence) is not None:
        return "no_skew"
    if evaluation.decode_tokens < READY_TOKENS or evaluation.sessions < READY_SESSIONS:
        return "provisional"
    return "ready"


def flat(evaluation: Evaluation, evidence: Evidence | None = None) -> str | None:
    """Why a map would gain nothing, in one line of numbers; None when it would.

    The left-out share against a map by lot decides. With evidence two more signs do: a Gini index
    that lots alone reach (then a good share is luck), and a predicted gain under 3% at the steep
    end of its band (then the skew is not worth a map on this lane). A lane with everything hot
    has nothing to gain and is never flat.
    """
    own, lot = evaluation.own, evaluation.random
    if lot <= 0:
        return None
    if own >= NO_SKEW_SHARE * lot:
        return (
            f"expected the map well below {NO_SKEW_SHARE:.0%} of a map by lot: this "
            "traffic uses all experts alike and gains nothing from a map"
        )
    if evidence is None:
        return None
    if evidence.skew.gini <= evidence.skew.gini_uniform:
        return (
            f"Gini index {evidence.skew.gini:.3f}: expected more than the "
            f"{evidence.skew.gini_uniform:.3f} that lots alone reach: this traffic uses all "
            "experts alike as far as the counts tell"
        )
    predicted = evidence.roofline
    if predicted is not None and predicted.gain.high < NO_SKEW_GAIN:
        return (
            f"predicted gain {predicted.gain.high:.1%} over a map by lot at most: expected "
            f"{NO_SKEW_GAIN:.0%} or more: on this lane so few reads are slow that a map gains "
            "nothing"
        )
    return None


def decide(
    evaluation: Evaluation, acceptance: Acceptance, evidence: Evidence | None = None
) -> tuple[Reason, str]:
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
    if word(evaluation, evidence) == "no_skew":
        return Reason.NO_SKEW, f"{shares}: {flat(evaluation, evidence)}"
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


def improves(change: Change, min_points: float | None = None) -> tuple[bool, str]:
    """Whether a map is better than the active one, and one line of numbers that names both.

    The interval of the improvement must lie above zero, and the improvement must be at least
    `min_points` percentage points, where given. A map that is not is rejected with the reason
    NotBetterThanCurrent.
    """
    points, low, high = (
        100 * value for value in (change.improvement, change.interval.low, change.interval.high)
    )
    numbers = (
        f"map {change.new_digest} leaves {change.new:.2%} cold, the active {change.active_digest} "
        f"{change.active:.2%}: better by {points:.2f} points (95% interval {low:.2f} to "
        f"{high:.2f}), {change.rows_moved} rows become hot"
    )
    if change.interval.low <= 0:
        return False, f"{numbers}: expected an interval above 0: the active map stays"
    if min_points is not None and points < min_points - ROUNDING:
        return False, (
            f"{numbers}: expected at least {min_points:g} points "
            "(acceptance.minImprovementPoints): the active map stays"
        )
    return True, numbers
