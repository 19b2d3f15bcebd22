"""Sections on cold shares: against other maps, by layer, the census behind them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..formats.evidence import Evidence
from ..formats.report import Report
from ..formats.rowmap import Geometry, per_layer
from . import heatmap
from .charts import Series, curve, layer_bars, layer_lines
from .markup import Raw, el
from .plots import Plots, experts_of, hot_of
from .tables import columns, details, figure, row, section, table, wide
from .words import MOST, number, percent


def by_lot(geometry: Geometry) -> float:
    """Share that a map drawn by lot leaves cold: the mean of 1 - H/E over layers."""
    layers = geometry.moe_layers
    return sum(
        1 - per_layer(geometry.hot_rows, layer) / per_layer(geometry.experts, layer)
        for layer in layers
    ) / len(layers)


def compared(report: Report) -> Raw:
    """The new map beside every other one, with bars to one scale."""
    if report.cold is None:
        return Raw("")
    cold, evidence = report.cold, report.evidence
    rows = [("own map, leave one session out", cold.own, "own")]
    if evidence is not None and evidence.change is not None:
        rows.append(("active map", evidence.change.active, "active"))
    rows += [(f"map of class {name}", share, "") for name, share in sorted(cold.others.items())]
    rows.append(("by position", cold.positional, ""))
    if evidence is not None:
        rows.append(("by lot", evidence.baselines.random, ""))
        rows.append(("oracle: each session under its own map", evidence.baselines.oracle, ""))
    elif report.geometry is not None:
        rows.append(("by lot", by_lot(report.geometry), ""))
    rows.append(("own map, in sample (flatters)", cold.in_sample, ""))
    span = report.own_interval if report.counted.sessions > 1 else None
    most = max([share for _, share, _ in rows] + [span[1] if span else 0.0]) or 1.0
    lines = []
    for name, share, kind in rows:
        mine = span if kind == "own" else None
        note = f"{percent(mine[0])} to {percent(mine[1])}" if mine else ""
        ends = (part(mine[0], most), part(mine[1], most)) if mine else None
        bar = _track(part(share, most), kind, ends)
        lines.append(row(name, percent(share), note, bar, here=kind == "own"))
    heads = ("rows hot", "cold share", "95% interval", f"bar: 0 to {percent(most)}")
    caption = "Cold share: decode selections of this class that wait for slow memory"
    return section("share", "Cold share", table(caption, heads, lines), _headroom(report))


def part(share: float, most: float) -> float:
    """`share` on a scale that ends at `most`, kept within 0 and 1."""
    return min(max(share / most, 0.0), 1.0)


def _track(length: float, kind: str, span: tuple[float, float] | None) -> Raw:
    bars = [el("i", class_=kind or None, style=f"width:{100 * length:.2f}%")]
    if span is not None:
        low, high = span
        style = f"left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"
        bars.append(el("i", class_="span", style=style))
    return el("td", el("span", *bars, class_="track", aria_hidden="true"))


def _headroom(report: Report) -> Raw | None:
    """What part of the possible gain is taken, of the better measured bound that there is."""
    evidence = report.evidence
    if evidence is not None and evidence.baselines.headroom is not None:
        return el(
            "p",
            f"Headroom used: {evidence.baselines.headroom:.0%} of the way from a map drawn by lot "
            "to the oracle, which no single map can reach.",
        )
    if report.headroom is not None:
        return el("p", f"Headroom used: {report.headroom:.0%} of what a map can gain in sample.")
    return None


def by_layer(report: Report, plots: Plots | None) -> Raw:
    """Cold share of each layer: all maps on one scale, and the own map on its own."""
    known = None if report.geometry is None else report.geometry.moe_layers
    rows = [layer for layer in report.layers if known is None or layer.layer in known]
    if not rows:
        return Raw("")
    layers = [layer.layer for layer in rows]
    own = [layer.own for layer in rows]
    series = [Series("own", "own map", own)]
    active = None if plots is None or known is None else plots.active_share()
    if active is not None and known is not None:
        shares = dict(zip(known, active.tolist(), strict=True))
        series.append(Series("active", "active map", [shares[layer] for layer in layers]))
    series.append(Series("position", "by position", [layer.positional for layer in rows]))
    means = ", ".join(f"{s.name} {percent(sum(s.values) / len(s.values))}" for s in series)
    compare = figure(
        "Cold share per layer",
        layer_lines(layers, series, f"Line chart of cold share per layer; means: {means}"),
        f"Mean over layers: {means}. Numbers: table Layers.",
    )
    worst = _worst(report, own, layers)
    listed = ", ".join(f"layer {layer} ({percent(own[layers.index(layer)])})" for layer in worst)
    alone = figure(
        "Own map per layer, on its own scale",
        layer_bars(layers, own, f"Bar chart of the own map's cold share; highest: {listed}", worst),
        f"Leave one session out. Highest: {listed}.",
    )
    return section("layers", "By layer", columns(compare, alone))


def _worst(report: Report, own: Sequence[float], layers: Sequence[int]) -> tuple[int, ...]:
    if report.evidence is not None and report.evidence.worst_layers:
        return tuple(layer for layer in report.evidence.worst_layers if layer in layers)
    order = sorted(range(len(layers)), key=lambda i: (-own[i], i))
    return tuple(layers[i] for i in order[:5])


def experts(report: Report, plots: Plots | None) -> Raw:
    """The selections by rank, the rank heatmap, and both as a table."""
    geometry = report.geometry
    if plots is None or geometry is None:
        return Raw("")
    layers, most = plots.counts.shape
    size = f"{layers} layers by {most} experts"
    ranks = figure(
        "Rank of every expert",
        heatmap.by_expert(plots, geometry, f"Heatmap of expert ranks, {size}"),
        f"{size}, ranked by decode selections within each layer. A light column is an expert id "
        "that is hot in many layers; offloading by position keeps the left part of every line.",
        heatmap.rank_legend(),
    )
    use = figure(
        "Selections by rank",
        heatmap.by_rank(
            plots, geometry, f"Heatmap of selections by rank with the border of hot rows, {size}"
        ),
        "Each layer's experts sorted by decode selections; the white line is the border: rows "
        "right of it are cold. A layer that is still light at the border wants more hot rows.",
        heatmap.use_legend(),
    )
    return section("experts", "Experts", use, ranks, _expert_table(geometry, plots))


def _expert_table(geometry: Geometry, plots: Plots) -> Raw:
    lines = []
    hot, experts_in = hot_of(geometry), experts_of(geometry)
    for index, layer in enumerate(geometry.moe_layers):
        counts = sorted(plots.counts[index, : experts_in[index]].tolist(), reverse=True)
        edge = int(hot[index])
        first = ", ".join(f"{e} ({percent(s)})" for e, s in heatmap.hottest(plots, index))
        cold = " ".join(map(str, heatmap.cold_rows(plots, geometry, index)))
        lines.append(
            row(
                str(layer),
                f"{edge} of {experts_in[index]}",
                f"{counts[edge - 1]:,}" if edge else "",
                f"{counts[edge]:,}" if edge < len(counts) else "",
                el("td", first, class_="left"),
                wide(cold or "none"),
            )
        )
    heads = (
        "layer",
        "hot rows",
        "selections, last hot rank",
        "selections, first cold rank",
        "hottest five (share)",
        "cold rows, coldest first",
    )
    caption = "Experts of each layer: the heatmaps in numbers"
    return details("Data: experts of each layer", table(caption, heads, lines, tall=True))


def census(evidence: Evidence) -> Raw:
    """Is the census large enough? Convergence, prompt lengths, support and skew."""
    numbers = [_support(evidence), _skew(evidence), _bands(evidence)]
    return section(
        "census",
        "Is this enough traffic?",
        _convergence(evidence),
        columns(*numbers, kind="thirds"),
        _never(evidence),
    )


def _convergence(evidence: Evidence) -> Raw | None:
    points = evidence.convergence
    if not points:
        return None
    xs = [float(min(point.tokens, MOST)) for point in points]
    first, last = points[0], points[-1]
    cold = curve(
        xs,
        Series("own", "cold share", [p.own for p in points]),
        f"Cold share falls from {percent(first.own)} at {first.tokens:,} tokens to "
        f"{percent(last.own)} at {last.tokens:,}",
        "decode tokens that the map was made of (log)",
    )
    alike = curve(
        xs,
        Series("position", "overlap", [p.overlap for p in points]),
        f"Overlap goes from {percent(first.overlap)} at {first.tokens:,} tokens to "
        f"{percent(last.overlap)} at {last.tokens:,}",
        "decode tokens that the map was made of (log)",
        top=1.0,
    )
    lines = [
        row(f"{p.tokens:,}", f"{p.sessions:,}", percent(p.own), percent(p.overlap)) for p in points
    ]
    heads = ("decode tokens", "sessions", "cold share", "overlap")
    return columns(
        figure(
            "Convergence: cold share of later sessions",
            cold,
            "The map of the first sessions, judged on all later ones. Flat at the right means "
            "that more traffic of this kind changes little.",
        ),
        figure(
            "Convergence: hot rows shared with the final map",
            alike,
            "The part of the final map's hot rows that the first sessions already find.",
        ),
        table("Convergence in numbers", heads, lines),
        kind="thirds",
    )


def _bands(evidence: Evidence) -> Raw | None:
    if not evidence.bands:
        return None
    lines = []
    for band in evidence.bands:
        end = "or more" if band.to_tokens is None else f"to {band.to_tokens:,}"
        name = f"{band.from_tokens:,} {end}"
        lines.append(row(name, f"{band.sessions:,}", f"{band.tokens:,}", percent(band.own)))
    heads = ("prompt tokens", "sessions", "decode tokens", "cold share")
    return table("Cold share by prompt length, leave one session out", heads, lines)


def _support(evidence: Evidence) -> Raw:
    support = evidence.support
    lines = [
        row("selections of an expert, median", number(support.hits_median)),
        row("selections of the last hot row, median over layers", number(support.hits_border)),
        row("experts with fewer than 20 selections", f"{support.under_20:,}"),
        row("experts never chosen", f"{support.never_seen:,}"),
        row("undecided border rows (within two standard errors)", f"{support.undecided:,}"),
    ]
    if evidence.halves is not None:
        lines.append(row("hot rows that two halves share", percent(evidence.halves.overlap)))
    return table("Support of the border between hot and cold", ("what", "value"), lines)


def _never(evidence: Evidence) -> Raw | None:
    if not evidence.support.never:
        return None
    never = [
        row(layer, wide(" ".join(map(str, ids))))
        for layer, ids in sorted(
            evidence.support.never.items(), key=lambda item: _layer_key(item[0])
        )
    ]
    listed = table("Experts never chosen in decode", ("layer", "experts"), never, tall=True)
    return details("Data: experts never chosen", listed)


def _layer_key(name: str) -> tuple[int, int, str]:
    """Layers by number; names that are none come last."""
    return (0, int(name), name) if name.isascii() and name.isdigit() else (1, 0, name)


def _skew(evidence: Evidence) -> Raw:
    skew = evidence.skew
    lines = [
        row("Gini index", f"{skew.gini:.3f}"),
        row("Gini index of use by lot, 95th percentile", f"{skew.gini_uniform:.3f}"),
        row("entropy (1 is flat)", f"{skew.entropy:.3f}"),
        row("selections of the hottest 1% of experts", percent(skew.top1)),
        row("selections of the hottest 5%", percent(skew.top5)),
        row("selections of the hottest 10%", percent(skew.top10)),
        row("hottest expert by the mean", f"{skew.max_by_mean:.1f}"),
    ]
    return table("Skew, averaged over layers", ("what", "value"), lines)
