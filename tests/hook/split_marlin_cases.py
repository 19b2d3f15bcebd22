"""Marlin experts split over two tiers; a script for the engine's Python.

`split_marlin_cases.py HOOK_FOLDER WORK_FOLDER [CASE...]` prints one line for each case that holds.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, sys.argv[1])

import cpu_triton  # noqa: F401  (before triton and vLLM)
import expertmaps_hook_sides as sides
import expertmaps_hook_split as split
import expertmaps_hook_tensors as tensors
import split_layers as made
import torch
from split_layers import refused, replaced
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.experts import marlin_moe

KINDS = ("int4", "int4-zp", "mxfp4", "mxfp4-bias")


class Recorder:
    """Stands for moe_wna16_marlin_gemm, which runs on NVIDIA GPUs alone: notes each call.

    So that a wrong slice shows in the output as well, it multiplies each route's row with what the
    handed tensors hold for its expert. Their bits are read as if they were not in Marlin's tile
    order and mxfp4 as if it were int4: it is no Marlin, and tests where the seam hands what, not
    Marlin's arithmetic.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, a: Any, output: Any, weight: Any, bias: Any, scales: Any, a_scales: Any,
        global_scale: Any, zeros: Any, workspace: Any, sorted_ids: Any, expert_ids: Any,
        count: Any, topk_weights: Any, *, moe_block_size: int, top_k: int, mul_topk_weights: bool,
        size_m: int, size_n: int, size_k: int, **rest: Any,
    ) -> Any:  # fmt: skip
        assert a_scales is None and global_scale is None
        taken = {}
        for block in range(int(count) // moe_block_size):
            expert = int(expert_ids[block])
            dense = self.dense(weight, scales, zeros, expert, size_k, size_n)
            for route in sorted_ids[block * moe_block_size :][:moe_block_size].tolist():
                if route >= size_m * top_k:
                    continue
                assert route not in taken
                taken[route] = expert
                row = a[route // top_k].float() @ dense
                if bias is not None:
                    row = row + bias[expert].float()
                if mul_topk_weights:
                    row = row * topk_weights.flatten()[route]
                output[route] = row.to(output.dtype)
        self.calls.append(
            {"weight": weight, "bias": bias, "scales": scales, "zeros": zeros, "output": output,
             "taken": taken, "block": moe_block_size, "sizes": (size_m, size_n, size_k)}
        )  # fmt: skip
        return output

    @staticmethod
    def dense(weight: Any, scales: Any, zeros: Any, expert: int, rows: int, columns: int) -> Any:
        def nibbles(packed: Any) -> Any:
            spread = packed.flatten()[:, None] >> torch.arange(0, 32, 4, dtype=torch.int32)
            return (spread & 15).float().view(-1, columns)

        many = rows // scales.shape[1]
        zero = 8.0 if zeros is None else nibbles(zeros[expert]).repeat_interleave(many, 0)
        return (nibbles(weight[expert]) - zero) * scales[expert].float().repeat_interleave(many, 0)


RECORD = Recorder()


def stand_in() -> None:
    _custom_ops.moe_wna16_marlin_gemm = RECORD
    marlin_moe.get_marlin_workspace = lambda device: torch.zeros(1, dtype=torch.int32)


def marlin_layer(
    kind: str, experts: int, top_k: int, hidden: int, inner: int, seed: int
) -> made.Container:
    """MarlinExperts with packed int32 weights [E, hidden/16, 4*inner], [E, inner/16, 2*hidden]."""
    make = torch.Generator().manual_seed(seed)

    def packed(*shape: int) -> Any:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=make, dtype=torch.int32)

    data = {
        "w13_weight": packed(experts, hidden // 16, 4 * inner),
        "w2_weight": packed(experts, inner // 16, 2 * hidden),
    }
    for name, columns, depth in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        scales = torch.rand((experts, depth // 32, columns), generator=make) / depth
        data[f"{name}_scales"] = scales.bfloat16()
        if kind == "int4-zp":
            data[f"{name}_qzeros"] = packed(experts, depth // 32, columns // 8)
        if kind == "mxfp4-bias":
            data[f"{name}_bias"] = torch.randn((experts, columns), generator=make).bfloat16()
    owner = made.Container(data)
    more = {
        f"{role}_{field}": getattr(owner, f"{name}_{owned}", None)
        for role, name in (("w1", "w13"), ("w2", "w2"))
        for field, owned in (("scale", "scales"), ("zp", "qzeros"), ("bias", "bias"))
    }
    if kind.startswith("int4"):
        quant = moe.int4_w4a16_moe_quant_config(**more, block_shape=[0, 32])
    else:
        quant = moe.mxfp4_w4a16_moe_quant_config(
            **{name: value for name, value in more.items() if not name.endswith("zp")}
        )
    config = made.moe_config(experts, top_k, hidden, inner)
    owner.hold(marlin_moe.MarlinExperts(config, quant))
    return owner


def both(
    kind: str = "int4", tokens: int = 9, experts: int = 8, top_k: int = 2, hot: int = 3,
    seed: int = 0, missing: float = 0.0, change: Callable[[Any], Any] = lambda tiered: tiered,
) -> tuple[Any, Any, Any, list[dict[str, Any]], list[dict[str, Any]], Any]:  # fmt: skip
    layer = marlin_layer(kind, experts, top_k, 64, 32, seed)
    ids, weights = made.routes(tokens, experts, top_k, seed, missing)
    x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    RECORD.calls.clear()
    whole, whole_calls = made.run(layer, ids, weights, x), list(RECORD.calls)
    tiered = made.tier(layer, made.order_of(experts, seed), hot)
    split.install(layer, change(tiered))
    RECORD.calls.clear()
    parts = made.run(layer, ids, weights, x)
    return ids, whole, parts, whole_calls, list(RECORD.calls), tiered


def each_pass_gets_its_own_slices_and_routes() -> None:
    for kind in KINDS:
        ids, _, _, whole, calls, tiered = both(kind, hot=3, seed=4)
        assert len(whole) == 2 and len(calls) == 4
        slot = {int(e): int(s) for e, s in enumerate(tiered.slot_of)}
        flat = ids.flatten().tolist()
        for index, call in enumerate(calls):
            gemm, cold = divmod(index, 2)
            name = ("w13", "w2")[gemm]
            tier = tiered.cold_tensors if cold else tiered.hot_tensors
            offset = 3 if cold else 0
            assert call["weight"] is tier[f"{name}_weight"]
            assert call["scales"] is tier[f"{name}_scales"]
            assert call["zeros"] is tier.get(f"{name}_qzeros")
            assert call["bias"] is tier.get(f"{name}_bias")
            assert (call["zeros"] is not None) == (kind == "int4-zp")
            assert (call["bias"] is not None) == (kind == "mxfp4-bias")
            assert call["sizes"] == whole[gemm]["sizes"]
            for route, row in call["taken"].items():
                assert slot[flat[route]] == row + offset
        for gemm in (0, 1):
            hot, cold = calls[2 * gemm : 2 * gemm + 2]
            assert hot["output"].data_ptr() == cold["output"].data_ptr()
            assert not set(hot["taken"]) & set(cold["taken"])
            assert set(hot["taken"]) | set(cold["taken"]) == set(whole[gemm]["taken"])


def split_through_the_seam_is_the_whole() -> None:
    """With the stand-in for both: any size and hot count, ids of -1, none and all hot."""
    draw = random.Random(1)
    for seed in range(24):
        experts = draw.choice((4, 6, 9))
        hot = (0, experts)[seed // 4] if seed < 8 else draw.randint(1, experts - 1)
        _, whole, parts, _, calls, _ = both(
            KINDS[seed % 4], draw.choice((1, 3, 17)), experts, draw.choice((1, 2, 4)), hot, seed,
            draw.choice((0.0, 0.2)),
        )  # fmt: skip
        assert len(calls) == (2 if hot in (0, experts) else 4)
        assert made.same_bits(whole, parts) and whole.isfinite().all(), seed


def block_size_is_that_of_all_experts() -> None:
    """28 tokens of 8 experts take blocks of 8; 3 or 5 experts alone would take blocks of 16."""
    _, whole, parts, before, calls, _ = both("int4", tokens=28, hot=3)
    assert [call["block"] for call in before] == [8, 8]
    assert [call["block"] for call in calls] == [8] * 4
    assert made.same_bits(whole, parts)
    layer = marlin_layer("int4", 3, 2, 64, 32, 0)
    ids, weights = made.routes(28, 3, 2, 0)
    layer.experts.moe_config.num_experts = 8
    RECORD.calls.clear()
    made.run(layer, ids, weights, torch.randn(28, 64).bfloat16())
    assert {call["block"] for call in RECORD.calls} == {16}


def reduction_is_one_sum_in_the_order_of_the_routes() -> None:
    seen = []
    original = _custom_ops.moe_sum

    def noting(rows: Any, output: Any, *rest: Any) -> None:
        seen.append(rows.shape)
        original(rows, output, *rest)

    def backwards(rows: Any, output: Any, *rest: Any) -> None:
        original(rows.flip(1), output, *rest)

    with replaced(_custom_ops, moe_sum=noting):
        both(tokens=5, top_k=4)
    assert seen == [(5, 4, 64)] * 2  # the whole layer, then the split one
    _, whole, _, _, _, _ = both(tokens=17, top_k=4)
    with replaced(_custom_ops, moe_sum=backwards):
        _, _, turned, _, _, _ = both(tokens=17, top_k=4)
    assert not made.same_bits(whole, turned), "the order of the sum was not seen"


def wrong_slices_are_seen() -> None:
    def stay(tiered: Any) -> Any:
        order = tiered.slot_of.long()
        hot, cold = dict(tiered.hot_tensors), dict(tiered.cold_tensors)
        for name in hot:
            if not name.endswith("weight"):
                rows = torch.cat((hot[name], cold[name]))[order]
                hot[name], cold[name] = rows[: tiered.hot], rows[tiered.hot :]
        return dataclasses.replace(tiered, hot_tensors=hot, cold_tensors=cold)

    def flip(tiered: Any) -> Any:
        return dataclasses.replace(tiered, slot_of=tiered.slot_of.flip(0))

    for kind in KINDS:
        for change in (stay, flip):
            _, whole, parts, _, _, _ = both(kind, change=change)
            assert not made.same_bits(whole, parts), (kind, change)

    original = sides.sides

    def shifted(*args: Any) -> Any:
        hot, cold = original(*args)
        moved = cold.expert_map.clone()
        moved[moved >= 0] = (moved[moved >= 0] + 1) % cold.rows
        return hot, dataclasses.replace(cold, expert_map=moved)

    with replaced(split, sides=shifted):
        _, whole, parts, _, _, _ = both()
        assert not made.same_bits(whole, parts), "an offset that is one off was not seen"


def other_formats_are_refused() -> None:
    layer = marlin_layer("int4", 8, 2, 64, 32, 0)
    assert split.reason(layer) is None
    layer.experts.input_dtype = torch.int8
    assert "activations are quantised to torch.int8" in str(split.reason(layer))
    layer.experts.input_dtype = None
    layer.experts.quant_config._w1.dtype = torch.float8_e4m3fn
    refused("HookUnsupported", "MarlinExperts: found torch.float8", lambda: split.check(layer))
    layer.experts.quant_config._w1.dtype = "int4"
    layer.experts.quant_config._w1.alpha_or_gscale = torch.zeros(8)
    refused("HookUnsupported", "w1_gscale [8]", lambda: tensors.discover(0, layer, 8))


CASES: list[Callable[[], None]] = [
    each_pass_gets_its_own_slices_and_routes, split_through_the_seam_is_the_whole,
    block_size_is_that_of_all_experts, reduction_is_one_sum_in_the_order_of_the_routes,
    wrong_slices_are_seen, other_formats_are_refused,
]  # fmt: skip

if __name__ == "__main__":
    made.stand_in()
    stand_in()
    made.run_cases(CASES, sys.argv[3:])
