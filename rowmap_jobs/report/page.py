"""report.html: a report as one self-contained page (no network, no script, light and dark). Pure.

The order is that of a reader with a decision to make: the word, the numbers, what to do; what to
know; then the plots; then every number that they were drawn from.
"""

from __future__ import annotations

import datetime

from ..formats.report import Report
from ..formats.rowmap import PerLayer, per_layer
from . import changes, shares, style, words
from .markup import Raw, el
from .plots import Plots
from .tables import pairs, row, section, table, wide

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
"""Content security policy: nothing may be loaded or run, the page's own style and images aside."""


def render(report: Report, plots: Plots | None = None) -> str:
    """The whole page; every string of the report is escaped. Equal input gives equal bytes.

    Raises ValueError when the arrays of `plots` are not of the report's geometry.
    """
    if plots is not None and report.geometry is not None:
        plots.fits(report.geometry)
    evidence = report.evidence
    sections = [
        shares.compared(report),
        shares.by_layer(report, plots),
        shares.experts(report, plots),
        changes.in_force(report, plots),
    ]
    if evidence is not None:
        sections += [changes.classes(evidence), shares.census(evidence), changes.speed(evidence)]
    sections += [_layers(report, plots), _counted(report), _provenance(report)]
    main = el("main", _hero(report), _contents(sections), _notes(report), *sections)
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("meta", name="viewport", content="width=device-width,initial-scale=1"),
        el("meta", name="referrer", content="no-referrer"),
        el("meta", name="color-scheme", content="light dark"),
        # Without an icon of its own a browser asks the server for one.
        el("link", rel="icon", href="data:,"),
        el("title", f"{words.title(report)}: {report.verdict}"),
        el("style", Raw(style.sheet())),
    )
    body = el("body", main, _footer(report))
    return "<!doctype html>" + el("html", head, body, lang="en") + "\n"


def tone(report: Report) -> str:
    """Class of the verdict's colour."""
    if not report.accepted or report.verdict == "no_skew":
        return "bad"
    return "good" if report.verdict == "ready" else "warn"


def _hero(report: Report) -> Raw:
    facts = [
        el(
            "div",
            el("dt", fact.label),
            el("dd", fact.value, class_="value"),
            el("dd", fact.detail, class_="detail") if fact.detail else None,
        )
        for fact in words.facts(report)
    ]
    return el(
        "header",
        el("h1", words.title(report)),
        el(
            "div",
            el("p", report.verdict, class_="word"),
            el("p", words.decision(report), class_="decision"),
            el("dl", *facts, class_="facts"),
            el("p", el("strong", "What to do: "), words.todo(report), class_="todo"),
            el("p", report.message, class_="message"),
            class_=f"hero {tone(report)}",
        ),
    )


def _notes(report: Report) -> Raw:
    items = [el("li", note) for note in report.notes]
    return section("notes", "To know", el("ul", *items)) if items else Raw("")


def _contents(sections: list[Raw]) -> Raw:
    """Links to the sections that the page has."""
    links = []
    for anchor, name in _NAMES:
        if any(f'<section id="{anchor}"' in part for part in sections):
            links.append(el("li", el("a", name, href=f"#{anchor}")))
    return el("nav", el("ul", *links), aria_label="Sections")


_NAMES = (
    ("share", "Cold share"),
    ("layers", "By layer"),
    ("experts", "Experts"),
    ("change", "Against the active map"),
    ("classes", "Other classes"),
    ("census", "Is this enough traffic?"),
    ("speed", "Decode speed"),
    ("table", "Layers"),
    ("counted", "Counted"),
    ("provenance", "Provenance"),
)


def _layers(report: Report, plots: Plots | None) -> Raw:
    if report.geometry is None:
        return Raw("")
    index = {layer: i for i, layer in enumerate(report.geometry.moe_layers)}
    layers = [layer for layer in report.layers if layer.layer in index]
    if not layers:
        return Raw("")
    names = sorted({name for layer in layers for name in layer.others})
    active = None if plots is None else plots.active_share()
    moved = None if plots is None else plots.moved()
    lines = []
    for layer in layers:
        cells = [words.percent(layer.own)]
        if active is not None and moved is not None:
            cells.append(words.percent(float(active[index[layer.layer]])))
        cells.append(words.percent(layer.positional))
        for name in names:
            cells.append(words.percent(layer.others[name]) if name in layer.others else "")
        hot = per_layer(report.geometry.hot_rows, layer.layer)
        experts = per_layer(report.geometry.experts, layer.layer)
        cells.append(f"{hot} of {experts}")
        if moved is not None:
            cells.append(f"{int(moved[index[layer.layer]]):,}")
        lines.append(row(str(layer.layer), *cells, str(layer.never_seen), str(layer.undecided)))
    heads = ["layer", "own", *(["active map"] if active is not None else []), "by position"]
    heads += [f"map {name}" for name in names] + ["hot rows"]
    heads += [*(["rows changed"] if moved is not None else []), "never chosen", "undecided"]
    note = el("p", "Undecided: rows whose side of the border is within two standard errors.")
    return section(
        "table", "Layers", table("Cold share and border of each layer", heads, lines), note
    )


def _counted(report: Report) -> Raw:
    numbers = report.counted
    rows = {
        "sessions": numbers.sessions,
        "transcripts": numbers.transcripts,
        "decode tokens": numbers.decode_tokens,
        "prefill tokens": numbers.prefill_tokens,
        "transcripts considered": numbers.considered,
        **{f"ids: {name}": n for name, n in numbers.fidelity.items()},
        **{f"not counted: {name}": n for name, n in numbers.skipped.items()},
        **{f"rendering refused: {name}": n for name, n in report.rendering_refused.items()},
    }
    if report.trick_check is not None:
        rows |= {f"forced against real decode: {k}": v for k, v in report.trick_check.items()}
    cells = {name: f"{value:,}" for name, value in rows.items()}
    if report.off_policy is not None:
        cells["recorded text, top-1 share"] = f"{report.off_policy.top1:.1%}"
        cells["recorded text, nats a token"] = f"{report.off_policy.mean_logprob:.3f}"
    return section("counted", "Counted", pairs("What was counted and what was not", cells))


def _provenance(report: Report) -> Raw:
    capture = report.capture
    cells = {
        "run": report.run or "none",
        "created": time(report.created),
        "window": f"{time(report.window[0])} to {time(report.window[1])}",
        "map": report.digest or "none",
        "row set": report.row_set_digest or "none",
        "census": report.census_digest,
        "engine": f"{capture.engine} {capture.engine_version} (runner {capture.runner})",
        "capture": f"{capture.method}, missed {capture.missed}, recomputed {capture.recomputed}",
        "hook": capture.hook_digest or "none",
        "model shape": report.fingerprint.shape,
        "router": report.fingerprint.router,
        "weights": report.fingerprint.quant,
        "tokenizer": report.fingerprint.tokenizer,
        "sample": f"seed {report.selection.seed}",
    }
    if report.geometry is not None:
        cells["row bytes"] = _bytes(report.geometry.row_bytes)
    lines = [row(name, wide(value)) for name, value in cells.items()]
    return section("provenance", "Provenance", table("Where the numbers come from", (), lines))


def _footer(report: Report) -> Raw:
    return el(
        "footer",
        "" if report.run is None else f"Run {report.run}, ",
        f"{time(report.created)}. This page loads nothing; the same numbers are in report.json.",
    )


def _bytes(value: PerLayer) -> str:
    """Bytes of a row; by layer only where layers differ."""
    sizes = {value} if isinstance(value, int) else set(value.values())
    return ", ".join(f"{size:,}" for size in sorted(sizes))


def time(seconds: int) -> str:
    """A moment in UTC; seconds that no calendar has as they are."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s"
    return moment.strftime("%Y-%m-%d %H:%M UTC")
