"""One browser for all tests of a run; a page a test, closed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.report.browser import Browser, Page, running


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A running browser; without one every test that asks for it fails."""
    with running(tmp_path_factory.mktemp("profile")) as started:
        yield started


Show = Callable[..., Page]


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Opens a page from its source, at a width and in a scheme, folded parts open or not."""
    opened: list[Page] = []

    def open_page(
        source: str, width: int = 1280, scheme: str = "light", unfold: bool = False
    ) -> Page:
        path = tmp_path / "report.html"
        path.write_text(source, encoding="utf-8")
        page = Page(browser)
        opened.append(page)
        page.look(width, scheme)
        page.open(path)
        if unfold:
            page.value("document.querySelectorAll('details').forEach(d => { d.open = true })")
        return page

    yield open_page
    for page in opened:
        page.close()
