"""Convergence, halves and context bands: by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rowmap_jobs.evaluation import by_session, left_out
from rowmap_jobs.evaluation.bands import bands
from rowmap_jobs.evaluation.convergence import by_age, convergence, halves, steps_up_to
from tests.evaluation.traffic import census_of, drawn, layout, popular

ONE = layout(1, 4, 2)


def test_sessions_are_added_by_age_and_judged_on_later_ones() -> None:
    counts = [[[0, 0, 3, 3]], [[5, 1, 0, 0]], [[2, 4, 4, 0]]]
    # Oldest first: 1, 2, 0; a session is as old as its oldest transcript.
    data = census_of(counts, ONE, created=[30, 10, 20])
    points = convergence(data, by_session(data), ONE)
    assert [(p.sessions, p.tokens) for p in points] == [(1, 6), (2, 16)]
    # After [5, 1, 0, 0] hot {0, 1}; later ones [2, 4, 7, 3] are 10 of 16 cold. Of all, [7, 5, 7, 3]
    # makes {0, 2} hot.
    assert points[0].own == pytest.approx(10 / 16) and points[0].overlap == 0.5
    # After [7, 5, 4, 0] still {0, 1}; the last session has all of its 6 cold.
    assert points[1].own == 1.0 and points[1].overlap == 0.5


def test_the_age_of_a_session_is_its_first_turns() -> None:
    counts = [[[1, 0, 0, 0]]] * 4
    data = census_of(counts, ONE, session=[5, 3, 5, 3], created=[9, 4, 1, 8])
    assert by_age(data).tolist() == [1, 0]


def test_sample_sizes_are_spaced_by_their_logarithm() -> None:
    assert steps_up_to(1) == [] and steps_up_to(2) == [1]
    assert steps_up_to(30) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert len(steps_up_to(20000)) < 32


def test_more_sessions_settle_the_map() -> None:
    weights, shape = popular(2, 48, 3), layout(2, 48, 32, top_k=3)
    data = census_of(drawn(weights, [15] * 40, 3, np.random.default_rng(2), noise=0.5), shape)
    points = convergence(data, by_session(data), shape)
    assert points[0].own > 1.3 * points[-1].own
    assert points[0].overlap < points[-1].overlap <= 1.0


def test_halves_take_turns_by_age() -> None:
    counts = [[[9, 8, 0, 0]], [[0, 0, 9, 8]], [[9, 8, 0, 0]], [[0, 0, 9, 8]]]
    data = census_of(counts, ONE, created=[1, 2, 3, 4])
    found = halves(data, by_session(data), ONE)
    assert found is not None and found.overlap == 0.0
    # By age the alike ones are neighbours now, and each half has one of both.
    data = census_of(counts, ONE, created=[1, 3, 2, 4])
    found = halves(data, by_session(data), ONE)
    assert found is not None and found.overlap == 1.0
    assert halves(census_of(counts[:1], ONE), by_session(census_of(counts[:1], ONE)), ONE) is None


def test_bands_by_the_longest_prompt_of_a_session() -> None:
    counts = [[[4, 0, 0, 0]], [[0, 4, 0, 0]], [[0, 0, 6, 0]], [[3, 3, 0, 0]], [[0, 0, 0, 2]]]
    data = census_of(
        counts, ONE, session=[0, 1, 2, 2, 3], prompt_len=[1023, 1024, 10, 70000, 16383]
    )
    by = by_session(data)
    found = bands(data, by, left_out(by, ONE))
    # Left out: [3,7,6,2] hot {1,2}: 4 cold; [7,3,6,2] {0,2}: 4; [4,4,0,2] {0,1}: 6; {0,1}: 2.
    assert [(b.from_tokens, b.to_tokens, b.sessions, b.tokens, b.own) for b in found] == [
        (0, 1024, 1, 4, 1.0),
        (1024, 4096, 1, 4, 1.0),
        (4096, 16384, 1, 2, 1.0),
        (65536, None, 1, 12, 0.5),
    ]


def test_one_sum_of_bands_is_the_whole() -> None:
    weights, shape = popular(2, 16, 0), layout(2, 16, 8, top_k=2)
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 100_000, 20).tolist()
    data = census_of(drawn(weights, [30] * 20, 2, rng), shape, prompt_len=lengths)
    by = by_session(data)
    cold = left_out(by, shape)
    found = bands(data, by, cold)
    assert sum(b.sessions for b in found) == 20 and sum(b.tokens for b in found) == 600
    whole = sum(b.own * b.tokens for b in found) / 600
    assert whole == pytest.approx(cold.sum() / by.sum())
