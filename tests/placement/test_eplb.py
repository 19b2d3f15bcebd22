"""Replicas over devices: the published example to the last slot, and what must always hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.placement.eplb import rebalance

# The example of the README of github.com/deepseek-ai/EPLB: two layers with 12 experts in 4 groups,
# 16 replicas on 2 nodes of 4 GPUs.
WEIGHT = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
PRINTED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_the_published_example() -> None:
    got = rebalance(WEIGHT, 16, 4, 2, 8)
    assert got.phy2log.tolist() == PRINTED
    assert got.logcnt.tolist() == [
        [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1],
        [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1],
    ]
    # Expert 5 of layer 0 is in slots 0 and 2; expert 6 in slot 1 alone.
    assert got.log2phy.shape == (2, 12, 2)
    assert sorted(got.log2phy[0, 5].tolist()) == [0, 2]
    assert got.log2phy[0, 6].tolist() == [1, -1]


def test_number_types_and_scale_do_not_change_it() -> None:
    for weights in (WEIGHT.astype(np.uint8), WEIGHT * 4.0, WEIGHT.astype(np.float32)):
        assert rebalance(weights, 16, 4, 2, 8).phy2log.tolist() == PRINTED


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, int, int, int, int]:
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 2)) if draw(st.booleans()) else draw(st.integers(1, 3))
    devices = nodes * per_node
    experts = groups * draw(st.integers(1, 4))
    slots = -(-experts // devices) * devices + devices * draw(st.integers(0, 2))
    seed = draw(st.integers(0, 1 << 30))
    weights = np.random.default_rng(seed).integers(0, 50, (draw(st.integers(1, 3)), experts))
    return weights, slots, groups, nodes, devices


@given(problems())
def test_every_expert_has_a_slot_and_the_tables_agree(problem: Any) -> None:
    weights, slots, groups, nodes, _ = problem
    got = rebalance(*problem)
    layers, experts = weights.shape
    assert got.phy2log.shape == (layers, slots) and got.logcnt.min() >= 1
    assert (got.logcnt.sum(axis=1) == slots).all()
    for layer in range(layers):
        assert (np.bincount(got.phy2log[layer], minlength=experts) == got.logcnt[layer]).all()
        for expert in range(experts):
            copies = got.logcnt[layer, expert]
            places = got.log2phy[layer, expert]
            assert (got.phy2log[layer, places[:copies]] == expert).all()
            assert len(set(places[:copies].tolist())) == copies and (places[copies:] == -1).all()
    if groups % nodes == 0:
        # A group stays on one node.
        on_node = got.phy2log.reshape(layers, nodes, -1) // (experts // groups)
        for layer in range(layers):
            sets = [set(ids.tolist()) for ids in on_node[layer]]
            assert sum(len(one) for one in sets) == groups


def test_without_a_fitting_group_experts_go_anywhere() -> None:
    got = rebalance(WEIGHT, 16, 3, 2, 8)
    assert (got.phy2log == rebalance(WEIGHT, 16, 1, 1, 8).phy2log).all()
    each = (WEIGHT / got.logcnt)[np.arange(2)[:, None], got.phy2log]
    loads = each.reshape(2, 8, 2).sum(axis=2)
    # Imbalance (max by mean, over the devices of a layer): 1.07 and 1.19; one hot expert alone,
    # without replicas, would be 1.42 and 1.36.
    assert (loads.max(axis=1) / loads.mean(axis=1) < 1.2).all()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((8, 4, 2, 8), "replicas: found 8, expected at least the 12 experts"),
        ((15, 4, 2, 8), "replicas: found 15, expected a multiple of the 8 devices"),
        ((16, 4, 2, 0), "devices: found 0, expected 1 or more"),
        ((16, 0, 2, 8), "groups: found 0, expected 1 or more"),
        ((18, 6, 2, 9), "devices: found 9, expected a multiple of the 2 nodes"),
        ((16, 8, 2, 8), "experts: found 12, expected a multiple of the 8 groups"),
        ((1 << 20, 4, 2, 8), "layers x replicas: found 2 x 1048576, expected at most 1048576"),
    ],
)
def test_numbers_that_do_not_divide(numbers: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        rebalance(WEIGHT, *numbers)
    assert str(refused.value) == f"eplb: {message}"


def test_a_table_of_replicas_has_a_limit() -> None:
    loads = np.zeros((1, 4096))
    loads[0, 0] = 1
    with pytest.raises(FormatError, match="layers x experts x replicas: found 1 x 4096 x"):
        rebalance(loads, 1 << 14, 1, 1, 1)
