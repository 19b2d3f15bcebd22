"""Which kernels can read a layer from two tiers, and the tensors that each is given.

An installer is a module with `check(module)`, which raises HookError (HookUnsupported) for a layer
it cannot split, and `install(module, tiered)`, which lets the layer's kernel read a TieredLayer
and returns the function that takes this back. `module` is vLLM's MoERunner.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


SCALED = ("w1_scale", "w2_scale", "w1_bias", "w2_bias")
EXPERTS = "vllm.model_executor.layers.fused_moe.experts."


@dataclass(frozen=True)
class Kernel:
    """A kernel of vLLM whose experts can lie in two tiers."""

    module: str
    """Where vLLM defines the class: one of the same name elsewhere is another kernel."""
    backend: str
    """The hook's module that knows its launches."""
    roles: tuple[str, ...]
    """What its passes are given beside the two weights, as attributes of the kernel's object."""
    tuned_late: bool = False
    """vLLM may choose its tactic after the weights are loaded, for each side alone."""
    installer: str = "expertmaps_hook_split"


KERNELS: dict[str, Kernel] = {
    "TritonExperts": Kernel(EXPERTS + "triton_moe", "expertmaps_hook_split_triton", SCALED),
    "MarlinExperts": Kernel(
        EXPERTS + "marlin_moe", "expertmaps_hook_split_marlin", (*SCALED, "w1_zp", "w2_zp")
    ),
    "TrtLlmMxfp4ExpertsModular": Kernel(
        EXPERTS + "trtllm_mxfp4_moe",
        "expertmaps_hook_split_trtllm",
        (*SCALED, "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"),
        tuned_late=True,
    ),
}
"""By the name of vLLM's class. A subclass is another kernel."""

HARDWARE = {"CPUUnquantizedExperts": "x86-64 CPU"}
"""Kernel class to the hardware that this hook was run on with it. Others ran without theirs: on
stand-ins or in Triton's interpreter."""


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
    if name not in KERNELS:
        raise HookError(
            "HookUnsupported",
            f"kernel of layer {layer}: found {name}, expected one of: {', '.join(sorted(KERNELS))}",
        )
    module: Any = importlib.import_module(KERNELS[name].installer)
    return module  # type: ignore[no-any-return]


def wire_kernels(containers: Iterable[Any]) -> list[dict[str, Any]]:
    """Kernels of the layers as the status carries them, with the hardware they were run on."""
    layers = Counter(kernel_class(container) for container in containers)
    return [
        {"name": name, "layers": count, "ranOn": HARDWARE.get(name)}
        for name, count in sorted(layers.items())
    ]
