"""What a model, census, row map or another system's file is, in facts for people and machines."""

from __future__ import annotations

import datetime
from collections import Counter
from typing import Any

import numpy as np

from ...exchange.base import Counts, Ranking
from ...formats.census import DECODE, FIDELITY, PREFILL
from ...formats.rowmap import RowMap, per_layer
from ...formats.status import HookStatus
from ...models.model import Model
from ...placement import hot_rows
from ...placement.budget import tier_bytes
from ...placement.rank import experts_of
from ...report.words import size
from ..inputs import CensusFile
from ..text import Fact, layers, span

MOST_LINES = 8
"""Tensors, and disagreements of configuration and headers, that are listed."""


def of_model(model: Model) -> list[Fact]:
    """Facts of a model."""
    evidence = {
        "headers": "its safetensors headers",
        "config": "config.json",
        "gguf": "its GGUF header",
    }
    row_bytes = model.row_bytes
    row = span(row_bytes.values())
    if len(set(row_bytes.values())) == 1:
        row += f" ({size(next(iter(row_bytes.values())))})"
    out = [
        ("model", f"{model.model_type or 'no model_type'}, by {evidence[model.evidence]}"),
        ("layers with experts", layers(model.layers)),
        ("experts a layer", f"{span(model.experts.values())}, top-{model.top_k}"),
        ("bytes of a row", row),
        ("rows", f"{sum(model.experts.values()):,}, {size(model.total_bytes)}"),
    ]
    layer, tensors = next(iter(model.tensors.items()))
    label = "a row" if len(set(model.tensors.values())) == 1 else f"a row of layer {layer}"
    for tensor in tensors[:MOST_LINES]:
        shape = " x ".join(map(str, tensor.shape)) or "1"
        out.append((label, f"{tensor.name}: {tensor.dtype} {shape}, {tensor.nbytes:,} bytes"))
        label = ""
    out += [(f"{whole.kind} layers", layers(whole.layers)) for whole in model.whole]
    if model.identity_experts:
        out.append(("identity experts", f"{model.identity_experts} without bytes: in no map"))
    differ = [str(each) for each in model.disagreements]
    if model.evidence == "headers":
        out.append(("config and headers", differ[0] if differ else "agree"))
    out += [("", line) for line in differ[1:MOST_LINES]]
    return [*out, *(("note", note) for note in model.notes)]


def of_census(file: CensusFile) -> list[Fact]:
    """Facts of a census; that it was read says that its checks hold."""
    census, header = file.census, file.census.header
    wire = census_wire(file)
    low, high = (moment(seconds) for seconds in header.window)
    capture = header.capture
    out = [
        ("class", header.traffic_class or "(none)"),
        ("window", f"{low} to {high}"),
        ("counted", f"{wire['sessions']:,} sessions, {wire['transcripts']:,} transcripts"),
        ("tokens", f"{wire['decodeTokens']:,} decode, {wire['prefillTokens']:,} prefill"),
        ("layers with experts", layers(census.layer_ids.tolist())),
        ("experts a layer", f"{span(census.experts.tolist())}, top-{span(census.top_k.tolist())}"),
        ("prompt tokens", span(census.prompt_len.tolist())),
        ("fidelity", ", ".join(f"{name} {n:,}" for name, n in wire["fidelity"].items())),
        ("hits of an expert", f"median {wire['hitsMedian']:g}, {wire['neverSeen']:,} never chosen"),
        ("capture", f"{capture.method}, {capture.engine} {capture.engine_version}"),
        ("missed", f"{capture.missed:,} rows, {capture.recomputed:,} recomputed"),
    ]
    if header.selection.skipped:
        skipped = sorted(header.selection.skipped.items())
        out.append(("not counted", ", ".join(f"{name} {n:,}" for name, n in skipped)))
    if census.steps is not None:
        out.append(("steps", f"{int(census.steps.sum()):,} with distinct experts"))
    return [
        *out,
        ("fingerprint", fingerprint_line(header.fingerprint)),
        ("checks", "selections = rows x top-k in every transcript, phase and layer"),
        ("sha256", file.digest),
    ]


def census_wire(file: CensusFile) -> dict[str, Any]:
    """The same for machines."""
    census, header = file.census, file.census.header
    words = Counter(FIDELITY[value] for value in census.fidelity.tolist())
    real = np.arange(census.counts.shape[3])[None, :] < census.experts[:, None]
    hits = census.decode()[real]
    return {
        "kind": "census",
        "class": header.traffic_class,
        "window": list(header.window),
        "sessions": len(np.unique(census.session)),
        "transcripts": len(census.created),
        "decodeTokens": int(census.rows[:, DECODE].sum()),
        "prefillTokens": int(census.rows[:, PREFILL].sum()),
        "layers": census.layer_ids.tolist(),
        "experts": census.experts.tolist(),
        "topK": census.top_k.tolist(),
        "fidelity": {name: words[name] for name in FIDELITY if words[name]},
        "hitsMedian": float(np.median(hits)),
        "neverSeen": int((hits == 0).sum()),
        "capture": header.capture.to_wire(),
        "selection": header.selection.to_wire(),
        "fingerprint": header.fingerprint.to_wire(),
        "digest": file.digest,
    }


def of_map(rows: RowMap) -> list[Fact]:
    """Facts of a row map."""
    geometry = rows.geometry
    fast, slow = tier_bytes(geometry)
    hot, experts = hot_rows(geometry), experts_of(geometry)
    order = "one over all layers" if rows.order is not None else "by layer"
    out = [
        ("layers with experts", layers(geometry.moe_layers)),
        ("experts a layer", f"{span(experts)}, top-{geometry.top_k}"),
        ("hot rows a layer", f"{span(hot)} ({sum(hot):,} of {sum(experts):,} rows)"),
        ("hot", size(fast)),
        ("cold", size(slow)),
        ("bytes of a row", span(per_layer(geometry.row_bytes, i) for i in geometry.moe_layers)),
        ("order", order),
    ]
    if geometry.whole_layers:
        out.append(("whole layers", layers(geometry.whole_layers)))
    return [
        *out,
        ("fingerprint", fingerprint_line(rows.fingerprint)),
        ("row set", rows.row_set_digest),
        ("sha256", rows.digest),
    ]


def map_wire(rows: RowMap) -> dict[str, Any]:
    """The same for machines."""
    fast, slow = tier_bytes(rows.geometry)
    return {
        "kind": "map",
        "digest": rows.digest,
        "rowSetDigest": rows.row_set_digest,
        "geometry": rows.geometry.to_wire(),
        "fingerprint": rows.fingerprint.to_wire(),
        "hotBytes": fast,
        "coldBytes": slow,
        "order": rows.order is not None,
    }


def of_status(status: HookStatus) -> list[Fact]:
    """Facts of a hook's status.json."""
    out = [
        ("engine", f"{status.engine} {status.engine_version}, runner {status.runner}"),
        ("hook", f"{status.hook_version}, mode {status.mode}, phase {status.phase}"),
        ("map", status.map_digest or "none"),
    ]
    if status.geometry is not None:
        out.append(("layers with experts", layers(status.geometry.moe_layers)))
    if status.fingerprint is not None:
        out.append(("fingerprint", fingerprint_line(status.fingerprint)))
    return out


def of_other(data: Counts | Ranking) -> list[Fact]:
    """Facts of another system's file that was read."""
    if isinstance(data, Ranking):
        out = [("layers", layers(list(data.order))), ("ranks", _ranks(data))]
    else:
        prefill = 0 if data.prefill is None else int(data.prefill.sum())
        out = [
            ("layers", layers(data.layout.layer_ids)),
            ("experts a layer", span(data.layout.experts)),
            ("sequences", f"{len(data.names):,}{'' if data.per_sequence else ' (sums only)'}"),
            ("selections", f"{int(data.decode.sum()):,} decode, {prefill:,} prefill"),
        ]
    return [*out, *(("note", note) for note in data.notes)]


def other_wire(name: str, data: Counts | Ranking) -> dict[str, Any]:
    """The same for machines."""
    out: dict[str, Any] = {"kind": name, "notes": list(data.notes)}
    if isinstance(data, Ranking):
        hot = None if data.hot is None else {str(k): v for k, v in sorted(data.hot.items())}
        return {**out, "layers": sorted(data.order), "complete": data.complete, "hotRows": hot}
    return {
        **out,
        "layers": list(data.layout.layer_ids),
        "experts": list(data.layout.experts),
        "sequences": len(data.names),
        "decodeSelections": int(data.decode.sum()),
        "prefillSelections": 0 if data.prefill is None else int(data.prefill.sum()),
    }


def _ranks(data: Ranking) -> str:
    told = span(len(order) for order in data.order.values())
    whole = "all experts" if data.complete else "some experts"
    hot = "" if data.hot is None else f", {span(data.hot.values())} hot"
    return f"{told} a layer ({whole}{hot})"


def fingerprint_line(fingerprint: Any) -> str:
    """The four parts of a fingerprint in short."""
    short = (getattr(fingerprint, name)[7:19] for name in ("shape", "router", "tokenizer"))
    shape, router, tokenizer = short
    return f"shape {shape}, router {router}, {fingerprint.quant}, tokenizer {tokenizer}"


def moment(seconds: int) -> str:
    """A moment in UTC; seconds that no calendar has as they are."""
    try:
        when = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return f"{seconds} s"
    return when.strftime("%Y-%m-%d %H:%M UTC")
