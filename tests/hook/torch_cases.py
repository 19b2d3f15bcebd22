"""Cases that need torch but no engine; a script for the engine's Python.

`torch_cases.py HOOK_FOLDER WORK_FOLDER` prints one line for each case that holds.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, sys.argv[1])

import expertmaps_hook_counts as counts
import expertmaps_hook_env as env
import expertmaps_hook_model as model
import expertmaps_hook_pages as pages
import expertmaps_hook_rehome as rehome
import expertmaps_hook_selftest as selftest

WORK = Path(sys.argv[2])
EXPERTS = 7
HOT = {0: (1, 2, 5), 1: (0, 6)}


def counters_agree_with_numpy() -> None:
    """Random ids over a model with a dense layer, uneven experts, several slots and chunks."""
    generator = np.random.default_rng(0)
    buffer = torch.zeros((32, 3, 4), dtype=torch.int32)
    limits = {0: 9, 2: 6}
    made = counts.Counters(buffer, limits, 4, slots=3)
    expected = np.zeros((7, 2, 9), np.int64)
    for _ in range(20):
        runs = [(int(generator.integers(-1, 6)), int(generator.integers(1, 7))) for _ in range(4)]
        rows = sum(count for _, count in runs)
        made.clear_rows(rows)
        buckets = np.repeat([6 if b < 0 else b for b, _ in runs], [count for _, count in runs])
        for place, layer in enumerate((0, 2)):
            ids = np.stack([generator.permutation(limits[layer])[:4] for _ in range(rows)])
            buffer[:rows, layer] = torch.from_numpy(ids.astype(np.int32))
            for row, bucket in enumerate(buckets):
                expected[bucket, place, ids[row]] += 1
        made.add(runs)
    assert made.missed() == 0
    for slot in range(3):
        taken = made.take(slot)
        assert np.array_equal(taken.counts.numpy(), expected[2 * slot : 2 * slot + 2])
        assert int(taken.bad) == 0
        assert int(made.take(slot).counts.sum()) == 0


def rows_that_were_not_captured_are_bad() -> None:
    """-1, an impossible id and a repeated id each make one bad row; none counts as expert 0."""
    buffer = torch.zeros((8, 1, 2), dtype=torch.int32)
    made = counts.Counters(buffer, {0: 4}, 2, slots=1)
    made.clear_rows(4)
    buffer[1, 0] = torch.tensor([1, 4])
    buffer[2, 0] = torch.tensor([3, 3])
    buffer[3, 0] = torch.tensor([0, 2])
    made.add([(1, 4)])
    taken = made.take(0)
    assert taken.counts[1, 0].tolist() == [1, 1, 1, 2]
    assert (int(taken.bad), made.missed()) == (3, 3)
    made.add([(-1, 1)])
    assert int(made.take(0).bad) == 0


class OnDevice(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def a_reader_of_the_status_never_asks_the_device() -> None:
    """Another thread that did would break the capture of a CUDA graph, and the boot with it."""
    originals = torch.zeros, torch.Tensor.pin_memory
    torch.zeros = lambda *args, pin_memory=False, **kwargs: originals[0](*args, **kwargs)
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[assignment, method-assign]
    try:
        buffer = torch.zeros((8, 1, 2), dtype=torch.int32).as_subclass(OnDevice)
        made = counts.Counters(buffer, {0: 4}, 2, slots=1)
        assert made.missed() == 0
        made.clear_rows(3)
        made.add([(1, 3)])
    finally:
        torch.zeros, torch.Tensor.pin_memory = originals  # type: ignore[method-assign]
    made._missed = torch.zeros((), dtype=torch.int64, device="meta")  # a read of it raises
    assert made.missed() == 3


READS = ("item", "tolist", "numpy", "cpu", "__int__", "__bool__", "__float__", "__index__")


def steps_read_nothing_back() -> None:
    """A step and a snapshot on a device whose data cannot be read: on `meta` any wait is an error.

    The methods that read a tensor count their calls as well, and the last line shows that they do.
    """
    calls: list[str] = []
    originals = {name: getattr(torch.Tensor, name) for name in READS}

    def counted(name: str) -> Callable[..., Any]:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return originals[name](self, *args, **kwargs)

        return read

    for device in ("meta", "cpu"):
        buffer = torch.zeros((32, 3, 4), dtype=torch.int32, device=device)
        made = counts.Counters(buffer, {0: 9, 2: 6}, 4, slots=3)
        for name in READS:
            setattr(torch.Tensor, name, counted(name))
        try:
            for _ in range(3):
                made.clear_rows(7)
                made.add([(0, 2), (-1, 4), (5, 1)])
                made.take(0)
                made.clear_slot(1)
        finally:
            for name, original in originals.items():
                setattr(torch.Tensor, name, original)
        assert calls == [], (device, calls)
    torch.Tensor.item = counted("item")  # type: ignore[method-assign]
    try:
        torch.ones(1).item()
    finally:
        torch.Tensor.item = originals["item"]  # type: ignore[method-assign]
    assert calls == ["item"]


def layers() -> list[model.MoeLayer]:
    torch.manual_seed(0)
    found = []
    for number in HOT:
        container = torch.nn.Module()
        for name, shape in (("w13_weight", (EXPERTS, 40, 70)), ("w2_weight", (EXPERTS, 70, 20)),
                            ("w2_bias", (EXPERTS, 3))):  # fmt: skip
            data = torch.randn(shape).to(torch.bfloat16)
            container.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        container.local_num_experts = EXPERTS
        found.append(model.MoeLayer(number, SimpleNamespace(routed_experts=container)))
    return found


def everything(found: list[model.MoeLayer]) -> list[Any]:
    return [tensor.data.clone() for item in found for tensor in item.tensors().values()]


def probe(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
    container = item.container
    return [container.w13_weight.float().sum((1, 2)), container.w2_weight[list(hot)].sum(0)]


def same(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def move_and_undo(tier: str) -> None:
    """All bytes are the same after the move, after eviction, and after it is undone."""
    found = layers()
    before, pointers = everything(found), [found[0].container.w13_weight.data_ptr()]
    residency = rehome.Residency(found, HOT, WORK, tier)
    residency.move(probe)
    assert same(before, everything(found))
    assert found[0].container.w13_weight.data_ptr() not in pointers
    residency.evict()
    assert same(before, everything(found))
    wire = residency.wire()
    assert (wire["hotRows"], wire["coldRows"], wire["tier"]) == (5, 9, tier)
    row = 2 * (40 * 70 + 70 * 20 + 3)
    assert (wire["hotBytes"], wire["coldBytes"]) == (5 * row, 9 * row)
    assert (wire["lockedBytes"] > 0) == (tier == "mlock")
    assert list(WORK.iterdir()) == []
    residency.undo()
    assert same(before, everything(found))
    found[0].container.w13_weight.data.zero_()  # its own memory again: writable


def overlay_tier() -> None:
    move_and_undo("overlay")


def mlock_tier() -> None:
    move_and_undo("mlock")


def all_hot_and_all_cold() -> None:
    for hot in ({0: tuple(range(EXPERTS)), 1: ()}, {0: (), 1: ()}):
        found = layers()
        before = everything(found)
        residency = rehome.Residency(found, hot, WORK, "overlay")
        residency.move()
        residency.evict()
        assert same(before, everything(found))
        residency.undo()


def refused(residency: rehome.Residency, reason: str, words: str = "", check: Any = probe) -> None:
    """A move that must fail, by reason and words of its message."""
    try:
        residency.move(check)
    except env.HookError as failure:
        assert failure.reason == reason and words in failure.message, failure
    else:
        raise AssertionError("it moved")


def rolled_back(reason: str, tier: str = "overlay", check: Any = probe) -> None:
    """A failure in the second layer puts the first one back."""
    found = layers()
    before = everything(found)
    residency = rehome.Residency(found, HOT, WORK, tier)
    refused(residency, reason, check=check)
    assert same(before, everything(found))
    for item in found:
        for tensor in item.tensors().values():
            tensor.data.zero_()
    assert list(WORK.iterdir()) == []


def an_undo_without_memory_leaves_rows_where_they_can_be_read() -> None:
    """The allocator refuses while rows are put back: they stay mapped, and the next try ends it."""
    found = layers()
    before = everything(found)
    residency = rehome.Residency(found, HOT, WORK, "overlay")
    original, calls = torch.empty, []

    def empty(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("can't allocate memory")
        return original(*args, **kwargs)

    def failing(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
        if item.layer == 1:
            torch.empty = empty
            raise RuntimeError("no kernel")
        return []

    try:
        refused(residency, "RehomeFailed", "no kernel", failing)
    finally:
        torch.empty = original
    assert len(calls) == 2
    assert same(before, everything(found))
    residency.undo()
    assert same(before, everything(found))
    for item in found:
        for tensor in item.tensors().values():
            tensor.data.zero_()


def a_disk_that_fails_while_rows_are_written_is_rolled_back() -> None:
    """Through a mapping this would be a signal that ends the engine."""
    original, calls = rehome.os.pwrite, []

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return original(descriptor, data[: 1 + len(data) // 2], offset)

    rehome.os.pwrite = pwrite
    try:
        rolled_back("RehomeFailed")
    finally:
        rehome.os.pwrite = original


def a_failed_lock_is_rolled_back() -> None:
    original, calls = pages.Libc.lock, []

    def lock(self: Any, address: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 5:
            raise OSError(12, "Cannot allocate memory")
        original(self, address, size)

    pages.Libc.lock = lock  # type: ignore[method-assign]
    try:
        rolled_back("LockFailed", "mlock")
    finally:
        pages.Libc.lock = original  # type: ignore[method-assign]


def a_row_in_the_wrong_place_is_seen() -> None:
    """An overlay that holds other bytes than its rows: the row hashes refuse it."""
    original = pages.Libc.protect

    def protect(self: Any, address: int, size: int) -> None:
        first = ctypes.string_at(address, 64)
        ctypes.memmove(address, bytes(reversed(first)), 64)
        original(self, address, size)

    pages.Libc.protect = protect  # type: ignore[method-assign]
    try:
        found = layers()
        residency = rehome.Residency(found, HOT, WORK, "overlay")
        before = everything(found)
        refused(residency, "RowsChanged", "rows [0]")
        assert same(before, everything(found))
    finally:
        pages.Libc.protect = original  # type: ignore[method-assign]


def a_self_test_that_differs_is_rolled_back() -> None:
    seen: list[int] = []

    def differing(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
        seen.append(item.layer)
        value = 1.0 if len(seen) == 4 else 0.0  # the second layer, after its move
        return [torch.tensor([value])]

    rolled_back("SelfTestFailed", check=differing)


def a_kernel_that_raises_is_rolled_back() -> None:
    def raising(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
        if item.layer == 1:
            raise RuntimeError("no kernel")
        return []

    rolled_back("RehomeFailed", check=raising)


def big_layers(count: int) -> list[model.MoeLayer]:
    """Layers of 24 MiB."""
    found = []
    for number in range(count):
        container = torch.nn.Module()
        for name, shape in (("w13_weight", (16, 512, 1024)), ("w2_weight", (16, 512, 512))):
            data = torch.full(shape, number + 1, dtype=torch.bfloat16)
            container.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
        container.local_num_experts = 16
        found.append(model.MoeLayer(number, SimpleNamespace(routed_experts=container)))
    return found


def resident(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def peak_of(step: Callable[[], None]) -> int:
    """Most bytes that were resident during a step, above those before it."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    step()
    return resident("VmHWM") - before


def moving_and_undoing_hold_one_layer_twice() -> None:
    """However many layers there are: each is released before the next one is copied."""
    found = big_layers(8)
    layer = 16 * found[0].row_bytes()
    hot = {item.layer: tuple(range(8)) for item in found}
    residency = rehome.Residency(found, hot, WORK, "overlay")
    moved = peak_of(residency.move)
    undone = peak_of(residency.undo)
    cold = 8 * layer // 2
    print(f"layer {layer >> 20} MiB: move +{moved >> 20}, undo +{undone >> 20}", file=sys.stderr)
    assert moved < 1.5 * layer, (moved, layer)
    assert undone < cold + 1.5 * layer, (undone, layer)
    for item in found:
        assert bool((item.container.w13_weight == item.layer + 1).all())


def minus_zero_and_nan_are_compared_by_bits() -> None:
    zero = torch.tensor([0.0, float("nan")])
    assert selftest.same_bits(zero, zero.clone())
    assert not selftest.same_bits(zero, torch.tensor([-0.0, float("nan")]))


CASES: list[Callable[[], None]] = [
    counters_agree_with_numpy, rows_that_were_not_captured_are_bad, steps_read_nothing_back,
    a_reader_of_the_status_never_asks_the_device,
    an_undo_without_memory_leaves_rows_where_they_can_be_read,
    a_disk_that_fails_while_rows_are_written_is_rolled_back,
    overlay_tier, mlock_tier,
    all_hot_and_all_cold, a_failed_lock_is_rolled_back, a_row_in_the_wrong_place_is_seen,
    a_self_test_that_differs_is_rolled_back, a_kernel_that_raises_is_rolled_back,
    minus_zero_and_nan_are_compared_by_bits, moving_and_undoing_hold_one_layer_twice,
]  # fmt: skip

if __name__ == "__main__":
    WORK.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        case()
        print(case.__name__, flush=True)
    print("done")
