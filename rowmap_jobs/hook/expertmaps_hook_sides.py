"""What each of the two kernel passes over a tiered layer is given, and how a pass is put in.

Between its kernel launches a layer stays vLLM's: the activation, the quantisation of what lies
between the two GEMMs, the tile configuration and the sum over routes are vLLM's own code, run
once over both tiers' rows. Only the launches are replaced, by one launch for each tier that is
not empty, and they write complementary rows of the same caches.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_tensors import per_expert
    from .expertmaps_hook_tiers import TieredLayer
else:
    from expertmaps_hook_env import HookError
    from expertmaps_hook_tensors import per_expert

WEIGHTS = {"w1": "w13_weight", "w2": "w2_weight"}
"""The container's names of the two weights; other roles are the experts object's attributes."""


@dataclass(frozen=True)
class Side:
    """One pass: the rows it may read, and where they stand."""

    rows: int
    """H or E - H, never 0."""
    offset: int
    """Slot of its first row: 0 or H."""
    expert_map: Any
    """Device int32 [E]: logical expert id to this side's row, -1 where the other side has it."""
    tensors: Mapping[str, Any]
    """By role (w1, w2, w1_scale, ...): [rows, ...]. A role that the layer has not is missing."""


def sides(
    container: Any, experts: Any, tiered: TieredLayer, roles: tuple[str, ...]
) -> tuple[Side, ...]:
    """The passes over a layer, hot first; a side without rows has none.

    `container` owns the parameters, `experts` is vLLM's kernel object whose attributes `roles`
    are handed to the kernel beside the two weights. Raises HookError (TiersInvalid, UnknownTensor).
    """
    _check_slots(tiered)
    found = {role: _parts(container, role, None, tiered) for role in WEIGHTS}
    for role in roles:
        tensor = getattr(experts, role, None)
        if tensor is None:
            continue
        if per_expert(tensor, tiered.experts):
            found[role] = _parts(container, role, tensor, tiered)
        else:
            found[role] = (tensor, tensor)  # one for all experts
    made = []
    for index, (rows, offset) in enumerate(
        ((tiered.hot, 0), (tiered.experts - tiered.hot, tiered.hot))
    ):
        if rows:
            local = tiered.slot_of - offset
            inside = (local >= 0) & (local < rows)
            expert_map = local.masked_fill(~inside, -1).contiguous()
            tensors = {role: parts[index] for role, parts in found.items()}
            made.append(Side(rows, offset, expert_map, tensors))
    return tuple(made)


def _check_slots(tiered: TieredLayer) -> None:
    """Raises HookError when the slots are no permutation."""
    slots = tiered.slot_of.tolist()
    order = [-1] * tiered.experts
    for expert, slot in enumerate(slots):
        if 0 <= slot < tiered.experts:
            order[slot] = expert
    if len(slots) != tiered.experts or -1 in order or not 0 <= tiered.hot <= tiered.experts:
        raise HookError(
            "TiersInvalid",
            f"layer {tiered.layer}: found {len(slots)} slots, {order.count(-1)} of them unfilled, "
            f"and {tiered.hot} hot rows; expected each of 0..{tiered.experts - 1} once",
        )
    if "int32" not in str(tiered.slot_of.dtype):
        raise HookError(
            "TiersInvalid", f"layer {tiered.layer}: slots of {tiered.slot_of.dtype}, expected int32"
        )


def _parts(container: Any, role: str, tensor: Any, tiered: TieredLayer) -> tuple[Any, Any]:
    """A tensor's hot and cold rows, None for a side without rows."""
    name = WEIGHTS.get(role) or _parameter_name(container, tensor) or role
    parts = (tiered.hot_tensors.get(name), tiered.cold_tensors.get(name))
    counts = (tiered.hot, tiered.experts - tiered.hot)
    shapes = set()
    for part, count in zip(parts, counts, strict=True):
        if not count:
            continue
        if part is None or int(part.shape[0]) != count:
            found = "nothing" if part is None else str(list(part.shape))
            raise HookError(
                "UnknownTensor",
                f"layer {tiered.layer}: {name} has {found} in a tier, expected {count} rows",
            )
        shapes.add((tuple(part.shape[1:]), str(part.dtype)))
    if len(shapes) != 1:
        raise HookError("UnknownTensor", f"layer {tiered.layer}: {name}: rows differ: {shapes}")
    return parts


def _parameter_name(container: Any, tensor: Any) -> str | None:
    """The name under which the container owns this very object."""
    for name, value in (
        *container.named_parameters(recurse=False),
        *container.named_buffers(recurse=False),
    ):
        if value is tensor:
            return str(name)
    return None


def whole_shapes(passes: tuple[Side, ...]) -> dict[str, Any]:
    """Tensors of the un-split layer's shapes without any memory, for code that reads shapes.

    vLLM resolves tile sizes from the weights' shapes: with these it resolves them for all
    experts, whatever a pass holds.
    """
    import torch

    experts = sum(side.rows for side in passes)
    return {
        role: torch.empty(
            (experts, *passes[0].tensors[role].shape[1:]),
            dtype=passes[0].tensors[role].dtype,
            device="meta",
        )
        for role in WEIGHTS
    }


def role_of(tensor: Any, whole: Mapping[str, Any]) -> str:
    """Which of the two weights a launch was given."""
    for role, shape in whole.items():
        if tensor is shape:
            return role
    raise HookError("HookUnsupported", "a kernel was given a weight that is neither w1 nor w2")


def rebound(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """The same function with other values for some of its module's names.

    Raises HookError when it does not use one of them: then it is not the code this was made for.
    """
    used = set(_names(function.__code__)) if hasattr(function, "__code__") else set()
    lost = sorted(set(names) - used)
    if lost:
        raise HookError(
            "HookUnsupported",
            f"{getattr(function, '__qualname__', function)} does not call {', '.join(lost)}",
        )
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


class Stand:
    """An object seen with some attributes replaced; everything else is the object's own."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self.__dict__["_original"] = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)
