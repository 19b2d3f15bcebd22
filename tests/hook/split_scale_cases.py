"""fp8 layers with one scale over all rows, split and padded; a script for the engine's Python.

`split_scale_cases.py HOOK_FOLDER WORK_FOLDER [CASE...]` prints one line for each case that holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, sys.argv[1])

import cpu_triton  # noqa: F401  (before triton and vLLM)
import expertmaps_hook_selftest as selftest
import expertmaps_hook_split as split
import expertmaps_hook_split_triton as split_triton
import split_layers as made
import torch
from split_layers import replaced
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.experts import triton_moe

KINDS = ("bf16", "bias", "block", "channel", "tensor", "static")


def one_scale_is_that_of_both_sides_rows() -> None:
    """fp8 by tensor: hot rows are far larger than cold ones, and both are scaled by the largest."""
    layer = made.triton_layer("tensor", 8, 2, 64, 32, 4)
    order = made.order_of(8, 4)
    layer.w13_weight_scale.data[order[:3]] *= 50
    ids, weights = made.routes(19, 8, 2, 4)
    x = torch.randn(19, 64).bfloat16()
    expected = made.run(layer, ids, weights, x)
    tiered = made.tier(layer, order, 3)
    original, seen, wide = split_triton._launch, [], []

    def noting(launch: Any, *args: Any, **kwargs: Any) -> None:
        def note(a: Any, b: Any, c: Any, scale: Any, *rest: Any, **more: Any) -> None:
            seen.append((a, scale))
            launch(a, b, c, scale, *rest, **more)

        original(note, *args, **kwargs)

    def per_side(launch: Any, *args: Any, **kwargs: Any) -> None:
        def own(a: Any, b: Any, c: Any, scale: Any, *rest: Any, **more: Any) -> None:
            """The second GEMM's rows quantised by the largest of those that this side takes."""
            routes, top_k = rest[2][: int(rest[4])], rest[6]
            if top_k == 1:
                taken = wide[-1][routes[routes < ids.numel()].long()].float()
                scale = (taken.abs().amax() / 448).reshape(1)
                a, _ = made.quantize(wide[-1], scale, made.FP8, False)
            launch(a, b, c, scale, *rest, **more)

        original(own, *args, **kwargs)

    def keeping(a: Any, *args: Any, **kwargs: Any) -> Any:
        wide.append(a)
        return made.quantize(a, *args, **kwargs)

    for launch, holds in ((noting, True), (per_side, False)):
        with (
            replaced(split_triton, _launch=launch),
            replaced(triton_moe, moe_kernel_quantize_input=keeping),
        ):
            undo = split.install(layer, tiered)
            assert made.same_bits(expected, made.run(layer, ids, weights, x)) == holds, launch
            undo()
    (rows, hot_scale), (_, cold_scale) = seen[2:]  # of the second GEMM
    assert hot_scale is cold_scale and hot_scale.numel() == 1
    hot = torch.isin(ids.flatten(), torch.tensor(order[:3], dtype=torch.int32))
    largest, other = (float(rows[side].float().abs().max()) for side in (hot, ~hot))
    assert largest == 448 > 10 * other > 0


def what_padding_leaves_reaches_other_rows_through_one_scale_alone() -> None:
    """vLLM's own un-split kernel; the self-test's rule says for which layers, before they run."""
    reached = set()
    for kind in KINDS:
        layer = made.triton_layer(kind, 8, 2, 64, 32, 3)
        ids, weights = made.routes(9, 8, 2, 3)
        ids[2::3] = -1
        x = torch.randn(9, 64).bfloat16()
        real = ids[:, 0] >= 0
        first, second = (made.run(layer, ids, weights, x, left)[real] for left in (1.0, 300.0))
        if not made.same_bits(first, second):
            reached.add(kind)
        assert selftest.one_scale_for_all_rows(layer.experts.quant_config) == (kind in reached)
    assert reached == {"tensor"}


def the_rule_of_one_scale_holds_for_vllms_own_configurations() -> None:
    one, scales = torch.ones(1), {"w1_scale": torch.ones(8), "w2_scale": torch.ones(8)}
    made_by = (
        (True, moe.int8_w8a8_moe_quant_config(**scales, a1_scale=None, a2_scale=None)),
        (True, moe.fp8_w8a8_moe_quant_config(**scales, a1_scale=one)),
        (False, moe.fp8_w8a8_moe_quant_config(**scales, a2_scale=one)),
        (False, moe.mxfp4_mxfp8_moe_quant_config(**scales)),
        (False, moe.mxfp4_w4a16_moe_quant_config(**scales)),
        (False, moe.int4_w4a16_moe_quant_config(**scales, block_shape=[0, 32])),
        (False, moe.gptq_marlin_moe_quant_config(**scales, weight_bits=4, group_size=32)),
    )
    for expected, config in made_by:
        assert selftest.one_scale_for_all_rows(config) == expected, config


CASES: list[Callable[[], None]] = [
    one_scale_is_that_of_both_sides_rows,
    what_padding_leaves_reaches_other_rows_through_one_scale_alone,
    the_rule_of_one_scale_holds_for_vllms_own_configurations,
]

if __name__ == "__main__":
    made.stand_in()
    made.run_cases(CASES, sys.argv[3:])
