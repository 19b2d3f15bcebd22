"""TRT-LLM MXFP4 experts split over two tiers, and the two kernels; for the engine's Python.

`split_trtllm_cases.py HOOK_FOLDER WORK_FOLDER [CASE...]` prints one line for each case that holds.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

sys.path.insert(0, sys.argv[1])

import cpu_triton  # noqa: F401  (before triton and vLLM)
import expertmaps_hook_kernels as kernels
import expertmaps_hook_sides as sides
import expertmaps_hook_split as split
import split_layers as made
import torch
from split_layers import replaced
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.experts import trtllm_mxfp4_moe as trtllm
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput

TILE = 4
HIDDEN, PADDED = 24, 32
PER_EXPERT = (
    "gemm1_weights", "gemm1_weights_scale", "gemm1_bias", "gemm1_alpha", "gemm1_beta",
    "gemm1_clamp_limit", "gemm2_weights", "gemm2_weights_scale", "gemm2_bias",
)  # fmt: skip


def added(terms: list[tuple[Any, Any]]) -> Any:
    """Sum of weight * row in fp32, in order; the terms are exact, so that fma gives the same."""
    total = torch.zeros(PADDED)
    for weight, row in terms:
        total = total + weight.float() * row.float()
    return total


class Recorder:
    """Stands for flashinfer's trtllm_fp4_block_scale_routed_moe, which needs an SM100 GPU.

    It does what its interface says about ids, offsets and results: routes outside
    [offset, offset + local) have no row and -1 in the map; rows are sorted by expert, each
    expert's padded to a tile, and what lies in the padding is not a number. A row is a mix of
    every tensor that is handed in for its expert, not the kernel's arithmetic.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        ids, weights = given["topk_ids"]
        offset, local = given["local_expert_offset"], given["local_num_experts"]
        for name in PER_EXPERT:
            assert given[name] is None or given[name].shape[0] == local, name
        assert ids.dtype == torch.int32 and ids.is_contiguous()
        places: dict[tuple[int, int], int] = {}
        rows = 0
        for expert in range(offset, offset + local):
            mine = (ids == expert).nonzero().tolist()
            for index, (token, route) in enumerate(mine):
                places[token, route] = rows + index
            rows += -(-len(mine) // TILE) * TILE
        permuted = torch.full((rows + TILE, PADDED), float("nan"), dtype=torch.bfloat16)
        index = torch.full(ids.shape, -1, dtype=torch.int32)
        for (token, route), place in places.items():
            expert = int(ids[token, route]) - offset
            permuted[place] = self.row(given, token, expert)
            index[token, route] = place
        if not given["do_finalize"]:
            assert given["output"] is None
            return [permuted, weights.flatten(), index.flatten()]
        for token in range(ids.shape[0]):
            terms = [
                (weights[token, route], permuted[int(index[token, route])])
                for route in range(ids.shape[1])
                if index[token, route] >= 0
            ]
            given["output"][token] = added(terms)[:HIDDEN].to(given["output"].dtype)
        return [given["output"]]

    @staticmethod
    def row(given: dict[str, Any], token: int, expert: int) -> Any:
        value = given["hidden_states"][token].float().sum()
        for step, name in enumerate(PER_EXPERT):
            if given[name] is not None:
                flat = given[name][expert].flatten().float()
                value = value + flat[torch.arange(PADDED) % flat.numel()] * (step + 1)
        # Far apart in size, so that the order of a sum shows in fp32.
        power = int(given["gemm1_weights"][expert].flatten()[0]) % 13
        return (value * 2.0**power).bfloat16()


RECORD = Recorder()


class ActivationType(enum.Enum):
    """Stands for flashinfer's enum."""

    Silu, Gelu, Swiglu, Geglu, Relu2 = range(5)


def stand_in() -> None:
    names = ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core")
    package, fused, core = (ModuleType(name) for name in names)
    package.trtllm_fp4_block_scale_routed_moe = RECORD  # type: ignore[attr-defined]
    core.ActivationType = ActivationType  # type: ignore[attr-defined]
    for module in (package, fused, core):
        sys.modules[module.__name__] = module
    torch.accelerator.current_device_index = lambda: "cpu"


def layer_of(experts: int, top_k: int, seed: int, bias: bool = True, defer: bool = False) -> Any:
    make = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Any:
        return torch.randint(0, 200, (experts, *shape), generator=make, dtype=torch.uint8)

    data = {
        "w13_weight": some(32, PADDED // 2), "w2_weight": some(PADDED, 8),
        "w13_weight_scale": some(32, 1), "w2_weight_scale": some(PADDED, 1),
    }  # fmt: skip
    if bias:
        data["w13_bias"] = torch.randn((experts, 32), generator=make)
        data["w2_bias"] = torch.randn((experts, PADDED), generator=make)
    owner = made.Container(data)
    quant = moe.mxfp4_w4a16_moe_quant_config(
        w1_scale=owner.w13_weight_scale, w2_scale=owner.w2_weight_scale,
        w1_bias=getattr(owner, "w13_bias", None), w2_bias=getattr(owner, "w2_bias", None),
        gemm1_alpha=1.702, gemm1_beta=1.0, gemm1_clamp_limit=7.0,
    )  # fmt: skip
    unpadded = PADDED if defer else HIDDEN
    config = made.moe_config(experts, top_k, PADDED, 16, hidden_dim_unpadded=unpadded)
    kernel = trtllm.TrtLlmMxfp4ExpertsModular(config, quant)
    # vLLM fills these with one value; here each expert has its own, so that a shift shows.
    for name in ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit"):
        setattr(kernel, name, torch.randn(experts, generator=make))
    config.should_defer_moe_finalize = lambda tokens: defer
    owner.hold(kernel)
    return owner


def run(owner: Any, ids: Any, weights: Any, x: Any, kind: Any = torch.bfloat16) -> Any:
    output = torch.full((ids.shape[0], HIDDEN), 7.0, dtype=kind)
    result = owner.experts.apply(
        output=output, hidden_states=x, w1=owner.w13_weight, w2=owner.w2_weight,
        topk_weights=weights, topk_ids=ids, activation=made.MoEActivation.SILU,
        global_num_experts=owner.experts.moe_config.num_experts, expert_map=None, a1q_scale=None,
        a2_scale=None, workspace13=None, workspace2=None, expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )  # fmt: skip
    return output if result is None else result


def both(
    experts: int = 8, hot: int = 3, tokens: int = 9, top_k: int = 3, seed: int = 0,
    missing: float = 0.0, defer: bool = False, bias: bool = True, kind: Any = torch.bfloat16,
    change: Callable[[Any], Any] = lambda tiered: tiered,
) -> tuple[Any, Any]:  # fmt: skip
    owner = layer_of(experts, top_k, seed, bias, defer)
    ids, weights = made.routes(tokens, experts, top_k, seed, missing)
    weights = weights.bfloat16().float()  # times a bf16 row: exact in fp32
    x = torch.randn((tokens, PADDED), generator=torch.Generator().manual_seed(seed)).bfloat16()
    whole = run(owner, ids, weights, x, kind)
    tiered = made.tier(owner, made.order_of(experts, seed), hot)
    split.install(owner, change(tiered))
    RECORD.calls.clear()
    return whole, run(owner, ids, weights, x, kind)


def split_is_the_whole_to_the_bit() -> None:
    draw = random.Random(3)
    for seed in range(24):
        experts = draw.choice((4, 7, 9))
        hot = (0, experts)[seed % 2] if seed < 6 else draw.randint(1, experts - 1)
        whole, parts = both(
            experts, hot, draw.choice((1, 5, 16)), draw.choice((1, 2, 4)), seed,
            draw.choice((0.0, 0.3)), bias=seed % 3 > 0,
        )  # fmt: skip
        assert made.same_bits(whole, parts) and whole.isfinite().all(), seed
        assert len(RECORD.calls) == (1 if hot in (0, experts) else 2)


def each_pass_gets_its_own_slices_and_offset() -> None:
    both(hot=3, seed=2)
    hot, cold = RECORD.calls
    assert (hot["local_expert_offset"], hot["local_num_experts"]) == (0, 3)
    assert (cold["local_expert_offset"], cold["local_num_experts"]) == (3, 5)
    assert hot["num_experts"] == cold["num_experts"] == 8
    for name in PER_EXPERT:
        assert (hot[name].shape[0], cold[name].shape[0]) == (3, 5), name
    assert not hot["do_finalize"] and not cold["do_finalize"]
    first, second = hot["topk_ids"][0], cold["topk_ids"][0]
    assert ((first < 0) != (second < 0)).all()
    assert int(first.max()) < 3 and set(second[second >= 0].tolist()) <= set(range(3, 8))
    for call in RECORD.calls:
        assert call["topk_ids"][1].dtype == torch.float32
    for hot_count in (0, 8):
        both(hot=hot_count)
        (one,) = RECORD.calls
        assert (one["local_expert_offset"], one["local_num_experts"]) == (0, 8)
        assert one["do_finalize"]


def large_calls_are_split_chunk_by_chunk() -> None:
    """vLLM cuts a large call into chunks; each chunk goes through both sides."""
    with replaced(trtllm.TrtLlmMxfp4ExpertsModular, _max_supported_tokens=lambda *_: 4):
        whole, parts = both(tokens=10)
        assert made.same_bits(whole, parts) and len(RECORD.calls) == 6


def a_deferring_consumer_gets_one_merged_output() -> None:
    for hot in (0, 3, 8):
        whole, parts = both(hot=hot, missing=0.2, defer=True, seed=hot)
        assert isinstance(whole, UnfinalizedMoEOutput) and type(parts) is UnfinalizedMoEOutput
        assert made.same_bits(whole.expert_weights, parts.expert_weights)
        assert parts.expanded_idx_to_permuted_idx.dtype == torch.int32
        assert parts.gemm2_permuted.is_contiguous()
        before, after = whole.expanded_idx_to_permuted_idx, parts.expanded_idx_to_permuted_idx
        assert torch.equal(before < 0, after < 0) and (hot in (0, 8) or bool((before < 0).any()))
        for token, route in (before >= 0).nonzero().tolist():
            old = whole.gemm2_permuted[int(before[token, route])]
            assert made.same_bits(old, parts.gemm2_permuted[int(after[token, route])])


def wrong_slices_and_orders_are_seen() -> None:
    def differs(what: str, **options: Any) -> None:
        whole, parts = both(**options)
        assert not made.same_bits(whole, parts), f"{what} was not seen"

    def stay(name: str) -> Callable[[Any], Any]:
        def change(tiered: Any) -> Any:
            rows = torch.cat((tiered.hot_tensors[name], tiered.cold_tensors[name]))
            rows = rows[tiered.slot_of.long()]
            hot = {**tiered.hot_tensors, name: rows[: tiered.hot]}
            cold = {**tiered.cold_tensors, name: rows[tiered.hot :]}
            return dataclasses.replace(tiered, hot_tensors=hot, cold_tensors=cold)

        return change

    for name in ("w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias"):
        differs(f"{name} that was not moved", change=stay(name))

    def flip(tiered: Any) -> Any:
        return dataclasses.replace(tiered, slot_of=tiered.slot_of.flip(0))

    differs("a map that is flipped before the rows", change=flip)
    original = sides.sides

    def shifted(*args: Any) -> Any:
        hot, cold = original(*args)
        return hot, dataclasses.replace(cold, offset=cold.offset - 1)

    def unmoved(container: Any, experts: Any, tiered: Any, roles: Any) -> Any:
        made_sides = original(container, experts, tiered, roles)
        alpha, at = experts.gemm1_alpha, 0
        for side in made_sides:
            side.tensors["gemm1_alpha"] = alpha[at : at + side.rows]
            at += side.rows
        return made_sides

    with replaced(split, sides=shifted):
        differs("an offset that is one off")
    with replaced(split, sides=unmoved):
        differs("gemm1_alpha that was not moved")
    final = kernels.finalize

    def backwards(output: Any, a: Any, b: Any, c: Any, d: Any, weights: Any) -> None:
        final(output, a, b.flip(1), c, d.flip(1), weights.flip(1))

    with replaced(kernels, finalize=backwards):
        differs("the order of the sum", tokens=64, top_k=4, kind=torch.float32)
    whole, parts = both(tokens=64, top_k=4, kind=torch.float32)
    assert made.same_bits(whole, parts)


def ids_by_definition(ids: Any, slot_of: Any, hot: int, offset: int) -> tuple[Any, Any]:
    slots = torch.where(ids >= 0, slot_of[ids.clamp(min=0).long()], -1)
    return (
        torch.where((slots >= 0) & (slots < hot), slots, -1).int(),
        torch.where(slots >= hot, slots - hot + offset, -1).where(slots >= 0, -1).int(),
    )


def id_split_is_its_definition() -> None:
    """1 to 8,192 tokens, ids of -1 and repeated ids, no and all rows hot, both numberings."""
    sizes = ((1, 4, 2), (3, 7, 3), (64, 384, 6), (512, 128, 8), (8192, 384, 6))
    for tokens, experts, top_k in sizes:
        slot_of = torch.randperm(experts).int()
        ids = torch.randint(-1, experts, (tokens, top_k), dtype=torch.int32)
        for hot in (0, 1, experts // 2, experts - 1, experts):
            for offset in (0, hot):
                got = kernels.split_ids(ids, slot_of, hot, offset)
                for have, want in zip(
                    got, ids_by_definition(ids, slot_of, hot, offset), strict=True
                ):
                    assert torch.equal(have, want), (tokens, hot, offset)
        both_sides = kernels.split_ids(ids, slot_of, experts // 2)
        assert torch.equal((both_sides[0] >= 0) ^ (both_sides[1] >= 0), ids >= 0)
    assert kernels.split_ids(ids[:0], slot_of, 1)[0].shape == (0, 6)
    beyond = torch.tensor([[384, 0]], dtype=torch.int32)
    assert int(kernels.split_ids(beyond, slot_of, 384)[0][0, 0]) == -1


def sum_by_definition(hot: Any, first: Any, cold: Any, second: Any, weights: Any) -> Any:
    total = torch.zeros((first.shape[0], hot.shape[1]))
    for route in range(first.shape[1]):
        a, b = first[:, route].long(), second[:, route].long()
        row = torch.where((a >= 0)[:, None], hot[a.clamp(min=0)], cold[b.clamp(min=0)]).float()
        step = total + weights[:, route : route + 1].float() * row
        total = torch.where(((a >= 0) | (b >= 0))[:, None], step, total)
    return total


def finalize_is_the_sum_in_the_order_of_the_routes() -> None:
    for tokens, width, top_k, kind in (
        (1, 24, 2, torch.float32), (7, 40, 3, torch.bfloat16), (64, 96, 8, torch.float32),
        (512, 33, 6, torch.float32), (8192, 16, 2, torch.float32),
    ):  # fmt: skip
        rows = tokens * top_k
        hot, cold = (torch.randn(rows + 3, width + 8).bfloat16() for _ in range(2))
        hot[-1], cold[-1] = float("nan"), float("inf")  # padding that no route names
        side = torch.randint(0, 3, (tokens, top_k))  # hot, cold, neither
        place = torch.randperm(rows).view(tokens, top_k)
        first = torch.where(side == 0, place, -1).int()
        second = torch.where(side == 1, place, -1).int()
        weights = torch.rand(tokens, top_k).bfloat16().to(kind)
        weights[side == 2] = float("inf")  # a route without a row adds nothing at all
        none = torch.full_like(first, -1)
        pairs = [(first, second), (none, second), (first, none)]
        for a, b in pairs if tokens < 8192 else pairs[:1]:
            for output in (torch.bfloat16, torch.float32) if tokens < 64 else (torch.bfloat16,):
                got = torch.full((tokens, width), 3.0, dtype=output)
                kernels.finalize(got, hot, a, cold, b, weights)
                want = sum_by_definition(hot[:, :width], a, cold[:, :width], b, weights)
                assert made.same_bits(got, want.to(output)), (tokens, output)
    hot, cold = (torch.randn(600, 64) * 2.0 ** torch.arange(600)[:, None].fmod(9) for _ in "ab")
    side = torch.randint(0, 2, (100, 6))
    place = torch.randperm(600).view(100, 6)
    first, second = (torch.where(side == tier, place, -1).int() for tier in (0, 1))
    weights = torch.rand(100, 6)
    right, swapped = torch.empty((100, 64)), torch.empty((100, 64))
    kernels.finalize(right, hot, first, cold, second, weights)
    kernels.finalize(swapped, hot, first.flip(1), cold, second.flip(1), weights.flip(1))
    assert not made.same_bits(right, swapped), "the order of the routes was not seen"


CASES: list[Callable[[], None]] = [
    split_is_the_whole_to_the_bit, each_pass_gets_its_own_slices_and_offset,
    large_calls_are_split_chunk_by_chunk, a_deferring_consumer_gets_one_merged_output,
    wrong_slices_and_orders_are_seen, id_split_is_its_definition,
    finalize_is_the_sum_in_the_order_of_the_routes,
]  # fmt: skip

if __name__ == "__main__":
    made.stand_in()
    stand_in()
    made.run_cases(CASES, sys.argv[3:])
