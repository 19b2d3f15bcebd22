"""Refusals and geometry, on stand-ins for the engine's objects."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import expertmaps_hook_env as env
import expertmaps_hook_installers as installers
import expertmaps_hook_model as model
import expertmaps_hook_selftest as selftest
import pytest

from rowmap_jobs.formats.status import KernelUse, ModelGeometry


class Tensor:
    """Shape and identity of a tensor."""

    def __init__(self, *shape: int, size: int = 2, contiguous: bool = True) -> None:
        self.shape, self.size, self.contiguous = shape, size, contiguous
        self.dtype = "torch.bfloat16"

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        total = 1
        for dim in self.shape:
            total *= dim
        return total

    def element_size(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return id(self)

    def is_contiguous(self) -> bool:
        return self.contiguous


class Container:
    """RoutedExperts, as far as the hook looks at it."""

    def __init__(self, experts: int = 8, **tensors: Any) -> None:
        self.tensors = {"w13_weight": Tensor(experts, 4, 3), "w2_weight": Tensor(experts, 3, 2)}
        self.tensors.update(tensors)
        for name, tensor in self.tensors.items():
            setattr(self, name, tensor)
        self.local_num_experts, self.top_k = experts, 2
        self.moe_config = SimpleNamespace(num_local_experts=experts, num_experts=experts)
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        self.quant_method = SimpleNamespace(
            moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace())
        )

    def named_parameters(self, recurse: bool) -> list[tuple[str, Any]]:
        assert not recurse
        return [(name, tensor) for name, tensor in self.tensors.items() if tensor is not None]

    def named_buffers(self, recurse: bool) -> list[tuple[str, Any]]:
        assert not recurse
        return []


def layer(number: int = 0, **fields: Any) -> model.MoeLayer:
    container = Container(**fields)
    return model.MoeLayer(number, SimpleNamespace(routed_experts=container, is_monolithic=False))


def config(**changes: Any) -> SimpleNamespace:
    found = SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_eplb=False, use_ubatching=False, enable_expert_parallel=False,
            world_size_across_dp=1,
        ),
        model_config=SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=False),
        offload_config=SimpleNamespace(
            offload_backend="auto", prefetch=SimpleNamespace(offload_group_size=0)
        ),
        load_config=SimpleNamespace(load_format="auto"),
        kernel_config=SimpleNamespace(enable_flashinfer_autotune=False),
        lora_config=None,
        weight_transfer_config=None,
    )  # fmt: skip
    for name, value in changes.items():
        owners = (
            found.parallel_config, found.model_config, found.offload_config,
            found.offload_config.prefetch, found.load_config, found.kernel_config, found,
        )  # fmt: skip
        for owner in owners:
            if hasattr(owner, name):
                setattr(owner, name, value)
    return found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_eplb": True}, "EplbUnsupported"),
        ({"use_ubatching": True}, "DboUnsupported"),
        (
            {"enable_expert_parallel": True, "world_size_across_dp": 2},
            "ExpertParallelUnsupported",
        ),
        ({"world_size_across_dp": 2}, "ParallelismUnsupported"),
        ({"lora_config": object()}, "LoraUnsupported"),
        ({"enable_sleep_mode": True}, "SleepModeUnsupported"),
        ({"weight_transfer_config": object()}, "WeightReloadUnsupported"),
        ({"offload_backend": "prefetch"}, "PrefetchOffloadUnsupported"),
        ({"offload_group_size": 4}, "PrefetchOffloadUnsupported"),
        ({"load_format": "ipc_cache"}, "SharedWeightsUnsupported"),
    ],
)
def test_configurations_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(env.HookError) as caught:
        model.check_config(config(**changes))
    assert caught.value.reason == reason


def test_what_would_break_a_move_between_memories_is_refused_by_name() -> None:
    items = [layer(0), layer(1)]
    for item, name in zip(items, ("TritonExperts", "TrtLlmMxfp4ExpertsModular"), strict=True):
        item.container.quant_method.moe_kernel.fused_experts = type(name, (), {})()
    model.check_device_config(config(), items, {"VLLM_ENABLE_STARTUP_PLAN": "0"})
    model.check_device_config(config(enable_flashinfer_autotune=True), items[:1], {})
    for changes, environ, reason in (
        ({"enable_cumem_allocator": True}, {}, "CumemAllocatorUnsupported"),
        ({}, {"VLLM_ENABLE_STARTUP_PLAN": "1"}, "StartupPlanUnsupported"),
        ({"enable_flashinfer_autotune": True}, {}, "AutotuneUnsupported"),
    ):
        with pytest.raises(env.HookError) as caught:
            model.check_device_config(config(**changes), items, environ)
        assert caught.value.reason == reason


def test_layers_that_take_turns_in_one_memory_are_refused() -> None:
    shared = Tensor(8, 4, 3)
    items = [layer(0, w13_weight=shared), layer(1), layer(4, w13_weight=shared)]
    with pytest.raises(env.HookError, match="layer 4: w13_weight lies where layer 0 has its own"):
        model.check_layers(items, "cpu")


def test_a_plain_configuration_and_layer_pass() -> None:
    model.check_config(config())
    model.check_config(config(enable_expert_parallel=True))
    model.check_layers([layer(w13_bias=Tensor(8, 4), w2_bias=Tensor(8, 3))], "cpu")


def refused(item: model.MoeLayer, device: str = "cpu") -> env.HookError:
    with pytest.raises(env.HookError) as caught:
        model.check_layers([item], device)
    return caught.value


def test_layers_are_refused_by_name() -> None:
    assert refused(layer(), "xpu").reason == "DeviceUnsupported"
    for router in ("ZeroExpertRouter", "RoutingSimulatorRouter"):
        item = layer()
        item.module.router = type(router, (), {})()
        assert refused(item).reason == "RouterUnsupported"
    item = layer()
    item.module.is_monolithic = True
    assert refused(item).reason == "KernelUnsupported"
    item = layer()
    item.container.expert_map_manager.num_fused_shared_experts = 1
    assert refused(item).reason == "FusedSharedExpertsUnsupported"
    item = layer()
    item.container.moe_config.num_experts = 16
    assert refused(item).reason == "ExpertParallelUnsupported"


def test_a_gpu_kernel_that_nothing_splits_is_refused_by_its_class() -> None:
    class BatchedDeepGemmExperts:
        pass

    item = layer(7)
    item.container.quant_method.moe_kernel.fused_experts = BatchedDeepGemmExperts()
    failure = refused(item, "cuda")
    assert failure.reason == "HookUnsupported"
    assert "kernel of layer 7: found BatchedDeepGemmExperts" in failure.message
    # A method that runs its kernel itself.
    item.container.quant_method = type("GptqMethod", (), {"moe_kernel": None})()
    assert "found GptqMethod" in refused(item, "cuda").message


@pytest.mark.parametrize(
    "name",
    [
        "BatchedTritonExperts", "TritonWNA16Experts", "TritonOrDeepGemmExperts", "tritonexperts",
        "BatchedMarlinExperts", "MarlinExpertsBase", "TrtLlmMxfp4ExpertsMonolithic",
        "TrtLlmMxfp4ExpertsBase", "TrtLlmNvFp4ExpertsModular", "CPUExperts",
    ],
)  # fmt: skip
def test_kernels_of_names_alike_are_refused(name: str) -> None:
    item = layer(7)
    item.container.quant_method.moe_kernel.fused_experts = type(name, (), {})()
    failure = refused(item, "cuda")
    assert failure.reason == "HookUnsupported" and f"found {name}, " in failure.message


@pytest.mark.parametrize("name", sorted(installers.KERNELS))
def test_another_module_s_class_of_a_known_name_is_refused(name: str) -> None:
    item = layer(7)
    found = type(name, (), {"__module__": "elsewhere"})
    item.container.quant_method.moe_kernel.fused_experts = found()
    failure = refused(item, "cuda")
    assert failure.reason == "HookUnsupported" and f"found elsewhere.{name}, " in failure.message


def test_an_installer_refuses_a_layer_it_cannot_split(monkeypatch: pytest.MonkeyPatch) -> None:
    class TritonExperts:
        pass

    def check(module: Any) -> None:
        raise env.HookError("HookUnsupported", f"LoRA is active on {module.routed_experts.top_k}")

    installer = ModuleType("installer_of_the_test")
    installer.check = check  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, installer.__name__, installer)
    known = installers.KERNELS["TritonExperts"]
    monkeypatch.setitem(
        installers.KERNELS, "TritonExperts", replace(known, installer=installer.__name__)
    )
    item = layer(7)
    item.container.quant_method.moe_kernel.fused_experts = TritonExperts()
    assert refused(item, "cuda").message == "LoRA is active on 2"


def test_the_status_says_for_each_kernel_where_it_was_run() -> None:
    class CPUUnquantizedExperts:
        pass

    class MarlinExperts:
        pass

    items = [layer(number) for number in range(3)]
    kinds = (MarlinExperts, CPUUnquantizedExperts, MarlinExperts)
    for item, kind in zip(items, kinds, strict=True):
        item.container.quant_method.moe_kernel.fused_experts = kind()
    found = [
        KernelUse.from_wire(wire, "kernels")
        for wire in installers.wire_kernels(item.container for item in items)
    ]
    assert [(use.name, use.layers, use.ran_on) for use in found] == [
        ("CPUUnquantizedExperts", 1, "x86-64 CPU"), ("MarlinExperts", 2, None),
    ]  # fmt: skip


def test_the_readme_claims_hardware_for_the_same_kernels() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    support = readme.partition("## Support")[2].partition("\n## ")[0]
    claimed = [line for line in support.splitlines() if line.startswith("|") and "| yes (" in line]
    assert len(claimed) == len(installers.HARDWARE)
    assert not set(installers.KERNELS) & set(installers.HARDWARE) or "has not run on" not in support


def test_a_row_on_a_gpu_has_its_scales() -> None:
    class TritonExperts:
        pass

    item = layer(
        w13_weight_scale=Tensor(8, 4, 1, size=4), w2_bias=Tensor(8), w2_weight_scale=Tensor(1)
    )
    item.container.quant_method.moe_kernel.fused_experts = TritonExperts()
    assert model.on_device([item], "cpu") == [item]
    (moved,) = model.on_device([item], "cuda")
    assert list(moved.tensors()) == ["w13_weight", "w2_weight", "w13_weight_scale"]
    assert moved.row_bytes() == 2 * (12 + 6) + 4 * 4


def test_unknown_expert_tensors_are_named_wherever_they_are() -> None:
    failure = refused(layer(w13_weight_norm=Tensor(8, 1)))
    assert failure.reason == "UnknownTensor" and "w13_weight_norm" in failure.message
    item = layer()
    item.container.quant_method.moe_kernel.fused_experts.gemm1_alpha = Tensor(8)
    assert "gemm1_alpha" in refused(item).message
    item = layer()
    item.container.quant_method.packed = Tensor(8, 3)
    assert "packed" in refused(item).message
    assert "w2_weight" in refused(layer(w2_weight=Tensor(8, 3, contiguous=False))).message
    assert "w2_weight" in refused(layer(w2_weight=None)).message
    assert "w2_weight" in refused(layer(w2_weight=Tensor(4, 6))).message


@pytest.mark.parametrize(
    "names",
    [
        ("weight_scale",),
        ("weight_scale_inv",),
        ("scales", "qzeros"),
        ("weight_scale", "weight_zero_point"),
    ],
)
def test_scales_and_zero_points_belong_to_the_row(names: tuple[str, ...]) -> None:
    parts = [f"{part}_{name}" for name in names for part in ("w13", "w2")]
    item = layer(**{name: Tensor(8, 5) for name in parts}, w13_g_idx=Tensor(8, 7))
    quant = SimpleNamespace(scale=getattr(item.container, parts[0]))
    item.container.quant_method.moe_quant_config = SimpleNamespace(_w1=quant, _w2=None)
    model.check_tensors(item)
    assert set(parts) < set(item.tensors()) and "w13_g_idx" not in item.tensors()
    assert item.row_bytes() == layer().row_bytes() + 2 * 5 * len(parts)
    quant.scale = Tensor(8, 5)
    assert "scale" in refused(item).message


def test_another_view_of_a_row_would_stay_behind() -> None:
    item = layer()
    view = Tensor(8, 3)
    view.data_ptr = item.container.w13_weight.data_ptr  # type: ignore[method-assign]
    item.container.quant_method.moe_kernel.fused_experts.packed = view
    assert "another view" in refused(item).message


def test_routing_tables_and_known_tensors_under_other_names_pass() -> None:
    item = layer(e_score_correction_bias=Tensor(8), expert_mask=Tensor(8))
    item.container.quant_method.moe_kernel.fused_experts.w1 = item.container.w13_weight
    item.container.scale = Tensor(3, 8)
    model.check_tensors(item)


def test_geometry_is_of_the_contract() -> None:
    layers = [layer(0), layer(3)]
    shape = model.model_shape(layers, (9,))
    wire = model.wire_geometry(shape)
    assert wire["rowBytes"] == 2 * (12 + 6)
    assert ModelGeometry.from_wire(wire, "geometry").moe_layers == (0, 3)
    uneven = model.wire_geometry(model.model_shape([layer(0), layer(1, experts=4)], ()))
    assert uneven["experts"] == {"0": 8, "1": 4}
    layers[1].container.top_k = 3
    with pytest.raises(env.HookError) as caught:
        model.model_shape(layers, ())
    assert caught.value.reason == "LayersUnsupported"


def test_shape_digest_is_deterministic_and_sees_shapes() -> None:
    base = model.shape_digest(model.shapes_of([layer(0), layer(1)]))
    assert base == model.shape_digest(model.shapes_of([layer(0), layer(1)]))
    assert base != model.shape_digest(model.shapes_of([layer(0), layer(2)]))
    assert base != model.shape_digest(model.shapes_of([layer(0), layer(1, experts=4)]))


def test_quant_names() -> None:
    plain = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    assert model.quant_name(plain, [layer()]) == "bf16"
    quantised = SimpleNamespace(model_config=SimpleNamespace(quantization="mxfp4"))
    assert model.quant_name(quantised, [layer()]) == "mxfp4"


@pytest.mark.parametrize("hot", [(), (0,), (7, 1, 3), tuple(range(8))])
def test_self_test_routes_cover_both_sides(hot: tuple[int, ...]) -> None:
    pools = selftest.choices(8, 2, hot)
    assert len(pools) == 3
    for pool in pools:
        assert len(pool) >= 2 and len(set(pool)) == len(pool)
    if 2 <= len(hot) <= 6:
        assert set(pools[0]) == set(hot) and not set(pools[1]) & set(hot)
        assert set(pools[2]) & set(hot) and set(pools[2]) - set(hot)


@pytest.mark.parametrize(
    ("one_scale", "config"),
    [
        (True, {}),
        (False, {"quant_dtype": None}),
        (False, {"quant_dtype": "mxfp8"}),
        (False, {"a2_scale": 0.5}),
        (False, {"block_shape": [128, 128]}),
        (False, {"per_act_token_quant": True}),
    ],
)
def test_one_scale_for_all_rows(one_scale: bool, config: dict[str, Any]) -> None:
    """fp8 that is scaled as it comes, and neither by row nor by block."""
    fp8 = {"quant_dtype": "torch.float8_e4m3fn", "a2_scale": None, "block_shape": None,
           "per_act_token_quant": False}  # fmt: skip
    assert selftest.one_scale_for_all_rows(SimpleNamespace(**{**fp8, **config})) == one_scale
