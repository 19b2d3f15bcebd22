"""Which kernels can read a layer from two tiers, and the tensors that each is given.

An installer is a module with `check(module)`, which raises HookError (HookUnsupported) for a layer
it cannot split, and `install(module, tiered)`, which lets the layer's kernel read a TieredLayer
and returns the function that takes this back. `module` is vLLM's MoERunner.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_tiers import TieredLayer
else:
    from expertmaps_hook_env import HookError


class Installer(Protocol):
    """Module that splits one kernel or several."""

    def check(self, module: Any) -> None:
        """Refuse a layer that cannot be split. Raises HookError."""

    def install(self, module: Any, tiered: TieredLayer) -> Callable[[], None]:
        """Let the layer's kernel read its experts from the tiers; returns what undoes it."""


INSTALLERS: dict[str, str] = dict.fromkeys(
    ("TritonExperts", "MarlinExperts", "TrtLlmMxfp4ExpertsModular"), "expertmaps_hook_split"
)
"""Name of vLLM's kernel class to the name of its installer module."""

SCALED = ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
ROLES: dict[str, tuple[str, ...]] = {
    "TritonExperts": SCALED,
    "MarlinExperts": (*SCALED, "w1_zp", "w2_zp"),
    "TrtLlmMxfp4ExpertsModular": (*SCALED, "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"),
}
"""What a kernel's passes are given beside the two weights, as attributes of the kernel's object."""


def fused_experts(container: Any) -> Any:
    """vLLM's kernel object of a layer; None where its method runs a kernel by itself."""
    kernel = getattr(getattr(container, "quant_method", None), "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)


def kernel_class(container: Any) -> str:
    """Name of the class of a layer's kernel, or of what stands in its place."""
    experts = fused_experts(container)
    stands = getattr(container, "quant_method", None) if experts is None else experts
    return type(stands).__name__


def installer(layer: int, container: Any) -> Installer:
    """What splits a layer's kernel. Raises HookError (HookUnsupported) naming its class."""
    name = kernel_class(container)
    if name not in INSTALLERS or name not in ROLES:
        known = ", ".join(sorted(set(INSTALLERS) & set(ROLES))) or "none"
        raise HookError(
            "HookUnsupported", f"kernel of layer {layer}: found {name}, expected one of: {known}"
        )
    module: Any = importlib.import_module(INSTALLERS[name])
    return module  # type: ignore[no-any-return]
