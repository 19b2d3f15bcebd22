"""Placement files of vLLM pull requests that are not merged; written only.

- #34811 `--expert-placement-file`: `{"expert_to_ep_rank": [rank of each expert]}`, one for all
  layers and without replicas.
- #49572 `eplb_config.initial_expert_map_path`: the logical expert of each slot, one list for all
  MoE layers or a list of lists in their order. It checks lengths, range and that every expert has
  a slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..formats.base import FormatError, canonical_json
from .slots import check_slots


def write_expert_to_ep_rank(slots: Mapping[int, Sequence[int]], ranks: int) -> bytes:
    """#34811. Raises FormatError for replicas, layers that differ, slots that do not divide."""
    experts = check_slots(slots, "map", "slots")
    first = min(slots)
    table = [int(e) for e in slots[first]]
    if len(table) != experts:
        found = f"{len(table)} slots for {experts} experts"
        raise FormatError("map", "slots", found, "no replicas (expert_to_ep_rank has none)")
    if ranks < 1 or experts % ranks:
        raise FormatError("map", "ranks", f"{experts} experts on {ranks}", "equal parts")
    size = experts // ranks
    placed = _ranks(table, size)
    for layer in sorted(slots):
        if _ranks([int(e) for e in slots[layer]], size) != placed:
            expected = f"the ranks of layer {first}: the file has one map for all layers"
            raise FormatError("map", f"layer {layer}", "another placement", expected)
    return canonical_json({"expert_to_ep_rank": placed})


def _ranks(table: Sequence[int], size: int) -> list[int]:
    out = [0] * len(table)
    for slot, expert in enumerate(table):
        out[expert] = slot // size
    return out


def write_initial_expert_map(slots: Mapping[int, Sequence[int]], layers: Sequence[int]) -> bytes:
    """#49572: one list when all layers agree, else one for each MoE layer of `layers` in order.

    Raises FormatError for a table with a hole, or a layer that is missing or one too many.
    """
    check_slots(slots, "map", "slots")
    if sorted(slots) != list(layers):
        raise FormatError("map", "layers", sorted(slots)[:8], f"{list(layers)[:8]} ...")
    rows = [[int(e) for e in slots[layer]] for layer in layers]
    return canonical_json(rows[0] if all(row == rows[0] for row in rows) else rows)
