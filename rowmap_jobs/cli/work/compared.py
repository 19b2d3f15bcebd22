"""Two row maps side by side: what moves between them, and what each leaves cold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...evaluation import by_session
from ...evaluation.change import between
from ...evaluation.layout import check_map
from ...evaluation.ranks import compare, of_map
from ...evaluation.shares import cold_under
from ...formats.census import Census
from ...formats.evidence import Change, Ranks
from ...formats.rowmap import RowMap, per_layer
from ...placement import map_mask
from ...placement.rank import experts_of


@dataclass(frozen=True)
class Compared:
    """Map B against map A."""

    same_rows: bool
    differ: tuple[str, ...]
    """Fields of fingerprint and geometry that differ."""
    moved: dict[int, int]
    """Rows that become hot, by layer."""
    bytes_moved: int
    ranks: Ranks
    change: Change | None = None
    """On a census, both maps as they are."""

    @property
    def rows_moved(self) -> int:
        return sum(self.moved.values())

    def to_wire(self) -> dict[str, Any]:
        return {
            "sameRows": self.same_rows,
            "differ": list(self.differ),
            "rowsMoved": self.rows_moved,
            "bytesMoved": self.bytes_moved,
            "moved": {str(layer): n for layer, n in self.moved.items()},
            "ranks": self.ranks.to_wire(),
            "change": None if self.change is None else self.change.to_wire(),
        }


def compared(a: RowMap, b: RowMap, census: Census | None = None, seed: int = 0) -> Compared:
    """What a switch from `a` to `b` does. Both must speak of the same layers and experts.

    Raises FormatError.
    """
    check_map(b, a.geometry, "map")
    width = max(experts_of(a.geometry))
    before, after = map_mask(a, width), map_mask(b, width)
    layers = b.geometry.moe_layers
    gained = (after & ~before).sum(axis=1).tolist()
    moved = dict(zip(layers, gained, strict=True))
    sizes = {layer: per_layer(b.geometry.row_bytes, layer) for layer in layers}
    change = None
    if census is not None:
        counts = by_session(census)
        cold = cold_under(counts, map_mask(b, counts.shape[2])).sum(axis=1)
        change = between(counts, a, b, cold, seed)
    return Compared(
        same_rows=bool((before == after).all()),
        differ=_differ(a, b),
        moved=moved,
        bytes_moved=sum(count * sizes[layer] for layer, count in moved.items()),
        ranks=compare(of_map(a, width), of_map(b, width), a.geometry),
        change=change,
    )


def _differ(a: RowMap, b: RowMap) -> tuple[str, ...]:
    out = []
    for part in ("fingerprint", "geometry"):
        ours, theirs = (getattr(each, part).to_wire() for each in (a, b))
        out += [f"{part}.{name}" for name in sorted(ours) if ours[name] != theirs.get(name)]
    return tuple(out)
