"""Layers of a geometry in the order of a census, and whether the two belong together."""

from __future__ import annotations

from ..formats.base import FormatError
from ..formats.census import Census
from ..formats.rowmap import Geometry, RowMap, per_layer


def sizes(geometry: Geometry) -> list[tuple[int, int]]:
    """(experts, hot rows) of each layer in the order of moeLayers."""
    return [
        (per_layer(geometry.experts, layer), per_layer(geometry.hot_rows, layer))
        for layer in geometry.moe_layers
    ]


def check_census(census: Census, geometry: Geometry, source: str = "census") -> None:
    """A census and a geometry must speak of the same layers, experts and top-k.

    Raises FormatError that names `source` and the first difference.
    """
    layers = [int(layer) for layer in census.layer_ids]
    if layers != list(geometry.moe_layers):
        raise FormatError(source, "layer_ids", layers, f"{list(geometry.moe_layers)}")
    for index, layer in enumerate(layers):
        for place, found, expected in (
            ("experts", int(census.experts[index]), per_layer(geometry.experts, layer)),
            ("top_k", int(census.top_k[index]), geometry.top_k),
        ):
            if found != expected:
                raise FormatError(source, f"{place} of layer {layer}", found, f"{expected}")


def check_map(rows: RowMap, geometry: Geometry, source: str) -> None:
    """A map that is compared must speak of the same layers and experts; hot rows may differ.

    Raises FormatError that names `source` and the first difference.
    """
    if rows.geometry.moe_layers != geometry.moe_layers:
        found, expected = list(rows.geometry.moe_layers), list(geometry.moe_layers)
        raise FormatError(source, "moeLayers", found, f"{expected}")
    for layer in geometry.moe_layers:
        experts = per_layer(rows.geometry.experts, layer)
        wanted = per_layer(geometry.experts, layer)
        if experts != wanted:
            raise FormatError(source, f"experts of layer {layer}", experts, f"{wanted}")
