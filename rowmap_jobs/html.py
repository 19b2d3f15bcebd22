"""report.html: a report as one self-contained page (no network, light and dark). Pure."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from html import escape

from .formats.report import Report
from .formats.rowmap import Geometry, PerLayer, per_layer

STYLE = """
:root{color-scheme:light dark;--line:#8884;--bar:#3b7dd8;--good:#1a7f37;--bad:#b3261e}
@media(prefers-color-scheme:dark){:root{--bar:#6ea8ff;--good:#58c377;--bad:#ff8a80}}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0}h2{font-size:1.1rem;margin-top:2rem}
.word{font-size:2rem;font-weight:700}.yes{color:var(--good)}.no{color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%}
th,td{border-bottom:1px solid var(--line);padding:.25rem .5rem;text-align:right}
th:first-child,td:first-child{text-align:left}
.bar{display:inline-block;height:.7em;background:var(--bar)}
code{overflow-wrap:anywhere}
"""

ADVICE = {
    "insufficient": "Record more traffic: below 1,000 decode tokens a map is made of noise.",
    "provisional": "Usable, but record more: 8,000 decode tokens of 12 sessions make it firm.",
    "ready": "Nothing to do; measure again when the traffic changes.",
    "no_skew": "Do not deploy a map for this class: its traffic uses all experts alike.",
}


def render(report: Report) -> str:
    """The whole page; every string of the report is escaped."""
    title = f"{report.lane or 'map'}.{report.traffic_class}: {report.verdict}"
    body = "".join(
        [
            _head(report),
            _shares(report),
            _notes(report),
            _layers(report),
            _counted(report),
            _provenance(report),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _head(report: Report) -> str:
    decision = "accepted" if report.accepted else f"rejected: {report.reason}"
    lane = report.lane or "none"
    css = "yes" if report.accepted else "no"
    advice = "" if not report.accepted and report.verdict == "ready" else ADVICE[report.verdict]
    return (
        f'<p class="word {css}">{escape(report.verdict)}</p>'
        f"<h1>Expert map of class {escape(report.traffic_class)} on lane {escape(lane)}: "
        f'<span class="{css}">{escape(decision)}</span></h1>'
        f"<p>{escape(report.message)}</p><p><strong>{escape(advice)}</strong></p>"
    )


def _shares(report: Report) -> str:
    if report.cold is None:
        return ""
    cold = report.cold
    rows = [("own map, leave one session out", cold.own, _interval(report))]
    rows.append(("own map, in sample (flatters)", cold.in_sample, ""))
    rows += [(f"map of class {name}", share, "") for name, share in sorted(cold.others.items())]
    rows.append(("by position", cold.positional, ""))
    if report.geometry is not None:
        rows.append(("by lot", by_lot(report.geometry), ""))
    most = max(share for _, share, _ in rows) or 1.0
    lines = [
        f"<tr><td>{escape(name)}</td><td>{share:.2%}</td><td>{note}</td>"
        f'<td style="text-align:left"><span class="bar" style="width:{10 * share / most:.2f}rem">'
        "</span></td></tr>"
        for name, share, note in rows
    ]
    head = "" if report.headroom is None else f"<p>Headroom used: {report.headroom:.0%}</p>"
    return (
        "<h2>Cold share: decode selections left in slow memory</h2>"
        + _table(("rows hot", "share", "95% interval", ""), lines)
        + head
    )


def _interval(report: Report) -> str:
    if report.own_interval is None:
        return ""
    low, high = report.own_interval
    return f"{low:.2%} to {high:.2%}"


def by_lot(geometry: Geometry) -> float:
    """Share that a map drawn by lot leaves cold: the mean of 1 - H/E over layers."""
    layers = geometry.moe_layers
    return sum(
        1 - per_layer(geometry.hot_rows, layer) / per_layer(geometry.experts, layer)
        for layer in layers
    ) / len(layers)


def _notes(report: Report) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f"<h2>To know</h2><ul>{items}</ul>" if items else ""


def _layers(report: Report) -> str:
    if not report.layers or report.geometry is None:
        return ""
    names = sorted({name for layer in report.layers for name in layer.others})
    lines = []
    for layer in report.layers:
        cells = [f"{layer.own:.2%}", f"{layer.positional:.2%}"]
        cells += [f"{layer.others[name]:.2%}" if name in layer.others else "" for name in names]
        hot = per_layer(report.geometry.hot_rows, layer.layer)
        experts = per_layer(report.geometry.experts, layer.layer)
        cells += [f"{hot} of {experts}", str(layer.never_seen), str(layer.undecided)]
        lines.append(f"<tr><td>{layer.layer}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>")
    heads = ["layer", "own", "by position", *(f"map {n}" for n in names)]
    heads += ["hot rows", "never chosen", "undecided"]
    return (
        "<h2>Layers</h2>"
        + _table(heads, lines)
        + "<p>Undecided: rows whose side of the border is within two standard errors.</p>"
    )


def _counted(report: Report) -> str:
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
    return "<h2>Counted</h2>" + _pairs(cells)


def _provenance(report: Report) -> str:
    cells = {
        "run": report.run or "none",
        "created": _time(report.created),
        "window": f"{_time(report.window[0])} to {_time(report.window[1])}",
        "map": report.digest or "none",
        "row set": report.row_set_digest or "none",
        "census": report.census_digest,
        "engine": f"{report.capture.engine} {report.capture.engine_version} "
        f"(runner {report.capture.runner})",
        "capture": f"{report.capture.method}, missed {report.capture.missed}, recomputed "
        f"{report.capture.recomputed}",
        "hook": report.capture.hook_digest or "none",
        "model shape": report.fingerprint.shape,
        "router": report.fingerprint.router,
        "weights": report.fingerprint.quant,
        "tokenizer": report.fingerprint.tokenizer,
        "sample": f"seed {report.selection.seed}",
    }
    if report.geometry is not None:
        cells["row bytes"] = _per_layer(report.geometry.row_bytes)
    return "<h2>Provenance</h2>" + _pairs(cells)


def _per_layer(value: PerLayer) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{sorted(set(value.values()))}"


def _time(seconds: int) -> str:
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _pairs(cells: Mapping[str, str]) -> str:
    lines = [
        f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>"
        for name, value in cells.items()
    ]
    return _table((), lines)


def _table(heads: Iterable[str], lines: Iterable[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    head = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'
