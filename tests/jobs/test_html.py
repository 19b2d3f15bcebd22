"""The page: self-contained, escaped, complete."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from rowmap_jobs import html
from rowmap_jobs.formats.census import Capture, OffPolicy, Selection
from rowmap_jobs.formats.report import LayerReport, Report
from rowmap_jobs.formats.run import ColdShares, Counted
from tests.formats.samples import FINGERPRINT, digest, geometry

EVIL = "<script>alert('x')</script>&\""


def report(**over: Any) -> Report:
    values: dict[str, Any] = {
        "run": "lane.agent-1",
        "lane": "lane",
        "traffic_class": "agent",
        "created": 1_795_000_000,
        "window": (1_794_000_000, 1_795_000_000),
        "digest": digest("map"),
        "row_set_digest": digest("rows"),
        "census_digest": digest("census"),
        "verdict": "ready",
        "accepted": True,
        "reason": "Accepted",
        "message": "cold share 2.00%",
        "fingerprint": FINGERPRINT,
        "geometry": geometry(),
        "capture": Capture(
            method="forced",
            engine="vLLM",
            engine_version="0.32.0",
            runner="v1",
            hook_digest=digest("hook"),
            missed=0,
            recomputed=0,
        ),
        "selection": Selection(seed=0, considered=20, used=12),
        "off_policy": OffPolicy(top1=0.81, mean_logprob=-0.4, n=900),
        "trick_check": {"selections": 100, "moved": 1},
        "counted": Counted(
            sessions=12,
            transcripts=14,
            decode_tokens=9000,
            prefill_tokens=50000,
            considered=20,
            skipped={"TooLong": 2},
            fidelity={"tokens": 14},
        ),
        "rendering_refused": {"ToolCallsRewritten": 1},
        "cold": ColdShares(own=0.02, in_sample=0.015, positional=0.25, others={"prose": 0.11}),
        "own_interval": (0.018, 0.022),
        "headroom": 0.97,
        "notes": ("3 lines were broken.",),
        "layers": tuple(
            LayerReport(
                layer=layer,
                own=0.02,
                positional=0.25,
                others={"prose": 0.1},
                never_seen=1,
                undecided=2,
            )
            for layer in (0, 2)
        ),
    }
    return Report(**{**values, **over})


class Checker(HTMLParser):
    """Collects text, and fails on anything that loads or runs, or on tags left open."""

    VOID = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "img", "iframe", "object"}
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onclick"}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> str:
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and "@import" not in page and "url(" not in page
    return " ".join(checker.text)


def test_the_page_says_everything_with_the_word_first() -> None:
    page = html.render(report())
    text = read(page)
    assert page.index('class="word yes">ready<') < page.index("<h1>")
    for part in (
        "2.00%",
        "1.80% to 2.20%",
        "25.00%",
        "map of class prose",
        "11.00%",
        "50.00%",
        "Headroom used: 97%",
        "9,000",
        "ids: tokens",
        "not counted: TooLong",
        "rendering refused: ToolCallsRewritten",
        "81.0%",
        "forced against real decode: moved",
        digest("map"),
        "2 of 4",
        "3 lines were broken.",
        "seed 0",
        "2026-11-",
    ):
        assert part in text
    assert "prefers-color-scheme:dark" in page


def test_strings_are_escaped() -> None:
    page = html.render(report(lane=EVIL, message=EVIL, notes=(EVIL,), run=EVIL))
    assert EVIL in read(page).replace("  ", " ") and "<script>" not in page


@pytest.mark.parametrize(
    ("over", "part"),
    [
        ({"accepted": False, "reason": "ColdShareTooHigh"}, "rejected: ColdShareTooHigh"),
        ({"accepted": False, "reason": "NoSkew", "verdict": "no_skew"}, "Do not deploy a map"),
        ({"verdict": "insufficient"}, "Record more traffic"),
        ({"verdict": "provisional"}, "Usable, but record more"),
        ({"cold": None, "geometry": None, "layers": (), "digest": None}, "none"),
        ({"off_policy": None, "trick_check": None, "headroom": None}, "ready"),
        ({"geometry": geometry(hot_rows={"0": 1, "2": 3})}, "3 of 4"),
    ],
)
def test_other_reports(over: dict[str, Any], part: str) -> None:
    assert part in read(html.render(report(**over)))


def test_a_report_survives_the_wire() -> None:
    assert Report.from_wire(report().to_wire(), "x") == report()
