"""The row map: which expert rows of each MoE layer are hot (fast memory) and cold (slow memory)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from .base import Digest, FormatError, MisfitError, Strict, canonical_json, load_json, sha256_digest

MAX_MAP_BYTES = 1 << 20
"""What fits into a ConfigMap."""

PerLayer = int | dict[str, int]
"""One integer for all layers, or `{absolute layer id: integer}`."""


class Fingerprint(Strict):
    """What a map is valid for; computed by the hook inside the engine."""

    shape: Digest = Field(description="Hash of tensor names, shapes and types of all MoE layers.")
    router: Digest = Field(description="Hash of the checkpoint's gate weights in layer order.")
    quant: str = Field(min_length=1, max_length=64, description="Weight format, such as bf16.")
    tokenizer: Digest = Field(description="sha256 of the tokenizer's file.")


class Geometry(Strict):
    """The shape of a map; equal for all maps of one lane."""

    experts: PerLayer
    top_k: int = Field(ge=1)
    hot_rows: PerLayer
    moe_layers: tuple[int, ...] = Field(min_length=1)
    whole_layers: tuple[int, ...] = ()
    expert_parallel: None = None
    row_bytes: PerLayer

    @model_validator(mode="after")
    def _complete(self) -> Self:
        layers = self.moe_layers
        if list(layers) != sorted(set(layers)) or layers[0] < 0:
            raise MisfitError("moeLayers", list(layers), "distinct layer ids from 0 up, ascending")
        keys = {str(layer) for layer in layers}
        for name in ("experts", "hot_rows", "row_bytes"):
            value = getattr(self, name)
            if isinstance(value, dict) and set(value) != keys:
                found = f"layers {sorted(value)}"
                raise MisfitError(to_camel(name), found, f"exactly the layers {list(layers)}")
        for layer in layers:
            experts, hot = per_layer(self.experts, layer), per_layer(self.hot_rows, layer)
            row_bytes = per_layer(self.row_bytes, layer)
            if experts < 1:
                raise MisfitError("experts", f"{experts} in layer {layer}", "1 or more")
            if not 0 <= hot <= experts:
                raise MisfitError(
                    "hotRows", f"{hot} in layer {layer}", f"0 to {experts} (its experts)"
                )
            if row_bytes < 1:
                raise MisfitError("rowBytes", f"{row_bytes} in layer {layer}", "1 or more")
            if self.top_k > experts:
                raise MisfitError(
                    "topK", self.top_k, f"at most {experts}, the experts of layer {layer}"
                )
        return self

    def to_wire(self) -> dict[str, object]:
        return {**super().to_wire(), "expertParallel": None}


def per_layer(value: PerLayer, layer: int) -> int:
    """The value that holds for an absolute layer id."""
    return value[str(layer)] if isinstance(value, dict) else value


class LayerRows(Strict):
    """Rows of one layer: a partition of its experts."""

    hot: tuple[int, ...]
    cold: tuple[int, ...]


class RowMap(Strict):
    """A whole row map. `layers` alone is what the public reference hook reads.

    `order` is for engines whose rows share one budget (llama.cpp): every row of every layer as
    (absolute layer, expert), the hot rows first and each part hottest first, so that whoever can
    hold fewer rows than the map asks for takes the front of it.
    """

    version: Literal[1] = 1
    fingerprint: Fingerprint
    geometry: Geometry
    row_set_digest: Digest
    layers: dict[str, LayerRows]
    order: tuple[tuple[int, int], ...] | None = None

    @model_validator(mode="after")
    def _partition(self) -> Self:
        expected = {str(layer) for layer in self.geometry.moe_layers}
        if set(self.layers) != expected:
            found = f"layers {sorted(self.layers)}"
            raise MisfitError("layers", found, f"exactly geometry.moeLayers {sorted(expected)}")
        for layer in self.geometry.moe_layers:
            rows = self.layers[str(layer)]
            hot = per_layer(self.geometry.hot_rows, layer)
            experts = per_layer(self.geometry.experts, layer)
            place = f"layers.{layer}"
            if len(rows.hot) != hot:
                raise MisfitError(
                    f"{place}.hot", f"{len(rows.hot)} rows", f"{hot} (geometry.hotRows)"
                )
            if len(rows.hot) + len(rows.cold) != experts:
                found = f"{len(rows.hot) + len(rows.cold)} rows"
                raise MisfitError(place, found, f"{experts} (geometry.experts)")
            if sorted(rows.hot + rows.cold) != list(range(experts)):
                found = "a row twice or out of range"
                raise MisfitError(place, found, f"each of 0..{experts - 1} once")
        actual = row_set_digest(self.geometry, self.layers)
        if self.row_set_digest != actual:
            raise MisfitError("rowSetDigest", self.row_set_digest, actual)
        if self.order is not None:
            _check_order(self.order, self.layers)
        return self

    def to_wire(self) -> dict[str, object]:
        return {**super().to_wire(), "geometry": self.geometry.to_wire()}

    def to_bytes(self) -> bytes:
        """Canonical bytes; their sha256 is the map's digest."""
        return canonical_json(self.to_wire())

    @property
    def digest(self) -> str:
        return sha256_digest(self.to_bytes())


def _check_order(order: tuple[tuple[int, int], ...], layers: Mapping[str, LayerRows]) -> None:
    """A permutation of all rows, hot rows in front, each layer in the order of its own lists."""
    total = sum(len(rows.hot) + len(rows.cold) for rows in layers.values())
    if len(order) != total:
        raise MisfitError("order", f"{len(order)} rows", f"{total}, the rows of all layers")
    hot = sum(len(rows.hot) for rows in layers.values())
    ranks = {layer: iter(rows.hot + rows.cold[::-1]) for layer, rows in layers.items()}
    fast = {layer: set(rows.hot) for layer, rows in layers.items()}
    for index, (layer, expert) in enumerate(order):
        place, found = f"order.{index}", [layer, expert]
        if str(layer) not in ranks:
            raise MisfitError(place, found, "a layer of geometry.moeLayers")
        wanted = next(ranks[str(layer)], None)
        if wanted is None:
            raise MisfitError(place, found, "each row once")
        if expert != wanted:
            next_row = f"expert {wanted}, the next of layers.{layer} (hot, then cold reversed)"
            raise MisfitError(place, found, next_row)
        if (expert in fast[str(layer)]) != (index < hot):
            raise MisfitError(place, found, f"the {hot} hot rows first, then the cold ones")


def geometry_digest(geometry: Geometry) -> str:
    """Hash of a geometry; a lane freezes it, and every later map must have the same."""
    return sha256_digest(canonical_json(geometry.to_wire()))


def row_set_digest(geometry: Geometry, layers: Mapping[str, LayerRows]) -> str:
    """Hash over the sorted hot sets: maps with equal ones need no move between them."""
    sets = {layer: {"hot": sorted(rows.hot)} for layer, rows in layers.items()}
    return sha256_digest(canonical_json({"geometry": geometry.to_wire(), "layers": sets}))


def build(
    fingerprint: Fingerprint,
    geometry: Geometry,
    layers: Mapping[int, tuple[list[int], list[int]]],
    order: Sequence[tuple[int, int]] | None = None,
) -> RowMap:
    """Make a map from `{layer: (hot hottest first, cold coldest first)}` and RowMap.order.

    Raises pydantic.ValidationError when the rows are not a partition.
    """
    rows = {
        str(layer): LayerRows(hot=tuple(hot), cold=tuple(cold))
        for layer, (hot, cold) in layers.items()
    }
    return RowMap(
        fingerprint=fingerprint,
        geometry=geometry,
        row_set_digest=row_set_digest(geometry, rows),
        layers=rows,
        order=None if order is None else tuple(order),
    )


def parse(raw: bytes, source: str, digest: str | None = None) -> RowMap:
    """Read a map whole: size, digest (when given), canonical form, partition, rowSetDigest.

    Raises FormatError naming `source`, the place, what was found and what was expected.
    """
    if len(raw) > MAX_MAP_BYTES:
        raise FormatError(source, "size", f"{len(raw)} bytes", f"at most {MAX_MAP_BYTES}")
    actual = sha256_digest(raw)
    if digest is not None and actual != digest:
        raise FormatError(source, "sha256", actual, digest)
    parsed = RowMap.from_wire(load_json(raw, source), source)
    if parsed.to_bytes() != raw:
        raise FormatError(
            source, "bytes", "another spelling", "canonical JSON (sorted keys, no spaces, newline)"
        )
    return parsed
