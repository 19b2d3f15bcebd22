"""A MoE layer whose experts lie in two tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TieredLayer:
    """One MoE layer in two tiers. Rows are hot first: slots 0..hot-1 are device rows, hot..experts-1 host rows."""  # noqa: E501

    layer: int  # absolute layer id
    experts: int  # E
    hot: int  # H; 0 and E are possible, an empty side has no tensors and gets no pass
    slot_of: Any  # device int32[E]: logical expert id -> slot
    hot_tensors: Mapping[
        str, Any
    ]  # name -> device tensor [H, ...], original dtype and strides per row
    cold_tensors: Mapping[
        str, Any
    ]  # name -> [E-H, ...] the device's view of pinned host memory (on a CPU test: plain tensor)
