"""Picture of the sample report: `python -m tests.report.screenshot OUT [WIDTH [SCHEME [HEIGHT]]]`.

Writes a PNG of the top of the page, HEIGHT pixels high (0: all of it), and makes it smaller by
reducing its colours to a palette of 64, which keeps text and plots readable.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rowmap_jobs.report import render
from tests.report.browser import Page, running
from tests.report.sample import build


def take(out: Path, width: int = 1280, scheme: str = "light", height: int = 1500) -> None:
    report, plots = build()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "report.html"
        source.write_text(render(report, plots), encoding="utf-8")
        with running(Path(folder) / "profile") as browser:
            page = Page(browser)
            page.look(width, scheme)
            page.open(source)
            whole = int(page.value("document.scrollingElement.scrollHeight"))
            out.write_bytes(page.picture(width, min(height or whole, whole)))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    words = sys.argv[1:]
    take(
        Path(words[0]),
        int(words[1]) if len(words) > 1 else 1280,
        words[2] if len(words) > 2 else "light",
        int(words[3]) if len(words) > 3 else 1500,
    )
