"""The hook's two Triton kernels: ids split by tier, and the weighted sum over both tiers' rows.

The one module of the hook that imports triton and torch at its top: import it inside a function,
on the way to a kernel. Neither kernel synchronises or allocates on the device by itself, so both
can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ID_BLOCK = 1024
MAX_COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def split_kernel(  # type: ignore[no-untyped-def]
    ids, slot_of, hot_ids, cold_ids, count, experts, hot, cold_offset, block: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < count
    expert = tl.load(ids + place, mask=inside, other=-1)
    known = inside & (expert >= 0) & (expert < experts)
    slot = tl.load(slot_of + expert, mask=known, other=-1)
    # An id without a slot is -1, which is below any hot count and below zero: -1 on both sides.
    is_cold = (slot >= hot) & (slot >= 0)
    tl.store(hot_ids + place, tl.where(is_cold, -1, slot), mask=inside)
    tl.store(cold_ids + place, tl.where(is_cold, slot - hot + cold_offset, -1), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def finalize_kernel(  # type: ignore[no-untyped-def]
    output, hot_rows, hot_index, cold_rows, cold_index, weights, tokens, columns,
    hot_stride, cold_stride, output_stride,
    top_k: tl.constexpr, many: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * many + tl.arange(0, many)
    column = tl.program_id(1) * wide + tl.arange(0, wide)
    real = token < tokens
    held = (column < columns)[None, :]
    total = tl.zeros((many, wide), dtype=tl.float32)
    for route in range(top_k):
        place = token * top_k + route
        hot = tl.load(hot_index + place, mask=real, other=-1).to(tl.int64)
        cold = tl.load(cold_index + place, mask=real, other=-1).to(tl.int64)
        weight = tl.load(weights + place, mask=real, other=0.0).to(tl.float32)
        from_hot = (hot >= 0)[:, None]
        from_cold = (hot < 0)[:, None] & (cold >= 0)[:, None]
        hot_row = tl.load(
            hot_rows + hot[:, None] * hot_stride + column[None, :], mask=from_hot & held, other=0.0
        )
        cold_row = tl.load(
            cold_rows + cold[:, None] * cold_stride + column[None, :],
            mask=from_cold & held,
            other=0.0,
        )
        row = tl.where(from_hot, hot_row, cold_row).to(tl.float32)
        scale = tl.broadcast_to(weight[:, None], (many, wide))
        # A route without a row adds nothing, not even 0 times a weight that may be infinite.
        total = tl.where(from_hot | from_cold, tl.fma(scale, row, total), total)
    target = output + token.to(tl.int64)[:, None] * output_stride + column[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=real[:, None] & held)


def split_ids(
    topk_ids: torch.Tensor, slot_of: torch.Tensor, hot: int, cold_offset: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert ids int32 [T, k] as the two tiers number them, each int32 [T, k] with -1 elsewhere.

    `slot_of` is int32 [E]; slots below `hot` are hot rows 0.., the others cold rows from
    `cold_offset` on (0: numbered in their own tensor; `hot`: numbered over both). An id that is no
    expert's (-1) is -1 on both sides.
    """
    ids = topk_ids.contiguous()
    hot_ids, cold_ids = torch.empty_like(ids), torch.empty_like(ids)
    count = ids.numel()
    if count:
        split_kernel[(triton.cdiv(count, ID_BLOCK),)](
            ids, slot_of, hot_ids, cold_ids, count, slot_of.numel(), hot, cold_offset,
            block=ID_BLOCK,
        )  # fmt: skip
    return hot_ids, cold_ids


def finalize(
    output: torch.Tensor,
    hot_rows: torch.Tensor,
    hot_index: torch.Tensor,
    cold_rows: torch.Tensor,
    cold_index: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """output[t] = sum over routes j, in their order, of weights[t, j] * row(t, j).

    The row of a route is hot_rows[hot_index[t, j]], or cold_rows[cold_index[t, j]] where the hot
    index is -1; with both -1 the route is skipped. One fp32 fma a route from zero, rounded once to
    the output's type: what TRT-LLM's own finalize does.

    Shapes: output [T, n], rows [R, h] with n <= h and contiguous columns, index int32 [T, k],
    weights [T, k] of any float type.
    """
    tokens, columns = output.shape
    if not tokens:
        return
    block = min(MAX_COLUMNS, triton.next_power_of_2(columns))
    together = 1 if tokens <= 64 else 8
    grid = (triton.cdiv(tokens, together), triton.cdiv(columns, block))
    finalize_kernel[grid](
        output, hot_rows, hot_index.contiguous(), cold_rows, cold_index.contiguous(),
        weights.contiguous(), tokens, columns,
        hot_rows.stride(0), cold_rows.stride(0), output.stride(0),
        top_k=weights.shape[1], many=together, wide=block,
    )  # fmt: skip
