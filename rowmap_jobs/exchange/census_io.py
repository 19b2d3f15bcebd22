"""Counts of another system's file as a census, and a census as counts.

A file of counts seldom says which model it is of: layout and fingerprint come from the caller and
are the model's. The layout is compared, not adapted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..census.baseline import cross_check
from ..formats.base import FormatError, sha256_digest
from ..formats.census import (
    DECODE,
    FIDELITY,
    PREFILL,
    Capture,
    Census,
    CensusHeader,
    Selection,
    check,
)
from ..formats.rowmap import Fingerprint, Geometry, per_layer
from ..formats.status import ModelGeometry
from .base import I64, Counts, Layout
from .tables import require_layers

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Origin:
    """Where counts come from, for the census header."""

    traffic_class: str
    window: tuple[int, int]
    """Unix seconds: from, to."""
    capture: Capture
    """`native_capture` makes one."""
    fidelity: str = "live"
    """One of formats.census.FIDELITY; what an engine counted as it served is live."""
    sessions: tuple[int, ...] | None = None
    """Session of each sequence; without it each is its own."""


def native_capture(engine: str, engine_version: str, imported: bytes | str) -> Capture:
    """A capture by an engine's own means; `imported` names or is what was imported.

    The header has one digest for what did the counting: for an import it is that of the file.
    """
    data = imported if isinstance(imported, bytes) else imported.encode()
    return Capture(
        method="native",
        engine=engine,
        engine_version=engine_version,
        runner="",
        hook_digest=sha256_digest(data),
        missed=0,
        recomputed=0,
    )


def layout_of(geometry: Geometry | ModelGeometry) -> Layout:
    """The layout of a map's or a model's geometry."""
    layers = geometry.moe_layers
    experts = tuple(per_layer(geometry.experts, layer) for layer in layers)
    return Layout(layers, experts, (geometry.top_k,) * len(layers))


def to_census(
    counts: Counts, layout: Layout, fingerprint: Fingerprint, origin: Origin, source: str
) -> Census:
    """A census of one transcript for each sequence.

    `layout` is the model's, with top-k. Rows that the file does not have follow from counts and
    top-k. Without prefill its counts and rows are zero. The prompt of a sequence is as long as its
    prefill rows, and it was made at the end of the window. A name of 64 hex digits (`from_census`
    gives such) is the transcript's id; other ids are hashes of name and counts. Raises FormatError:
    another layout than the model's, sums that are not rows x top-k in every layer, and whatever
    else a census may not have.
    """
    fitted = replace(counts, layout=_agreed(counts.layout, layout, source))
    if fitted.decode.size == 0:
        raise FormatError(source, "sequences", "none", "one at least")
    rows = cross_check(fitted, source)
    total = len(fitted.names)
    if not len(fitted.decode) == total == len(rows):
        expected = f"{len(fitted.decode)}, one for each sequence"
        raise FormatError(source, "names", f"{total} names", expected)
    if origin.fidelity not in FIDELITY:
        raise FormatError(source, "fidelity", origin.fidelity, f"one of {', '.join(FIDELITY)}")
    census = Census(
        header=_header(fingerprint, origin, total),
        counts=_both(fitted),
        rows=rows,
        layer_ids=np.array(layout.layer_ids, dtype=np.int32),
        experts=np.array(layout.experts, dtype=np.int32),
        top_k=np.array(layout.top_k, dtype=np.int32),
        session=np.array(_sessions(origin.sessions, total, source), dtype=np.int32),
        transcript_id=np.frombuffer(
            b"".join(_id(fitted, t) for t in range(total)), dtype=np.uint8
        ).reshape(total, 32),
        fidelity=np.full(total, FIDELITY.index(origin.fidelity), dtype=np.uint8),
        prompt_len=np.minimum(rows[:, PREFILL], np.iinfo(np.int32).max).astype(np.int32),
        created=np.full(total, origin.window[1], dtype=np.int64),
        steps=fitted.steps,
        touched=fitted.touched,
    )
    check(census, source)
    return census


def _agreed(found: Layout, model: Layout, source: str) -> Layout:
    """The model's layout, when the counts have its layers, experts and top-k."""
    require_layers(found.layer_ids, model.layer_ids, source)
    if found.layer_ids != model.layer_ids:
        raise FormatError(source, "layers", list(found.layer_ids)[:8], "ascending layer ids")
    for layer, has, should in zip(model.layer_ids, found.experts, model.experts, strict=True):
        if has != should:
            raise FormatError(source, f"layer {layer}", f"{has} experts", f"{should}, the model's")
    if model.top_k is None:
        raise FormatError(source, "top-k", "none", "the model's top-k")
    for layer, k, should in zip(
        model.layer_ids, found.top_k or model.top_k, model.top_k, strict=True
    ):
        if k != should:
            raise FormatError(source, f"layer {layer}", f"top-k {k}", f"{should}, the model's")
    return model


def _header(fingerprint: Fingerprint, origin: Origin, total: int) -> CensusHeader:
    return CensusHeader(
        fingerprint=fingerprint,
        traffic_class=origin.traffic_class,
        window=origin.window,
        capture=origin.capture,
        selection=Selection(seed=0, considered=total, used=total),
    )


def _both(counts: Counts) -> I64:
    """int64[T,2,L,E]; the width is that of the layer with most experts."""
    total, layers = counts.decode.shape[:2]
    width = max(counts.layout.experts)
    out = np.zeros((total, 2, layers, width), dtype=np.int64)
    for phase, table in ((PREFILL, counts.prefill), (DECODE, counts.decode)):
        if table is not None:
            # What lies beyond the width are columns of no layer's experts.
            out[:, phase, :, : table.shape[2]] = table[:, :, :width]
    return out


def _sessions(given: Sequence[int] | None, total: int, source: str) -> Sequence[int]:
    if given is None:
        return range(total)
    if len(given) != total:
        raise FormatError(source, "sessions", f"{len(given)} sessions", f"{total}, one a sequence")
    return given


def _id(counts: Counts, t: int) -> bytes:
    if _HEX.fullmatch(counts.names[t]):
        return bytes.fromhex(counts.names[t])
    # A file's name may hold bytes that are no UTF-8.
    name = counts.names[t].encode("utf-8", "surrogatepass")
    digest = hashlib.sha256(name + b"\0")
    digest.update(np.ascontiguousarray(counts.decode[t]).tobytes())
    if counts.prefill is not None:
        digest.update(np.ascontiguousarray(counts.prefill[t]).tobytes())
    return digest.digest()


def from_census(census: Census) -> Counts:
    """Counts of each transcript, named by its id in hex; nothing is summed."""
    return Counts(
        layout=Layout(
            tuple(census.layer_ids.tolist()),
            tuple(census.experts.tolist()),
            tuple(census.top_k.tolist()),
        ),
        decode=census.counts[:, DECODE],
        prefill=census.counts[:, PREFILL],
        rows=census.rows,
        names=tuple(bytes(row).hex() for row in census.transcript_id),
        per_sequence=True,
        steps=census.steps,
        touched=census.touched,
    )
