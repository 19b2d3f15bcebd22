"""Counters of expert selections, next to the buffer that vLLM's own capturer fills.

Everything here is a handful of tensor operations for each step, without a read-back. Rows of the
buffer are set to -1 before a step, so a row that the capture did not reach shows as -1 and never
as expert 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .expertmaps_hook_positions import DROPPED
else:
    from expertmaps_hook_positions import DROPPED


class Snapshot(NamedTuple):
    """Counters of one slot when its transcript was complete."""

    counts: Any
    """int64[2, layers, experts]: prefill, decode."""
    bad: Any
    """Rows with a missing, impossible or repeated expert in any layer."""
    copied: Any = None
    """Device event after both copies; None where the device is the CPU."""


class Counters:
    """Tables [slot, phase, layer, expert] on the device of the buffer."""

    def __init__(self, buffer: Any, experts: Mapping[int, int], top_k: int, slots: int) -> None:
        import torch

        self._torch = torch
        self._buffer = buffer
        self.layers = sorted(experts)
        self.experts = max(experts.values())
        self.slots = slots
        depth, width = int(buffer.shape[1]), int(buffer.shape[2])
        if self.layers[-1] >= depth or width < top_k:
            raise ValueError(f"capture buffer of {depth} layers and {width} experts is too small")
        self._top_k = top_k
        device = buffer.device
        whole = self.layers == list(range(depth))
        self._select = None if whole else torch.tensor(self.layers, device=device)
        limits = [experts[layer] for layer in self.layers]
        self._limits = torch.tensor(limits, device=device).view(1, -1, 1)
        count = len(self.layers)
        self._offsets = (torch.arange(count, device=device) * self.experts).view(1, -1, 1)
        self._stride = count * self.experts
        # One more bucket for rows of no transcript, one more cell for selections that are not.
        cells = (2 * slots + 1) * self._stride
        self._cells = torch.zeros(cells + 1, dtype=torch.int64, device=device)
        self._trash = cells
        self._table = self._cells[:cells].view(2 * slots + 1, count, self.experts)
        self._bad = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._missed = torch.zeros((), dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._told = (
            torch.zeros((), dtype=torch.int64, pin_memory=True) if buffer.is_cuda else self._missed
        )

    def clear_rows(self, rows: int) -> None:
        """Before a step: no row carries what an earlier one left."""
        self._buffer[:rows].fill_(-1)

    def add(self, runs: Sequence[tuple[int, int]]) -> None:
        """After a step: add the captured rows, run by run, to the buckets they belong to."""
        torch = self._torch
        buckets = self._buckets(runs)
        ids = self._buffer[: len(buckets)]
        if self._select is not None:
            ids = ids.index_select(1, self._select)
        ids = ids[..., : self._top_k].to(torch.int64)
        valid = (ids >= 0) & (ids < self._limits)
        cells = buckets.view(-1, 1, 1) * self._stride + self._offsets + ids
        cells = torch.where(valid, cells, self._trash).reshape(-1)
        self._cells.scatter_add_(0, cells, self._one.expand(cells.numel()))
        ordered = ids.sort(dim=-1).values
        repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        bad = (repeated | ~valid.all(-1)).any(-1).to(torch.int64)
        self._bad.scatter_add_(0, buckets // 2, bad)
        self._missed += bad.sum()
        if self._buffer.is_cuda:
            self._told.copy_(self._missed, non_blocking=True)

    def _buckets(self, runs: Sequence[tuple[int, int]]) -> Any:
        names = [2 * self.slots if bucket == DROPPED else bucket for bucket, _ in runs]
        lengths = [rows for _, rows in runs]
        values = np.repeat(np.asarray(names, np.int64), np.asarray(lengths, np.int64))
        host = self._torch.from_numpy(values)
        if self._buffer.is_cuda:
            host = host.pin_memory()  # from other memory the copy would wait for the device
        return host.to(self._buffer.device, non_blocking=True)

    def take(self, slot: int) -> Snapshot:
        """Copy a slot's counters and zero them, in order with the steps around it."""
        table = self._table[2 * slot : 2 * slot + 2]
        counts, bad, copied = table.clone(), self._bad[slot].clone(), None
        if self._buffer.is_cuda:
            copied = self._torch.cuda.Event()
            copied.record()
        self.clear_slot(slot)
        return Snapshot(counts, bad, copied)

    def clear_slot(self, slot: int) -> None:
        """Forget what a slot holds."""
        self._table[2 * slot : 2 * slot + 2].zero_()
        self._bad[slot] = 0

    def missed(self) -> int:
        """Bad rows over all requests, as far as the device has come.

        Any thread may ask at any time: a read of the device itself would break a graph capture
        that the engine's thread is in the middle of.
        """
        return int(self._told)
