"""A MoE layer whose experts lie in two tiers: what a residency hands to a layer's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TieredLayer:
    """One MoE layer in two tiers. Rows are hot first.

    Slots 0..hot-1 are device rows, hot..experts-1 host rows. An empty side (hot is 0 or experts)
    has no tensors and gets no pass.
    """

    layer: int
    """Absolute layer id."""
    experts: int
    hot: int
    slot_of: Any
    """Device int32 [experts]: logical expert id to slot."""
    hot_tensors: Mapping[str, Any]
    """By name, device [hot, ...], of the original's type and strides within a row."""
    cold_tensors: Mapping[str, Any]
    """By name, [experts - hot, ...]: the device's view of pinned host memory."""
