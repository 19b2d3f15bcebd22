"""Which batches the self-test of a moved layer runs."""

from __future__ import annotations

import expertmaps_hook_selftest as selftest
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (0, []),
        (8, []),
        (33, [17, 33]),
        (64, [17, 33, 49]),
        (65, [17, 33, 49, 65]),
        (300, [17, 33, 49, 65, 97, 128, 129, 193, 256, 257, 300]),
    ],
)
def test_more_batches_are_doublings_and_the_first_ones_beyond_a_tile(
    most: int, sizes: list[int]
) -> None:
    """32 experts, 8 hot, top-4."""
    assert selftest.more_sizes(most, 32, 8, 4) == sizes


def tile(tokens: int, experts: int, top_k: int) -> int:
    """Of FlashInfer: the next power of two of the tokens of an expert, from 8 to 256."""
    wanted = 8
    while wanted < 256 and wanted * experts < tokens * top_k:
        wanted *= 2
    return wanted


@given(
    st.integers(2, 400).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1))),
    st.integers(1, 8),
    st.integers(65, 1 << 14),
)
def test_every_combination_of_tiles_that_serving_meets_is_tested(
    sides: tuple[int, int], top_k: int, most: int
) -> None:
    experts, hot = sides

    def tiles(tokens: int) -> tuple[int, ...]:
        return tuple(tile(tokens, count, top_k) for count in (experts, hot, experts - hot))

    tested = {tiles(n) for n in (*selftest.TOKENS, *selftest.more_sizes(most, experts, hot, top_k))}
    assert {tiles(tokens) for tokens in range(1, most + 1)} <= tested


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
