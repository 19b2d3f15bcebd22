"""vLLM's Marlin experts (MXFP4, int4) over two tiers, through the fused_marlin_moe seam.

The same replacement as for Triton: vLLM's fused_marlin_moe runs unchanged but for the sorting of
routes and the GEMM, which happen once for each side; the block size comes from all experts.
Marlin cuts the K loop over thread blocks by the number of tiles of a launch, so equal bits do not
follow from equal tiles: the self-test before the layer is used decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_sides import Side, Stand, rebound, role_of, whole_shapes
else:
    from expertmaps_hook_env import HookError
    from expertmaps_hook_sides import Stand, rebound, role_of, whole_shapes


def reason(experts: Any) -> str | None:
    """Why this experts object cannot be split, or None."""
    if getattr(experts, "_lora_context", None) is not None:
        return "LoRA is active"
    config = experts.quant_config
    if not (config.use_mxfp4_w4a16 or config.use_int4_w4a16):
        return f"found {config.weight_quant_dtype} weights, expected mxfp4 or int4"
    if experts.input_dtype is not None:
        return f"activations are quantised to {experts.input_dtype}"
    return None


def replacements(
    experts: Any, passes: tuple[Side, ...], slot_of: Any
) -> dict[str, Callable[..., Any]]:
    """Attributes to set on the experts object. Raises HookError when vLLM's code is another."""
    original = type(experts).apply
    fused = original.__globals__.get("fused_marlin_moe")
    scope = getattr(fused, "__globals__", {})
    inner, align = scope.get("_fused_marlin_moe"), scope.get("moe_align_block_size")
    if fused is None or inner is None or align is None:
        raise HookError("HookUnsupported", "vLLM's Marlin experts have no fused_marlin_moe")
    whole = whole_shapes(passes)
    ops = inner.__globals__["ops"]
    gemm = functools.partial(_gemm, ops, passes, whole)
    applied = rebound(
        original,
        fused_marlin_moe=rebound(
            fused,
            moe_align_block_size=functools.partial(_align, align, passes),
            _fused_marlin_moe=rebound(inner, ops=Stand(ops, moe_wna16_marlin_gemm=gemm)),
        ),
    )

    def apply(output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(experts, output, hidden_states, whole["w1"], whole["w2"], *args, **kwargs)

    return {"apply": apply}


def _align(
    align: Any, passes: tuple[Side, ...], topk_ids: Any, block_size: int, experts: int,
    expert_map: Any, **_: Any,
) -> tuple[Any, None, None]:  # fmt: skip
    """In place of moe_align_block_size: one sorted list of routes for each side."""
    lists = tuple(
        align(topk_ids, block_size, experts, side.expert_map, ignore_invalid_experts=True)
        for side in passes
    )
    return lists, None, None


def _gemm(
    ops: Any, passes: tuple[Side, ...], whole: dict[str, Any], a: Any, output: Any, weight: Any,
    bias: Any, scales: Any, a_scales: Any, global_scale: Any, zeros: Any, workspace: Any,
    lists: Any, _ids: None, _count: None, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """In place of moe_wna16_marlin_gemm: one GEMM for each side, into the same output."""
    role = role_of(weight, whole)
    if global_scale is not None:
        raise HookError("HookUnsupported", "Marlin was given a global scale")
    for side, routes in zip(passes, lists, strict=True):
        ops.moe_wna16_marlin_gemm(
            a,
            output,
            side.tensors[role],
            None if bias is None else side.tensors[f"{role}_bias"],
            side.tensors[f"{role}_scale"],
            a_scales,
            None,
            None if zeros is None else side.tensors[f"{role}_zp"],
            workspace,
            *routes,
            *args,
            **kwargs,
        )
    return output
