"""What page and terminal say: the same word, the same numbers, the same sentence."""

from __future__ import annotations

from typing import Any

import pytest

from rowmap_jobs.formats.report import Report
from rowmap_jobs.formats.run import Counted
from rowmap_jobs.reasons import Reason
from rowmap_jobs.report import Plots, render, summary
from rowmap_jobs.report.terminal import WIDTH
from rowmap_jobs.report.words import facts, size, todo
from tests.report.reader import EVIL, words
from tests.report.sample import build, geometry


@pytest.fixture(scope="module")
def sample() -> tuple[Report, Plots]:
    return build(geometry(3, 16, 9), sessions=14)


FEW = Counted(sessions=9, transcripts=10, decode_tokens=5200, prefill_tokens=1, considered=10)
CASES: list[tuple[dict[str, Any], str]] = [
    ({}, "Switch to this map, and profile again when the traffic changes."),
    (
        {"verdict": "provisional", "counted": FEW},
        "Switch to this map, and record more to make it firm: 5,200 of 8,000 decode tokens and "
        "9 of 12 sessions.",
    ),
    (
        {"verdict": "insufficient", "counted": FEW},
        "Record more traffic before you rely on this map: 5,200 of 8,000 decode tokens and 9 of "
        "12 sessions, and below 1,000 decode tokens a map is made of noise.",
    ),
    (
        {"verdict": "no_skew"},
        "Do not deploy this map: the traffic has too little skew to gain from one.",
    ),
    (
        {
            "accepted": False,
            "verdict": "provisional",
            "reason": "TooFewDecodeTokens",
            "counted": FEW,
        },
        "Keep what is active, and record more traffic or widen the window: 5,200 of 8,000 decode "
        "tokens and 9 of 12 sessions.",
    ),
    (
        {"accepted": False, "verdict": "no_skew", "reason": "NoSkew"},
        "Do not deploy a map for this class: its traffic has too little skew to gain from one.",
    ),
    (
        {"accepted": False, "reason": "ColdShareTooHigh"},
        "Keep what is active, and keep more rows hot, split the class, or record more traffic.",
    ),
    (
        {"accepted": False, "reason": "NotBetterThanCurrent"},
        "Keep the active map: on the same traffic this one is not surely better.",
    ),
    (
        {"accepted": False, "reason": "SomethingNew"},
        "Keep what is active: this map was rejected (SomethingNew).",
    ),
]


@pytest.mark.parametrize(("over", "sentence"), CASES)
def test_page_and_terminal_say_the_same(
    sample: tuple[Report, Plots], over: dict[str, Any], sentence: str
) -> None:
    report = sample[0].model_copy(update=over)
    page, terminal = words(render(report, sample[1])), summary(report)
    said = " ".join(terminal.split())
    assert todo(report) == sentence
    assert f"What to do: {sentence}" in page and f"What to do: {sentence}" in said
    decision = "accepted" if report.accepted else f"rejected: {report.reason}"
    assert terminal.startswith(f"{report.verdict} ({decision})\n")
    assert f"{report.verdict} {decision}" in page
    assert len(facts(report)) == 5
    for fact in facts(report):
        assert f"{fact.label} {fact.value} {fact.detail}" in page
        assert f"{fact.label} {fact.value} ({fact.detail})" in said
    for note in report.notes:
        assert note in page and note in said


def test_the_numbers_are_those_of_the_report(sample: tuple[Report, Plots]) -> None:
    report = sample[0]
    assert report.cold is not None and report.own_interval is not None
    assert report.evidence is not None and report.evidence.change is not None
    now, predicted, gain, speed, counted = facts(report)
    assert now.value == f"{report.evidence.change.active:.2%}" and now.detail == "active map"
    assert predicted.value == f"{report.cold.own:.2%}"
    low, high = report.own_interval
    assert predicted.detail == f"95% interval {low:.2%} to {high:.2%}, leave one session out"
    assert gain.value == f"{100 * report.evidence.change.improvement:+.2f} points"
    assert speed.value == "124 to 161 tok/s" and "now 98.0 to 144, ceiling 161" in speed.detail
    assert counted.value == f"{report.counted.decode_tokens:,} tokens"


def test_one_session_has_no_interval(sample: tuple[Report, Plots]) -> None:
    one = FEW.model_copy(update={"sessions": 1})
    report = sample[0].model_copy(update={"counted": one, "own_interval": (0.0, 1.0)})
    assert facts(report)[1].detail == "no interval: it needs two sessions or more"
    assert "0.00% to 100.00%" not in words(render(report))


def test_every_reason_to_reject_a_map_has_its_own_sentence(sample: tuple[Report, Plots]) -> None:
    rejecting = (
        Reason.TOO_FEW_DECODE_TOKENS,
        Reason.COLD_SHARE_TOO_HIGH,
        Reason.NO_SKEW,
        Reason.NOT_BETTER_THAN_CURRENT,
    )
    said = {
        todo(sample[0].model_copy(update={"accepted": False, "reason": str(reason)}))
        for reason in rejecting
    }
    assert len(said) == len(rejecting) and not any("was rejected" in one for one in said)


@pytest.mark.parametrize("evil", [EVIL, "\x1b]0;owned\x07\x1b[2J", "日本 é", "a" * 400, "x\ny\tz"])
def test_the_terminal_gets_printable_ascii_of_100_columns(
    sample: tuple[Report, Plots], evil: str
) -> None:
    over = {"lane": evil, "traffic_class": evil, "reason": evil, "accepted": False}
    text = summary(sample[0].model_copy(update={**over, "notes": (evil, "")}))
    assert all(" " <= c <= "~" for c in text.replace("\n", ""))
    assert max(map(len, text.splitlines())) <= WIDTH == 100
    assert text.endswith("\n") and not text.endswith("\n\n")


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (2048, "2.00 KiB"),
        (18_800_640, "17.93 MiB"),
        (206.61 * (1 << 30), "206.61 GiB"),
    ],
)
def test_sizes(count: float, said: str) -> None:
    assert size(count) == said
