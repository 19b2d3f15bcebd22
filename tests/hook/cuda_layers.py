"""MoE layers, a device and a kernel for the CUDA residency on a machine without a GPU.

The device is a stand-in: CPU tensors whose bytes are counted while they are alive, against a
capacity. The kernel is a stand-in: plain arithmetic over rows, so that a wrong row, scale or slot
changes its output. Discovery, copies, hashes, plan, pinning and undo are the hook's own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import expertmaps_hook_env as env
import expertmaps_hook_installers as installers
import expertmaps_hook_model as model
import expertmaps_hook_pages as pages
import expertmaps_hook_pinned as pinned
import expertmaps_hook_plan as plan
import expertmaps_hook_selftest as selftest
import numpy as np
import torch
from fake_cuda import FakeCudart, FakeLibc

EXPERTS, HIDDEN, INNER, TOP_K = 7, 24, 10, 2
NAMES = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w2_bias")
ROW = 2 * (20 * 24 + 24 * 10) + 4 * (20 + 24)
"""Bytes of a row that moves: two fp16 weights and their fp32 scales; the bias stays."""


class Device:
    """Stands for a GPU. Calls are noted; the one at `fail_at` fails."""

    def __init__(self, calls: list[str], capacity: int, host: int) -> None:
        self.device = torch.device("cpu")
        self.calls, self.fail_at = calls, -1
        self.capacity, self.host_capacity = capacity, host
        self.used = self.host_used = 0
        self.mapped: dict[int, int] = {}
        self.leaks = False
        """Whether the allocator keeps what nobody uses any more."""

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.fail_at:
            raise RuntimeError(f"{name} failed")

    def memory(self, size: int, host: bool = False) -> Any:
        """uint8 [size], counted until the last tensor over it is gone."""
        if host:
            self.host_used += size
        elif self.used + size > self.capacity:
            raise RuntimeError("out of memory")
        else:
            self.used += size
        array = np.zeros(size, np.uint8)
        weakref.finalize(array, self._freed, size, host)
        return torch.from_numpy(array)

    def _freed(self, size: int, host: bool) -> None:
        if host:
            self.host_used -= size
        elif not self.leaks:
            self.used -= size

    def empty(self, rows: int, row_bytes: int) -> Any:
        self._note("empty")
        return self.memory(rows * row_bytes).view(rows, row_bytes)

    def view(self, address: int, size: int) -> Any:
        import ctypes

        self._note("view")
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)

    def sync(self) -> None:
        self._note("sync")

    def free(self) -> plan.Bytes:
        self._note("free")
        host = self.host_used + sum(self.mapped.values())
        return plan.Bytes(self.capacity - self.used, self.host_capacity - host)


class Machine:
    """Device, driver and libc over one list of calls."""

    def __init__(self, capacity: int = 1 << 40, host: int = 1 << 40) -> None:
        self.calls: list[str] = []
        self.device = Device(self.calls, capacity, host)
        self.cuda = FakeCudart(self.calls)
        self.libc = FakeLibc(pages.Libc(), self.calls)
        self.device.mapped = self.libc.mapped
        self.pinned = pinned.Pinned(pinned.CudaRuntime(self.cuda), None, self.libc)

    def fail_at(self, place: int) -> None:
        self.device.fail_at = self.cuda.fail_at = self.libc.fail_at = place

    def nothing_pinned(self) -> bool:
        return not self.cuda.registered and not self.libc.mapped and self.pinned.size == 0


class TritonExperts:
    """Stands for vLLM's kernel object of that name: rows by expert, from wherever they are."""

    def __init__(self, container: Any) -> None:
        self.container = container
        # One scale is the parameter itself, the other a second object over its memory.
        self.quant_config = SimpleNamespace(
            quant_dtype=None,
            _w1=SimpleNamespace(scale=container.w13_weight_scale),
            _w2=SimpleNamespace(scale=container.w2_weight_scale.data),
        )

    def row(self, name: str, expert: int) -> Any:
        return getattr(self.container, name)[expert]


class Container(torch.nn.Module):
    """RoutedExperts, as far as the hook looks at it."""

    def __init__(self, device: Device, seed: int, offloaded: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = {
            "w13_weight": ((EXPERTS, 2 * INNER, HIDDEN), torch.float16),
            "w2_weight": ((EXPERTS, HIDDEN, INNER), torch.float16),
            "w13_weight_scale": ((EXPERTS, 2 * INNER, 1), torch.float32),
            "w2_weight_scale": ((EXPERTS, HIDDEN, 1), torch.float32),
            "w2_bias": ((EXPERTS,), torch.float32),  # one number an expert
        }
        for name, (shape, dtype) in shapes.items():
            values = torch.rand(shape, generator=generator).to(dtype)
            memory = device.memory(values.numel() * values.element_size(), offloaded)
            data = memory.view(dtype).view(shape)
            data.copy_(values)
            parameter = torch.nn.Parameter(data, requires_grad=False)
            if offloaded:
                parameter._vllm_is_uva_offloaded = True  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)
        self.register_buffer("one_for_all", torch.ones(3))
        self.local_num_experts, self.top_k, self.hidden_size = EXPERTS, TOP_K, HIDDEN
        self.moe_config = SimpleNamespace(
            in_dtype=torch.float32, num_local_experts=EXPERTS, num_experts=EXPERTS
        )
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        self.quant_method = SimpleNamespace(
            moe_kernel=SimpleNamespace(fused_experts=TritonExperts(self)),
            topk_indices_dtype=torch.int32,
        )

    def _ensure_moe_quant_config_init(self) -> None:
        pass

    def forward_modular(self, x: Any, topk_weights: Any, topk_ids: Any, **_: Any) -> Any:
        row = self.quant_method.moe_kernel.fused_experts.row
        output = torch.zeros(x.shape)
        for token, ids in enumerate(topk_ids.tolist()):
            for place, expert in enumerate(ids):
                if expert < 0:
                    output[token] = torch.rand(x.shape[1])  # undefined, as on a GPU
                    continue
                first = (row("w13_weight", expert) * row("w13_weight_scale", expert)) @ x[token]
                inner = first[:INNER] * first[INNER:]
                last = (row("w2_weight", expert) * row("w2_weight_scale", expert)) @ inner
                output[token] += topk_weights[token, place] * (last + row("w2_bias", expert))
        return output


INSTALLED: list[int] = []
"""Layers that read from tiers now."""


def install(module: Any, tiered: Any, mistake: str = "") -> Callable[[], None]:
    """Let the stand-in kernel read from tiers, with one mistake if asked for."""
    experts = module.routed_experts.quant_method.moe_kernel.fused_experts
    slots = tiered.slot_of.tolist()
    if mistake == "map":
        slots[0], slots[1] = slots[1], slots[0]

    def row(name: str, expert: int) -> Any:
        slot = slots[expert]
        if mistake == "scale" and name == "w2_weight_scale":
            slot = (slot + 1) % len(slots)
        if slot < tiered.hot:
            return tiered.hot_tensors[name][slot]
        return tiered.cold_tensors[name][slot - tiered.hot]

    experts.row = row
    INSTALLED.append(tiered.layer)

    def undo() -> None:
        del experts.row
        INSTALLED.remove(tiered.layer)

    return undo


def use_installer(**functions: Any) -> None:
    """Have the hook find the stand-in kernel's installer."""
    module = ModuleType("cuda_layers_installer")
    module.check = functions.get("check", lambda _: None)  # type: ignore[attr-defined]
    module.install = functions.get("install", install)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    known = installers.KERNELS["TritonExperts"]
    installers.KERNELS["TritonExperts"] = replace(known, installer=module.__name__)


def layers(device: Device, count: int = 3, offloaded: tuple[int, ...] = ()) -> list[model.MoeLayer]:
    made = []
    for number in range(count):
        container = Container(device, number, number in offloaded)
        module = SimpleNamespace(routed_experts=container, is_monolithic=False)
        made.append(model.MoeLayer(number, module))
    model.check_layers(made, "cuda")
    return model.on_device(made, "cuda")


def refused(call: Callable[[], Any]) -> env.HookError:
    try:
        call()
    except env.HookError as failure:
        return failure
    raise AssertionError("it was not refused")


def same(left: list[Any], right: list[Any]) -> bool:
    return all(selftest.same_bits(a, b) for a, b in zip(left, right, strict=True))
