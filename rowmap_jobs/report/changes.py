"""Sections on consequences: the active map, the other classes, the speed. Pure."""

from __future__ import annotations

from ..formats.evidence import Drift, Effect, Evidence, Matrix, Ranks, Roofline, Unique
from ..formats.report import Report
from .charts import layer_bars
from .markup import Raw, el, join
from .plots import Plots
from .shares import part
from .style import TINTS
from .tables import columns, figure, pairs, row, section, table, wide
from .words import band, number, percent, points, regret, size


def in_force(report: Report, plots: Plots | None) -> Raw:
    """The new map against the active map: rows that move, what they gain, drift."""
    evidence = report.evidence
    moved = _moved(report, plots)
    if evidence is None:
        return section("change", "Against the active map", moved)
    parts = (columns(moved, _change(evidence)), _ranks(evidence), _drift(evidence.drift))
    return section("change", "Against the active map", *parts)


def _moved(report: Report, plots: Plots | None) -> Raw | None:
    moved = None if plots is None else plots.moved()
    if moved is None or report.geometry is None:
        return None
    layers, values = report.geometry.moe_layers, [float(n) for n in moved.tolist()]
    total, most = int(moved.sum()), max(int(n) for n in moved.tolist())
    where = layers[values.index(float(most))]
    words = f"{total:,} rows become hot, {most:,} of them in layer {where}, the most of a layer"
    return figure(
        "Rows changed per layer",
        layer_bars(
            layers,
            values,
            f"Bar chart of rows changed per layer: {words}",
            kind="active",
            shares=False,
        ),
        f"{words}. Numbers: table Layers.",
    )


def _change(evidence: Evidence) -> Raw | None:
    change = evidence.change
    if change is None:
        return None
    low, high = change.interval.low, change.interval.high
    return table(
        "The new map against the active map, on the same transcripts",
        ("what", "value"),
        [
            row("cold share, active map", percent(change.active)),
            row("cold share, new map", percent(change.new)),
            row("gain, points", points(change.improvement)),
            row("gain, 95% interval", f"{points(low)} to {points(high)}"),
            row("rows that become hot", f"{change.rows_moved:,}"),
            row("bytes that move", size(change.bytes_moved)),
            row("active map", wide(change.active_digest)),
        ],
    )


def _ranks(evidence: Evidence) -> Raw | None:
    found = (
        ("active map", evidence.against_active),
        ("two halves of the sessions", evidence.halves),
    )
    lines = [_rank_row(name, ranks) for name, ranks in found if ranks is not None]
    if not lines:
        return None
    heads = (
        "compared with",
        "hot rows shared",
        "cold rows that change",
        "Jaccard",
        "Spearman",
        "at the border",
        "Kendall",
        "at the border",
    )
    return table("Rankings compared, averaged over layers", heads, lines)


def _rank_row(name: str, ranks: Ranks) -> Raw:
    return row(
        name,
        percent(ranks.overlap),
        percent(ranks.churn),
        f"{ranks.jaccard:.3f}",
        *(
            "" if value is None else f"{value:.3f}"
            for value in (
                ranks.spearman,
                ranks.spearman_border,
                ranks.kendall,
                ranks.kendall_border,
            )
        ),
    )


def _drift(drift: Drift | None) -> Raw | None:
    if drift is None:
        return None
    word = "the traffic has left the active map" if drift.recommend else "too little to switch for"
    return el(
        "p",
        el("strong", f"Drift: {word}. "),
        f"On this window the active map leaves {percent(drift.active)} cold, a map made of it "
        f"{percent(drift.refit)}: a regret of {regret(drift.regret)} points "
        f"(95% interval {regret(drift.interval.low)} to {regret(drift.interval.high)}).",
    )


def classes(evidence: Evidence) -> Raw:
    """Every class's traffic under every class's map."""
    parts = [_matrix(evidence.matrix), _effects(evidence.effects)]
    return section("classes", "Other classes", *parts)


def _matrix(matrix: Matrix | None) -> Raw | None:
    if matrix is None or not matrix.classes:
        return None
    most = max((share for shares in matrix.shares for share in shares), default=0.0) or 1.0
    lines = []
    for i, (name, shares) in enumerate(zip(matrix.classes, matrix.shares, strict=False)):
        cells = []
        for j, share in enumerate(shares):
            tint = round(part(share, most) * (len(TINTS) - 1))
            kind = f"t{tint} diagonal" if i == j else f"t{tint}"
            cells.append(el("td", percent(share), class_=kind))
        worst = regret(matrix.regret[i]) if i < len(matrix.regret) else ""
        best = " (least)" if name == matrix.minimax else ""
        lines.append(row(f"map {name}", *cells, worst + best))
    heads = ("rows hot", *(f"traffic {name}" for name in matrix.classes), "worst regret, points")
    return join(
        [
            table(
                "Cold share of each class's traffic under each class's map; outlined: its own map, "
                "leave one session out",
                heads,
                lines,
                kind="matrix",
            ),
            el("p", _single(matrix)),
        ]
    )


def _single(matrix: Matrix) -> str:
    out = (
        f"If one map had to serve all classes it would be the map of {matrix.minimax}: regret is "
        "what a class loses against its own map, and its largest one is the least."
    )
    if matrix.blend_regret is None:
        return out
    ending = "and is refused" if matrix.blend_refused else "and is not refused"
    return f"{out} The best blend has a regret of {regret(matrix.blend_regret)} points {ending}."


def _effects(effects: tuple[Effect, ...]) -> Raw | None:
    if not effects:
        return None
    lines = [
        row(
            effect.traffic_class,
            percent(effect.now),
            percent(effect.then),
            points(effect.then - effect.now),
            "" if effect.tokens_per_second is None else band(effect.tokens_per_second),
        )
        for effect in effects
    ]
    heads = ("traffic", "cold share now", "then", "change, points", "tokens/s then")
    return table("What the switch would do to the lane's other classes", heads, lines)


def speed(evidence: Evidence) -> Raw:
    """What the shares mean in tokens a second, and the experts that a step reads."""
    both = columns(_roofline(evidence.roofline), _unique(evidence.unique))
    return section("speed", "Decode speed", both)


def _roofline(roof: Roofline | None) -> Raw | None:
    if roof is None:
        return None
    measured = (
        f"{number(roof.measured_tokens_per_second)} tokens/s at {percent(roof.measured_share)}"
    )
    cells = {
        "predicted with the new map": f"{band(roof.predicted)} tokens/s",
        "gain over a map drawn by lot": f"{roof.gain.low:+.0%} to {roof.gain.high:+.0%}",
        "ceiling (cold share 0)": f"{number(roof.ceiling)} tokens/s",
        "measured pair": measured,
        "concurrency": f"{roof.concurrency:,}",
        "rows a step": f"{roof.rows_per_step:,}",
        "link": f"{size(roof.link_bytes_per_second)}/s",
        "fast memory": f"{size(roof.memory_bytes_per_second)}/s",
        "slow bytes a token": size(roof.slow_bytes_per_token),
    }
    if roof.now is not None:
        cells = {"predicted now": f"{band(roof.now)} tokens/s", **cells}
    return pairs("Roofline: decode speed of one sequence", cells)


def _unique(unique: tuple[Unique, ...]) -> Raw | None:
    if not unique:
        return None
    lines = [
        row(
            f"{u.rows:,}",
            f"{u.expected:.1f}",
            "" if u.cold is None else percent(u.cold),
            "" if u.measured is None else f"{u.measured:.1f}",
        )
        for u in unique
    ]
    heads = ("rows a step", "expected if independent", "cold of them", "measured")
    return table("Distinct experts that a step reads, averaged over layers", heads, lines)
