"""Split a layer's kernel over two tiers: which kernels can be, and the switch itself.

The residency calls `check` before it moves a row, `install` once the layer's rows have moved, and
the returned function to go back. Between the two the layer's weights are only read through the
tiers; what stays in the container's parameters is asked for its shape alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_installers import KERNELS, fused_experts
    from .expertmaps_hook_sides import sides
    from .expertmaps_hook_tiers import TieredLayer
else:
    from expertmaps_hook_env import HookError
    from expertmaps_hook_installers import KERNELS, fused_experts
    from expertmaps_hook_sides import sides


def reason(module: Any) -> str | None:
    """Why a layer (MoERunner or its container) cannot be split, or None."""
    container = _container(module)
    experts = fused_experts(container)
    if experts is None:
        return (
            f"kernel: found {type(container).__name__} with "
            f"{type(getattr(container, 'quant_method', None)).__name__}, which has no seam; "
            f"expected one of {_known()}"
        )
    kernel = KERNELS.get(type(experts).__name__)
    if kernel is None or kernel.module != type(experts).__module__:
        kind = "monolithic kernel" if getattr(experts, "is_monolithic", bool)() else "kernel"
        return f"{kind}: found {_full_name(experts)}, expected one of {_known()}"
    config = experts.moe_config
    count = int(config.num_local_experts)
    refused = (
        (count != int(config.num_experts) or container.expert_map is not None, "expert parallel"),
        (getattr(container.expert_map_manager, "num_fused_shared_experts", 0), "shared experts"),
    )
    for found, what in refused:
        if found:
            return f"kernel: {type(experts).__name__} with {what}"
    why = _backend(experts).reason(experts)
    return f"kernel: {type(experts).__name__}: {why}" if why else None


def check(module: Any) -> None:
    """Refuse a layer that cannot be split. Raises HookError (HookUnsupported)."""
    why = reason(module)
    if why is not None:
        raise HookError("HookUnsupported", why)


def install(module: Any, tiered: TieredLayer) -> Callable[[], None]:
    """Let the layer's kernel read its experts from the tiers; returns what takes this back.

    Raises HookError (HookUnsupported, TiersInvalid, UnknownTensor) with nothing changed.
    """
    check(module)
    container = _container(module)
    experts = fused_experts(container)
    passes = sides(container, experts, tiered, KERNELS[type(experts).__name__].roles)
    replaced = _backend(experts).replacements(experts, passes, tiered.slot_of)
    taken = sorted(name for name in replaced if name in vars(experts))
    if taken:
        raise HookError(
            "HookUnsupported",
            f"layer {tiered.layer}: {', '.join(taken)} is replaced already",
        )
    for name, function in replaced.items():
        setattr(experts, name, function)

    def undo() -> None:
        for name, function in replaced.items():
            if vars(experts).get(name) is function:
                delattr(experts, name)

    return undo


def _container(module: Any) -> Any:
    return getattr(module, "routed_experts", module)


def _backend(experts: Any) -> Any:
    return importlib.import_module(KERNELS[type(experts).__name__].backend)


def _full_name(experts: Any) -> str:
    return f"{type(experts).__module__}.{type(experts).__qualname__}"


def _known() -> str:
    return ", ".join(sorted(KERNELS))
