"""The new map against the active one, and drift: by hand and on made traffic."""

from __future__ import annotations

import numpy as np
import pytest

from rowmap_jobs.evaluation import change, drift
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.rowmap import RowMap
from rowmap_jobs.judgement import improves
from rowmap_jobs.placement import place
from tests.evaluation.traffic import census_of, drawn, layout, popular
from tests.formats.samples import FINGERPRINT

TWO = layout(2, 3, 1)


def hot(*layers: list[int]) -> RowMap:
    """The map of these counts on `TWO`."""
    return place(np.array(layers), FINGERPRINT, TWO)


SESSIONS = [
    [[9, 1, 0], [0, 2, 8]],
    [[6, 0, 0], [0, 3, 3]],
    [[3, 1, 0], [0, 0, 4]],
]


def test_a_change_by_hand() -> None:
    active = hot([0, 1, 0], [0, 1, 0])
    found = change(census_of(SESSIONS, TWO), TWO, active)
    # Of 40 selections 18 + 15 are cold now; the new map keeps {0} and {2}, 2 + 5 cold, left out.
    assert found.active == pytest.approx(33 / 40) and found.new == pytest.approx(7 / 40)
    assert found.improvement == pytest.approx(26 / 40)
    assert (found.rows_moved, found.bytes_moved) == (2, 20)
    assert found.active_digest == active.digest
    assert found.new_digest == hot([18, 2, 0], [0, 5, 15]).digest
    # Sessions gain 14, 6 and 6 of 20, 12 and 8: no resample leaves these ratios.
    assert 0.5 <= found.interval.low <= found.improvement <= found.interval.high <= 0.75


def test_one_layer_moves_and_only_its_bytes_count() -> None:
    active = hot([5, 0, 0], [0, 5, 0])
    shape = TWO.model_copy(update={"row_bytes": {"0": 1000, "1": 7}})
    found = change(census_of(SESSIONS, TWO), shape, active)
    assert (found.rows_moved, found.bytes_moved) == (1, 7)


def test_the_same_map_again_is_no_improvement() -> None:
    active = hot([18, 2, 0], [0, 5, 15])
    found = change(census_of(SESSIONS, TWO), TWO, active)
    assert found.improvement == 0.0 and found.rows_moved == 0
    assert improves(found) == (
        False,
        f"map {active.digest} leaves 17.50% cold, the active {active.digest} 17.50%: better by "
        "0.00 points (95% interval 0.00 to 0.00), 0 rows become hot: expected an interval above "
        "0: the active map stays",
    )


def test_one_session_proves_nothing() -> None:
    found = change(census_of(SESSIONS[:1], TWO), TWO, hot([0, 1, 0], [0, 1, 0]))
    assert (found.interval.low, found.interval.high) == (-1.0, 1.0)
    assert not improves(found)[0]


def test_what_helps_one_session_alone_is_not_sure() -> None:
    """A gain that hangs on one of twelve sessions is inside its own noise."""
    sessions = [[[0, 0, 20], [0, 0, 20]]] * 11 + [[[0, 60, 0], [0, 0, 60]]]
    active, candidate = hot([1, 0, 0], [0, 0, 1]), hot([0, 1, 0], [0, 0, 1])
    found = change(census_of(sessions, TWO), TWO, active, candidate)
    assert found.improvement == pytest.approx(60 / 560) and found.interval.low == 0.0
    assert not improves(found)[0]


def test_a_map_of_other_layers_is_refused() -> None:
    other = layout(3, 3, 1)
    active = place(np.ones((3, 3), dtype=np.int64), FINGERPRINT, other)
    for judge in (change, drift):
        with pytest.raises(FormatError) as refused:
            judge(census_of(SESSIONS, TWO), TWO, active)
        expected = "active map: moeLayers: found [0, 1, 2], expected [0, 1]"
        assert str(refused.value) == expected


def test_an_active_map_with_other_hot_rows_is_compared_as_it_is() -> None:
    wide = place(np.array([[3, 2, 1], [3, 2, 1]]), FINGERPRINT, layout(2, 3, 2))
    found = change(census_of(SESSIONS, TWO), TWO, wide)
    assert found.active == pytest.approx(15 / 40) and found.rows_moved == 1


def test_regret_of_a_new_window_by_hand() -> None:
    found = drift(census_of(SESSIONS, TWO), TWO, hot([1, 0, 0], [0, 1, 0]))
    assert found.active == pytest.approx(17 / 40) and found.refit == pytest.approx(7 / 40)
    assert found.regret == pytest.approx(10 / 40)
    # The second of the three sessions loses nothing: that a new map helps is not sure.
    assert found.interval.low == 0.0 and not found.recommend


@pytest.mark.parametrize(("strayed", "recommended"), [(0.0, False), (2.5, True)])
def test_drift_is_seen_when_the_traffic_moves_and_only_then(
    strayed: float, recommended: bool
) -> None:
    shape, rng = layout(2, 64, 48, top_k=4), np.random.default_rng(5)
    weights = popular(2, 64, 0)
    active = place(drawn(weights, [2000], 4, rng)[0], FINGERPRINT, shape)
    moved = weights * np.exp(rng.normal(0, strayed, weights.shape))
    window = census_of(drawn(moved, [200] * 12, 4, rng, noise=0.3), shape)
    found = drift(window, shape, active)
    assert found.recommend is recommended
    assert found.interval.low <= found.regret <= found.interval.high


def test_a_small_window_of_unmoved_traffic_recommends_nothing() -> None:
    """A refit of few sessions is worse than it will be: that must not look like drift, ever."""
    shape = layout(2, 64, 48, top_k=4)
    weights, rng = popular(2, 64, 0), np.random.default_rng(7)
    active = place(drawn(weights, [4000], 4, rng)[0], FINGERPRINT, shape)
    for _ in range(10):
        window = census_of(drawn(weights, [10] * 4, 4, rng, noise=0.3), shape)
        assert not drift(window, shape, active).recommend
