"""The CUDA residency moves layers of vLLM's own kernels, with the hook's own split and self-test.

vLLM's modular kernel, experts objects and Triton kernels (interpreted) are real, so are discovery,
copies, hashes, split and self-test. Device, driver and the operators that only GPUs have are
stand-ins. `joint_cases.py HOOK_FOLDER WORK_FOLDER [CASE...]` prints one line for each case.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, sys.argv[1])

import cpu_triton  # noqa: F401  (before triton and vLLM)
import cuda_layers as stand
import expertmaps_hook_cuda as cuda
import expertmaps_hook_model as model
import expertmaps_hook_plan as plan
import expertmaps_hook_rows as rows
import expertmaps_hook_selftest as selftest
import expertmaps_hook_split as split
import split_layers as made
import split_marlin_cases as marlin
import split_trtllm_cases as trtllm
import torch
from split_layers import replaced
from vllm.model_executor.layers.fused_moe import modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import (
    MoEPrepareAndFinalizeNoDPEPModular,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

EXPERTS, TOP_K, HIDDEN, INNER = 8, 2, 64, 32
TRITON = ("bf16", "block", "channel", "tensor", "static")
ONE_SCALE = "tensor"
"""Takes one scale over all rows, those without a route too: what padding leaves is not compared."""
SEEN_IN = ("block", "tensor", "int4-zp", "trtllm")
HOT = {0: (5, 1, 2), 1: (0, 6, 3)}
LARGE = 24
"""Tokens of the self-test's largest batch: few, since the interpreter is slow."""


class Method:
    """Stands for a quantisation method: the way of all of them from the layer to the kernel."""

    topk_indices_dtype = torch.int32
    is_monolithic = False
    apply = UnquantizedFusedMoEMethod.forward_native

    def __init__(self, experts: Any) -> None:
        self.moe_kernel = mk.FusedMoEKernel(MoEPrepareAndFinalizeNoDPEPModular(), experts)
        self.moe_quant_config = experts.quant_config


def container(kind: str, seed: int, device: stand.Device) -> Any:
    """A layer on real experts whose parameters lie in the stand-in's device memory."""
    if kind in TRITON:
        found = made.triton_layer(kind, EXPERTS, TOP_K, HIDDEN, INNER, seed)
    elif kind in marlin.KINDS:
        found = marlin.marlin_layer(kind, EXPERTS, TOP_K, HIDDEN, INNER, seed)
    else:
        found = trtllm.layer_of(EXPERTS, TOP_K, seed, defer=kind == "trtllm-defer")
    for parameter in found.parameters():
        data = parameter.data
        memory = device.memory(data.numel() * data.element_size())
        parameter.data = memory.view(data.dtype).view(data.shape).copy_(data)
    if kind.startswith("int4"):
        # As vLLM's INT4 methods leave a layer: one weight under two names, and indices.
        owned = dict(found._parameters)
        index = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN), requires_grad=False)
        aliases = {f"{part}_qweight": owned[f"{part}_weight"] for part in ("w13", "w2")}
        found._parameters = {**aliases, "w13_g_idx": index, **owned}
    found.quant_method = Method(found.experts)
    found.moe_config, found.activation = found.experts.moe_config, MoEActivation.SILU
    found.top_k, found.local_num_experts, found.global_num_experts = TOP_K, EXPERTS, EXPERTS
    found.hidden_size = found.moe_config.hidden_dim
    found.apply_router_weight_on_input = False
    kind_of = type(found)
    kind_of.forward_modular = RoutedExperts.forward_modular
    kind_of._ensure_moe_quant_config_init = RoutedExperts._ensure_moe_quant_config_init
    return found


def layers(machine: stand.Machine, kind: str, count: int = 2) -> list[model.MoeLayer]:
    found = [
        model.MoeLayer(
            number,
            SimpleNamespace(
                routed_experts=container(kind, number, machine.device), is_monolithic=False
            ),
        )
        for number in range(count)
    ]
    model.check_layers(found, "cuda")
    return model.on_device(found, "cuda")


def probe(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
    """The hook's self-test with what it adds on a GPU: a large batch, whole tokens of id -1."""
    return selftest.probe(item, hot, padding=True, most=LARGE)


def forward(item: model.MoeLayer, padded: bool = True) -> list[Any]:
    """Outputs for routes over hot, cold and all experts, and with tokens of id -1."""
    hot, outputs = HOT[item.layer], []
    cold = sorted(set(range(EXPERTS)) - set(hot))
    make = torch.Generator().manual_seed(7)
    for pool in (hot, cold, *(range(EXPERTS),) * (1 + padded)):
        places, weights = made.routes(7, len(pool), TOP_K, 3)
        ids = torch.tensor(pool, dtype=torch.int32)[places.long()]
        real = torch.ones(7, dtype=torch.bool)
        if len(outputs) == 3:
            real[1::3] = False
            ids[~real] = -1
        x = torch.randn(7, item.container.hidden_size, generator=make).bfloat16()
        result = item.container.forward_modular(x, weights, ids)
        outputs.append(selftest._comparable(result)[real].clone())
    return outputs


def owners(item: model.MoeLayer) -> Iterator[dict[str, Any]]:
    experts = item.container.quant_method.moe_kernel.fused_experts
    yield item.container._parameters
    yield vars(experts)
    yield from (vars(getattr(experts.quant_config, name)) for name in ("_w1", "_w2"))


def held(item: model.MoeLayer) -> list[tuple[dict[str, Any], str, Any]]:
    """Every tensor [experts, ...] of a layer with its place."""
    return [
        (owner, name, value)
        for owner in owners(item)
        for name, value in owner.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == EXPERTS
    ]


class State:
    """What must be there again: bits, objects and the engine's own functions."""

    def __init__(self, found: list[model.MoeLayer]) -> None:
        self.held = [place for item in found for place in held(item)]
        self.bits = [value.detach().clone() for _, _, value in self.held]
        self.pointers = [value.data_ptr() for _, _, value in self.held]
        self.found = found

    def check(self) -> None:
        for (owner, name, value), bits in zip(self.held, self.bits, strict=True):
            assert owner[name] is value, name
            assert value.stride() == bits.stride() and value.dtype == bits.dtype, name
            assert selftest.same_bits(value, bits), name
        for item in self.found:
            experts = item.container.quant_method.moe_kernel.fused_experts
            assert not {"apply", "_invoke_kernel"} & set(vars(experts))

    def check_pointers(self) -> None:
        found = [value.data_ptr() for _, _, value in self.held]
        assert found == self.pointers


def residency(machine: stand.Machine, found: list[model.MoeLayer], hot: Any = HOT) -> Any:
    return cuda.CudaResidency(found, hot, machine.device, machine.pinned, plan.Bytes(0, 0))


def nobody_reads_what_is_left(item: model.MoeLayer, expected: list[Any], run: Any) -> None:
    """With tensors that have a shape and a type but no memory at all in the originals' place."""
    left = held(item)
    try:
        for owner, name, value in left:
            empty = torch.empty_like(value, device="meta")
            owner[name] = torch.nn.Parameter(empty, requires_grad=False)
        assert stand.same(expected, run(item))
    finally:
        for owner, name, value in left:
            owner[name] = value


def layers_move_and_go_back_to_the_bit(kind: str) -> None:
    """Hot, cold and mixed routes, ids of -1; no, three and all experts hot."""
    run = functools.partial(forward, padded=kind != ONE_SCALE)
    for hot in (HOT, {0: (), 1: tuple(range(EXPERTS))}):
        machine = stand.Machine()
        found = layers(machine, kind)
        state = State(found)
        outputs = [run(item) for item in found]
        runs = len(selftest.TOKENS) * (3 + (kind != ONE_SCALE))
        more = selftest.more_sizes(LARGE, EXPERTS, len(hot[0]), TOP_K)
        assert len(more) >= 3 and len(probe(found[0], hot[0])) == runs + len(more)
        used = machine.device.used
        assert all(output.abs().max() > 0 for output in outputs[0])
        tables = residency(machine, found, hot)
        tables.move(probe)
        forget()
        wire = tables.wire()
        assert wire["hotRows"] == sum(len(experts) for experts in hot.values())
        assert wire["coldBytes"] == wire["coldRows"] * found[0].row_bytes() > 0
        # The originals are gone; a kernel's own vectors were not in the stand-in's memory before.
        assert used - machine.device.used >= wire["coldBytes"] - 3 * 4 * EXPERTS * len(found)
        for item, expected in zip(found, outputs, strict=True):
            assert stand.same(expected, run(item)), (kind, hot)
            nobody_reads_what_is_left(item, expected, run)
        tables.undo()
        forget()
        state.check()
        assert machine.nothing_pinned()
        for item, expected in zip(found, outputs, strict=True):
            assert stand.same(expected, run(item))


def forget() -> None:
    """What the stand-ins for kernels noted holds tensors."""
    marlin.RECORD.calls.clear()
    trtllm.RECORD.calls.clear()
    gc.collect()


def triton_layers() -> None:
    for kind in TRITON:
        layers_move_and_go_back_to_the_bit(kind)


def marlin_layers() -> None:
    for kind in marlin.KINDS:
        layers_move_and_go_back_to_the_bit(kind)


def trtllm_layers() -> None:
    for kind in ("trtllm", "trtllm-defer"):
        layers_move_and_go_back_to_the_bit(kind)


def caught(kind: str, reason: str, what: str, *changes: tuple[Any, dict[str, Any]]) -> None:
    """A mistake in the first layer that moves is seen, and no byte has left its place."""
    machine = stand.Machine()
    found = layers(machine, kind)
    state = State(found)
    tables = residency(machine, found)
    with ExitStack() as undo:
        for owner, values in changes:
            undo.enter_context(replaced(owner, **values))
        failure = stand.refused(lambda: tables.move(probe))
    assert failure.reason == reason, (kind, what, failure)
    state.check()
    state.check_pointers()
    assert machine.nothing_pinned()


def unsorted(only: Callable[[int], bool]) -> Callable[..., None]:
    """copy_rows that leaves the rows of some tensors in the order of the experts."""
    count = [0]
    original = rows.copy_rows

    def copy(source: Any, order: Any, target: Any) -> None:
        place, hot = count[0] // 2, not count[0] % 2
        count[0] += 1
        stay = range(len(order)) if hot else range(EXPERTS - len(order), EXPERTS)
        original(source, list(stay) if only(place) else order, target)

    return copy


def one_wrong(place: int) -> Callable[..., None]:
    """copy_rows that puts another expert's row into the first cold slot of one tensor."""
    count = [0]
    original = rows.copy_rows

    def copy(source: Any, order: Any, target: Any) -> None:
        wrong = [order[1], *order[1:]]
        original(source, wrong if count[0] == 2 * place + 1 else order, target)
        count[0] += 1

    return copy


def places(kind: str, scales: bool) -> list[int]:
    """Places of a layer's weights among its parts, or of its scales and zero points."""
    item = layers(stand.Machine(), kind, 1)[0]
    parts = cuda._layer(item, HOT[0], torch.device("cpu")).parts
    names = [part.name.replace("qweight", "weight") for part in parts]
    ends = ("scale", "scales", "qzeros") if scales else ("weight",)
    return [index for index, name in enumerate(names) if name.endswith(ends)]


def mistakes_are_seen() -> None:
    """By the hashes, and by the self-test with the engine's kernel where the hashes look away."""
    original_table, original_sides = cuda.slot_table, split.sides
    unseen = (cuda, {"check_rows": lambda *_: None})

    def flipped(order: Any, device: Any) -> Any:
        return original_table(order, device).flip(0)

    def shifted(*args: Any) -> Any:
        hot, cold = original_sides(*args)
        moved = cold.expert_map.clone()
        moved[moved >= 0] = (moved[moved >= 0] + 1) % cold.rows
        return hot, dataclasses.replace(cold, expert_map=moved, offset=cold.offset - 1)

    for kind in SEEN_IN:
        weights, scales = places(kind, False), places(kind, True)
        assert len(weights) == 2 and scales
        copies: dict[str, Callable[[], Any]] = {
            "a wrong row": functools.partial(one_wrong, weights[1]),
            "a wrong scale": functools.partial(one_wrong, scales[0]),
            "scales that stayed": functools.partial(unsorted, scales.__contains__),
        }
        faults: dict[str, Callable[[], Any]] = {
            what: lambda copy=copy: (rows, {"copy_rows": copy()})  # type: ignore[misc]
            for what, copy in copies.items()
        }
        faults["a flipped map"] = lambda: (cuda, {"slot_table": flipped})
        for what, fault in faults.items():
            caught(kind, "RowsChanged", what, fault())
            caught(kind, "SelfTestFailed", what, fault(), unseen)
        caught(kind, "SelfTestFailed", "one off", (split, {"sides": shifted}))


CASES: list[Callable[[], None]] = [triton_layers, marlin_layers, trtllm_layers, mistakes_are_seen]


def stand_in() -> None:
    made.stand_in()
    selftest.TOKENS = (1, 5)  # the interpreter is slow
    marlin.stand_in()
    trtllm.stand_in()
    trtllm.HIDDEN = trtllm.PADDED  # the runner pads; this is below it
    record = trtllm.RECORD.__class__.__call__

    def rounded(self: Any, **given: Any) -> Any:
        """Weights times rows are exact in fp32, so that the stand-in's sum is a sum of fma."""
        ids, weights = given.pop("topk_ids")
        return record(self, topk_ids=(ids, weights.bfloat16().float()), **given)

    trtllm.Recorder.__call__ = rounded  # type: ignore[method-assign]


if __name__ == "__main__":
    stand_in()
    made.run_cases(CASES, sys.argv[3:])
