"""Serve mode on CUDA: hot rows in device memory, cold rows in pinned host memory read in place.

Every tensor with a row for each expert is split, hot rows first, and the layer's kernel is
installed to read both tiers. Layer by layer, in the planned order: hash all rows, run the
self-test, copy, compare the hashes as the kernel will find the rows, install, run the self-test
again, and only then release the original. All layers move or none does: a failure puts those
that had moved back from their tiers. It all happens before the engine captures CUDA graphs, so
every address is final by then.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_env as env
    from . import expertmaps_hook_installers as installers
    from . import expertmaps_hook_rows as rows
    from . import expertmaps_hook_selftest as selftest
    from .expertmaps_hook_model import MoeLayer
    from .expertmaps_hook_pages import lay_out
    from .expertmaps_hook_pinned import Block, Pinned
    from .expertmaps_hook_plan import Bytes, LayerMove, device_bytes, pinned_chunks, plan
    from .expertmaps_hook_rehome import Probe
    from .expertmaps_hook_tensors import ExpertTensor, discover
    from .expertmaps_hook_tiers import TieredLayer
else:
    import expertmaps_hook_env as env
    import expertmaps_hook_installers as installers
    import expertmaps_hook_rows as rows
    import expertmaps_hook_selftest as selftest
    from expertmaps_hook_model import MoeLayer
    from expertmaps_hook_pages import lay_out
    from expertmaps_hook_pinned import Block, Pinned
    from expertmaps_hook_plan import Bytes, LayerMove, device_bytes, pinned_chunks, plan
    from expertmaps_hook_tensors import ExpertTensor, discover
    from expertmaps_hook_tiers import TieredLayer

RELEASE_SLACK = 256 << 20
"""Device bytes that kernels of the self-test may take for good, beside what its first run took."""

Hashes = dict[str, list[int]]
"""By tensor name, a hash of each expert's row."""


@dataclass(frozen=True)
class Layer:
    """One layer, its tensors and its hot experts in slot order."""

    item: MoeLayer
    parts: tuple[ExpertTensor, ...]
    installer: installers.Installer
    order: tuple[int, ...]
    """Expert of each slot: hot experts first."""
    hot: int

    def sides(self, part: ExpertTensor) -> tuple[tuple[int, bool], tuple[int, bool]]:
        """(rows, whether they lie on the device) of the hot and of the cold side."""
        return (self.hot, True), (self.item.experts - self.hot, part.is_vector)


@dataclass(frozen=True)
class Moved:
    """What it takes to put a layer back."""

    layer: Layer
    tiered: TieredLayer
    hashes: Hashes
    blocks: tuple[Block, ...]
    uninstall: Callable[[], None]


class CudaResidency:
    """The tiers of all layers. `device` and `pinned` are where their memory comes from."""

    def __init__(
        self,
        layers: list[MoeLayer],
        hot: Mapping[int, tuple[int, ...]],
        device: Any,
        pinned: Pinned,
        guard: Bytes,
    ) -> None:
        """Plans the moves. Raises HookError with nothing changed: a refusal or a shortage."""
        self._device, self._pinned, self._guard = device, pinned, guard
        self._layers = {item.layer: _layer(item, hot[item.layer], device.device) for item in layers}
        gc.collect()
        self._moves = {number: _move(layer) for number, layer in self._layers.items()}
        self._steps = plan(list(self._moves.values()), device.free(), guard)
        self._moved: list[Moved] = []
        self._seconds = 0.0
        self._slack = RELEASE_SLACK

    def move(self, probe: Probe | None = None) -> None:
        """Move all layers, or none. Raises HookError with everything put back.

        Where putting back fails as well, the layers in question stay in their tiers and are
        served from there; the next `undo` tries again and says so.
        """
        try:
            if probe is not None and self._steps:
                self._warm_up(self._layers[self._steps[0].layer], probe)
            for place, step in enumerate(self._steps):
                self._check_free(place)
                self._move_layer(self._layers[step.layer], probe)
        except BaseException as error:
            # Frames of the failed step hold its tensors, and putting back needs their memory.
            traceback.clear_frames(error.__traceback__)
            try:
                self.undo()
            except env.HookError as stuck:
                env.logger.error("expertmaps: %s", stuck)
            if isinstance(error, Exception):
                raise env.as_failure(error, "RehomeFailed") from error
            raise

    def _warm_up(self, layer: Layer, probe: Probe) -> None:
        """Have the kernels take the workspaces that they keep: no layer's move gives them back.

        The engine's own profiling run needs the same ones, so they come out of the guard, which is
        for what comes after the move.
        """
        before = self._device.free().device
        probe(layer.item, layer.order[: layer.hot])
        kept = max(0, before - self._device.free().device)
        self._slack += kept
        self._guard = self._guard._replace(device=max(0, self._guard.device - kept))

    def _move_layer(self, layer: Layer, probe: Probe | None) -> None:
        item, hot = layer.item, layer.order[: layer.hot]
        before = probe(item, hot) if probe is not None else []
        hashes = {
            part.name: rows.hashes(part.layout.flat(part.holders[0].data)) for part in layer.parts
        }
        with ExitStack() as undo:
            started = time.monotonic()
            tiered, blocks = self._split(layer, undo)
            self._device.sync()
            self._seconds += time.monotonic() - started
            check_rows(layer, tiered, hashes)
            self._release(layer, undo)
            uninstall = layer.installer.install(item.module, tiered)
            undo.callback(uninstall)
            after = probe(item, hot) if probe is not None else []
            selftest.compare(item.layer, before, after)
            undo.pop_all()
        self._moved.append(Moved(layer, tiered, hashes, blocks, uninstall))

    def _check_free(self, place: int) -> None:
        """What the plan counted on must still be there: others use this memory, too."""
        number = self._steps[place].layer
        needs, free = self._moves[number].tiers, self._device.free()
        for tier, reason in (("device", "DeviceMemoryShort"), ("host", "HostMemoryShort")):
            need, found, guard = (getattr(side, tier) for side in (needs, free, self._guard))
            if found - need < guard:
                raise env.HookError(
                    reason,
                    f"{tier} memory before layer {number}: needs {need} bytes, found {found} bytes "
                    f"free, guard {guard}; the plan had expected more",
                )
        moved = self._steps[:place]
        if moved:
            released = sum(self._moves[step.layer].whole.device for step in moved)
            short = moved[-1].after.device - free.device
            if short > max(self._slack, released // 2):
                raise env.HookError(
                    "MemoryNotReleased",
                    f"device memory before layer {number}: {short} bytes fewer free than planned, "
                    f"of {released} that {place} layers gave back: the allocator keeps them, or "
                    "another process took them",
                )

    def _split(self, layer: Layer, undo: ExitStack) -> tuple[TieredLayer, tuple[Block, ...]]:
        """Copies of all rows in both tiers, and the map from expert to slot."""
        wanted = {
            (part.name, side): (count, part.layout.row_bytes, on_device)
            for part in layer.parts
            for side, (count, on_device) in zip(("hot", "cold"), layer.sides(part), strict=True)
        }
        memory, blocks = self._memory(wanted, undo)
        tiers: dict[str, dict[str, Any]] = {"hot": {}, "cold": {}}
        orders = {"hot": layer.order[: layer.hot], "cold": layer.order[layer.hot :]}
        for part in layer.parts:
            source = part.layout.flat(part.holders[0].data)
            for side, order in orders.items():
                if order:
                    target = memory[part.name, side]
                    rows.copy_rows(source, order, target)
                    tiers[side].update(dict.fromkeys(part.names, part.layout.tensor(target)))
        item = layer.item
        slots = slot_table(layer.order, self._device.device)
        made = TieredLayer(item.layer, item.experts, layer.hot, slots, tiers["hot"], tiers["cold"])
        return made, blocks

    def _memory(
        self, wanted: Mapping[Any, tuple[int, int, bool]], undo: ExitStack
    ) -> tuple[dict[Any, Any], tuple[Block, ...]]:
        """uint8 [rows, row bytes] for each key of (rows, row bytes, whether on the device)."""
        found: dict[Any, Any] = {}
        sizes = []
        for key, (count, row_bytes, on_device) in wanted.items():
            if count and on_device:
                found[key] = self._device.empty(count, row_bytes)
            elif count:
                sizes.append((key, count * row_bytes))
        blocks = []
        for chunk in pinned_chunks(sizes):
            segments, size = lay_out((0, key, size, 1) for key, size in chunk)
            block = self._pinned.allocate(size)
            undo.callback(self._free, block)
            blocks.append(block)
            whole = self._device.view(block.device_address, block.size)
            for segment in segments:
                place: Any = segment.name
                found[place] = whole[segment.offset : segment.end].view(*wanted[place][:2])
        return found, tuple(blocks)

    def _free(self, block: Block) -> None:
        """Give back a block whose rows are not needed any more; what fails is logged."""
        try:
            self._device.sync()  # copies into it may still be under way
            self._pinned.free(block)
        except Exception as error:
            env.logger.warning("expertmaps: %d pinned bytes: %s", block.size, error)

    def _release(self, layer: Layer, undo: ExitStack) -> None:
        """Let go of the originals; until `undo` is dropped it holds them."""
        for part in layer.parts:
            empty = rows.shell(part.layout, layer.item.experts, self._device.device)
            for holder in part.holders:
                undo.callback(setattr, holder, "data", holder.data)
                holder.data = empty

    def evict(self) -> None:
        """Nothing: cold rows leave no copy on the device."""

    def undo(self) -> None:
        """Put every layer back, the last one first, and release the tiers.

        Raises HookError (UndoIncomplete) naming layers that do not fit: they stay in their tiers.
        """
        stuck: list[Moved] = []
        why = ""
        while self._moved:
            moved = self._moved.pop()
            try:
                self._put_back(moved)
            except Exception as error:
                stuck.append(moved)
                why = why or str(env.as_failure(error, "RehomeFailed"))
        self._moved = stuck[::-1]
        self._seconds = 0.0
        if stuck:
            numbers = [moved.layer.item.layer for moved in self._moved]
            raise env.HookError(
                "UndoIncomplete", f"layers {numbers[:64]} are served from their tiers still: {why}"
            )

    def _put_back(self, moved: Moved) -> None:
        """Whole tensors again, where they had been: device memory, or host memory if offloaded."""
        layer, experts = moved.layer, moved.layer.item.experts
        wanted = {
            part.name: (experts, part.layout.row_bytes, not part.offloaded) for part in layer.parts
        }
        with ExitStack() as undo:
            self._device.free()
            memory, _ = self._memory(wanted, undo)
            for part in layer.parts:
                for side, low in (
                    (moved.tiered.hot_tensors, 0),
                    (moved.tiered.cold_tensors, layer.hot),
                ):
                    if part.name in side:
                        source = part.layout.flat(side[part.name])
                        for row in range(int(source.shape[0])):
                            memory[part.name][layer.order[low + row]].copy_(source[row])
            self._device.sync()
            for part in layer.parts:
                _check_part(layer, part, rows.hashes(memory[part.name]), moved.hashes)
            undo.pop_all()
        moved.uninstall()
        for part in layer.parts:
            for holder in part.holders:
                holder.data = part.layout.tensor(memory[part.name])
        for block in moved.blocks:
            self._free(block)

    def wire(self) -> dict[str, Any]:
        """Residency, as the status carries it: bytes of rows that are in one tier or the other."""
        sizes = [
            (count * part.layout.row_bytes, on_device)
            for layer in self._layers.values()
            for part in layer.parts
            if not part.is_vector
            for count, on_device in layer.sides(part)
        ]
        total = sum(size for size, _ in sizes)
        hot_bytes = sum(size for size, on_device in sizes if on_device)
        hot_rows = sum(layer.hot for layer in self._layers.values())
        found = {
            "hotRows": hot_rows,
            "coldRows": sum(layer.item.experts for layer in self._layers.values()) - hot_rows,
            "hotBytes": hot_bytes,
            "coldBytes": total - hot_bytes,
            "lockedBytes": self._pinned.size,
            "tier": "uva",
        }
        if self._seconds:
            found["moveBytesPerSecond"] = int(total / self._seconds)
        return found


def _layer(item: MoeLayer, hot: tuple[int, ...], device: Any) -> Layer:
    """A layer with its tensors found and its kernel checked. Raises HookError."""
    installer = installers.installer(item.layer, item.container)
    installer.check(item.module)
    cold = sorted(set(range(item.experts)) - set(hot))
    parts = tuple(discover(item.layer, item.container, item.experts))
    for part in parts:
        found = part.holders[0].device
        if found.type != device.type:
            raise env.HookError(
                "HookUnsupported",
                f"layer {item.layer}: {part.name} lies on {found.type}, expected {device.type} "
                "(VLLM_WEIGHT_OFFLOADING_DISABLE_UVA copies weights at each step)",
            )
    return Layer(item, parts, installer, (*hot, *cold), len(hot))


def _move(layer: Layer) -> LayerMove:
    """Bytes of a layer's move, as the allocators count them."""
    whole, tiers = [0, 0], [0, 0]
    cold = []
    for part in layer.parts:
        size = part.layout.row_bytes
        kept = size * layer.item.experts
        whole[part.offloaded] += kept if part.is_vector or part.offloaded else device_bytes(kept)
        for count, on_device in layer.sides(part):
            if on_device:
                tiers[0] += size * count if part.is_vector else device_bytes(size * count)
            else:
                cold.append((part.name, size * count))
    for chunk in pinned_chunks(cold):
        tiers[1] += lay_out((0, name, size, 1) for name, size in chunk)[1]
    return LayerMove(layer.item.layer, Bytes(*whole), Bytes(*tiers))


def slot_table(order: tuple[int, ...], device: Any) -> Any:
    """Device int32 [experts]: the slot of each expert."""
    import torch

    slots = [0] * len(order)
    for slot, expert in enumerate(order):
        slots[expert] = slot
    return torch.tensor(slots, dtype=torch.int32, device=device)


def check_rows(layer: Layer, tiered: TieredLayer, hashes: Hashes) -> None:
    """Every expert's row, found through the device's own map, has the hash it had before.

    Raises HookError (RowsChanged) naming layer, tensor and experts.
    """
    slots = [int(slot) for slot in tiered.slot_of.tolist()]
    for part in layer.parts:
        by_slot: list[int] = []
        for side in (tiered.hot_tensors, tiered.cold_tensors):
            if part.name in side:
                by_slot += rows.hashes(part.layout.flat(side[part.name]))
        found = [by_slot[slot] if 0 <= slot < len(by_slot) else -1 for slot in slots]
        _check_part(layer, part, found, hashes)


def _check_part(layer: Layer, part: ExpertTensor, found: list[int], hashes: Hashes) -> None:
    changed = rows.differing(found, hashes[part.name])
    if changed:
        raise env.HookError(
            "RowsChanged", f"layer {layer.item.layer} {part.name}: rows {changed[:8]} differ"
        )
