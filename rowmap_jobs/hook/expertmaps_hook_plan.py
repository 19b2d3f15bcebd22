"""The order in which layers move into two tiers, simulated from free bytes before the first move.

Pure arithmetic over bytes. A layer's move needs its new rows beside the whole layer, in both
tiers; once they are compared the whole layer is freed. A layer that lies on the device frees
experts - hot rows there; one that the engine had offloaded to the host costs hot rows there, so
that others have to go first. What is free depends on which layers have moved and not on their
order, so the search goes over that; layers of equal bytes are one kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
else:
    from expertmaps_hook_env import HookError

DEVICE_BLOCK = 2 << 20
"""torch's caching allocator takes large tensors from the device in multiples of this."""

CHUNK_LIMIT = 64 << 30
"""Most bytes of host memory that are pinned by one call."""

STATES = 10_000
"""States the search looks at; 40 layers of two kinds have 441 at most."""


class Bytes(NamedTuple):
    """Bytes on the device and in host memory."""

    device: int
    host: int


@dataclass(frozen=True)
class LayerMove:
    """What one layer's move takes from and gives to both tiers, in bytes."""

    layer: int
    whole: Bytes
    """Where the whole layer lies now: given back once the layer has moved."""
    tiers: Bytes
    """Hot rows on the device, cold rows in host memory."""


@dataclass(frozen=True)
class Step:
    """One layer of a plan, with what the simulation says is free."""

    layer: int
    lowest: Bytes
    """While the whole layer and both tiers are there."""
    after: Bytes


Kind = tuple[Bytes, Bytes]
"""Bytes of the whole layer, bytes of its tiers."""


def plan(moves: Sequence[LayerMove], free: Bytes, guard: Bytes) -> tuple[Step, ...]:
    """An order in which no step leaves fewer bytes free than the guard, in either tier.

    If there is such an order one is found, unless the layers are of so many kinds that STATES
    states were looked at first; then none is taken. Layers that free most device memory go first.

    Raises HookError (DeviceMemoryShort, HostMemoryShort) naming bytes needed and free, the guard,
    and how many layers would have moved before.
    """
    kinds: dict[Kind, list[int]] = {}
    for move in moves:
        kinds.setdefault((move.whole, move.tiers), []).append(move.layer)
    order = sorted(kinds, key=lambda kind: (kind[1].device - kind[0].device, kind))
    path = _search(order, tuple(len(kinds[kind]) for kind in order), free, guard)
    left = {kind: list(reversed(kinds[kind])) for kind in order}
    steps, now = [], free
    for index in path:
        lowest, after = simulate(order[index], now)
        steps.append(Step(left[order[index]].pop(), lowest, after))
        now = after
    if len(steps) < len(moves):
        open_kinds = [(layers[-1], kind) for kind, layers in left.items() if layers]
        raise _shortage(open_kinds, now, guard, f"{len(steps)} of {len(moves)} layers")
    return tuple(steps)


def simulate(kind: Kind, free: Bytes) -> tuple[Bytes, Bytes]:
    """Free bytes while a layer moves, and after it has moved."""
    whole, tiers = kind
    lowest = Bytes(free.device - tiers.device, free.host - tiers.host)
    return lowest, Bytes(lowest.device + whole.device, lowest.host + whole.host)


def _search(kinds: Sequence[Kind], counts: tuple[int, ...], free: Bytes, guard: Bytes) -> list[int]:
    """The longest sequence of kinds found that keeps the guards: depth first, no state twice."""
    best: list[int] = []
    path: list[int] = []
    seen = {counts}
    stack = [(counts, free, iter(range(len(kinds))))]
    while stack and len(best) < sum(counts):
        left, now, choices = stack[-1]
        for index in choices:
            lowest, after = simulate(kinds[index], now)
            if not left[index] or lowest.device < guard.device or lowest.host < guard.host:
                continue
            remaining = (*left[:index], left[index] - 1, *left[index + 1 :])
            if remaining not in seen and len(seen) < STATES:
                seen.add(remaining)
                path.append(index)
                stack.append((remaining, after, iter(range(len(kinds)))))
                best = list(path) if len(path) > len(best) else best
                break
        else:
            stack.pop()
            del path[-1:]
    return best


def _shortage(left: Iterable[tuple[int, Kind]], now: Bytes, guard: Bytes, moved: str) -> HookError:
    """The layer that is nearest to fitting, and the tier that it does not fit into."""

    def missing(needs: Bytes) -> Bytes:
        return Bytes(
            max(0, needs.device + guard.device - now.device),
            max(0, needs.host + guard.host - now.host),
        )

    layer, (_, needs) = min(left, key=lambda item: sum(missing(item[1][1])))
    on_device = missing(needs).device > 0
    tier = "device" if on_device else "host"
    reason = "DeviceMemoryShort" if on_device else "HostMemoryShort"
    return HookError(
        reason,
        f"{tier} memory after {moved}: layer {layer} needs {getattr(needs, tier)} bytes beside "
        f"itself, found {getattr(now, tier)} bytes free, guard {getattr(guard, tier)}; "
        "nothing moved",
    )


def device_bytes(size: int) -> int:
    """What a tensor takes from the device: rounded up to the allocator's blocks."""
    return -(-size // DEVICE_BLOCK) * DEVICE_BLOCK


def pinned_chunks(
    sizes: Sequence[tuple[str, int]], limit: int = CHUNK_LIMIT
) -> list[list[tuple[str, int]]]:
    """Tensors (name, bytes) in the groups that are pinned together, in order; none over the limit.

    Tensors without bytes are left out. Raises HookError (HostMemoryShort) for one over the limit.
    """
    chunks: list[list[tuple[str, int]]] = []
    filled = limit + 1
    for name, size in sizes:
        if size > limit:
            raise HookError(
                "HostMemoryShort",
                f"{name}: found {size} bytes, expected at most {limit} in one piece",
            )
        if not size:
            continue
        if filled + size > limit:
            chunks.append([])
            filled = 0
        chunks[-1].append((name, size))
        filled += size
    return chunks
