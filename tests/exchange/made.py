"""Small counts, placements and refusals for the tests of formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from rowmap_jobs.exchange.base import Counts, Layout
from rowmap_jobs.formats.base import FormatError


def line_of(call: Callable[[], object]) -> str:
    """The one line of a refusal; fails where nothing is refused."""
    with pytest.raises(FormatError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    return line


def passes_or_refuses(call: Callable[[], Any]) -> Any:
    """What a reader gives, or None for a refusal in one line; anything else fails the test."""
    try:
        return call()
    except FormatError as error:
        assert "\n" not in str(error)
        return None


@st.composite
def tables(draw: st.DrawFn, sequences: int = 1) -> Counts:
    """Counts of up to 4 layers x 6 experts, top-2, with absolute ids that may have gaps."""
    layers = tuple(sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=4))))
    experts = draw(st.integers(3, 6))
    count = draw(st.integers(1, sequences))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    decode = np.zeros((count, len(layers), experts), dtype=np.int64)
    for t, layer in np.ndindex(count, len(layers)):
        for _ in range(draw(st.integers(1, 6)) if layer == 0 else 3):
            decode[t, layer, rng.choice(experts, 2, replace=False)] += 1
    layout = Layout(layers, (experts,) * len(layers), None)
    return Counts(layout, decode, None, None, tuple("ab"[:count]), count > 1)


@st.composite
def placements(draw: st.DrawFn) -> dict[int, list[int]]:
    """Slots of up to 3 layers: every expert once, some twice."""
    layers = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=3)))
    experts, extra = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    out = {}
    for layer in layers:
        more = draw(st.lists(st.integers(0, experts - 1), min_size=extra, max_size=extra))
        out[layer] = draw(st.permutations([*range(experts), *more]))
    return out
