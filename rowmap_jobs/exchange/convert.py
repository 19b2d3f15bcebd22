"""A row map in the terms of the writers."""

from __future__ import annotations

from ..formats.rowmap import RowMap
from .base import Ranking


def from_map(rows: RowMap) -> Ranking:
    """Hot rows hottest first, then the cold ones coldest last; how many are hot."""
    layers = {layer: rows.layers[str(layer)] for layer in rows.geometry.moe_layers}
    order = {layer: part.hot + part.cold[::-1] for layer, part in layers.items()}
    hot = {layer: len(part.hot) for layer, part in layers.items()}
    return Ranking(order, complete=True, hot=hot)
