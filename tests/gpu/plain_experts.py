"""A small MoE layer in Triton with the seam of vLLM's Triton experts; torch and triton only.

It stands for vLLM's TritonExperts where vLLM is not installed: `apply` calls the same two names,
takes its tiles from the weights' shapes, and reads one tensor for each role. So the hook's own
split runs over it unchanged, on real device rows and real pinned host rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def grouped_gemm(  # type: ignore[no-untyped-def]
    a, b, c, scale, weights, sorted_ids, expert_ids, count, routes, n, k,
    stride_am, stride_be, stride_bn, stride_cm, stride_se,
    top_k: tl.constexpr, weighted: tl.constexpr,
    block_m: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
):  # fmt: skip
    """C[route] = A[route // top_k] @ B[expert].T * scale[expert], for one block of routes."""
    block = tl.program_id(0)
    if block * block_m >= tl.load(count):
        return
    route = tl.load(sorted_ids + block * block_m + tl.arange(0, block_m)).to(tl.int64)
    real = route < routes
    expert = tl.load(expert_ids + block).to(tl.int64)
    column = tl.program_id(1) * block_n + tl.arange(0, block_n)
    inside = column < n
    if expert < 0:
        zero = tl.zeros((block_m, block_n), dtype=tl.bfloat16)
        tl.store(c + route[:, None] * stride_cm + column[None, :], zero,
                 mask=real[:, None] & inside[None, :])  # fmt: skip
        return
    total = tl.zeros((block_m, block_n), dtype=tl.float32)
    for start in range(0, k, block_k):
        step = start + tl.arange(0, block_k)
        held = step < k
        x = tl.load(a + (route // top_k)[:, None] * stride_am + step[None, :],
                    mask=real[:, None] & held[None, :], other=0.0)  # fmt: skip
        w = tl.load(b + expert * stride_be + column[None, :] * stride_bn + step[:, None],
                    mask=inside[None, :] & held[:, None], other=0.0)  # fmt: skip
        total = tl.dot(x, w, acc=total)
    total *= tl.load(scale + expert * stride_se + column, mask=inside, other=0.0)[None, :]
    if weighted:
        total *= tl.load(weights + route, mask=real, other=0.0)[:, None]
    tl.store(c + route[:, None] * stride_cm + column[None, :], total.to(tl.bfloat16),
             mask=real[:, None] & inside[None, :])  # fmt: skip


def moe_align_block_size(
    topk_ids: Any, block: int, experts: int, expert_map: Any = None,
    ignore_invalid_experts: bool = False,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Routes by expert, each expert's padded to whole blocks: ids, expert of a block, their count.

    Without `ignore_invalid_experts` routes of experts that are not here get blocks of expert -1.
    """
    flat = topk_ids.flatten().long()
    known = torch.where(flat >= 0, flat, experts)
    table = torch.arange(experts + 1, device=flat.device)
    if expert_map is not None:
        table[:experts] = torch.where(expert_map >= 0, expert_map, experts).long()
    kept = table[known] if ignore_invalid_experts else known
    counts = torch.zeros(experts + 1, dtype=torch.long, device=flat.device)
    counts.scatter_add_(0, kept, torch.ones_like(kept))
    padded = -(-counts[:experts] // block) * block
    ends = padded.cumsum(0)
    order = torch.argsort(kept, stable=True)
    first = counts.cumsum(0) - counts
    rank = torch.arange(len(flat), device=flat.device) - first[kept[order]]
    starts = torch.cat((ends - padded, ends[-1:].new_full((1,), flat.numel() * block)))
    size = flat.numel() * block
    sorted_ids = torch.full((size + flat.numel() + block,), flat.numel(), device=flat.device)
    sorted_ids.scatter_(0, (starts[kept[order]] + rank).clamp(max=size + flat.numel()), order)
    blocks = torch.arange(flat.numel(), device=flat.device) * block
    expert_ids = torch.searchsorted(ends, blocks, right=True).clamp(max=experts - 1)
    if expert_map is not None and not ignore_invalid_experts:
        expert_ids = expert_map[expert_ids]
    return sorted_ids[:size].int(), expert_ids.int(), ends[-1:].int()


def _prepare_expert_assignment(
    topk_ids: Any, config: Any, num_tokens: int, top_k: int, experts: int, expert_map: Any,
    **_: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    return moe_align_block_size(topk_ids, config["BLOCK_SIZE_M"], experts, expert_map)


def invoke_fused_moe_triton_kernel(
    a: Any, b: Any, c: Any, a_scale: Any, b_scale: Any, weights: Any, sorted_ids: Any,
    expert_ids: Any, count: Any, weighted: bool, top_k: int, config: Any, B_bias: Any = None,
) -> None:  # fmt: skip
    rows, columns = c.numel() // c.shape[-1], b.shape[1]
    grid = (len(expert_ids), triton.cdiv(columns, config["BLOCK_SIZE_N"]))
    grouped_gemm[grid](
        a, b, c, b_scale, weights, sorted_ids, expert_ids, count, rows, columns, b.shape[2],
        a.stride(0), b.stride(0), b.stride(1), c.stride(-2), b_scale.stride(0),
        top_k=top_k, weighted=weighted, block_m=config["BLOCK_SIZE_M"],
        block_n=config["BLOCK_SIZE_N"], block_k=config["BLOCK_SIZE_K"],
    )  # fmt: skip


class PlainExperts:
    """silu(x @ gate) * (x @ up) @ down, weighted and summed over routes; scales by column."""

    w1_scale: Any
    w2_scale: Any

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any
    ) -> None:
        """output bf16 [T, K]; w1 [E, 2N, K], w2 [E, K, N], ids int32 and weights fp32 [T, k]."""
        tokens, top_k = topk_ids.shape
        experts, columns, width = w1.shape
        # Other tiles for another number of experts: a pass that took its own would show.
        config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32 << (experts % 3)}
        cache = torch.zeros(
            (tokens * top_k, columns), dtype=torch.bfloat16, device=hidden_states.device
        )
        rows = torch.zeros(
            (tokens, top_k, width), dtype=torch.bfloat16, device=hidden_states.device
        )
        routes = _prepare_expert_assignment(topk_ids, config, tokens, top_k, experts, None)
        invoke_fused_moe_triton_kernel(
            hidden_states, w1, cache, None, self.w1_scale, topk_weights, *routes, False, top_k,
            config, B_bias=None,
        )  # fmt: skip
        gate, up = cache.float().chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).bfloat16()
        invoke_fused_moe_triton_kernel(
            inner, w2, rows, None, self.w2_scale, topk_weights, *routes, True, 1, config,
            B_bias=None,
        )  # fmt: skip
        output.copy_(rows.float().sum(1))
