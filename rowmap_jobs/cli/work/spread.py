"""Experts and their replicas over devices, and how even their load is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formats.base import FormatError
from ...formats.census import Census
from ...placement.eplb import Replicas, rebalance


@dataclass(frozen=True)
class Spread:
    """A placement of replicas; balances are mean over greatest load of a device, 0 to 1."""

    layers: tuple[int, ...]
    replicas: Replicas
    balance: float
    plain: float | None
    """With experts in a row and no replicas; None where they do not divide over the devices."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "layers": list(self.layers),
            "phy2log": self.replicas.phy2log.tolist(),
            "log2phy": self.replicas.log2phy.tolist(),
            "logcnt": self.replicas.logcnt.tolist(),
            "balance": self.balance,
            "plainBalance": self.plain,
        }


def spread(census: Census, slots: int, groups: int, nodes: int, devices: int) -> Spread:
    """DeepSeek's balancer over the decode load of a census. Raises FormatError."""
    experts = set(census.experts.tolist())
    if len(experts) != 1:
        raise FormatError("census", "experts", sorted(experts), "one number for all layers")
    width = experts.pop()
    load = census.decode()[:, :width]
    if not load.any():
        raise FormatError("census", "counts", "no selection in decode", "a load to balance")
    made = rebalance(load, slots, groups, nodes, devices)
    shares = load / made.logcnt
    rows = np.arange(len(load))[:, None]
    plain = None
    if width % devices == 0:
        plain = _balance(load.astype(np.float64), devices)
    layers = tuple(census.layer_ids.tolist())
    return Spread(layers, made, _balance(shares[rows, made.phy2log], devices), plain)


def _balance(slots: Any, devices: int) -> float:
    """Mean over greatest load of a device, averaged over layers; `slots` float[L,S]."""
    device = slots.reshape(len(slots), devices, -1).sum(axis=2)
    most = np.maximum(device.max(axis=1), 1e-300)
    return float((device.mean(axis=1) / most).mean())
