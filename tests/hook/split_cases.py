"""Split layers against whole ones, in the Triton interpreter; a script for the engine's Python.

`split_cases.py HOOK_FOLDER WORK_FOLDER [CASE...]` prints one line for each case that holds.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

import cpu_triton  # noqa: F401  (before triton and vLLM)
import expertmaps_hook_sides as sides
import expertmaps_hook_split as split
import expertmaps_hook_split_triton as split_triton
import expertmaps_hook_tensors as tensors
import split_layers as made
import torch
from split_layers import refused, replaced

WORK = Path(sys.argv[2])
KINDS = ("bf16", "bias", "block", "channel", "tensor", "static")
EXAMPLES = int(os.environ.get("SPLIT_EXAMPLES", "18"))


def both(
    kind: str = "bf16", tokens: int = 9, experts: int = 8, top_k: int = 2, hidden: int = 64,
    inner: int = 32, hot: int = 3, seed: int = 0, missing: float = 0.0,
    change: Callable[[Any], Any] = lambda tiered: tiered,
) -> tuple[Any, Any]:  # fmt: skip
    """Output [T, K] of the whole layer and of the same layer split."""
    layer = made.triton_layer(kind, experts, top_k, hidden, inner, seed)
    ids, weights = made.routes(tokens, experts, top_k, seed, missing)
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=make).bfloat16()
    whole = made.run(layer, ids, weights, x)
    originals = {name: value.data for name, value in layer.named_parameters()}
    tiered = made.tier(layer, made.order_of(experts, seed), hot)
    undo = split.install(layer, change(tiered))
    parts = made.run(layer, ids, weights, x)
    undo()
    for name, value in layer.named_parameters():
        value.data = originals[name]
    assert made.same_bits(whole, made.run(layer, ids, weights, x)), "undo left something behind"
    return whole, parts


def triton_split_is_the_whole_to_the_bit() -> None:
    """Layers of random kind, size, hot count (none and all too), tokens up to 64, ids of -1."""
    draw = random.Random(0)
    seen = set()
    for seed in range(EXAMPLES):
        kind = KINDS[seed % len(KINDS)]
        experts = draw.choice((4, 6, 9, 13))
        hot = (0, experts)[seed // len(KINDS)] if seed < 12 else draw.randint(1, experts - 1)
        tokens = draw.choice((1, 1, 2, 3, 7, 17, 33)) if seed % 11 else 64
        size = {
            "hidden": draw.choice((64, 96, 160)),
            "inner": draw.choice((32, 64)),
            "top_k": draw.choice((1, 2, 3, 4)),
            "missing": draw.choice((0.0, 0.0, 0.2)),
        }
        whole, parts = both(kind, tokens, experts, hot=hot, seed=seed, **size)
        assert whole.float().abs().max() > 0 and whole.isfinite().all(), (seed, kind)
        assert made.same_bits(whole, parts), (seed, kind, experts, hot, tokens, size)
        seen.add((kind, hot in (0, experts)))
    assert len(seen) == 2 * len(KINDS)


def routes_on_one_side_only_are_the_whole() -> None:
    """All routes hot, all routes cold: the other side's launch finds nothing and writes nothing."""
    for pool in (slice(0, 4), slice(4, 8)):
        layer = made.triton_layer("block", 8, 2, 64, 32, 5)
        order = made.order_of(8, 5)
        chosen = torch.tensor(order[pool], dtype=torch.int32)
        ids = torch.stack([chosen[torch.randperm(4)[:2]] for _ in range(11)])
        weights = torch.full((11, 2), 0.5)
        x = torch.randn(11, 64).bfloat16()
        whole = made.run(layer, ids, weights, x)
        split.install(layer, made.tier(layer, order, 4))
        assert made.same_bits(whole, made.run(layer, ids, weights, x))


def ids_of_minus_one_add_nothing_in_a_small_step() -> None:
    """vLLM takes few routes unsorted and writes zeros for -1, over what lay in the workspace."""
    for kind in ("bf16", "tensor"):
        layer = made.triton_layer(kind, 13, 3, 64, 32, 6)
        weights, x = torch.full((1, 3), 0.5), torch.randn(1, 64).bfloat16()
        chosen = [torch.tensor([row], dtype=torch.int32) for row in ([4, -1, 9], [-1, -1, -1])]
        whole = [made.run(layer, ids, weights, x) for ids in chosen]
        split.install(layer, made.tier(layer, made.order_of(13, 6), 5))
        parts = [made.run(layer, ids, weights, x) for ids in chosen]
        assert all(made.same_bits(*pair) for pair in zip(whole, parts, strict=True)), kind
        assert whole[1].float().abs().max() == 0 < whole[0].float().abs().max()


def differs(what: str, **options: Any) -> None:
    whole, parts = both(**options)
    assert not made.same_bits(whole, parts), f"{what} was not seen"


def scales_that_were_not_moved_are_seen() -> None:
    def stay(tiered: Any) -> Any:
        """Rows in the order of the map, scales in the order of the experts."""
        order = tiered.slot_of.long()
        moved = {
            name: torch.cat((tiered.hot_tensors[name], tiered.cold_tensors[name]))
            for name in tiered.hot_tensors
        }
        hot, cold = dict(tiered.hot_tensors), dict(tiered.cold_tensors)
        for name, value in moved.items():
            if "scale" in name or "bias" in name:
                hot[name], cold[name] = value[order][: tiered.hot], value[order][tiered.hot :]
        return dataclasses.replace(tiered, hot_tensors=hot, cold_tensors=cold)

    for kind in ("block", "channel", "tensor", "bias"):
        differs(f"{kind}: scales or biases of other experts", kind=kind, change=stay)


def a_map_that_is_flipped_before_the_rows_is_seen() -> None:
    for kind in KINDS:
        differs(
            "another map over the same rows",
            kind=kind,
            change=lambda tiered: dataclasses.replace(tiered, slot_of=tiered.slot_of.flip(0)),
        )


def an_offset_that_is_one_off_is_seen() -> None:
    original = sides.sides

    def shifted(container: Any, experts: Any, tiered: Any, roles: Any) -> Any:
        hot, cold = original(container, experts, tiered, roles)
        moved = cold.expert_map.clone()
        moved[moved >= 0] = (moved[moved >= 0] + 1) % cold.rows
        return hot, dataclasses.replace(cold, expert_map=moved)

    with replaced(split, sides=shifted):
        differs("cold rows one off")


def blocks_for_experts_of_the_other_side_are_seen() -> None:
    """Without ignore_invalid_experts a tile of -1 writes zeros over the other side's rows."""
    original = split_triton._assign

    def keeping(align: Any, *args: Any, **kwargs: Any) -> Any:
        def all_blocks(*a: Any, ignore_invalid_experts: bool) -> Any:
            return align(*a, ignore_invalid_experts=False)

        return original(all_blocks, *args, **kwargs)

    with replaced(split_triton, _assign=keeping):
        differs("zeros over the other side")


def a_cleared_cache_between_the_passes_is_seen() -> None:
    original = split_triton._launch

    def clearing(launch: Any, passes: Any, *args: Any, **kwargs: Any) -> None:
        def after_zero(a: Any, b: Any, c: Any, *rest: Any, **more: Any) -> None:
            c.zero_()
            launch(a, b, c, *rest, **more)

        original(after_zero, passes, *args, **kwargs)

    with replaced(split_triton, _launch=clearing):
        differs("a cleared cache")


def tuned(experts: int, inner: int, block_k: int) -> None:
    """A tuned file for one expert count, as vLLM looks for it."""
    tiles = {
        "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": block_k, "GROUP_SIZE_M": 1,
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip
    name = f"E={experts},N={inner},device_name=cpu.json"
    (WORK / name).write_text(json.dumps({"1": tiles}), "utf-8")


def tiles_are_those_of_all_experts() -> None:
    """Tuned files for 8, 3 and 5 experts differ in the K step, and so in bits."""
    os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(WORK)
    size: dict[str, Any] = {"tokens": 48, "hidden": 320, "inner": 48, "hot": 3, "seed": 11}
    for experts, block_k in ((8, 16), (3, 64), (5, 128)):
        tuned(experts, 48, block_k)
    original, seen = split_triton._launch, []

    def noting(launch: Any, *args: Any, **kwargs: Any) -> None:
        def note(*rest: Any, **more: Any) -> None:
            seen.append(rest[11]["BLOCK_SIZE_K"])
            launch(*rest, **more)

        original(note, *args, **kwargs)

    def per_side(launch: Any, *args: Any, **kwargs: Any) -> None:
        def own(a: Any, b: Any, *rest: Any, **more: Any) -> None:
            config = {**rest[9], "BLOCK_SIZE_K": {3: 64, 5: 128}[b.shape[0]]}
            launch(a, b, *rest[:9], config, **more)

        original(own, *args, **kwargs)

    try:
        with replaced(split_triton, _launch=noting):
            whole, parts = both(**size)
            assert made.same_bits(whole, parts)
            assert seen == [16] * 4, seen  # two GEMMs, two sides
        with replaced(split_triton, _launch=per_side):
            differs("tiles of a side's own", **size)
    finally:
        del os.environ["VLLM_TUNED_CONFIG_FOLDER"]


def tiers_that_do_not_fit_are_refused_with_nothing_changed() -> None:
    layer = made.triton_layer("block", 8, 2, 64, 32, 0)
    good = made.tier(layer, made.order_of(8, 0), 3)
    twice = good.slot_of.clone()
    twice[0] = twice[1]
    short = {**good.cold_tensors, "w2_weight": good.cold_tensors["w2_weight"][1:]}
    lost = {k: v for k, v in good.cold_tensors.items() if k != "w13_weight_scale"}
    other = {**good.cold_tensors, "w2_weight": good.cold_tensors["w2_weight"].float()}
    for reason, part, values in (
        ("TiersInvalid", "1 of them unfilled", {"slot_of": twice}),
        ("TiersInvalid", "int64", {"slot_of": good.slot_of.long()}),
        ("TiersInvalid", "9 hot rows", {"hot": 9}),
        ("UnknownTensor", "has [4, 64, 32] in a tier, expected 5", {"cold_tensors": short}),
        ("UnknownTensor", "w13_weight_scale has nothing", {"cold_tensors": lost}),
        ("UnknownTensor", "rows differ", {"cold_tensors": other}),
    ):  # fmt: skip
        bad = dataclasses.replace(good, **values)
        refused(reason, part, lambda bad=bad: split.install(layer, bad))
        assert "apply" not in vars(layer.experts)
    undo = split.install(layer, good)
    refused("HookUnsupported", "apply is replaced already", lambda: split.install(layer, good))
    undo()
    assert "apply" not in vars(layer.experts)


def kernels_without_a_seam_are_refused_by_name() -> None:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import (
        TritonExperts,
        TritonWNA16Experts,
    )
    from vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe import (
        TrtLlmMxfp4ExpertsMonolithic,
    )

    class Renamed(TritonExperts):  # type: ignore[misc]
        pass

    class DeepseekV4MegaMoEExperts(torch.nn.Module):
        pass

    layer = made.triton_layer("bf16", 8, 2, 64, 32, 0)
    experts = layer.experts
    assert split.reason(layer) is None
    for kind, part in (
        (TrtLlmMxfp4ExpertsMonolithic, "TrtLlmMxfp4ExpertsMonolithic, expected one of"),
        (TritonWNA16Experts, "triton_moe.TritonWNA16Experts, expected one of"),
        (Renamed, "Renamed, expected one of"),
    ):
        layer.hold(kind.__new__(kind))
        assert part in str(split.reason(layer))
        assert ("monolithic kernel" in str(split.reason(layer))) == kind.is_monolithic()
        refused("HookUnsupported", part, lambda: split.check(layer))
    assert "found DeepseekV4MegaMoEExperts" in str(split.reason(DeepseekV4MegaMoEExperts()))
    layer.hold(experts)
    layer.expert_map = torch.zeros(8)
    assert "expert parallel" in str(split.reason(layer))
    layer.expert_map = None
    layer.expert_map_manager.num_fused_shared_experts = 1
    assert "shared experts" in str(split.reason(layer))
    layer.expert_map_manager.num_fused_shared_experts = 0
    for owner, name, called in (
        (experts, "ab_strides", "ab_strides"), (experts, "w13_scales", "w13_scales"),
        (experts.quant_config._a2, "scale", "a2_scale"),
    ):  # fmt: skip
        setattr(owner, name, torch.zeros(8))
        refused("HookUnsupported", f"{called} [8]", lambda: tensors.discover(0, layer, 8))
        setattr(owner, name, None)
    experts.packed = layer.w13_weight  # what a pass would not be given, under another name
    refused("HookUnsupported", "w13_weight [8", lambda: tensors.discover(0, layer, 8))
    del experts.packed
    assert len(tensors.discover(0, layer, 8)) == 2
    experts._lora_context = object()
    assert "LoRA" in str(split.reason(layer))


def code_that_is_another_is_refused() -> None:
    """The seam is looked for in vLLM's code, not taken for granted."""

    def elsewhere(self: Any, w1: Any) -> Any:
        return w1

    refused("HookUnsupported", "does not call launch", lambda: sides.rebound(elsewhere, launch=1))
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    layer = made.triton_layer("bf16", 8, 2, 64, 32, 0)
    tiered = made.tier(layer, made.order_of(8, 0), 3)
    with replaced(TritonExperts, apply=elsewhere):
        refused(
            "HookUnsupported",
            "does not call _prepare_expert_assignment, invoke_fused_moe_triton_kernel",
            lambda: split.install(layer, tiered),
        )


CASES: list[Callable[[], None]] = [
    triton_split_is_the_whole_to_the_bit, routes_on_one_side_only_are_the_whole,
    ids_of_minus_one_add_nothing_in_a_small_step,
    scales_that_were_not_moved_are_seen, a_map_that_is_flipped_before_the_rows_is_seen,
    an_offset_that_is_one_off_is_seen, blocks_for_experts_of_the_other_side_are_seen,
    a_cleared_cache_between_the_passes_is_seen, tiles_are_those_of_all_experts,
    tiers_that_do_not_fit_are_refused_with_nothing_changed,
    kernels_without_a_seam_are_refused_by_name, code_that_is_another_is_refused,
]  # fmt: skip

if __name__ == "__main__":
    WORK.mkdir(parents=True, exist_ok=True)
    made.stand_in()
    made.run_cases(CASES, sys.argv[3:])
