"""The page: whole, escaped, small, the same each time; what was not measured is not there."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.evidence import Band, Evidence
from rowmap_jobs.formats.report import Report
from rowmap_jobs.report import Plots, render, summary
from tests.formats.samples import digest
from tests.report.reader import EVIL, read, words
from tests.report.sample import build, geometry, without_active

SMALL = geometry(3, 16, 9)


@pytest.fixture(scope="module")
def whole() -> tuple[Report, Plots]:
    return build()


@pytest.fixture(scope="module")
def small() -> tuple[Report, Plots]:
    return build(SMALL, sessions=5)


def on_the_wire(report: Report) -> dict[str, Any]:
    """The report as its JSON object, which reads back to the same report."""
    wire = report.to_wire()
    assert Report.from_wire(wire, "report.json") == report
    return wire


def bent(report: Report, **over: Any) -> Report:
    return report.model_copy(update=over)


def test_a_page_of_40_layers_and_384_experts_is_small(whole: tuple[Report, Plots]) -> None:
    page = render(*whole)
    assert len(page.encode()) < 400_000
    assert read(page).tags.count("image") == 2


def test_equal_reports_give_equal_bytes(whole: tuple[Report, Plots]) -> None:
    assert render(*whole) == render(*build())


def test_the_word_the_numbers_and_what_to_do_come_first(small: tuple[Report, Plots]) -> None:
    text = words(render(*small)).split("Cold share of each layer")[0]
    order = ["ready accepted", "Cold share now", "Cold share predicted", "What to do:", "To know"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_every_part_of_the_report_is_on_the_page(whole: tuple[Report, Plots]) -> None:
    text = words(render(*whole))
    for part in (
        "map of class prose",
        "oracle: each session under its own map",
        "Headroom used",
        "Cold share per layer",
        "Own map per layer",
        "Rank of every expert",
        "Selections by rank",
        "Rows changed per layer",
        "Drift: the traffic has left the active map.",
        "traffic batch-ja",
        "15.30 (least)",
        "is refused",
        "Convergence: cold share",
        "Convergence: hot rows shared",
        "32,768 to 131,072",
        "Gini index",
        "Experts never chosen in decode",
        "Roofline",
        "Distinct experts that a step reads",
        "295 of 384",
        "ids: tokens",
        "not counted: TooLong",
        "rendering refused: ToolCallsRewritten",
        "83.0%",
        "forced against real decode: moved",
        digest("map"),
        digest("active"),
        "seed 0",
        "18,800,640",
        "2026-11-18 11:06 UTC",
    ):
        assert part in text, part


def test_the_heatmaps_have_their_numbers_in_a_table(small: tuple[Report, Plots]) -> None:
    report, plots = small
    text = words(render(report, plots)).split("the heatmaps in numbers")[1]
    for index in range(3):
        counts = plots.counts[index]
        order = np.argsort(-counts, kind="stable")
        assert f"{order[0]} ({counts[order[0]] / counts.sum():.2%})" in text
        cold = [str(e) for e in order[::-1] if not plots.hot[index, e]]
        assert " ".join(cold) in text


TEXTS = ("run", "lane", "traffic_class", "reason", "message")


@pytest.mark.parametrize("field", TEXTS)
def test_strings_of_the_report_are_escaped(small: tuple[Report, Plots], field: str) -> None:
    page = render(bent(small[0], **{"accepted": False, field: EVIL}), small[1])
    assert words(page).count(EVIL) >= 1 and EVIL not in page


def test_names_inside_of_parts_are_escaped(small: tuple[Report, Plots]) -> None:
    report, plots = small
    wire = on_the_wire(report)
    wire["notes"] = [EVIL]
    wire["cold"]["others"] = {EVIL: 0.1}
    wire["layers"][0]["others"] = {EVIL: 0.1}
    wire["counted"]["skipped"] = {EVIL: 1}
    wire["counted"]["fidelity"] = {EVIL: 1}
    wire["renderingRefused"] = {EVIL: 1}
    wire["trickCheck"] = {EVIL: 1}
    wire["capture"]["engine"] = EVIL
    wire["fingerprint"]["quant"] = EVIL
    wire["evidence"]["matrix"]["classes"] = [EVIL] * 3
    wire["evidence"]["matrix"]["minimax"] = EVIL
    wire["evidence"]["effects"][0]["class"] = EVIL
    wire["evidence"]["support"]["never"] = {EVIL: [1]}
    page = render(Report.from_wire(wire, "report"), plots)
    assert words(page).count(EVIL) >= 14 and EVIL not in page


def test_characters_that_cannot_be_shown_are_replaced(small: tuple[Report, Plots]) -> None:
    page = render(bent(small[0], message="a\x00b\x1b[31m\u202ec\ud800d"), small[1])
    assert "a�b�[31m�c�d" in words(page)
    page.encode("utf-8")


@pytest.mark.parametrize(
    ("over", "gone"),
    [
        ({"evidence": None}, ("Drift", "Roofline", "Gini", "Other classes", "Convergence")),
        ({"cold": None, "evidence": None}, ("Cold share now", "by lot")),
        ({"own_interval": None}, ("95% interval 2.",)),
        ({"layers": ()}, ("Cold share per layer", "Cold share and border of each layer")),
        ({"geometry": None}, ("Rank of every expert", "row bytes", "Rows changed")),
        ({"notes": ()}, ("To know",)),
        ({"off_policy": None, "trick_check": None}, ("recorded text", "forced against")),
        ({"headroom": None, "evidence": None}, ("Headroom",)),
        ({"run": None, "lane": None}, ("on lane",)),
    ],
)
def test_what_was_not_measured_is_not_there(
    small: tuple[Report, Plots], over: dict[str, Any], gone: tuple[str, ...]
) -> None:
    before, after = words(render(*small)), words(render(bent(small[0], **over), small[1]))
    for part in gone:
        assert part not in after
        assert part in before or part.startswith("95%")


OPTIONAL = sorted(
    name
    for name, field in Evidence.model_fields.items()
    if not field.is_required() and name != "worst_layers"
)


@pytest.mark.parametrize("part", OPTIONAL)
def test_every_part_of_the_evidence_may_be_missing(small: tuple[Report, Plots], part: str) -> None:
    report, plots = small
    assert report.evidence is not None
    empty = Evidence.model_fields[part].default
    less = bent(report, evidence=report.evidence.model_copy(update={part: empty}))
    assert len(words(render(less, plots))) < len(words(render(report, plots)))


def test_the_last_band_of_prompt_lengths_has_no_end(small: tuple[Report, Plots]) -> None:
    report, plots = small
    assert report.evidence is not None
    band = Band(from_tokens=4096, to_tokens=None, sessions=3, tokens=1234, own=0.0421)
    less = bent(report, evidence=report.evidence.model_copy(update={"bands": (band,)}))
    assert "4,096 or more 3 1,234 4.21%" in words(render(less, plots))


def test_a_lane_without_an_active_map(small: tuple[Report, Plots]) -> None:
    report, plots = small
    assert report.evidence is not None
    less = {"change": None, "drift": None, "against_active": None, "effects": (), "halves": None}
    first = bent(report, evidence=report.evidence.model_copy(update=less))
    text = words(render(first, without_active(plots)))
    assert "active map" not in text.replace("without an active map", "")
    assert report.cold is not None
    assert f"Cold share now {report.cold.positional:.2%} by position" in text


def test_a_report_without_plots_has_its_tables(small: tuple[Report, Plots]) -> None:
    page = render(small[0])
    assert "image" not in read(page).tags and "Cold share and border of each layer" in words(page)


def test_layers_of_different_sizes_and_no_cold_rows() -> None:
    shape = geometry(3, 16, 9).model_copy(
        update={"experts": {"0": 16, "1": 8, "2": 4}, "hot_rows": {"0": 9, "1": 8, "2": 0}}
    )
    counts = np.array([[5] * 16, [3] * 8 + [0] * 8, [1, 0, 2, 3] + [0] * 12], dtype=np.int64)
    hot = np.zeros((3, 16), dtype=bool)
    hot[0, :9] = hot[1, :8] = True
    report, _ = build(SMALL, sessions=3)
    text = words(render(bent(report, geometry=shape), Plots(counts, hot)))
    assert "8 of 8" in text and "0 of 4" in text


def test_plots_of_another_shape_are_refused(small: tuple[Report, Plots]) -> None:
    report, plots = small
    other = Plots(plots.counts[:2], plots.hot)
    with pytest.raises(
        ValueError, match=r"plots.counts: found shape \(2, 16\), expected \(3, 16\)"
    ):
        render(report, other)


def test_tables_have_captions_and_headers_with_their_scope(whole: tuple[Report, Plots]) -> None:
    page = render(*whole)
    tags = read(page).tags
    assert tags.count("table") == tags.count("caption") > 10
    assert tags.count("th") == page.count('<th scope="row"') + page.count('<th scope="col"')
    assert page.count('role="img" aria-label="') == tags.count("svg") > 5
    assert page.count('role="region" aria-label="') == page.count('tabindex="0"')


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    out: list[tuple[Any, ...]] = []
    for key, value in items:
        nested = isinstance(value, dict | list)
        out += leaves(value, (*path, key)) if nested else [(*path, key)]
    return out


WIRE = on_the_wire(build(SMALL, sessions=4)[0])
HARD = st.sampled_from(
    [0, -1, 1e308, -1e308, 10**40, 10**400, 5e-324, "", "\x00", "x" * 5000, True]
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(leaves(WIRE)), HARD), min_size=1, max_size=4))
def test_whatever_passes_the_format_can_be_shown(bends: list[tuple[tuple[Any, ...], Any]]) -> None:
    wire = copy.deepcopy(WIRE)
    for path, value in bends:
        node = wire
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
    try:
        report = Report.from_wire(wire, "report.json")
    except FormatError:
        return
    read(render(report))
    assert summary(report).isascii()
