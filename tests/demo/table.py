"""The demo's closing table."""

from __future__ import annotations

from tests.demo.evaluate import other_shares
from tests.demo.job import Demo, spoken
from tests.demo.settings import CLASSES, LANE


def table(demo: Demo) -> str:
    """Class, digest, cold shares, boots and profile time, in fixed columns."""
    head = ("class", "map digest", "cold: own map", "by position", "other class's map", "profile")
    rows = [head]
    for name in CLASSES:
        status = (demo.kube.get("expertmap", f"{LANE}.{name}") or {})["status"]
        accepted = status["accepted"]
        others = accepted.get("otherColdSharePercent") or other_shares(demo.kube, name)
        rows.append(
            (
                name,
                accepted["digest"][:19],
                f"{accepted['coldSharePercent']} %",
                f"{accepted['positionalColdSharePercent']} %",
                ", ".join(f"{share} %" for share in others.values()) or "-",
                f"{demo.seen.profile_seconds[name]:.0f} s",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    lines.append("")
    for boot in demo.seen.boots:
        lines.append(f"boot  {boot.what:24}  {boot.seconds:5.0f} s  {spoken(boot.compile)}")
    return "\n".join(lines)
