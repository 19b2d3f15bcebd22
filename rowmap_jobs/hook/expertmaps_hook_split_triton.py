"""vLLM's Triton experts (bf16, fp16, fp32, fp8) over two tiers: the same bits as over one.

TritonExperts.apply runs unchanged but for two calls: routes are sorted once for each side, and
each GEMM is launched once for each side into the one cache. A route's row is computed by one tile
row whose K loop has the same steps in both cases, since the tile configuration comes from the
whole layer's shapes; which other rows share the tile does not enter. Routes of the other side
get no block at all: a block for an expert that is not here would write zeros over its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .expertmaps_hook_sides import Side, rebound, role_of, whole_shapes
else:
    from expertmaps_hook_sides import rebound, role_of, whole_shapes


class Assignment(NamedTuple):
    """Routes sorted for each side: (sorted_token_ids, expert_ids, num_tokens_post_padded)."""

    sorted: tuple[tuple[Any, Any, Any], ...]
    clears: bool
    """vLLM takes the whole layer's routes unsorted and writes zeros for id -1."""


def reason(experts: Any) -> str | None:
    """Why this experts object cannot be split, or None."""
    if getattr(experts, "quantization_emulation", False):
        return "quantisation is emulated"
    if getattr(experts, "_lora_context", None) is not None:
        return "LoRA is active"
    config = experts.quant_config
    plain = config.quant_dtype is None and config.weight_quant_dtype is None
    if not plain and not config.use_fp8_w8a8:
        return f"found {config.weight_quant_dtype} weights, expected bf16, fp16, fp32 or fp8"
    return None


def replacements(
    experts: Any, passes: tuple[Side, ...], slot_of: Any
) -> dict[str, Callable[..., Any]]:
    """Attributes to set on the experts object. Raises HookError when vLLM's code is another."""
    original = type(experts).apply
    scope = original.__globals__
    whole = whole_shapes(passes)
    applied = rebound(
        original,
        _prepare_expert_assignment=functools.partial(
            _assign, scope.get("moe_align_block_size"), passes
        ),
        invoke_fused_moe_triton_kernel=functools.partial(
            _launch, scope.get("invoke_fused_moe_triton_kernel"), passes, whole
        ),
    )

    def apply(output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any) -> Any:
        return applied(experts, output, hidden_states, whole["w1"], whole["w2"], *args, **kwargs)

    return {"apply": apply}


def _assign(
    align: Any, passes: tuple[Side, ...], topk_ids: Any, config: Any, num_tokens: int,
    top_k: int, experts: int, expert_map: Any, **_: Any,
) -> tuple[Assignment, None, None]:  # fmt: skip
    """In place of _prepare_expert_assignment: one sorted list of routes for each side."""
    lists = tuple(
        align(
            topk_ids,
            config["BLOCK_SIZE_M"],
            experts,
            side.expert_map,
            ignore_invalid_experts=True,
        )
        for side in passes
    )
    return Assignment(lists, num_tokens * top_k * 4 <= experts), None, None


def _launch(
    launch: Any, passes: tuple[Side, ...], whole: dict[str, Any], a: Any, b: Any, c: Any,
    a_scale: Any, b_scale: Any, topk_weights: Any, assignment: Assignment, _ids: None,
    _count: None, *args: Any, B_bias: Any = None, **kwargs: Any,  # noqa: N803
) -> None:  # fmt: skip
    """In place of invoke_fused_moe_triton_kernel: one launch for each side, into the same C."""
    role = role_of(b, whole)
    if assignment.clears:
        c.zero_()
    for side, routes in zip(passes, assignment.sorted, strict=True):
        launch(
            a,
            side.tensors[role],
            c,
            a_scale,
            None if b_scale is None else side.tensors[f"{role}_scale"],
            topk_weights,
            *routes,
            *args,
            B_bias=None if B_bias is None else side.tensors[f"{role}_bias"],
            **kwargs,
        )
