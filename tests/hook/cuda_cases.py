"""Cases of the CUDA residency that need torch but no GPU; a script for the engine's Python.

`cuda_cases.py HOOK_FOLDER` prints one line for each case that holds.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, sys.argv[1])

import cuda_layers as stand
import expertmaps_hook_cuda as cuda
import expertmaps_hook_model as model
import expertmaps_hook_plan as plan
import expertmaps_hook_rows as rows
import expertmaps_hook_selftest as selftest
import expertmaps_hook_tensors as tensors
from cuda_layers import EXPERTS, INSTALLED, NAMES, ROW, Machine, refused, same

HOT = {0: (5, 1, 2), 1: (0, 6, 3), 2: (4, 2, 1)}
NOTHING = plan.Bytes(0, 0)


def snapshot(found: list[model.MoeLayer]) -> list[Any]:
    return [getattr(item.container, name).data.clone() for item in found for name in NAMES]


def residency(machine: Machine, found: list[model.MoeLayer], hot: Any = HOT) -> Any:
    return cuda.CudaResidency(found, hot, machine.device, machine.pinned, NOTHING)


def holders(found: list[model.MoeLayer]) -> list[Any]:
    return [
        holder
        for item in found
        for part in tensors.discover(item.layer, item.container, item.experts)
        for holder in part.holders
    ]


def padded(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
    return selftest.probe(item, hot, padding=True)


def rows_move_bit_for_bit_and_back() -> None:
    """Outputs, tiers' rows, counted bytes, and after undo every byte of every holder."""
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    before, all_holders = snapshot(found), holders(found)
    outputs = [padded(item, HOT[item.layer]) for item in found]
    used = machine.device.used
    made = residency(machine, found)
    made.move(padded)
    gc.collect()
    assert sorted(INSTALLED) == [0, 1, 2]
    for item, output in zip(found, outputs, strict=True):
        assert same(output, padded(item, HOT[item.layer]))
        assert item.container.w13_weight.shape == (EXPERTS, 20, 24)
        assert item.container.w13_weight.untyped_storage().nbytes() == 16
    # Device: 4 of 7 rows of each layer are gone, and cold rows are nowhere but in pinned memory.
    assert used - machine.device.used == 3 * 4 * ROW
    assert machine.pinned.size == sum(machine.cuda.registered.values()) == 3 * 16384
    wire = made.wire()
    assert wire.pop("moveBytesPerSecond") > 0
    assert wire == {
        "hotRows": 9, "coldRows": 12, "hotBytes": 9 * ROW, "coldBytes": 12 * ROW,
        "lockedBytes": 3 * 16384, "tier": "uva",
    }  # fmt: skip
    made.evict()
    made.undo()
    gc.collect()
    assert same(before, snapshot(found)) and machine.nothing_pinned() and not INSTALLED
    assert machine.device.used == used
    for holder in all_holders:
        assert holder.data_ptr() and holder.shape[0] == EXPERTS
    first = found[0].container
    first.w2_weight_scale.data.zero_()  # its own memory again, seen by its other holder
    config = first.quant_method.moe_kernel.fused_experts.quant_config
    assert float(config._w2.scale.abs().sum()) == 0.0


def tiers_hold_what_the_contract_says() -> None:
    """Hot first in the map's order, both names of a tensor, and which memory each lies in."""
    seen: list[Any] = []
    stand.use_installer(install=lambda module, tiered: seen.append(tiered) or (lambda: None))
    machine = Machine()
    found = stand.layers(machine.device, 1)
    before = {name: getattr(found[0].container, name).data.clone() for name in NAMES}
    made = residency(machine, found)
    made.move()
    tiered = seen[0]
    assert (tiered.layer, tiered.experts, tiered.hot) == (0, EXPERTS, 3)
    assert tiered.slot_of.dtype == torch.int32
    order = [5, 1, 2, 0, 3, 4, 6]
    assert [tiered.slot_of.tolist().index(slot) for slot in range(7)] == order
    assert set(tiered.hot_tensors) == set(tiered.cold_tensors) >= {*NAMES, "w2_scale", "w1_scale"}
    for name in NAMES:
        assert torch.equal(tiered.hot_tensors[name], before[name][order[:3]])
        assert torch.equal(tiered.cold_tensors[name], before[name][order[3:]])
    assert tiered.hot_tensors["w2_scale"] is tiered.hot_tensors["w2_weight_scale"]
    low, size = next(iter(machine.cuda.registered.items()))
    for name in NAMES:
        inside = low <= tiered.cold_tensors[name].data_ptr() < low + size
        assert inside == (name != "w2_bias"), name
    made.undo()


def empty_sides_have_no_tensors() -> None:
    seen: list[Any] = []

    def install(module: Any, tiered: Any) -> Callable[[], None]:
        seen.append(tiered)
        return stand.install(module, tiered)

    stand.use_installer(install=install)
    machine = Machine()
    found = stand.layers(machine.device, 2)
    before = snapshot(found)
    made = residency(machine, found, {0: tuple(range(EXPERTS)), 1: ()})
    made.move(padded)
    by_layer = {tiered.layer: tiered for tiered in seen}
    assert by_layer[0].cold_tensors == {} and by_layer[1].hot_tensors == {}
    assert len(machine.cuda.registered) == 1
    made.undo()
    assert same(before, snapshot(found)) and machine.nothing_pinned()


def undone(machine: Machine, found: list[model.MoeLayer], before: list[Any], used: int) -> None:
    gc.collect()
    assert same(before, snapshot(found))
    assert machine.nothing_pinned(), machine.calls
    assert not INSTALLED and machine.device.used == used
    for holder in holders(found):
        holder.data.zero_()


def each_call_that_fails_is_undone() -> None:
    """Every call to device, driver and libc of a whole move fails once."""
    stand.use_installer()
    machine = Machine()
    made = residency(machine, stand.layers(machine.device))
    start = len(machine.calls)
    made.move(padded)
    kinds = machine.calls[start:]
    assert set(kinds) == {"free", "empty", "map", "register", "pointer", "view", "sync"}
    assert kinds[:2] == ["free", "free"]  # around the kernels' first run
    third = len(kinds[2:]) // 3
    assert kinds[2:] == kinds[2 : 2 + third] * 3  # one order for every layer
    assert kinds[-6:] == ["empty", "map", "register", "pointer", "view", "sync"]
    made.undo()
    reasons = set()
    for place in range(start, start + len(kinds)):
        machine = Machine()
        found = stand.layers(machine.device)
        before, used = snapshot(found), machine.device.used
        made = residency(machine, found)
        assert len(machine.calls) == start
        machine.fail_at(place)
        failure = refused(lambda made=made: made.move(padded))
        assert machine.calls[place] == kinds[place - start]
        reasons.add(failure.reason)
        undone(machine, found, before, used)
        made.undo()  # again: nothing is left to do
    assert reasons == {"PinFailed", "RehomeFailed"}


def a_device_that_fails_while_planning_changes_nothing() -> None:
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    before, used = snapshot(found), machine.device.used
    machine.fail_at(0)
    try:
        residency(machine, found)
    except RuntimeError:
        undone(machine, found, before, used)
    else:
        raise AssertionError("it planned")


def caught(reason: str, words: str, check: Any = padded, **functions: Any) -> None:
    """A mistake in the second layer that moves is caught by name, and both are put back."""
    stand.use_installer(**functions)
    machine = Machine()
    found = stand.layers(machine.device)
    before, used = snapshot(found), machine.device.used
    made = residency(machine, found)
    failure = refused(lambda: made.move(check))
    assert failure.reason == reason and words in failure.message, failure
    undone(machine, found, before, used)


def with_mistake(mistake: str) -> Callable[..., Any]:
    def install(module: Any, tiered: Any) -> Any:
        return stand.install(module, tiered, mistake if tiered.layer == 1 else "")

    return install


def a_wrong_scale_or_map_in_the_kernel_fails_the_self_test() -> None:
    for mistake in ("scale", "map"):
        caught("SelfTestFailed", "layer 1: output", install=with_mistake(mistake))


def what_a_kernel_keeps_from_its_first_run_is_not_missed() -> None:
    """A workspace that stays, larger than all that the layers give back."""
    slack, rounded = cuda.RELEASE_SLACK, cuda.device_bytes
    cuda.RELEASE_SLACK, cuda.device_bytes = 0, lambda size: size
    try:
        stand.use_installer()
        machine = Machine()
        found = stand.layers(machine.device)
        kept: list[Any] = []

        def greedy(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
            if not kept:
                kept.append(machine.device.empty(1 << 10, 1 << 10))
            return padded(item, hot)

        made = residency(machine, found)
        made.move(greedy)
        made.undo()
    finally:
        cuda.RELEASE_SLACK, cuda.device_bytes = slack, rounded


def a_workspace_that_stays_comes_out_of_the_guard() -> None:
    """The engine's own profiling needs it next: it is not asked for on top of the guard."""
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    guard, margin, workspace = plan.Bytes(8 << 20, 0), 12 << 20, []
    machine.device.capacity = machine.device.used + guard.device + margin
    made = cuda.CudaResidency(found, HOT, machine.device, machine.pinned, guard)

    def greedy(item: model.MoeLayer, hot: tuple[int, ...]) -> list[Any]:
        if not workspace:
            workspace.append(machine.device.empty(7, 1 << 20))
        return padded(item, hot)

    made.move(greedy)
    made.undo()


def weights_that_lie_elsewhere_are_refused() -> None:
    """As where vLLM offloads without UVA."""
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    machine.device.device = torch.device("meta")
    failure = refused(lambda: residency(machine, found))
    assert failure.reason == "HookUnsupported" and not machine.calls, failure
    assert "layer 0: w13_weight lies on cpu, expected meta" in failure.message


def an_allocator_that_keeps_what_was_released_is_seen() -> None:
    """Or hot rows would cost memory, and the status would say that they gave some back."""
    slack, rounded = cuda.RELEASE_SLACK, cuda.device_bytes
    cuda.RELEASE_SLACK, cuda.device_bytes = 0, lambda size: size
    try:
        for leaks in (False, True):
            stand.use_installer()
            machine = Machine()
            found = stand.layers(machine.device)
            before = snapshot(found)
            made = residency(machine, found)
            machine.device.leaks = leaks
            if not leaks:
                made.move(padded)
                made.undo()
                continue
            failure = refused(lambda made=made: made.move(padded))
            assert failure.reason == "MemoryNotReleased" and "1 layers" in failure.message, failure
            assert same(snapshot(found), before)
            assert not INSTALLED and machine.nothing_pinned()
    finally:
        cuda.RELEASE_SLACK, cuda.device_bytes = slack, rounded


def a_kernel_that_ignores_the_tiers_is_seen() -> None:
    """It would read the shells that took the originals' place."""
    caught("SelfTestFailed", "layer 0", install=lambda module, tiered: lambda: None)


def corrupted(target: tuple[str, str], place: int) -> Callable[..., None]:
    """copy_rows that changes one byte in one tier of one tensor of the second layer."""
    original, count = rows.copy_rows, [0]
    wanted = 10 + 2 * NAMES.index(target[0]) + (target[1] == "cold")

    def copy(source: Any, order: Any, memory: Any) -> None:
        original(source, order, memory)
        if count[0] == wanted:
            memory[1, place] ^= 1
        count[0] += 1

    return copy


def a_wrong_row_or_scale_is_seen_by_its_hash() -> None:
    original = rows.copy_rows
    for name in NAMES:
        for side, expert in (("hot", 6), ("cold", 2)):  # slot 1 of layer 1's tiers
            rows.copy_rows = corrupted((name, side), 0)  # type: ignore[assignment]
            try:
                caught("RowsChanged", f"layer 1 {name}: rows [{expert}]", check=None)
            finally:
                rows.copy_rows = original  # type: ignore[assignment]


def a_wrong_map_is_seen_before_it_is_used() -> None:
    original = cuda.slot_table

    def wrong(change: Callable[[Any], None]) -> Callable[..., Any]:
        made: list[int] = []

        def table(order: Any, device: Any) -> Any:
            found = original(order, device)
            made.append(1)
            if len(made) == 2:
                change(found)
            return found

        return table

    def swapped(table: Any) -> None:
        table[2], table[4] = int(table[4]), int(table[2])

    def outside(table: Any) -> None:
        table[2] = EXPERTS

    try:
        for change, experts in ((swapped, "[2, 4]"), (outside, "[2]")):
            cuda.slot_table = wrong(change)  # type: ignore[assignment]
            caught("RowsChanged", f"layer 1 w13_weight: rows {experts}", check=None)
    finally:
        cuda.slot_table = original  # type: ignore[assignment]


def a_kernel_or_installer_that_raises_is_undone() -> None:
    def no_install(module: Any, tiered: Any) -> Any:
        if tiered.layer == 1:
            raise ValueError("no seam")
        return stand.install(module, tiered)

    caught("RehomeFailed", "no seam", install=no_install)
    for place in (2, 3):  # before and after the second layer's move
        seen: list[int] = []

        def raising(item: Any, hot: Any, seen: list[int] = seen, place: int = place) -> Any:
            seen.append(item.layer)
            if len(seen) == place + 1:
                raise RuntimeError("no kernel")
            return padded(item, hot)

        caught("RehomeFailed", "no kernel", check=raising)


def an_interrupt_is_undone_and_passed_on() -> None:
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    before, used = snapshot(found), machine.device.used

    def interrupted(item: Any, hot: Any) -> Any:
        if item.layer == 2:
            raise KeyboardInterrupt
        return padded(item, hot)

    try:
        residency(machine, found).move(interrupted)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("it went on")
    undone(machine, found, before, used)


def a_shortage_is_told_before_the_first_layer() -> None:
    stand.use_installer()
    machine = Machine(host=1 << 14)
    found = stand.layers(machine.device)
    before, used = snapshot(found), machine.device.used
    assert refused(lambda: residency(machine, found)).reason == "HostMemoryShort"
    machine.device.host_capacity = 1 << 40
    machine.device.capacity = used + 3 * ROW  # under one block of the allocator
    failure = refused(lambda: residency(machine, found))
    assert failure.reason == "DeviceMemoryShort" and "nothing moved" in failure.message
    undone(machine, found, before, used)


def memory_that_others_take_meanwhile_is_seen() -> None:
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    before, used = snapshot(found), machine.device.used
    made = residency(machine, found)

    runs: list[int] = []

    def shrinking(item: Any, hot: Any) -> Any:
        runs.append(item.layer)
        if len(runs) > 1:  # the first one only warms the kernels up
            machine.device.capacity = machine.device.used + 2 * EXPERTS * ROW
        return padded(item, hot)

    failure = refused(lambda: made.move(shrinking))
    assert failure.reason == "DeviceMemoryShort" and "before layer 1" in failure.message
    undone(machine, found, before, used)


def offloaded_layers_go_to_the_device_and_back_to_host_memory() -> None:
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device, offloaded=(0, 2))
    before, used, host = snapshot(found), machine.device.used, machine.device.host_used
    assert host == 2 * EXPERTS * (ROW + 4)
    made = residency(machine, found)
    assert made._steps[0].layer == 1  # the one that frees device memory
    made.move(padded)
    gc.collect()
    assert machine.device.host_used == 0  # the engine's pinned originals are gone
    assert machine.device.used == used + 6 * ROW - 4 * ROW + 2 * EXPERTS * 4
    made.undo()
    gc.collect()
    assert same(before, snapshot(found)) and not INSTALLED
    assert machine.device.used == used
    assert len(machine.cuda.registered) == 2  # whole layers, pinned again, as they had been


def layers_that_do_not_fit_back_are_told_and_served() -> None:
    """Two layers moved, the third fails, and meanwhile others took the device's memory."""
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    before, used = snapshot(found), machine.device.used
    outputs = [padded(item, HOT[item.layer]) for item in found]
    made = residency(machine, found)

    def greedy(item: Any, hot: Any) -> Any:
        if item.layer == 2:
            machine.device.capacity = machine.device.used
            raise RuntimeError("no kernel")
        return padded(item, hot)

    assert refused(lambda: made.move(greedy)).reason == "RehomeFailed"
    failure = refused(made.undo)
    assert failure.reason == "UndoIncomplete" and "out of memory" in failure.message
    assert "layers [0, 1] are served from their tiers" in failure.message
    assert sorted(INSTALLED) == [0, 1] and len(machine.cuda.registered) == 2
    for item, output in zip(found, outputs, strict=True):
        assert same(output, padded(item, HOT[item.layer]))
    del failure  # its frames hold the tiers
    machine.device.capacity = 1 << 40
    made.undo()
    undone(machine, found, before, used)


def a_row_that_changed_in_its_tier_is_not_put_back_silently() -> None:
    stand.use_installer()
    machine = Machine()
    found = stand.layers(machine.device)
    made = residency(machine, found)
    made.move(padded)
    tiered = next(moved.tiered for moved in made._moved if moved.tiered.layer == 1)
    tiered.cold_tensors["w2_weight_scale"][1].view(torch.uint8)[0] ^= 1  # of expert 2
    failure = refused(made.undo)
    assert failure.reason == "UndoIncomplete" and "layers [1] are served" in failure.message
    assert "RowsChanged: layer 1 w2_weight_scale: rows [2]" in failure.message
    assert INSTALLED == [1]
    stand.INSTALLED.clear()


def pinned_memory_that_cannot_be_given_back_does_not_stop_the_undo() -> None:
    """Neither a refusal of the driver nor a device that has failed meanwhile."""
    stand.use_installer()

    def dead() -> None:
        if not INSTALLED:  # the layer is whole again
            raise RuntimeError("the device has failed")

    for broken in ("driver", "device"):
        machine = Machine()
        found = stand.layers(machine.device, 1)
        before = snapshot(found)
        made = residency(machine, found)
        made.move(padded)
        if broken == "driver":
            machine.cuda.cudaHostUnregister = lambda _: 1  # type: ignore[assignment,misc]
        else:
            machine.device.sync = dead  # type: ignore[method-assign]
        made.undo()
        assert same(before, snapshot(found)) and not INSTALLED
        assert bool(machine.libc.mapped) == (broken == "device")
        made.undo()


CASES: list[Callable[[], None]] = [
    rows_move_bit_for_bit_and_back, tiers_hold_what_the_contract_says, empty_sides_have_no_tensors,
    each_call_that_fails_is_undone, a_device_that_fails_while_planning_changes_nothing,
    a_wrong_scale_or_map_in_the_kernel_fails_the_self_test, a_kernel_that_ignores_the_tiers_is_seen,
    a_wrong_row_or_scale_is_seen_by_its_hash, a_wrong_map_is_seen_before_it_is_used,
    a_kernel_or_installer_that_raises_is_undone, an_interrupt_is_undone_and_passed_on,
    a_shortage_is_told_before_the_first_layer, memory_that_others_take_meanwhile_is_seen,
    offloaded_layers_go_to_the_device_and_back_to_host_memory,
    an_allocator_that_keeps_what_was_released_is_seen,
    what_a_kernel_keeps_from_its_first_run_is_not_missed,
    a_workspace_that_stays_comes_out_of_the_guard, weights_that_lie_elsewhere_are_refused,
    layers_that_do_not_fit_back_are_told_and_served,
    a_row_that_changed_in_its_tier_is_not_put_back_silently,
    pinned_memory_that_cannot_be_given_back_does_not_stop_the_undo,
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in CASES:
        case()
        print(case.__name__, flush=True)
    print("done")
