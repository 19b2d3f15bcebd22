"""Cold shares by session: by hand, against the definition, and what must hold of any traffic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs.evaluation import by_session, evaluate, interval, left_out
from rowmap_jobs.evaluation.shares import best_alone, cold_under
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.census import Census
from rowmap_jobs.formats.rowmap import Geometry
from rowmap_jobs.placement import hot_mask, map_mask, place
from tests.evaluation.traffic import census_of, drawn, layout, popular
from tests.formats.samples import FINGERPRINT

# Two layers of three experts, top-1, one row hot: no sum over a wrong axis gives these numbers.
TWO_BY_THREE = layout(2, 3, 1)
LOPSIDED = [[[5, 0, 2], [0, 0, 7]], [[1, 2, 0], [0, 1, 2]]]


def test_every_share_of_two_by_three_by_hand() -> None:
    result = evaluate(census_of(LOPSIDED, TWO_BY_THREE), TWO_BY_THREE, {})
    # Totals [6, 2, 2] and [0, 1, 9]: hot 0 and 2.
    assert result.in_sample == pytest.approx(5 / 20)
    # First session under hot {1} and {2}: 7 and 0 cold; second under {0} and {2}: 2 and 1.
    assert result.own == pytest.approx(10 / 20)
    assert [layer.own for layer in result.layers] == [pytest.approx(0.9), pytest.approx(0.1)]
    assert result.positional == pytest.approx(14 / 20)
    assert [layer.positional for layer in result.layers] == [pytest.approx(0.4), 1.0]
    assert [layer.never_seen for layer in result.layers] == [0, 1]
    assert result.random == pytest.approx(2 / 3)
    assert (result.sessions, result.decode_tokens) == (2, 10)
    # 7 of 14 and 3 of 6: whichever sessions are drawn, it is a half.
    assert result.interval == pytest.approx((0.5, 0.5))


def test_cold_selections_of_two_by_three_by_session_and_layer() -> None:
    counts = np.array(LOPSIDED, dtype=np.int64)
    assert left_out(counts, TWO_BY_THREE).tolist() == [[7, 0], [2, 1]]
    assert best_alone(counts, TWO_BY_THREE).tolist() == [[2, 0], [1, 1]]
    hot = np.array([[False, True, True], [True, False, False]])
    assert cold_under(counts, hot).tolist() == [[5, 7], [1, 3]]


def test_turns_of_a_session_are_summed_wherever_they_stand() -> None:
    counts = [[[1, 0, 2], [0, 3, 0]], [[4, 0, 0], [2, 2, 0]], [[0, 5, 0], [0, 0, 5]]]
    data = census_of(counts, TWO_BY_THREE, session=[7, 2, 7])
    assert by_session(data).tolist() == [[[4, 0, 0], [2, 2, 0]], [[1, 5, 2], [0, 3, 5]]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"layer_ids": np.array([0, 2], np.int32)},
            "census: layer_ids: found [0, 2], expected [0, 1]",
        ),
        (
            {"experts": np.array([3, 2], np.int32)},
            "census: experts of layer 1: found 2, expected 3",
        ),
        ({"top_k": np.array([2, 1], np.int32)}, "census: top_k of layer 0: found 2, expected 1"),
    ],
)
def test_a_census_of_another_model_is_refused(changes: dict[str, object], message: str) -> None:
    data = replace(census_of(LOPSIDED, TWO_BY_THREE), **changes)  # type: ignore[arg-type]
    with pytest.raises(FormatError) as refused:
        evaluate(data, TWO_BY_THREE, {})
    assert str(refused.value) == message


def test_a_small_class_is_judged_with_the_prior_it_was_placed_with() -> None:
    # Alone, the first session is served by {1}; with the pool's weight on 0 by {0}.
    counts = np.array([[[4, 0, 0]], [[0, 1, 0]]], dtype=np.int64)
    shape = layout(1, 3, 1)
    assert left_out(counts, shape).tolist() == [[4], [1]]
    prior = np.array([[1.5, 0.0, 0.0]])
    assert left_out(counts, shape, prior).tolist() == [[0], [1]]
    result = evaluate(census_of(counts, shape), shape, {}, prior=prior)
    assert result.own == pytest.approx(1 / 5) and result.in_sample == pytest.approx(1 / 5)


def test_sessions_beyond_one_block_are_all_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, (11, 2, 6))
    whole = left_out(counts, layout(2, 6, 3))
    monkeypatch.setattr("rowmap_jobs.evaluation.shares.AT_A_TIME", 12)
    assert left_out(counts, layout(2, 6, 3)).tolist() == whole.tolist()


@st.composite
def small_traffic(draw: st.DrawFn) -> tuple[Census, Geometry]:
    """A census of few experts and a geometry for it; layers may differ in width and hot rows."""
    layers, sessions = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    experts = draw(st.lists(st.integers(2, 6), min_size=layers, max_size=layers))
    hot = [draw(st.integers(0, many)) for many in experts]
    top_k = draw(st.integers(1, min(experts)))
    rows = draw(st.lists(st.integers(0, 6), min_size=sessions, max_size=sessions))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counts = np.zeros((sessions, layers, max(experts)), dtype=np.int64)
    for session, layer in np.ndindex(sessions, layers):
        for _ in range(rows[session]):
            counts[session, layer, rng.choice(experts[layer], top_k, replace=False)] += 1
    shape = Geometry(
        experts={str(i): many for i, many in enumerate(experts)},
        top_k=top_k,
        hot_rows={str(i): many for i, many in enumerate(hot)},
        moe_layers=tuple(range(layers)),
        row_bytes=10,
    )
    owner = draw(st.lists(st.integers(0, 3), min_size=sessions, max_size=sessions))
    return census_of(counts, shape, session=owner), shape


@given(small_traffic())
@settings(max_examples=60, deadline=None)
def test_left_out_is_the_map_of_all_other_sessions(made: tuple[Census, Geometry]) -> None:
    data, shape = made
    counts = by_session(data)
    found = left_out(counts, shape)
    for session, own in enumerate(counts):
        rest = np.delete(counts, session, axis=0).sum(axis=0)
        hot = map_mask(place(rest, FINGERPRINT, shape), counts.shape[2])
        assert found[session].tolist() == np.where(hot, 0, own).sum(axis=1).tolist()


@given(small_traffic())
@settings(max_examples=60, deadline=None)
def test_shares_are_ordered_from_oracle_to_left_out(made: tuple[Census, Geometry]) -> None:
    data, shape = made
    result, counts = evaluate(data, shape, {}), by_session(data)
    oracle = best_alone(counts, shape).sum() / max(counts.sum(), 1)
    assert 0 <= oracle <= result.in_sample + 1e-12
    assert result.in_sample <= result.own + 1e-12 and result.own <= 1
    assert result.in_sample <= result.positional + 1e-12 and result.positional <= 1
    assert 0 <= result.random <= 1 and 0 <= result.interval[0] <= result.interval[1] <= 1


@given(small_traffic(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_order_of_transcripts_does_not_matter(
    made: tuple[Census, Geometry], data: st.DataObject
) -> None:
    census, shape = made
    order = data.draw(st.permutations(range(len(census.session))))
    names = ("counts", "rows", "session", "transcript_id", "fidelity", "prompt_len", "created")
    shuffled = replace(census, **{name: getattr(census, name)[order] for name in names})
    assert evaluate(shuffled, shape, {}) == evaluate(census, shape, {})


@given(small_traffic(), st.data())
@settings(max_examples=40, deadline=None)
def test_more_hot_rows_are_never_colder(made: tuple[Census, Geometry], data: st.DataObject) -> None:
    census, shape = made
    assert isinstance(shape.hot_rows, dict) and isinstance(shape.experts, dict)
    more = {
        layer: data.draw(st.integers(hot, shape.experts[layer]))
        for layer, hot in shape.hot_rows.items()
    }
    larger = shape.model_copy(update={"hot_rows": more})
    counts = by_session(census)
    assert (left_out(counts, larger) <= left_out(counts, shape)).all()
    assert (best_alone(counts, larger) <= best_alone(counts, shape)).all()


def test_the_interval_holds_the_share_nearly_always() -> None:
    """Over 60 censuses of 12 uneven sessions each, the estimate leaves its interval at most once.

    The true share, which the interval is for, must be inside most of the time.
    """
    weights, shape = popular(1, 24, seed=4), layout(1, 24, 16, top_k=2)
    rng = np.random.default_rng(9)
    fresh = drawn(weights, [200] * 40, 2, rng, noise=0.7)
    outside, missed = 0, 0
    for seed in range(60):
        rows = rng.integers(20, 200, 12).tolist()
        counts = drawn(weights, rows, 2, rng, noise=0.7)
        cold = left_out(counts, shape).sum(axis=1)
        low, high = interval(cold, counts.sum(axis=(1, 2)), seed)
        outside += not low <= cold.sum() / counts.sum() <= high
        hot = hot_mask(counts.sum(axis=0), shape)
        truth = cold_under(fresh, hot).sum() / fresh.sum()
        missed += not low <= truth <= high
    assert outside <= 1
    assert missed <= 15
