"""Ranking, geometry, evaluation and judgement: pure numbers, by tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rowmap_jobs import evaluation, judgement, placement
from rowmap_jobs.evaluation import Evaluation, evaluate
from rowmap_jobs.formats.run import Acceptance
from rowmap_jobs.formats.status import ModelGeometry
from rowmap_jobs.geometry import check_frozen, resolve
from rowmap_jobs.reasons import RunError
from tests.formats.samples import FINGERPRINT, geometry
from tests.formats.samples import census as random_census


def model(**over: Any) -> ModelGeometry:
    values: dict[str, Any] = {"experts": 4, "top_k": 2, "moe_layers": (0, 2), "row_bytes": 10}
    return ModelGeometry(**{**values, **over})


MIXED = {"experts": {"0": 4, "2": 8}, "row_bytes": {"0": 10, "2": 5}}


@pytest.mark.parametrize(
    ("over", "hot", "budget", "rows"),
    [
        ({}, 3, None, 3),
        ({}, 0, None, 0),
        ({}, 4, None, 4),
        ({}, None, 59, 2),
        ({}, None, 60, 3),
        ({}, None, 0, 0),
        ({}, None, 10**12, 4),
        (MIXED, None, 45, 3),
        # The small layer is whole; the rest of the budget goes to the other one.
        (MIXED, None, 65, {"0": 4, "2": 5}),
        (MIXED, None, 1000, {"0": 4, "2": 8}),
    ],
)
def test_hot_rows_of_a_residency(
    over: dict[str, Any], hot: int | None, budget: int | None, rows: Any
) -> None:
    assert resolve(model(**over), hot, budget).hot_rows == rows


def test_more_hot_rows_than_experts() -> None:
    with pytest.raises(RunError) as refused:
        resolve(model(**MIXED), 5, None)
    assert refused.value.reason == "TooManyHotRows"
    assert "found 5, expected at most 4" in refused.value.message


def test_a_residency_is_needed() -> None:
    with pytest.raises(RunError, match="expected hotExpertsPerLayer or hotBytes"):
        resolve(model(), None, None)


@pytest.mark.parametrize(
    ("over", "part"),
    [
        ({"hot_rows": 3}, "hotRows: found 2, expected 3"),
        # The draft layer of another engine version is counted as a layer.
        ({"moe_layers": (0, 2, 61)}, "moeLayers: found [0, 2], expected [0, 2, 61]"),
        ({"experts": 8, "top_k": 1}, "experts: found 4, expected 8; topK: found 2, expected 1"),
    ],
)
def test_a_frozen_geometry_names_both(over: dict[str, Any], part: str) -> None:
    built = resolve(model(), 2, None)
    check_frozen(built, None)
    check_frozen(built, geometry())
    with pytest.raises(RunError) as refused:
        check_frozen(built, geometry(**over))
    assert refused.value.reason == "GeometryMismatch" and part in refused.value.message


def test_ties_go_to_the_lower_id_and_never_seen_come_last() -> None:
    counts = np.array([[5, 0, 5, 0], [0, 0, 0, 9]], dtype=np.int64)
    built = placement.place(counts, FINGERPRINT, geometry())
    assert built.layers["0"].hot == (0, 2) and built.layers["0"].cold == (3, 1)
    assert built.layers["2"].hot == (3, 0) and built.layers["2"].cold == (2, 1)


def test_layers_of_different_width() -> None:
    shape = geometry(experts={"0": 3, "2": 4}, hot_rows={"0": 1, "2": 2})
    counts = np.array([[0, 0, 0, 0], [1, 2, 3, 4]], dtype=np.int64)
    mask = placement.hot_mask(counts, shape)
    assert mask.tolist() == [[True, False, False, False], [False, False, True, True]]
    built = placement.place(counts, FINGERPRINT, shape)
    assert placement.map_mask(built, 4).tolist() == mask.tolist()
    assert placement.positional_mask(shape, 4).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
    ]


def sessions(*decode: list[int]) -> Any:
    """A one-layer census of top-1: decode counts of one session each."""
    base = random_census(len(decode))
    counts = np.zeros((len(decode), 2, 1, 4), dtype=np.int64)
    counts[:, 1, 0] = np.array(decode)
    rows = np.zeros((len(decode), 2), dtype=np.int64)
    rows[:, 1] = counts[:, 1, 0].sum(axis=1)
    return replace(
        base,
        counts=counts,
        rows=rows,
        layer_ids=np.array([0], np.int32),
        experts=np.array([4], np.int32),
        top_k=np.array([1], np.int32),
    )


ONE = geometry(moe_layers=(0,), top_k=1)


def test_leave_one_session_out_by_hand() -> None:
    # Total 11, 10, 8, 9. In sample hot {0, 1}. Leaving out the first: 1, 5, 8, 9: hot {2, 3}.
    data = sessions([10, 5, 0, 0], [1, 5, 0, 0], [0, 0, 8, 9])
    result = evaluate(data, ONE, {})
    assert result.in_sample == pytest.approx(17 / 38)
    # First: hot {2, 3}, 15 cold. Second: 10, 5, 8, 9: hot {0, 3}, 5 cold. Third: hot {0, 1}, 17.
    assert result.own == pytest.approx((15 + 5 + 17) / 38)
    assert result.positional == pytest.approx(17 / 38)
    assert result.random == 0.5 and result.sessions == 3 and result.decode_tokens == 38
    assert result.layers[0].never_seen == 0


def test_turns_of_a_session_are_left_out_together() -> None:
    data = sessions([10, 0, 0, 0], [10, 0, 0, 0], [0, 3, 3, 0])
    apart = evaluate(data, ONE, {}).own
    together = evaluate(replace(data, session=np.array([0, 0, 1], np.int32)), ONE, {}).own
    assert (apart, together) == (3 / 26, 23 / 26)


def test_another_classes_map() -> None:
    other = placement.place(np.array([[0, 0, 5, 4]]), FINGERPRINT, ONE)
    result = evaluate(sessions([6, 2, 1, 0], [6, 2, 1, 0]), ONE, {"prose": other})
    assert result.others == {"prose": pytest.approx(16 / 18)}
    assert result.layers[0].others == {"prose": pytest.approx(16 / 18)}
    assert result.own == pytest.approx(2 / 18) and result.in_sample == pytest.approx(2 / 18)
    assert result.headroom == pytest.approx(1.0)
    assert result.layers[0].never_seen == 1


def test_prefill_does_not_rank() -> None:
    data = sessions([1, 2, 3, 4], [1, 2, 3, 4])
    data.counts[:, 0, 0] = [9, 9, 0, 0]
    assert placement.place(data.decode(), FINGERPRINT, ONE).layers["0"].hot == (3, 2)


def test_counts_beyond_32_bits_rank_and_sum_right() -> None:
    big = 3 * 2**31
    result = evaluate(sessions([1, 2, big, big], [1, 2, big, big]), ONE, {})
    assert result.own == pytest.approx(3 / (2 * big + 3)) and result.decode_tokens == 4 * big + 6


def test_the_interval_covers_the_share_and_one_session_says_nothing() -> None:
    rng = np.random.default_rng(3)
    cold, whole = rng.integers(0, 20, 40), np.full(40, 100)
    low, high = evaluation.interval(cold, whole, 0)
    assert low < cold.sum() / whole.sum() < high and high - low < 0.06
    assert evaluation.interval(cold, whole, 0) == (low, high)
    assert evaluation.interval(cold[:1], whole[:1], 0) == (0.0, 1.0)


def test_rows_at_the_border_are_undecided() -> None:
    # Hot 100, 51; cold 49, 4: only the middle two could change sides.
    assert evaluation.border(np.array([[100, 51, 49, 4]]), ONE) == [2]
    assert evaluation.border(np.array([[9, 9, 9, 9]]), ONE) == [4]
    assert evaluation.border(np.array([[9, 9, 9, 9]]), geometry(moe_layers=(0,), hot_rows=4)) == [0]


def judged(**over: Any) -> Evaluation:
    values: dict[str, Any] = {
        "decode_tokens": 9000,
        "sessions": 20,
        "own": 0.02,
        "in_sample": 0.015,
        "positional": 0.25,
        "random": 0.25,
        "interval": (0.018, 0.022),
    }
    return Evaluation(**{**values, **over})


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({}, "ready"),
        ({"decode_tokens": 999}, "insufficient"),
        ({"decode_tokens": 999, "own": 0.25}, "insufficient"),
        ({"decode_tokens": 7999}, "provisional"),
        ({"sessions": 11}, "provisional"),
        # A flat router: the best map is hardly better than one drawn by lot.
        ({"own": 0.226}, "no_skew"),
        ({"own": 0.224}, "ready"),
        # Everything is hot: nothing to gain and nothing to lose.
        ({"own": 0.0, "random": 0.0, "positional": 0.0}, "ready"),
    ],
)
def test_words(over: dict[str, Any], expected: str) -> None:
    assert judgement.word(judged(**over)) == expected


@pytest.mark.parametrize(
    ("over", "limits", "reason", "part"),
    [
        ({}, {}, "Accepted", "cold share 2.00% (leave one session out), 25.00% by position"),
        ({"decode_tokens": 7999}, {}, "TooFewDecodeTokens", "found 7999 of 20 sessions, expected"),
        ({"decode_tokens": 500}, {"min_decode_tokens": 100}, "Accepted", "500 decode tokens"),
        ({"own": 0.24}, {}, "NoSkew", "uses all experts alike"),
        ({}, {"max_cold_share_percent": 1.9}, "ColdShareTooHigh", "expected at most 1.9%"),
        ({}, {"max_cold_share_percent": 2.0}, "Accepted", ""),
        ({}, {"max_cold_share_vs_positional": 0.05}, "ColdShareTooHigh", "at most 0.05 of the"),
        ({}, {"max_cold_share_vs_positional": 0.5}, "Accepted", ""),
        # Passes in sample, fails on what it has not seen.
        (
            {"own": 0.08, "in_sample": 0.01},
            {"max_cold_share_percent": 5},
            "ColdShareTooHigh",
            "cold share 8.00%",
        ),
    ],
)
def test_decisions(over: dict[str, Any], limits: dict[str, Any], reason: str, part: str) -> None:
    found, message = judgement.decide(judged(**over), Acceptance(**limits))
    assert found == reason and part in message and "\n" not in message


def test_sixty_tokens_look_perfect_in_sample_and_are_not() -> None:
    """exllamav3 #315: a profile from one prompt looked like 93% and was worse than none."""
    rng = np.random.default_rng(0)
    draws = [np.bincount(rng.integers(0, 4, 12), minlength=4).tolist() for _ in range(5)]
    result = evaluate(sessions(*draws), ONE, {})
    assert result.in_sample < result.own
    assert judgement.word(result) == "insufficient"
