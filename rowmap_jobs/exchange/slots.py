"""Tables of slots: which logical expert lies in each physical slot of a layer, ranks in a row.

SGLang, TensorRT-LLM, vllm-ascend and vLLM's proposals all place experts this way. A slot says
where an expert lies, not how hot it is. What a table does say of heat is its replicas: an engine
gives a second slot to experts that get more tokens than one slot should.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..formats.base import FormatError
from ..placement.eplb import rebalance
from .base import I64, Counts, Ranking
from .tables import MAX_EXPERTS, check_layer_ids, coverage

MAX_SLOTS = 1 << 17


def check_slots(
    slots: Mapping[int, Sequence[int]], source: str, place: str, experts: int | None = None
) -> int:
    """Experts E of a table: ids are 0..E-1, every one has a slot, layers have equally many slots.

    Without `experts`, E is the highest id of all layers + 1. Raises FormatError naming the layer.
    """
    if not slots:
        raise FormatError(source, place, "no layer", "at least one layer")
    check_layer_ids(list(slots), source, place)
    count = len(next(iter(slots.values())))
    if not 1 <= count <= MAX_SLOTS:
        raise FormatError(source, place, f"{count} slots", f"1 to {MAX_SLOTS}")
    highest = max((max(row) for row in slots.values() if row), default=0)
    width = experts if experts is not None else highest + 1
    if not 1 <= width <= MAX_EXPERTS:
        raise FormatError(source, place, f"expert {highest}", f"ids below {MAX_EXPERTS}")
    for layer, row in slots.items():
        where = f"{place} layer {layer}"
        if len(row) != count:
            raise FormatError(source, where, f"{len(row)} slots", f"{count} as in the first layer")
        bad = [expert for expert in row if not 0 <= expert < width]
        if bad:
            raise FormatError(source, where, f"expert {bad[0]}", f"0 to {width - 1}")
        if len(set(row)) != width:
            lost = min(set(range(width)) - set(row))
            expected = f"each of 0..{width - 1} in some slot"
            raise FormatError(source, where, f"no slot for expert {lost}", expected)
    return width


def to_ranking(
    slots: Mapping[int, Sequence[int]], source: str, place: str, experts: int | None = None
) -> Ranking:
    """Experts with more replicas first, then in the order of their first slot.

    Raises FormatError (see check_slots). The notes say how little heat such a table holds.
    """
    width = check_slots(slots, source, place, experts)
    order: dict[int, tuple[int, ...]] = {}
    for layer in sorted(slots):
        first: dict[int, int] = {}
        copies = [0] * width
        for slot, expert in enumerate(slots[layer]):
            first.setdefault(expert, slot)
            copies[expert] += 1
        order[layer] = tuple(sorted(first, key=lambda e: (-copies[e], first[e])))
    replicas = len(next(iter(slots.values()))) - width
    heat = (
        f"{replicas} slots a layer are replicas: replicated experts come first, the rest by slot"
        if replicas
        else "no replicas: the order is that of the slots and says nothing of heat"
    )
    return Ranking(order, complete=True, notes=(coverage(slots), heat))


def balanced(counts: Counts, ranks: int, slots: int | None = None) -> dict[int, list[int]]:
    """Slots by the decode load: DeepSeek's load balancer over `ranks`, `slots` a layer.

    Without `slots`, as many as experts: no replicas. Raises FormatError when layers differ in
    experts or the numbers do not divide.
    """
    width = set(counts.layout.experts)
    if len(width) != 1:
        raise FormatError("counts", "experts", sorted(width), "one number for all layers")
    experts = width.pop()
    loads = counts.decode.sum(axis=0)[:, :experts]
    table = rebalance(loads, experts if slots is None else slots, 1, 1, ranks).phy2log
    return of_layers(counts.layout.layer_ids, table)


def of_layers(layer_ids: Sequence[int], table: I64) -> dict[int, list[int]]:
    """Slots by absolute layer from a placement int64[L,slots] of those layers."""
    return {layer: row.tolist() for layer, row in zip(layer_ids, table, strict=True)}
