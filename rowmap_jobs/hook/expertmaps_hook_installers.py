"""Which kernels can read a layer from two tiers, and which of their tensors have expert rows.

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

WEIGHTS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
SCALES = ("w13_weight_scale", "w2_weight_scale")
BLOCK_SCALES = ("w13_weight_scale_inv", "w2_weight_scale_inv")
DESCRIBED = ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
"""Names of what only the kernel's quantisation config holds."""

TENSORS: dict[str, tuple[str, ...]] = {
    "TritonExperts": (*WEIGHTS, *SCALES, *BLOCK_SCALES, *DESCRIBED),
    "MarlinExperts": (*WEIGHTS, *SCALES, *DESCRIBED),
    "TrtLlmMxfp4ExpertsModular": (
        *WEIGHTS, *SCALES, *DESCRIBED, "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit",
    ),
}  # fmt: skip
"""Tensors with a row for each expert that a kernel's passes are given. Any other is refused."""


def kernel_class(container: Any) -> str:
    """Name of the class of a layer's kernel, or of what stands in its place."""
    method = getattr(container, "quant_method", None)
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return type(method if kernel is None else kernel).__name__


def installer(layer: int, container: Any) -> Installer:
    """What splits a layer's kernel. Raises HookError (HookUnsupported) naming its class."""
    name = kernel_class(container)
    if name not in INSTALLERS or name not in TENSORS:
        known = ", ".join(sorted(set(INSTALLERS) & set(TENSORS))) or "none"
        raise HookError(
            "HookUnsupported", f"kernel of layer {layer}: found {name}, expected one of: {known}"
        )
    module: Any = importlib.import_module(INSTALLERS[name])
    return module  # type: ignore[no-any-return]
