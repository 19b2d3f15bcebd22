"""The page in a browser: loads nothing, says nothing on the console, reads at every width and in
both schemes, by keyboard and by screen reader.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmap_jobs.formats.report import Report
from rowmap_jobs.report import Plots, heatmap, render
from tests.report.browser import Page
from tests.report.conftest import Show
from tests.report.reader import EVIL
from tests.report.sample import build, geometry
from tests.report.test_style import contrast

pytestmark = pytest.mark.browser

MEASURE = (Path(__file__).parent / "measure.js").read_text(encoding="utf-8")
LOOKS = [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]
LONG = "x" * 60 + "-very-long-name-without-a-space"


@pytest.fixture(scope="module")
def whole() -> tuple[Report, Plots]:
    return build()


@pytest.fixture(scope="module")
def source(whole: tuple[Report, Plots]) -> str:
    return render(*whole)


@pytest.fixture(scope="module")
def sources(source: str) -> dict[str, str]:
    """Pages that are as different as can be."""
    small, plots = build(geometry(3, 16, 9), sessions=5)
    bare = {"evidence": None, "cold": None, "layers": (), "notes": (), "geometry": None}
    wild = {"accepted": False, "verdict": "no_skew", "lane": LONG, "notes": (EVIL, LONG)}
    broad, broad_plots = build(geometry(94, 512, 128), sessions=3)
    return {
        "whole": source,
        "bare": render(small.model_copy(update=bare)),
        "wild": render(small.model_copy(update={**wild, "message": LONG, "reason": LONG}), plots),
        "broad": render(broad, broad_plots),
    }


def complaints(page: Page) -> list[Any]:
    """What the browser had to say: console, errors, dialogs, refusals."""
    kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
    return [e for kind in (*kinds, "Page.javascriptDialogOpening") for e in page.events(kind)]


def asked_for(page: Page) -> list[str]:
    """Addresses that the page asked for, images inside of it aside."""
    urls = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
    return [url for url in urls if not url.startswith("data:image/png;")]


@pytest.mark.parametrize("name", ["whole", "bare", "wild", "broad"])
def test_it_loads_nothing_and_nothing_is_wrong(
    show: Show, sources: dict[str, str], name: str
) -> None:
    page = show(sources[name], unfold=True)
    page.value("document.title")
    (url,) = asked_for(page)
    assert url.startswith("file://") and url.endswith("/report.html")
    assert complaints(page) == []
    assert page.value("document.scripts.length") == 0
    assert page.value("document.compatMode") == "CSS1Compat"


@pytest.mark.parametrize(
    ("markup", "directive"),
    [
        ("<img src='http://127.0.0.1:9/x.png'>", "img-src"),
        ("<link rel=stylesheet href='http://127.0.0.1:9/x.css'>", "style-src-elem"),
        ("<iframe src='http://127.0.0.1:9/'></iframe>", "frame-src"),
        (
            "<style>@font-face{font-family:q;src:url(http://127.0.0.1:9/q)}p{font-family:q}</style>",
            "font-src",
        ),
    ],
)
def test_the_policy_forbids_the_network_to_whatever_gets_in(
    show: Show, source: str, markup: str, directive: str
) -> None:
    page = show(source)
    blocked = page.value_of_promise(
        "new Promise(done => {"
        "document.addEventListener('securitypolicyviolation', e => done(e.effectiveDirective));"
        f"document.body.insertAdjacentHTML('beforeend', {json.dumps(markup)});"
        "setTimeout(() => done('nothing'), 20000)})"
    )
    assert blocked == directive
    asked = {
        event["requestId"]
        for event in page.events("Network.requestWillBeSent")
        if event["request"]["url"].startswith("http:")
    }
    refused = {
        event["requestId"]
        for event in page.events("Network.loadingFailed")
        if event.get("blockedReason") == "csp"
    }
    assert asked <= refused


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("name", ["whole", "wild", "broad", "bare"])
def test_it_reads_at_every_width_and_in_both_schemes(
    show: Show, sources: dict[str, str], name: str, width: int, scheme: str
) -> None:
    page = show(sources[name], width, scheme, unfold=True)
    assert page.value("innerWidth") == width
    assert page.value("document.scrollingElement.scrollWidth") <= width
    texts = json.loads(page.value(MEASURE))
    assert len(texts) > 40
    dark = sum(texts[0]["ground"][:3]) < 3 * 128
    assert dark == (scheme == "dark")
    for text in texts:
        left, _, right, _ = text["box"]
        assert text["size"] >= 12, text
        assert contrast(text["colour"][:3], text["ground"][:3]) >= 4.5, text
        assert text["hidden"] is None, text
        if text["svg"] is not None:
            assert inside(text["box"], text["frame"]), text
        elif not text["scroll"]:
            assert left >= 0 and right <= width, text
        elif text["caption"]:
            assert inside(text["box"], text["region"]), text
    assert overlapping(texts) == []


def inside(one: list[float], other: list[float], slack: float = 1.0) -> bool:
    return (
        one[0] >= other[0] - slack
        and one[1] >= other[1] - slack
        and one[2] <= other[2] + slack
        and one[3] <= other[3] + slack
    )


def overlapping(texts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Labels of one picture that stand on each other."""
    out = []
    drawn = [text for text in texts if text["svg"] is not None]
    for _, group in itertools.groupby(drawn, key=lambda text: text["svg"]):
        for a, b in itertools.combinations(group, 2):
            (la, ta, ra, ba), (lb, tb, rb, bb) = a["box"], b["box"]
            # A line box is taller than its glyphs.
            if min(ra, rb) - max(la, lb) > 0 and min(ba, bb) - max(ta, tb) > 4:
                out.append((a["text"], b["text"]))
    return out


def test_what_is_wider_than_the_window_scrolls_in_its_box_by_keyboard(
    show: Show, source: str
) -> None:
    page = show(source, 400)
    find = "document.querySelector('div[aria-label^=\"Rank of every expert\"]')"
    assert page.value(f"{find}.scrollWidth > {find}.clientWidth")
    page.value(f"{find}.focus()")
    page.press("ArrowRight", 39)
    end = time.monotonic() + 10
    while not page.value(f"{find}.scrollLeft > 0"):
        assert time.monotonic() < end, "the arrow key moved nothing"
        time.sleep(0.05)


def test_every_place_that_takes_the_focus_is_reached_by_tab_and_shows_it(
    show: Show, source: str
) -> None:
    page = show(source, unfold=True)
    count = page.value(
        "(() => { const all = [...document.querySelectorAll('a[href],summary,[tabindex]')];"
        "all.forEach((e, i) => { e.dataset.place = i });"
        "return all.length })()"
    )
    assert count > 20
    reached = []
    for _ in range(count):
        page.press("Tab", 9)
        place, outline = page.value(
            "[document.activeElement.dataset.place, "
            "getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert outline == "solid", place
        reached.append(int(place))
    assert reached == list(range(count))


def test_a_screen_reader_finds_a_name_for_everything(show: Show, source: str) -> None:
    page = show(source, unfold=True)
    nodes = page.tree()
    roles: dict[str, list[str]] = {}
    for node in nodes:
        name = node.get("name", {}).get("value", "")
        roles.setdefault(node["role"]["value"], []).append(name)
    pictures = page.value("document.querySelectorAll('svg').length")
    tables = page.value("document.querySelectorAll('table').length")
    images = roles.get("image", []) + roles.get("img", [])
    assert len(images) == pictures >= 7
    assert len(roles["table"]) == tables > 10
    for role in ("image", "img", "table", "region", "navigation", "link", "heading", "figure"):
        assert all(name.strip() for name in roles.get(role, [])), (role, roles.get(role))
    regions = roles["region"]
    assert len(regions) == len(set(regions)), "regions of the same name"
    assert {"main", "navigation", "contentinfo", "DisclosureTriangle"} <= set(roles)
    levels = page.value("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    assert page.value("document.documentElement.lang") == "en"


def test_the_heatmap_shows_its_pixels(show: Show, whole: tuple[Report, Plots], source: str) -> None:
    report, plots = whole
    assert report.geometry is not None
    page = show(source)
    shown = page.value_of_promise(
        "(async () => { const image = new Image();"
        "image.src = document.querySelectorAll('image')[1].getAttribute('href');"
        "await image.decode();"
        "const canvas = document.createElement('canvas');"
        "canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;"
        "const pen = canvas.getContext('2d'); pen.drawImage(image, 0, 0);"
        "return [canvas.width, canvas.height, ...pen.getImageData(0, 0, 8, 1).data] })()"
    )
    pixels = heatmap.rank_pixels(plots, report.geometry)
    assert shown[:2] == [pixels.shape[1], pixels.shape[0]]
    colours = np.array(shown[2:]).reshape(8, 4)
    expected = [[*heatmap.palette()[index], 255] for index in pixels[0, :8]]
    assert colours.tolist() == expected


def test_nothing_moves_by_itself(show: Show, source: str) -> None:
    page = show(source)
    assert page.value("document.getAnimations().length") == 0
