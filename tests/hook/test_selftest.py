"""Which batches the self-test of a moved layer runs."""

from __future__ import annotations

import expertmaps_hook_selftest as selftest
import pytest


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (0, []),
        (64, []),
        (65, [65]),
        (128, [128]),
        (2048, [128, 256, 512, 1024, 2048]),
        (3000, [128, 256, 512, 1024, 2048, 3000]),
        (1 << 20, [128, 256, 512, 1024, 2048, 4096, 8192, 16384]),
    ],
)
def test_large_batches_pass_each_doubling_up_to_the_engines_largest(
    most: int, sizes: list[int]
) -> None:
    assert selftest.large_sizes(most) == sizes


@pytest.mark.parametrize(
    ("hot", "pools"),
    [
        ((4, 1, 2), [[1, 2, 4], [0, 3, 5], [1, 0, 2, 3, 4, 5]]),
        ((), [[0, 1], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]),
        ((0, 1, 2, 3, 4, 5), [[0, 1, 2, 3, 4, 5], [0, 1], [0, 1, 2, 3, 4, 5]]),
        ((3,), [[3, 0], [0, 1, 2, 4, 5], [3, 0]]),
    ],
)
def test_routes_are_hot_cold_and_mixed(hot: tuple[int, ...], pools: list[list[int]]) -> None:
    assert selftest.choices(6, 2, hot) == pools
