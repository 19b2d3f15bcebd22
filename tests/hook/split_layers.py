"""MoE layers for the split's tests: vLLM's own experts objects on random weights, and their tiers.

vLLM's CPU build has no CUDA operators. Those that the seams call are written here in plain
PyTorch, after their documented results: the sorting of routes, the sum over routes, and fp8
quantisation. They stand for the GPU's and serve the whole and the split layer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import expertmaps_hook_env as env
import expertmaps_hook_rows as rows
import expertmaps_hook_tensors as tensors
import expertmaps_hook_tiers as tiers
import torch
from vllm.model_executor.layers.fused_moe import config as moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

FP8 = torch.float8_e4m3fn


def align(
    topk_ids: Any, experts: int, block: int, sorted_ids: Any, expert_ids: Any, padded: Any,
    expert_map: Any = None, scatter: Any = None,
) -> None:  # fmt: skip
    """Stands for moe_align_block_size: routes by expert, each expert padded to whole blocks."""
    routes = topk_ids.flatten().tolist()
    known = [route if 0 <= route < experts else -1 for route in routes]
    if expert_map is not None:
        table = expert_map.tolist()
        known = [table[route] if route >= 0 else -1 for route in known]
    sorted_ids.fill_(len(routes))
    expert_ids.fill_(-1)
    place = 0
    for expert in range(experts):
        mine = [index for index, route in enumerate(known) if route == expert]
        sorted_ids[place : place + len(mine)] = torch.tensor(mine, dtype=torch.int32)
        blocks = -(-len(mine) // block)
        expert_ids[place // block : place // block + blocks] = expert
        place += blocks * block
    padded.fill_(place)


def moe_sum(rows: Any, output: Any, topk_ids: Any = None, expert_map: Any = None) -> None:
    """Stands for moe_sum: rows [T, k, K] added in the order of the routes, in their own type."""
    assert expert_map is None
    total = torch.zeros_like(output)
    for route in range(rows.shape[1]):
        total = total + rows[:, route]
    output.copy_(total)


def quantize(
    a: Any, scale: Any, dtype: Any, per_token: bool, block: Any = None, **_: Any
) -> tuple[Any, Any]:
    """Stands for moe_kernel_quantize_input: fp8 by block, token or tensor."""
    if dtype != FP8:
        return a, scale
    wide = a.float()
    if block is not None:
        parts = wide.view(a.shape[0], -1, block[1])
        scale = parts.abs().amax(-1).clamp(min=1e-6) / 448
        wide = (parts / scale[..., None]).view(a.shape)
    elif per_token:
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 448
        wide = wide / scale
    else:
        scale = (wide.abs().amax().clamp(min=1e-6) / 448).reshape(1) if scale is None else scale
        wide = wide / scale
    return wide.clamp(-448, 448).to(FP8), scale


def stand_in() -> None:
    """Put the stand-ins where vLLM's modules look for the operators."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts import triton_moe
    from vllm.model_executor.layers.fused_moe.prepare_finalize import no_dp_ep

    def prepare(
        a: Any, scale: Any, quant_dtype: Any, per_act_token_quant: bool, block_shape: Any, **_: Any
    ) -> tuple[Any, Any]:
        return quantize(a, scale, quant_dtype, per_act_token_quant, block_shape)

    _custom_ops.moe_align_block_size = align
    _custom_ops.moe_sum = moe_sum
    triton_moe.moe_kernel_quantize_input = quantize
    no_dp_ep.moe_kernel_quantize_input = prepare


class Container(torch.nn.Module):
    """Stands for RoutedExperts: owns the parameters, and the way to the experts object."""

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__()
        for name, data in parameters.items():
            parameter = torch.nn.Parameter(data, requires_grad=False)
            self.register_parameter(name, parameter)
        self.expert_map = None
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        self.quant_method: Any = None

    def hold(self, experts: Any) -> None:
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))

    @property
    def experts(self) -> Any:
        return self.quant_method.moe_kernel.fused_experts

    def per_expert(self) -> dict[str, Any]:
        """Its own and the kernel's tensors with a row for each expert."""
        count = self.experts.moe_config.num_experts
        return {
            name: value
            for name, value in {**dict(self.named_parameters()), **vars(self.experts)}.items()
            if tensors.per_expert(value, count)
        }


def moe_config(experts: int, top_k: int, hidden: int, inner: int, **more: Any) -> Any:
    return moe.FusedMoEConfig(
        num_experts=experts, experts_per_token=top_k, hidden_dim=hidden, intermediate_size=inner,
        num_local_experts=experts, num_logical_experts=experts, activation=MoEActivation.SILU,
        device="cpu", routing_method=moe.RoutingMethodType.Renormalize,
        moe_parallel_config=moe.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16, **more,
    )  # fmt: skip


def triton_layer(
    kind: str, experts: int, top_k: int, hidden: int, inner: int, seed: int
) -> Container:
    """TritonExperts with weights [E, 2*inner, hidden] and [E, hidden, inner].

    `kind`: bf16, bias, block (fp8 in blocks of 32 x 32), channel or tensor (fp8), static (as
    tensor, with the activations' scales in the checkpoint).
    """
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    make = torch.Generator().manual_seed(seed)
    shapes = {"w13": (experts, 2 * inner, hidden), "w2": (experts, hidden, inner)}
    data: dict[str, Any] = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=make) / shape[-1] ** 0.5
        fp8 = kind in ("block", "channel", "tensor", "static")
        data[f"{name}_weight"] = (values * 100).to(FP8) if fp8 else values.bfloat16()
        scale = {
            "block": (experts, -(-shape[1] // 32), -(-shape[2] // 32)),
            "channel": (experts, shape[1], 1),
            "tensor": (experts,),
            "static": (experts,),
        }.get(kind)
        if scale is not None:
            data[f"{name}_weight_scale"] = (torch.rand(scale, generator=make) + 0.1) / 50
        if kind == "bias":
            data[f"{name}_bias"] = torch.randn(shape[:2], generator=make).bfloat16()
    made = Container(data)
    if kind == "bf16":
        quant = moe.FusedMoEQuantConfig.make()
    elif kind == "bias":
        quant = moe.biased_moe_quant_config(made.w13_bias, made.w2_bias)
    else:
        quant = moe.fp8_w8a8_moe_quant_config(
            w1_scale=made.w13_weight_scale,
            w2_scale=made.w2_weight_scale,
            a1_scale=torch.tensor([0.01]) if kind == "static" else None,
            a2_scale=torch.tensor([0.02]) if kind == "static" else None,
            per_act_token_quant=kind == "channel",
            block_shape=[32, 32] if kind == "block" else None,
        )
    made.hold(TritonExperts(moe_config(experts, top_k, hidden, inner), quant))
    return made


def order_of(experts: int, seed: int) -> list[int]:
    """Expert of each slot: a random permutation."""
    return torch.randperm(experts, generator=torch.Generator().manual_seed(seed)).tolist()


def tier(container: Container, order: list[int], hot: int) -> tiers.TieredLayer:
    """Move a container's rows into tiers; what is left in its parameters has no rows."""
    slot_of = torch.empty(len(order), dtype=torch.int32)
    slot_of[order] = torch.arange(len(order), dtype=torch.int32)
    warm, cold = {}, {}
    for name, parameter in container.per_expert().items():
        if hot:
            warm[name] = parameter.data[order[:hot]].clone()
        if hot < len(order):
            cold[name] = parameter.data[order[hot:]].clone()
        if isinstance(parameter, torch.nn.Parameter):
            layout = rows.Layout.of(parameter.data, name)
            parameter.data = rows.shell(layout, len(order), "cpu")
    return tiers.TieredLayer(0, len(order), hot, slot_of, warm, cold)


def same_bits(left: Any, right: Any) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return bool(torch.equal(left.view(kind), right.view(kind)))


def routes(
    tokens: int, experts: int, top_k: int, seed: int, missing: float = 0.0
) -> tuple[Any, Any]:
    """Ids int32 and weights fp32 [T, k]: distinct ids a token, some weights equal, some ids -1."""
    make = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=make)[:top_k] for _ in range(tokens)])
    weights = torch.randint(1, 5, (tokens, top_k), generator=make).float()
    gone = torch.rand(tokens, top_k, generator=make) < missing
    return ids.int().masked_fill(gone, -1), weights / weights.sum(-1, keepdim=True)


def run(container: Container, ids: Any, weights: Any, hidden: Any, left: float = 1.0) -> Any:
    """The layer's output [T, K], as vLLM's modular kernel calls the experts.

    `left` is the size of what an earlier layer left in the workspace.
    """
    experts = container.experts
    w1, w2 = container.w13_weight, container.w2_weight
    _, tokens, inner, width, top_k = experts.moe_problem_size(hidden, w1, w2, ids)
    first, second, out = experts.workspace_shapes(
        tokens, inner, width, top_k, -1, -1, None, MoEActivation.SILU
    )
    fill = torch.Generator().manual_seed(1)
    quantised, scale = quantize(
        hidden, experts.a1_scale, experts.quant_dtype, experts.per_act_token_quant,
        experts.block_shape,
    )  # fmt: skip
    output = torch.empty(out, dtype=torch.bfloat16)
    experts.apply(
        output=output, hidden_states=quantised, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids,
        activation=MoEActivation.SILU, global_num_experts=experts.moe_config.num_experts,
        expert_map=None, a1q_scale=scale, a2_scale=experts.a2_scale,
        workspace13=(left * torch.randn(first, generator=fill)).bfloat16(),
        workspace2=(left * torch.randn(second, generator=fill)).bfloat16(),
        expert_tokens_meta=None, apply_router_weight_on_input=False,
    )  # fmt: skip
    return output


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def refused(reason: str, part: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except env.HookError as failure:
        assert failure.reason == reason and part in failure.message, failure
    else:
        raise AssertionError(f"no {reason}: {part}")


def run_cases(cases: list[Callable[[], None]], wanted: list[str]) -> None:
    """Run them all, or those that are named; prints the name of each that holds."""
    torch.manual_seed(0)
    for case in cases:
        if not wanted or case.__name__ in wanted:
            case()
            print(case.__name__, flush=True)
    print("done")
