"""The summary for a terminal: the same word, numbers and sentence as the page. Pure."""

from __future__ import annotations

import re
import textwrap

from ..formats.report import Report
from . import words

WIDTH = 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def plain(value: str) -> str:
    """`value` in printable ASCII on one line: escape sequences of a hostile name do nothing."""
    line = " ".join(value.split())
    line = _CONTROL.sub(lambda found: f"\\x{ord(found.group()):02x}", line)
    return line.encode("ascii", "backslashreplace").decode("ascii")


def summary(report: Report) -> str:
    """The summary, ending in a newline; printable ASCII, at most 100 columns."""
    out = [
        *_wrap(f"{report.verdict}  ({words.decision(report)})"),
        *_wrap(words.title(report)),
        "",
    ]
    facts = words.facts(report)
    wide = max(len(fact.label) for fact in facts) + 2
    for fact in facts:
        detail = f"  ({fact.detail})" if fact.detail else ""
        out += _wrap(fact.value + detail, fact.label.ljust(wide))
    out += ["", *_wrap(words.todo(report), "What to do: ")]
    for note in report.notes:
        out += _wrap(note, "Note: ")
    return "\n".join(out) + "\n"


def _wrap(value: str, lead: str = "") -> list[str]:
    return textwrap.wrap(
        plain(value),
        WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_on_hyphens=False,
    ) or [lead.rstrip()]
