"""vLLM's TRT-LLM MXFP4 experts over two tiers, through _invoke_kernel.

Each side's pass stops after GEMM2 and leaves permuted, unweighted rows with a permute map. One
kernel then sums both sides' rows in the order of the routes, or, for a consumer that takes the
layer's output unfinalised, both are merged into one such output. Not run on hardware: whether the
kernel picks the same tactic for a side as for the whole is for the self-test to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_sides import Side, Stand
else:
    from expertmaps_hook_sides import Stand


def reason(experts: Any) -> str | None:
    """Why this experts object cannot be split, or None."""
    if not callable(getattr(type(experts), "_invoke_kernel", None)):
        return "it has no _invoke_kernel"
    return None


def replacements(
    experts: Any, passes: tuple[Side, ...], slot_of: Any
) -> dict[str, Callable[..., Any]]:
    """Attributes to set on the experts object."""
    if TYPE_CHECKING:
        from . import expertmaps_hook_kernels as kernels
    else:
        import expertmaps_hook_kernels as kernels

    original = type(experts)._invoke_kernel
    views = [Stand(experts, **side.tensors) for side in passes]
    hot = passes[0].rows  # all experts where there is one side alone

    def invoke(
        output: Any, x_quant: Any, x_scale: Any, topk_ids: Any, topk_weights: Any, w1: Any,
        w2: Any, activation: Any, global_num_experts: int, local_num_experts: int,
        local_expert_offset: int, topk: int,
    ) -> Any:  # fmt: skip
        # Both sides number experts by slot and say with their offset which slots are theirs.
        ids = kernels.split_ids(topk_ids, slot_of, hot, cold_offset=hot)
        results = [
            original(
                view,
                output if len(passes) == 1 else None,
                x_quant,
                x_scale,
                side_ids,
                topk_weights,
                side.tensors["w1"],
                side.tensors["w2"],
                activation,
                global_num_experts,
                side.rows,
                side.offset,
                topk,
            )
            for view, side, side_ids in zip(views, passes, ids, strict=False)
        ]
        if len(results) == 1:
            return results[0]
        first, second = results
        if output is None:
            return merged(first, second)
        kernels.finalize(
            output,
            first.gemm2_permuted,
            first.expanded_idx_to_permuted_idx,
            second.gemm2_permuted,
            second.expanded_idx_to_permuted_idx,
            first.expert_weights,
        )
        return None

    return {"_invoke_kernel": invoke}


def merged(hot: Any, cold: Any) -> Any:
    """Two unfinalised outputs as one: cold rows behind hot rows, -1 where neither has the route.

    gemm2_permuted [R_hot + R_cold, h], expanded_idx_to_permuted_idx int32 [T, k].
    """
    import torch

    rows = hot.gemm2_permuted.shape[0]
    first, second = hot.expanded_idx_to_permuted_idx, cold.expanded_idx_to_permuted_idx
    behind = torch.where(second >= 0, second + rows, second)
    return type(hot)(
        gemm2_permuted=torch.cat((hot.gemm2_permuted, cold.gemm2_permuted)),
        expert_weights=hot.expert_weights,
        expanded_idx_to_permuted_idx=torch.where(first >= 0, first, behind),
    )
