"""Words with evidence, and whether a map beats the active one: by tables."""

from __future__ import annotations

from typing import Any

import pytest

from rowmap_jobs import judgement
from rowmap_jobs.evaluation import Evaluation
from rowmap_jobs.formats.evidence import (
    Baselines,
    Change,
    Evidence,
    Interval,
    Roofline,
    Skew,
    Support,
)
from rowmap_jobs.formats.run import Acceptance
from rowmap_jobs.reasons import Reason
from tests.formats.samples import digest


def judged(**over: Any) -> Evaluation:
    values: dict[str, Any] = {
        "decode_tokens": 9000,
        "sessions": 20,
        "own": 0.02,
        "in_sample": 0.015,
        "positional": 0.25,
        "random": 0.25,
        "interval": (0.018, 0.022),
    }
    return Evaluation(**{**values, **over})


def seen(gini: float = 0.6, gain: float | None = None) -> Evidence:
    roofline = None
    if gain is not None:
        roofline = Roofline(
            concurrency=1,
            rows_per_step=1,
            link_bytes_per_second=1.0,
            memory_bytes_per_second=2.0,
            measured_share=0.2,
            measured_tokens_per_second=10.0,
            predicted=Interval(low=10.0, high=11.0),
            gain=Interval(low=0.0, high=gain),
            ceiling=12.0,
            slow_bytes_per_token=1.0,
        )
    return Evidence(
        baselines=Baselines(random=0.25, oracle=0.01),
        skew=Skew(
            gini=gini,
            gini_uniform=0.05,
            entropy=0.8,
            top1=0.1,
            top5=0.2,
            top10=0.3,
            max_by_mean=4.0,
        ),
        support=Support(hits_median=9.0, hits_border=4.0, under_20=1, never_seen=0, undecided=3),
        roofline=roofline,
    )


@pytest.mark.parametrize(
    ("over", "evidence", "expected"),
    [
        ({}, seen(), "ready"),
        ({}, None, "ready"),
        # A share that lots would reach, by luck or not: the Gini index tells.
        ({}, seen(gini=0.05), "no_skew"),
        ({}, seen(gini=0.051), "ready"),
        ({"decode_tokens": 999}, seen(gini=0.05), "insufficient"),
        ({"decode_tokens": 7999}, seen(gini=0.05), "no_skew"),
        # Hardly any read is slow on this lane.
        ({}, seen(gain=0.029), "no_skew"),
        ({}, seen(gain=0.031), "ready"),
        ({"own": 0.24}, seen(gain=0.5), "no_skew"),
        # Everything is hot: nothing to gain, and nothing wrong with the traffic.
        ({"own": 0.0, "random": 0.0}, seen(gini=0.05, gain=0.0), "ready"),
    ],
)
def test_words_with_evidence(
    over: dict[str, Any], evidence: Evidence | None, expected: str
) -> None:
    assert judgement.word(judged(**over), evidence) == expected


@pytest.mark.parametrize(
    ("evidence", "reason", "part"),
    [
        (seen(), "Accepted", "cold share 2.00%"),
        (seen(gini=0.04), "NoSkew", "Gini index 0.040: expected more than the 0.050"),
        (seen(gain=0.01), "NoSkew", "predicted gain 1.0% over a map by lot at most: expected 3%"),
    ],
)
def test_decisions_with_evidence(evidence: Evidence, reason: str, part: str) -> None:
    found, message = judgement.decide(judged(), Acceptance(), evidence)
    assert found == reason and part in message and "\n" not in message


def against(improvement: float, low: float, high: float) -> Change:
    return Change(
        active_digest=digest("old"),
        new_digest=digest("new"),
        active=0.12,
        new=0.12 - improvement,
        improvement=improvement,
        interval=Interval(low=low, high=high),
        rows_moved=980,
        bytes_moved=980 * 18_800_640,
    )


@pytest.mark.parametrize(
    ("change", "points", "better", "part"),
    [
        (against(0.0963, 0.09, 0.1), None, True, "better by 9.63 points"),
        (against(0.0963, 0.09, 0.1), 9.63, True, "(95% interval 9.00 to 10.00)"),
        (against(0.0963, 0.09, 0.1), 9.7, False, "at least 9.7 points (acceptance.minImprov"),
        # The estimate counts against the limit, not the interval's end.
        (against(0.005, 0.001, 0.009), 0.5, True, "980 rows become hot"),
        (against(0.005, 0.0, 0.01), None, False, "expected an interval above 0"),
        (against(0.005, -0.001, 0.011), 0.2, False, "the active map stays"),
        (against(-0.01, -0.02, -0.001), None, False, "better by -1.00 points"),
        (against(0.001, 0.0005, 0.0015), 0.0, True, ""),
    ],
)
def test_better_than_the_active_map(
    change: Change, points: float | None, better: bool, part: str
) -> None:
    found, line = judgement.improves(change, points)
    assert found is better and part in line
    assert digest("old") in line and digest("new") in line
    assert "\n" not in line and len(line) < 1024


def test_the_reason_for_a_map_that_is_not_better() -> None:
    assert Reason.NOT_BETTER_THAN_CURRENT == "NotBetterThanCurrent"
