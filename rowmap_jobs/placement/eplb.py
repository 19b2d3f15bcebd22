"""Replicas of hot experts spread over devices, by the public algorithm of DeepSeek's EPLB.

Source: github.com/deepseek-ai/EPLB, the policies that its README describes. Groups of experts are
packed onto nodes, the busiest experts of each node get the spare slots as replicas, and the
replicas are packed onto the node's devices. Packing takes the heaviest first and gives it to the
lightest pack that has room; ties go to the lower index.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from .rank import F64, I64, checked

SOURCE = "eplb"
MAX_SLOTS = 1 << 20
"""Layers x replicas."""
MAX_TABLE = 1 << 24
"""Layers x experts x the most replicas of one expert: entries of log2phy."""


@dataclass(frozen=True)
class Replicas:
    """Where the experts of each layer are; physical slots in device order."""

    phy2log: I64
    """int64[L,R]: the expert in each slot."""
    log2phy: I64
    """int64[L,E,X]: slots of each expert in order of replication; -1 beyond its replicas."""
    logcnt: I64
    """int64[L,E]: replicas of each expert."""


def rebalance(
    weights: npt.NDArray[Any], replicas: int, groups: int, nodes: int, devices: int
) -> Replicas:
    """Place `replicas` slots a layer over `devices` by the loads [L,E] of the experts.

    `devices` counts all nodes. With groups a multiple of nodes a group stays on one node
    (hierarchical policy), else experts go anywhere (global policy). Raises FormatError when the
    numbers do not divide, or there are fewer slots than experts.
    """
    loads = checked(weights, "weights").astype(np.float64)
    layers, experts = loads.shape
    _divide(layers, experts, replicas, groups, nodes, devices)
    if groups % nodes:
        groups, nodes = 1, 1
    out = [_layer(load, replicas, groups, nodes, devices) for load in loads]
    phy2log = np.array([slots for slots, _ in out], dtype=np.int64).reshape(layers, replicas)
    rank = np.array([ranks for _, ranks in out], dtype=np.int64).reshape(layers, replicas)
    logcnt = np.zeros((layers, experts), dtype=np.int64)
    np.add.at(logcnt, (np.arange(layers)[:, None], phy2log), 1)
    most = int(logcnt.max(initial=1))
    if layers * experts * most > MAX_TABLE:
        found = f"{layers} x {experts} x {most}"
        raise FormatError(SOURCE, "layers x experts x replicas", found, f"at most {MAX_TABLE}")
    log2phy = np.full((layers, experts, most), -1, dtype=np.int64)
    log2phy[np.arange(layers)[:, None], phy2log, rank] = np.arange(replicas)
    return Replicas(phy2log, log2phy, logcnt)


def _divide(
    layers: int, experts: int, replicas: int, groups: int, nodes: int, devices: int
) -> None:
    numbers = {"replicas": replicas, "groups": groups, "nodes": nodes, "devices": devices}
    for name, value in numbers.items():
        if value < 1:
            raise FormatError(SOURCE, name, value, "1 or more")
    if replicas < experts:
        raise FormatError(SOURCE, "replicas", replicas, f"at least the {experts} experts")
    if layers * replicas > MAX_SLOTS:
        found = f"{layers} x {replicas}"
        raise FormatError(SOURCE, "layers x replicas", found, f"at most {MAX_SLOTS}")
    if replicas % devices:
        raise FormatError(SOURCE, "replicas", replicas, f"a multiple of the {devices} devices")
    if devices % nodes:
        raise FormatError(SOURCE, "devices", devices, f"a multiple of the {nodes} nodes")
    if groups % nodes == 0 and experts % groups:
        raise FormatError(SOURCE, "experts", experts, f"a multiple of the {groups} groups")


def _layer(
    load: F64, replicas: int, groups: int, nodes: int, devices: int
) -> tuple[list[int], list[int]]:
    """Expert and replica number of every slot of one layer."""
    members = np.arange(len(load)).reshape(groups, -1)
    slots: list[int] = []
    ranks: list[int] = []
    for packed in _pack(load[members].sum(axis=1), nodes):
        experts = members[packed].reshape(-1)
        copies, numbers = _replicate(load[experts], replicas // nodes)
        share = load[experts] / np.bincount(copies, minlength=len(experts))
        for device in _pack(share[copies], devices // nodes):
            slots += experts[copies[device]].tolist()
            ranks += numbers[device].tolist()
    return slots, ranks


def _replicate(load: F64, slots: int) -> tuple[I64, I64]:
    """Local expert and replica number of each slot: spare ones to the busiest replica, in turn."""
    copies, numbers = list(range(len(load))), [0] * len(load)
    count = [1] * len(load)
    busy = [(-each, expert) for expert, each in enumerate(load.tolist())]
    heapq.heapify(busy)
    for _ in range(slots - len(load)):
        _, expert = busy[0]
        copies.append(expert)
        numbers.append(count[expert])
        count[expert] += 1
        heapq.heapreplace(busy, (-float(load[expert]) / count[expert], expert))
    return np.array(copies, dtype=np.int64), np.array(numbers, dtype=np.int64)


def _pack(load: F64, packs: int) -> list[list[int]]:
    """Items of each pack, equally many, in the order in which they were put there."""
    room = len(load) // packs
    if room == 1:
        # One item a pack: nothing to balance, so that nothing moves.
        return [[item] for item in range(packs)]
    out: list[list[int]] = [[] for _ in range(packs)]
    lightest = [(0.0, pack) for pack in range(packs)]
    for item in np.argsort(-load, kind="stable").tolist():
        weight, pack = heapq.heappop(lightest)
        out[pack].append(item)
        if len(out[pack]) < room:
            heapq.heappush(lightest, (weight + float(load[item]), pack))
    return out
