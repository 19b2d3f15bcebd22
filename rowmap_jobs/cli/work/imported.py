"""Another system's counts as a census, and its placement as a row map."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...census.baseline import split_draft, subtract
from ...census.merge import merge
from ...exchange import registry
from ...exchange.adapters import Known
from ...exchange.base import Counts, Layout, Ranking
from ...exchange.census_io import Origin, native_capture, to_census
from ...exchange.files import list_folder
from ...exchange.streams import opened
from ...exchange.tables import require_layers
from ...formats.base import FormatError, canonical_json, sha256_digest
from ...formats.census import Census
from ...formats.rowmap import Fingerprint, Geometry, RowMap, build, per_layer
from ...models.model import Model
from ...placement.budget import Shape, explicit, with_rows

ENGINES = {
    "recipe": "vLLM",
    "vllm-routed-experts": "vLLM",
    "sglang-counts": "SGLang",
    "trtllm-statistics": "TensorRT-LLM",
    "llamacpp-trace": "llama.cpp",
    "llamacpp-pin": "llama.cpp",
    "imatrix": "llama.cpp",
    "exllamav3-npz": "exllamav3",
    "exllamav3": "exllamav3",
    "exllamav3-json": "exllamav3",
    "b12x": "b12x",
    "route-trace": "BigMoeOnEdge",
}
"""What counted, by format; `jsonl` may be anybody's."""
UNBOUND = "unbound"
"""`quant` of a fingerprint that is no lane's."""
_STEP = 1 << 20


@dataclass(frozen=True)
class Source:
    """A file that was read, and what its census will say of it."""

    path: Path
    form: str
    data: Counts | Ranking
    created: int
    """Unix seconds."""
    digest: str


def read(path: Path, form: str, known: Known, created: int | None) -> Source:
    """Read a file or folder whose format is named. Raises FormatError."""
    data = registry.read(path, form, known)
    when = int(path.stat().st_mtime) if created is None else created
    return Source(path, form, data, when, content_digest(path))


def content_digest(path: Path) -> str:
    """sha256 of a file, or of the names and sha256 of the files in a folder. Raises FormatError."""
    if path.is_dir():
        files = list_folder(path, str(path))
        return sha256_digest(canonical_json([[_name(f), content_digest(f)] for f in files]))
    digest = hashlib.sha256()
    with opened(path, str(path)) as stream:
        while piece := stream.read(_STEP):
            digest.update(piece)
    return f"sha256:{digest.hexdigest()}"


def _name(path: Path) -> str:
    # A name may hold bytes that are no UTF-8.
    return path.name.encode("utf-8", "surrogateescape").hex()


def unbound(model: Model) -> Fingerprint:
    """A fingerprint of a model's headers alone, where a lane's cannot be told from its files.

    It tells models apart, and no lane takes a map that has it.
    """
    shape = sha256_digest(canonical_json({UNBOUND: model.to_wire()["tensors"]}))
    other = sha256_digest(canonical_json({UNBOUND: [shape, model.model_type]}))
    return Fingerprint(shape=shape, router=other, quant=UNBOUND, tokenizer=other)


def sessions(names: Sequence[str], by: str, source: str) -> tuple[int, ...] | None:
    """Session numbers of sequences: `sequence` (None: each its own), `file` (all one), or a
    pattern whose first group (or whole match) names the session. Raises FormatError for a name
    without a match.
    """
    if by == "sequence":
        return None
    if by == "file":
        return (0,) * len(names)
    pattern = re.compile(by)
    numbers: dict[str, int] = {}
    out = []
    for name in names:
        match = pattern.search(name)
        if match is None:
            raise FormatError(source, "sequence", name, f"a name that matches {by}")
        key = match[1] if pattern.groups and match[1] is not None else match[0]
        out.append(numbers.setdefault(key, len(numbers)))
    return tuple(out)


def census_of(
    source: Source,
    layout: Layout,
    fingerprint: Fingerprint,
    traffic_class: str,
    session_by: str = "sequence",
    baseline: Counts | None = None,
    engine_version: str = "unknown",
) -> tuple[Census, tuple[str, ...]]:
    """The census of a file of counts, and notes on what was left out.

    `layout` is the model's; layers behind its last are a draft model's and are left out.
    `baseline` is a dump of the same process before any traffic. Raises FormatError.
    """
    name = str(source.path)
    counts = source.data
    if isinstance(counts, Ranking):
        raise FormatError(name, "file", "an order of experts without counts", "counts")
    if baseline is not None:
        counts = subtract(counts, baseline, name)
    counts, _ = split_draft(counts, layout.layer_ids, name)
    capture = native_capture(ENGINES.get(source.form, "unknown"), engine_version, "")
    origin = Origin(
        traffic_class=traffic_class,
        window=(source.created, source.created),
        capture=capture.model_copy(update={"hook_digest": source.digest}),
        sessions=sessions(counts.names, session_by, name),
    )
    return to_census(counts, layout, fingerprint, origin, name), counts.notes


def together(censuses: Sequence[Census], names: Sequence[str]) -> Census:
    """One census of those of several files, which `names` are. Raises FormatError."""
    return censuses[0] if len(censuses) == 1 else merge(censuses, "import", names)


def map_of(
    source: Source, shape: Shape, fingerprint: Fingerprint, hot: Sequence[int] | None = None
) -> tuple[RowMap, tuple[str, ...]]:
    """The row map of another system's placement, and its notes.

    `hot` are the hot rows of each layer, needed where the file does not say them; an incomplete
    order lists the hot experts, and the others follow by id. Raises FormatError.
    """
    name = str(source.path)
    ranking = source.data
    if isinstance(ranking, Counts):
        raise FormatError(name, "file", "counts", "a placement")
    listed = {layer: order for layer, order in ranking.order.items() if order}
    if ranking.complete:
        require_layers(listed, shape.moe_layers, name)
    extra = sorted(set(listed) - set(shape.moe_layers))
    if extra:
        expected = f"one of the model's layers {list(shape.moe_layers)}"
        raise FormatError(name, "layers", f"layer {extra[0]}", expected)
    orders = {
        layer: _filled(listed.get(layer, ()), per_layer(shape.experts, layer), name, layer)
        for layer in shape.moe_layers
    }
    if hot is None:
        hot = [_hot(ranking, layer, name) for layer in shape.moe_layers]
    geometry = with_rows(shape, explicit(shape, hot))
    return _split(orders, fingerprint, geometry), ranking.notes


def _hot(ranking: Ranking, layer: int, source: str) -> int:
    if ranking.hot is not None:
        return ranking.hot.get(layer, 0)
    if not ranking.complete:
        return len(ranking.order.get(layer, ()))
    raise FormatError(source, "hot rows", "an order without them", "a number of hot rows (--hot)")


def _filled(order: Sequence[int], experts: int, source: str, layer: int) -> list[int]:
    """All experts of a layer: those listed, then the others by id."""
    bad = [expert for expert in order if not 0 <= expert < experts]
    if bad or len(set(order)) != len(order):
        found = f"expert {bad[0]}" if bad else "an expert twice"
        raise FormatError(source, f"layer {layer}", found, f"each of 0..{experts - 1} once")
    rest = sorted(set(range(experts)) - set(order))
    return [*order, *rest]


def _split(orders: dict[int, list[int]], fingerprint: Fingerprint, geometry: Geometry) -> RowMap:
    layers = {}
    for layer, order in orders.items():
        hot = per_layer(geometry.hot_rows, layer)
        layers[layer] = (order[:hot], order[hot:][::-1])
    return build(fingerprint, geometry, layers)


def relabelled(census: Census, traffic_class: str) -> Census:
    """The census under another class's name."""
    header = census.header.model_copy(update={"traffic_class": traffic_class})
    return replace(census, header=header)
