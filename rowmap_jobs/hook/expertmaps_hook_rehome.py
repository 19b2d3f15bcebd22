"""Serve mode on a CPU: every expert tensor moves into one mapped file, hot rows stay in memory.

All rows lie at their old distance from a new base address, so the kernel runs unchanged and its
output is the same to the bit. Cold rows are pages of the file, which the kernel may drop and
read again; hot rows are anonymous memory laid over their part of the mapping (overlay: a node
without swap cannot evict it) or locked file pages (mlock). Layer by layer the original is
released once the new rows were compared with it; any failure puts every layer back.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_env as env
    from . import expertmaps_hook_pages as pages
    from . import expertmaps_hook_selftest as selftest
    from .expertmaps_hook_model import MoeLayer, row_size
else:
    import expertmaps_hook_env as env
    import expertmaps_hook_pages as pages
    import expertmaps_hook_selftest as selftest
    from expertmaps_hook_model import MoeLayer, row_size

Probe = Callable[[MoeLayer, tuple[int, ...]], list[Any]]
"""Runs a layer on fixed input; the results before and after the move must be the same bits."""


class Residency:
    """The mapped file and what was moved into it."""

    def __init__(
        self, layers: list[MoeLayer], hot: Mapping[int, tuple[int, ...]], folder: Path, tier: str
    ) -> None:
        self._layers, self._hot, self._tier = layers, hot, tier
        self._libc = pages.Libc()
        plan = [
            (item.layer, name, row_size(tensor) * item.experts, row_size(tensor))
            for item in layers
            for name, tensor in item.tensors().items()
        ]
        self.segments, self.size = pages.lay_out(plan)
        self._ranges = {
            (item.layer, item.name): pages.hot_ranges(item, hot[item.layer])
            for item in self.segments
        }
        self._moved: list[tuple[Any, pages.Segment]] = []
        self._base = 0
        self._locked = 0
        self._seconds = 0.0
        pages.check_map_count(sum(len(ranges) for ranges in self._ranges.values()))
        self._descriptor = pages.create_cold_file(folder, self.size)

    def move(self, probe: Probe | None = None) -> None:
        """Move all layers, or none. Raises HookError with everything put back."""
        try:
            self._base = self._libc.map_file(self._descriptor, self.size)
            for item in self._layers:
                self._move_layer(item, probe)
        except BaseException as error:
            try:
                self.undo()
            except (OSError, RuntimeError) as stuck:  # told by the next try
                env.logger.error("expertmaps: %s", stuck)
            if isinstance(error, Exception):
                raise env.as_failure(error, "RehomeFailed") from error
            raise
        gc.collect()
        self._libc.trim()

    def _move_layer(self, item: MoeLayer, probe: Probe | None) -> None:
        hot = self._hot[item.layer]
        before = probe(item, hot) if probe is not None else []
        originals = item.tensors()
        kept = []
        for segment in self.segments:
            if segment.layer == item.layer:
                parameter = originals[segment.name]
                self._place(segment, parameter)
                kept.append(parameter.data)
                self._point(segment, parameter)
        after = probe(item, hot) if probe is not None else []
        selftest.compare(item.layer, before, after)
        kept.clear()
        for segment in self.segments:
            if segment.layer == item.layer:
                self._evict(segment)

    def _place(self, segment: pages.Segment, parameter: Any) -> None:
        """Copy a tensor into the mapping, put its hot pages in place, compare all rows."""
        source, target = parameter.data_ptr(), self._base + segment.offset
        before = row_hashes(source, segment)
        started = time.monotonic()
        self._write(segment, source)
        # Written back now, while the pages are clean to drop; the rest of the boot needs memory.
        os.fdatasync(self._descriptor)
        for low, high in self._ranges[segment.layer, segment.name]:
            if self._tier == "mlock":
                self._lock(low, high)
            else:
                self._libc.overlay(self._base + low, high - low)
                size = min(high, segment.end) - low
                ctypes.memmove(self._base + low, source + low - segment.offset, size)
        self._seconds += time.monotonic() - started
        self._libc.protect(target, pages.page_up(segment.size))
        changed = [
            row
            for row, pair in enumerate(zip(before, row_hashes(target, segment), strict=True))
            if pair[0] != pair[1]
        ]
        if changed:
            raise env.HookError(
                "RowsChanged", f"layer {segment.layer} {segment.name}: rows {changed[:8]} differ"
            )

    def _write(self, segment: pages.Segment, source: int) -> None:
        """Copy through the file: a disk that fails is an error here, and a signal in a mapping."""
        view = memoryview((ctypes.c_char * segment.size).from_address(source)).cast("B")
        done = 0
        while done < segment.size:
            done += os.pwrite(self._descriptor, view[done:], segment.offset + done)

    def _lock(self, low: int, high: int) -> None:
        try:
            self._libc.lock(self._base + low, high - low)
        except OSError as error:
            raise env.HookError(
                "LockFailed",
                f"{high - low} bytes after {self._locked} locked: {error.strerror}; "
                "needs uid 0 and IPC_LOCK, or EXPERTMAPS_TIER=overlay",
            ) from None
        self._locked += high - low

    def _point(self, segment: pages.Segment, parameter: Any) -> None:
        """Let the parameter's data be the mapped bytes."""
        import torch

        # No Python object owns the mapping: it lives as long as the process.
        raw = (ctypes.c_char * segment.size).from_address(self._base + segment.offset)
        view = torch.frombuffer(raw, dtype=parameter.dtype).view(parameter.shape)
        if view.stride() != parameter.data.stride():
            raise env.HookError("UnknownTensor", f"{segment.name}: strides differ")
        self._moved.append((parameter, segment))
        parameter.data = view

    def evict(self) -> None:
        """Drop all cold pages, which loading and warm-up have read."""
        for segment in self.segments:
            self._evict(segment)

    def _evict(self, segment: pages.Segment) -> None:
        ranges = self._ranges[segment.layer, segment.name]
        for low, high in pages.cold_ranges(segment, ranges):
            self._libc.forget(self._base + low, high - low)
            os.posix_fadvise(self._descriptor, low, high - low, os.POSIX_FADV_DONTNEED)
        if self._tier == "overlay":  # under an overlay the file's own pages are of no use
            for low, high in ranges:
                os.posix_fadvise(self._descriptor, low, high - low, os.POSIX_FADV_DONTNEED)

    def undo(self) -> None:
        """Give every moved parameter memory of its own again, then drop mapping and file.

        Raises what the allocator raises: the parameters that are left stay mapped and serve.
        """
        import torch

        while self._moved:
            parameter, segment = self._moved[-1]
            fresh = torch.empty(parameter.shape, dtype=parameter.dtype)
            address = self._base + segment.offset
            ctypes.memmove(fresh.data_ptr(), address, segment.size)
            parameter.data = fresh
            self._moved.pop()
            # Given back at once: all copies together would take the memory of a second model.
            self._libc.unmap(address, pages.page_up(segment.size))
        if self._base:
            self._libc.unmap(self._base, self.size)
            self._base = 0
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._locked = 0

    def wire(self) -> dict[str, Any]:
        """Residency, as the status carries it."""
        hot_rows = sum(len(self._hot[item.layer]) for item in self._layers)
        rows = sum(item.experts for item in self._layers)
        hot_bytes = sum(len(self._hot[item.layer]) * item.row_bytes for item in self.segments)
        found = {
            "hotRows": hot_rows,
            "coldRows": rows - hot_rows,
            "hotBytes": hot_bytes,
            "coldBytes": sum(item.size for item in self.segments) - hot_bytes,
            "lockedBytes": self._locked,
            "tier": self._tier,
        }
        if self._seconds:
            total = sum(item.size for item in self.segments)
            found["moveBytesPerSecond"] = int(total / self._seconds)
        return found


def row_hashes(address: int, segment: pages.Segment) -> list[bytes]:
    """A hash of each row's bytes at an address. hashlib lets threads run side by side."""
    rows = segment.size // segment.row_bytes

    def one(row: int) -> bytes:
        start = address + row * segment.row_bytes
        view = memoryview((ctypes.c_char * segment.row_bytes).from_address(start))
        return hashlib.sha256(view).digest()

    if segment.row_bytes < 1 << 16:
        return [one(row) for row in range(rows)]
    with ThreadPoolExecutor(min(8, len(env.cpus())), initializer=env.leave_bound_cpu) as pool:
        return list(pool.map(one, range(rows)))
