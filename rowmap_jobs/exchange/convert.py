"""Our own artifacts in the terms of the writers: a census as Counts, a map as a Ranking."""

from __future__ import annotations

from ..formats.census import DECODE, PREFILL, Census
from ..formats.rowmap import RowMap
from .base import Counts, Layout, Ranking


def from_census(census: Census) -> Counts:
    """Counts of every transcript, named by its place; nothing is summed."""
    layout = Layout(
        tuple(census.layer_ids.tolist()),
        tuple(census.experts.tolist()),
        tuple(census.top_k.tolist()),
    )
    return Counts(
        layout,
        census.counts[:, DECODE],
        census.counts[:, PREFILL],
        census.rows,
        tuple(bytes(row).hex() for row in census.transcript_id),
        per_sequence=True,
    )


def from_map(rows: RowMap) -> Ranking:
    """Hot rows hottest first, then the cold ones coldest last; how many are hot."""
    layers = {layer: rows.layers[str(layer)] for layer in rows.geometry.moe_layers}
    order = {layer: part.hot + part.cold[::-1] for layer, part in layers.items()}
    hot = {layer: len(part.hot) for layer, part in layers.items()}
    return Ranking(order, complete=True, hot=hot)
