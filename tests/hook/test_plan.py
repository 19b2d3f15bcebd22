"""The order in which layers move: table cases from the reference machine, and every small case."""

from __future__ import annotations

from itertools import permutations

import expertmaps_hook_env as env
import expertmaps_hook_plan as plan
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

GIB = 1 << 30
ROW, EXPERTS, HOT, LAYERS = 18_800_640, 384, 295, 40
GUARD = plan.Bytes(8 * GIB, 10 * GIB)


def on_device(layer: int, hot: int = HOT) -> plan.LayerMove:
    return plan.LayerMove(
        layer, plan.Bytes(EXPERTS * ROW, 0), plan.Bytes(hot * ROW, (EXPERTS - hot) * ROW)
    )


def offloaded(layer: int, hot: int = HOT) -> plan.LayerMove:
    return plan.LayerMove(
        layer, plan.Bytes(0, EXPERTS * ROW), plan.Bytes(hot * ROW, (EXPERTS - hot) * ROW)
    )


def walk(
    steps: tuple[plan.Step, ...], moves: list[plan.LayerMove], free: plan.Bytes, guard: plan.Bytes
) -> None:
    """Redo the arithmetic of a plan by hand: each layer once, never below a guard."""
    by_layer = {move.layer: move for move in moves}
    assert sorted(step.layer for step in steps) == sorted(by_layer)
    device, host = free
    for step in steps:
        move = by_layer[step.layer]
        device, host = device - move.tiers.device, host - move.tiers.host
        assert step.lowest == (device, host)
        assert device >= guard.device and host >= guard.host
        device, host = device + move.whole.device, host + move.whole.host
        assert step.after == (device, host)


def test_the_reference_machines_bytes() -> None:
    moves = [on_device(layer) for layer in range(LAYERS)]
    device = sum(move.tiers.device for move in moves)
    host = sum(move.tiers.host for move in moves)
    assert (device, host) == (295 * 40 * 18_800_640, 89 * 40 * 18_800_640)
    assert (f"{device / GIB:.2f}", f"{host / GIB:.2f}") == ("206.61", "62.33")
    assert f"{moves[0].tiers.device / GIB:.2f}" == "5.17"
    assert device + host == 384 * 40 * ROW


def test_layers_on_the_device_pay_for_offloaded_ones() -> None:
    """31 layers on the device free 48.3 GiB, 9 offloaded ones take 46.5 GiB of them."""
    moves = [offloaded(layer) for layer in range(9)] + [on_device(layer) for layer in range(9, 40)]
    free = plan.Bytes(14 * GIB, 90 * GIB)
    steps = plan.plan(moves, free, GUARD)
    walk(steps, moves, free, GUARD)
    assert [step.layer for step in steps][:31] == list(range(9, 40))
    assert steps[-1].after.device == free.device + 31 * 89 * ROW - 9 * 295 * ROW
    with pytest.raises(env.HookError) as caught:
        plan.plan(moves[:10], free, GUARD)
    assert caught.value.reason == "DeviceMemoryShort"


def test_host_memory_is_freed_by_offloaded_layers_when_it_is_short() -> None:
    """A plan that starts with the layer that frees most device memory would be stuck."""
    moves = [on_device(0), offloaded(1), on_device(2)]
    free = plan.Bytes(20 * GIB, GUARD.host + 90 * ROW)
    steps = plan.plan(moves, free, GUARD)
    walk(steps, moves, free, GUARD)
    assert [step.layer for step in steps] == [1, 0, 2]


@pytest.mark.parametrize(
    ("free", "reason", "words"),
    [
        (plan.Bytes(13 * GIB, 90 * GIB), "DeviceMemoryShort",
         (f"needs {295 * ROW} bytes", f"found {13 * GIB} bytes free", f"guard {8 * GIB}")),
        (plan.Bytes(14 * GIB, 10 * GIB), "HostMemoryShort",
         (f"needs {89 * ROW} bytes", f"found {10 * GIB} bytes free", f"guard {10 * GIB}")),
    ],
)  # fmt: skip
def test_a_shortage_is_named_before_the_first_layer(
    free: plan.Bytes, reason: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(env.HookError) as caught:
        plan.plan([on_device(0), on_device(1)], free, GUARD)
    assert caught.value.reason == reason
    for word in (*words, "after 0 of 2 layers", "nothing moved"):
        assert word in caught.value.message


def test_the_message_tells_how_far_it_would_have_come() -> None:
    moves = [on_device(layer) for layer in range(4)]
    free = plan.Bytes(20 * GIB, GUARD.host + 2 * 89 * ROW + 5)
    with pytest.raises(env.HookError) as caught:
        plan.plan(moves, free, GUARD)
    assert "after 2 of 4 layers" in caught.value.message
    assert f"found {GUARD.host + 5} bytes free" in caught.value.message


def test_a_guard_is_kept_to_the_byte() -> None:
    free = plan.Bytes(GUARD.device + 295 * ROW, GUARD.host + 89 * ROW)
    assert len(plan.plan([on_device(0)], free, GUARD)) == 1
    for short in (plan.Bytes(free.device - 1, free.host), plan.Bytes(free.device, free.host - 1)):
        with pytest.raises(env.HookError):
            plan.plan([on_device(0)], short, GUARD)


def test_empty_sides_cost_nothing() -> None:
    free = plan.Bytes(GUARD.device + 384 * ROW, GUARD.host)
    assert plan.plan([on_device(0, hot=384)], free, GUARD)[0].after == free
    free = plan.Bytes(GUARD.device, GUARD.host + 384 * ROW)
    assert plan.plan([on_device(0, hot=0)], free, GUARD)[0].lowest == GUARD
    assert plan.plan([], plan.Bytes(0, 0), GUARD) == ()


small = st.integers(0, 6)
moves_of = st.lists(st.tuples(small, small, small, small), min_size=1, max_size=5).map(
    lambda rows: [
        plan.LayerMove(layer, plan.Bytes(a, b), plan.Bytes(c, d))
        for layer, (a, b, c, d) in enumerate(rows)
    ]
)
pair = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda both: plan.Bytes(*both))
few = st.tuples(st.integers(0, 2), st.integers(0, 2)).map(lambda both: plan.Bytes(*both))


def fits(order: tuple[plan.LayerMove, ...], free: plan.Bytes, guard: plan.Bytes) -> bool:
    device, host = free
    for move in order:
        device, host = device - move.tiers.device, host - move.tiers.host
        if device < guard.device or host < guard.host:
            return False
        device, host = device + move.whole.device, host + move.whole.host
    return True


@settings(max_examples=400)
@given(moves_of, pair, few)
def test_an_order_is_found_exactly_when_there_is_one(
    moves: list[plan.LayerMove], free: plan.Bytes, guard: plan.Bytes
) -> None:
    possible = any(fits(order, free, guard) for order in permutations(moves))
    try:
        steps = plan.plan(moves, free, guard)
    except env.HookError as failure:
        assert failure.reason in ("DeviceMemoryShort", "HostMemoryShort")
        assert not possible
    else:
        walk(steps, moves, free, guard)


def test_many_kinds_end() -> None:
    """60 layers of 60 kinds that fit only in part: a refusal, not an endless search."""
    moves = [plan.LayerMove(n, plan.Bytes(n, 60 - n), plan.Bytes(60, n + 1)) for n in range(60)]
    with pytest.raises(env.HookError):
        plan.plan(moves, plan.Bytes(1000, 1000), plan.Bytes(0, 0))


def test_device_tensors_take_whole_blocks() -> None:
    block = plan.DEVICE_BLOCK
    assert [plan.device_bytes(size) for size in (0, 1, block, block + 1)] == [
        0, block, block, 2 * block,
    ]  # fmt: skip


def test_pinned_memory_is_asked_for_in_chunks() -> None:
    sizes = [("a", 30), ("b", 34), ("none", 0), ("c", 1), ("d", 64)]
    assert plan.pinned_chunks(sizes, 64) == [[("a", 30), ("b", 34)], [("c", 1)], [("d", 64)]]
    assert plan.pinned_chunks([], 64) == []
    assert plan.CHUNK_LIMIT == 64 * GIB
    with pytest.raises(env.HookError) as caught:
        plan.pinned_chunks([("big", 65)], 64)
    assert caught.value.reason == "HostMemoryShort" and "big" in caught.value.message


@given(st.lists(st.integers(0, 10), max_size=12), st.integers(10, 25))
def test_chunks_hold_every_tensor_once_and_in_order(sizes: list[int], limit: int) -> None:
    named = [(str(place), size) for place, size in enumerate(sizes)]
    chunks = plan.pinned_chunks(named, limit)
    assert [item for chunk in chunks for item in chunk] == [item for item in named if item[1]]
    assert all(chunk and sum(size for _, size in chunk) <= limit for chunk in chunks)
