"""Results as plain text: facts under a title, and tables. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 100
Fact = tuple[str, str]


def facts(title: str, pairs: Iterable[Fact]) -> str:
    """A title and its facts: labels in a column, long values wrapped beside them."""
    kept = list(pairs)
    wide = max((len(label) for label, _ in kept), default=0) + 4
    lines = [title]
    for label, value in kept:
        lead = f"  {label}".ljust(wide)
        lines += textwrap.wrap(
            value,
            WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * wide,
            break_on_hyphens=False,
            break_long_words=False,
        ) or [lead.rstrip()]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Columns two spaces apart; the first `left` are aligned to the left, numbers to the right."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    wide = [max(len(line[i]) for line in lines) for i in range(len(head))]
    out = []
    for line in lines:
        cells = [
            cell.ljust(wide[i]) if i < left else cell.rjust(wide[i]) for i, cell in enumerate(line)
        ]
        out.append("  ".join(cells).rstrip())
    return "\n".join(out)


def layers(ids: Sequence[int]) -> str:
    """Ids in short with their number: `0-3, 5 (5)`."""
    runs: list[list[int]] = []
    for layer in sorted(ids):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return f"{', '.join(parts) or 'none'} ({len(ids)})"


def span(values: Iterable[int]) -> str:
    """One number, or the least and the greatest: `32` or `247 to 362`."""
    distinct = sorted(set(values))
    if len(distinct) < 2:
        return f"{distinct[0]:,}" if distinct else "none"
    return f"{distinct[0]:,} to {distinct[-1]:,}"


def percent(value: float) -> str:
    return f"{value:.2%}"


def points(value: float) -> str:
    """A difference of shares in percentage points."""
    return f"{value * 100:+.2f}"
