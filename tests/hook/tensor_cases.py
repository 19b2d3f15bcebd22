"""Cases of expert tensors, their rows and the self-test, with torch but no GPU.

`tensor_cases.py HOOK_FOLDER` prints one line for each case that holds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, sys.argv[1])

import cuda_layers as stand
import expertmaps_hook_env as env
import expertmaps_hook_pinned as pinned
import expertmaps_hook_rows as rows
import expertmaps_hook_selftest as selftest
import expertmaps_hook_tensors as tensors
from cuda_layers import EXPERTS, NAMES, ROW, Machine, refused, same
from expertmaps_hook_device import CudaDevice
from fake_cuda import FakeCudart


def transposed_rows_keep_their_strides() -> None:
    values = torch.rand(EXPERTS, 6, 4)
    turned = values.transpose(1, 2)
    layout = rows.Layout.of(turned, "w")
    target = torch.empty(3, layout.row_bytes, dtype=torch.uint8)
    rows.copy_rows(layout.flat(turned), [4, 0, 6], target)
    moved = layout.tensor(target)
    assert moved.stride() == turned.stride() and torch.equal(moved, turned[[4, 0, 6]])
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.uint8):
        typed = torch.randint(0, 100, (EXPERTS, 5)).to(dtype)
        layout = rows.Layout.of(typed, "w")
        assert layout.tensor(layout.flat(typed).clone()).dtype == dtype
        empty = rows.shell(layout, EXPERTS, "cpu")
        assert (empty.shape, empty.dtype) == (typed.shape, dtype)


def rows_that_are_no_pieces_are_refused() -> None:
    whole = torch.rand(EXPERTS, 6, 8)
    for bad in (whole[:, :, :6], whole[::2], whole[:, :3], whole[:, :1].expand(EXPERTS, 6, 8)):
        failure = refused(lambda bad=bad: rows.Layout.of(bad, "layer 3: w13_weight"))
        assert failure.reason == "UnknownTensor" and "w13_weight" in failure.message


def hashes_are_the_formula_and_see_every_change() -> None:
    generator = np.random.default_rng(0)
    for size in (1, 4, 6, 40, 4096):
        data = generator.integers(0, 256, (5, size), dtype=np.uint8)
        data[3] = data[1]
        found = rows.hashes(torch.from_numpy(data))
        assert found[3] == found[1] and len(set(found)) == (4 if size > 1 else len(set(found)))
        words = data.view(np.int32) if size % 4 == 0 else data
        with np.errstate(over="ignore"):
            value = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(
                0x9E3779B97F4A7C15
            )
            value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            value = (value ^ (value >> np.uint64(31))) | np.uint64(1)
            expected = (words.astype(np.int64) * value.astype(np.int64)).sum(1)
        assert found == expected.tolist(), size
        for place in generator.integers(0, size, 20):
            for bit in (1, 0x80):
                changed = data.copy()
                changed[2, place] ^= bit
                other = rows.hashes(torch.from_numpy(changed))
                assert rows.differing(found, other) == [2]
    row = torch.arange(64, dtype=torch.uint8).reshape(1, 64)
    swapped = row.clone()
    swapped[0, :8], swapped[0, 8:16] = row[0, 8:16], row[0, :8]
    assert rows.hashes(row) != rows.hashes(swapped)
    signs = row.clone()
    signs[0, 3] ^= 0x80
    signs[0, 11] ^= 0x80  # two words changed by their top bits: they do not cancel
    assert rows.hashes(row) != rows.hashes(signs)
    odd = torch.zeros(67, dtype=torch.uint8)[3:].view(1, 64)
    odd.copy_(row)
    assert rows.hashes(odd) == rows.hashes(row)  # wherever in memory a row lies


def unknown_tensors_are_refused_by_name_wherever_they_are() -> None:
    stand.use_installer()

    def with_one(add: Callable[[Any], None]) -> env.HookError:
        container = stand.Container(Machine().device, 0, False)
        add(container)
        return refused(lambda: tensors.discover(4, container, EXPERTS))

    extra = torch.rand(EXPERTS, 2)
    places: dict[str, Callable[[Any], None]] = {
        "w13_other": lambda c: c.register_parameter(
            "w13_other", torch.nn.Parameter(extra, requires_grad=False)
        ),
        "table": lambda c: c.register_buffer("table", extra),
        "ab_strides": lambda c: setattr(c, "ab_strides", extra),
        "packed": lambda c: setattr(c.quant_method, "packed", extra),
        "g1_scale_c": lambda c: setattr(
            c.quant_method.moe_kernel.fused_experts, "g1_scale_c", extra
        ),
        "w13_g_idx": lambda c: setattr(
            c.quant_method.moe_kernel.fused_experts, "w13_g_idx", extra
        ),
        "buffer": lambda c: setattr(
            c.quant_method.moe_kernel, "prepare_finalize", SimpleNamespace(buffer=extra)
        ),
        "w2_gscale": lambda c: setattr(
            c.quant_method.moe_kernel.fused_experts.quant_config._w2, "alpha_or_gscale", extra
        ),
        "a1_scale": lambda c: setattr(
            c.quant_method, "moe_quant_config", SimpleNamespace(_a1=SimpleNamespace(scale=extra))
        ),
        "gemm1_alpha": lambda c: setattr(c.quant_method, "gemm1_alpha", torch.rand(EXPERTS)),
    }  # fmt: skip
    for name, add in places.items():
        failure = with_one(add)
        assert failure.reason == "HookUnsupported", failure
        assert f"layer 4: {name} [7" in failure.message, failure
    shared = with_one(lambda c: setattr(c, "w1_bias", c.w13_weight.data[:, :2]))
    assert shared.reason == "UnknownTensor" and "w1_bias" in shared.message
    overlap = with_one(lambda c: setattr(c, "w1_bias", c.w2_bias.data.view(torch.int32)))
    assert overlap.reason == "HookUnsupported" and "share memory" in overlap.message
    missing = with_one(lambda c: setattr(c, "w2_weight", None))
    assert missing.reason == "UnknownTensor" and "w2_weight" in missing.message


def what_is_not_of_the_experts_stays() -> None:
    """Scalars, per-tensor values and routing tables; the kernels' own vectors are split."""
    container = stand.Container(Machine().device, 0, False)
    container.e_score_correction_bias = torch.rand(EXPERTS)
    container.w13_input_scale = torch.tensor(1.0)
    container.scale = torch.rand(3, EXPERTS)

    class TrtLlmMxfp4ExpertsModular(stand.TritonExperts):
        gemm1_alpha: Any

    kernel = TrtLlmMxfp4ExpertsModular(container)
    kernel.gemm1_alpha = torch.rand(EXPERTS)
    container.quant_method.moe_kernel.fused_experts = kernel
    found = {part.name: part for part in tensors.discover(0, container, EXPERTS)}
    assert set(found) == {*NAMES, "gemm1_alpha"}
    assert found["gemm1_alpha"].is_vector and not found["w2_weight_scale"].is_vector
    assert found["w2_weight_scale"].names == ("w2_weight_scale", "w2_scale")
    assert (
        len(found["w2_weight_scale"].holders) == 2 and len(found["w13_weight_scale"].holders) == 1
    )


def a_row_is_its_weights_and_scales() -> None:
    stand.use_installer()
    found = stand.layers(Machine().device, 1)[0]
    assert found.row_bytes() == ROW
    assert list(found.tensors()) == [name for name in NAMES if name != "w2_bias"]


def padding_is_of_whole_tokens_and_not_compared() -> None:
    pool = [6, 2, 4]
    generator = torch.Generator().manual_seed(1)
    _, weights, ids, real = selftest.batch(pool, 8, 2, 5, generator, True)
    assert real.tolist() == [True, True, False, True, True, False, True, True]
    assert ids[~real].tolist() == [[-1, -1]] * 2
    assert all(set(row) <= set(pool) and len(set(row)) == 2 for row in ids[real].tolist())
    assert torch.allclose(weights.sum(1), torch.ones(8))
    assert -1 not in selftest.batch(pool, 8, 2, 5, generator, False)[2]
    stand.use_installer()
    item = stand.layers(Machine().device, 1)[0]
    plain, more = selftest.probe(item, (1, 2)), selftest.probe(item, (1, 2), padding=True)
    assert (len(plain), len(more)) == (9, 12)
    assert [len(output) for output in more[9:]] == [1, 6, 43]
    assert same(more, selftest.probe(item, (1, 2), padding=True))  # whatever padding rows hold


def a_kernel_that_differs_in_large_batches_only_is_caught() -> None:
    stand.use_installer()
    item = stand.layers(Machine().device, 1)[0]
    run = functools.partial(selftest.probe, item, (1, 2), padding=True, most=100)
    before, forward = run(), item.container.forward_modular
    more = selftest.more_sizes(100, item.experts, 2, int(item.container.top_k))
    assert len(before) == 12 + len(more) and more[-1] == 100
    assert [len(output) for output in before[9:-3]] == more
    selftest.compare(0, before, run())

    def wrong(x: Any, **kwargs: Any) -> Any:
        result = forward(x=x, **kwargs).clone()
        if len(x) > 64:
            result.view(-1)[-1] += 1
        return result

    item.container.forward_modular = wrong
    failure = stand.refused(lambda: selftest.compare(0, before, run()))
    first = 9 + next(place for place, size in enumerate(more) if size > 64)
    assert failure.reason == "SelfTestFailed" and f"output {first} is" in failure.message


def an_unfinished_output_is_compared_by_route() -> None:
    """Two orders of the same rows are one output; a missing route is zero."""
    values = torch.rand(3, 4)
    one = SimpleNamespace(
        gemm2_permuted=values, expanded_idx_to_permuted_idx=torch.tensor([[0, 2], [-1, 1]])
    )
    other = SimpleNamespace(
        gemm2_permuted=values[[2, 0, 1]],
        expanded_idx_to_permuted_idx=torch.tensor([[1, 0], [-1, 2]]),
    )
    assert selftest.same_bits(selftest._comparable(one), selftest._comparable(other))
    assert float(selftest._comparable(one)[1, 0].sum()) == 0.0
    wrong = SimpleNamespace(
        gemm2_permuted=values, expanded_idx_to_permuted_idx=torch.tensor([[0, 1], [-1, 1]])
    )
    assert not selftest.same_bits(selftest._comparable(one), selftest._comparable(wrong))


def what_lies_in_a_list_or_a_table_of_the_kernel_is_seen() -> None:
    for value in ([torch.rand(EXPERTS, 3)], {"packed": torch.rand(EXPERTS, 3)}):
        for owner in ("quant_method", "kernel"):
            container = stand.Container(Machine().device, 0, False)
            method = container.quant_method
            target = method if owner == "quant_method" else method.moe_kernel.fused_experts
            target.extra = value
            failure = stand.refused(lambda c=container: tensors.discover(0, c, EXPERTS))
            assert failure.reason == "HookUnsupported" and "extra." in failure.message, failure


def the_self_test_feeds_what_the_engine_feeds() -> None:
    """A method that pads its input itself is given un-padded columns."""
    container = stand.Container(Machine().device, 0, False)
    assert selftest._input_width(container) == stand.HIDDEN
    container.quant_method.skip_forward_padding = True
    container.moe_config.hidden_dim_unpadded = stand.HIDDEN - 4
    assert selftest._input_width(container) == stand.HIDDEN - 4


def a_cuda_device_is_asked_in_order() -> None:
    """torch.cuda is a stand-in here: what is called, in which order, and with what."""
    calls: list[Any] = []
    kept = {
        (torch.cuda, "synchronize"): lambda place: calls.append(("synchronize", place)),
        (torch.cuda, "empty_cache"): lambda: calls.append("empty_cache"),
        (torch.accelerator, "empty_host_cache"): lambda: calls.append("empty_host_cache"),
        (torch.cuda, "mem_get_info"): lambda place: (7 << 30, 9 << 30),
        (torch.cuda, "get_device_properties"): lambda place: SimpleNamespace(
            pci_domain_id=1, pci_bus_id=0xF, pci_device_id=0
        ),
        (pinned, "host_free"): lambda: 5 << 30,
        (pinned, "cpus_near"): lambda bus: calls.append(bus) or frozenset([3]),
        (pinned, "load_cudart"): lambda version: calls.append(version) or FakeCudart(),
    }
    before = {place: getattr(*place) for place in kept}
    for place, value in kept.items():
        setattr(*place, value)
    try:
        device = CudaDevice("cuda:2")
        assert device.free() == (7 << 30, 5 << 30)
        assert calls == [("synchronize", "cuda:2"), "empty_cache", "empty_host_cache"]
        assert device.pinned()._cpus == {3}
        assert calls[-2:] == [torch.version.cuda, "0001:0f:00.0"]
    finally:
        for place, value in before.items():
            setattr(*place, value)
    memory = CudaDevice("cpu").empty(3, 10)
    assert (memory.shape, memory.dtype) == ((3, 10), torch.uint8)


def a_view_that_torch_copied_is_refused() -> None:
    original, seen = torch.as_tensor, []
    memory = torch.zeros(4096, dtype=torch.uint8)

    def as_tensor(source: Any, device: Any) -> Any:
        seen.append((source.__cuda_array_interface__, device))
        return memory

    torch.as_tensor = as_tensor  # type: ignore[assignment]
    try:
        address = memory.data_ptr()
        assert CudaDevice("cuda:2").view(address, 4096) is memory
        failure = refused(lambda: CudaDevice("cuda:2").view(address + 64, 4096))
        assert failure.reason == "PinFailed" and "copied" in failure.message
    finally:
        torch.as_tensor = original
    interface, device = seen[0]
    assert device == "cuda:2" and interface["data"] == (address, False)
    assert (interface["shape"], interface["typestr"]) == ((4096,), "|u1")


CASES: list[Callable[[], None]] = [
    transposed_rows_keep_their_strides,
    rows_that_are_no_pieces_are_refused,
    hashes_are_the_formula_and_see_every_change,
    unknown_tensors_are_refused_by_name_wherever_they_are,
    what_is_not_of_the_experts_stays,
    a_row_is_its_weights_and_scales,
    what_lies_in_a_list_or_a_table_of_the_kernel_is_seen,
    the_self_test_feeds_what_the_engine_feeds,
    padding_is_of_whole_tokens_and_not_compared,
    a_kernel_that_differs_in_large_batches_only_is_caught,
    an_unfinished_output_is_compared_by_route,
    a_cuda_device_is_asked_in_order,
    a_view_that_torch_copied_is_refused,
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        case()
        print(case.__name__, flush=True)
    print("done")
