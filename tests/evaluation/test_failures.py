"""Ways in which other evaluations were fooled; here they show."""

from __future__ import annotations

import numpy as np

from rowmap_jobs import judgement
from rowmap_jobs.evaluation import by_session, change, evaluate, evidence
from rowmap_jobs.evaluation.convergence import halves
from rowmap_jobs.evaluation.ranks import compare, of_counts
from rowmap_jobs.evaluation.shares import cold_under
from rowmap_jobs.formats.run import Acceptance
from rowmap_jobs.placement import hot_mask, place
from tests.evaluation.traffic import census_of, drawn, layout, popular
from tests.formats.samples import FINGERPRINT

WIDE = layout(4, 384, 295, top_k=6)
NARROW = layout(2, 64, 48, top_k=4)


def test_sixty_four_tokens_look_perfect_in_sample() -> None:
    """exllamav3 #315: a profile of one prompt claimed 93% and ran slower than none."""
    weights, rng = popular(4, 384, 0), np.random.default_rng(0)
    counts = drawn(weights, [32, 32], 6, rng)
    result = evaluate(census_of(counts, WIDE), WIDE, {})
    fresh = drawn(weights, [2000], 6, rng)
    truth = cold_under(fresh, hot_mask(counts.sum(axis=0), WIDE)).sum() / fresh.sum()
    assert result.in_sample == 0.0
    assert truth > 0.05 and result.own > 0.05
    assert judgement.word(result) == "insufficient"
    reason, message = judgement.decide(result, Acceptance())
    assert reason == "TooFewDecodeTokens" and "found 64 of 2 sessions" in message


def test_one_long_prompt_flatters_too() -> None:
    """Many tokens of one session: thousands of selections, and still one taste."""
    weights, rng = popular(2, 64, 1), np.random.default_rng(3)
    result = evaluate(census_of(drawn(weights, [9000], 4, rng, noise=1.5), NARROW), NARROW, {})
    assert result.in_sample < 0.02 and result.own > 5 * result.in_sample
    assert result.interval == (0.0, 1.0)
    assert judgement.word(result) != "ready"


def test_halves_of_rows_agree_however_little_was_recorded() -> None:
    """imp #1358: an even/odd split of rows inflated stability; the prompt-disjoint one is right."""
    rng = np.random.default_rng(4)
    said: dict[str, list[float]] = {name: [] for name in ("rows", "sessions", "truth")}
    for world in range(6):
        weights = popular(2, 64, world)
        tastes = [weights * np.exp(rng.normal(0, 1.2, weights.shape)) for _ in range(8)]
        # Two transcripts of each session: its even and its odd rows.
        parts = np.concatenate([drawn(taste, [100, 100], 4, rng) for taste in tastes])
        right = census_of(parts, NARROW, session=[index // 2 for index in range(16)])
        by_rows = compare(
            of_counts(parts[0::2].sum(axis=0), NARROW),
            of_counts(parts[1::2].sum(axis=0), NARROW),
            NARROW,
        )
        by_sessions = halves(right, by_session(right), NARROW)
        assert by_sessions is not None and by_sessions.churn > 1.5 * by_rows.churn
        assert by_sessions.overlap < by_rows.overlap
        # The left-out share by rows promises what fresh sessions do not keep.
        fresh = drawn(weights, [20] * 60, 4, rng, noise=1.2)
        hot = hot_mask(parts.sum(axis=0), NARROW)
        said["truth"].append(cold_under(fresh, hot).sum() / fresh.sum())
        said["rows"].append(evaluate(census_of(parts, NARROW), NARROW, {}).own)
        said["sessions"].append(evaluate(right, NARROW, {}).own)
    rows, sessions, truth = (np.mean(said[name]) for name in ("rows", "sessions", "truth"))
    assert rows < 0.8 * truth
    assert abs(sessions - truth) < abs(rows - truth) / 3


def test_a_flat_router_has_no_skew_to_use() -> None:
    """llama.cpp #28544: nearly every row was hit, none much more than others."""
    rng = np.random.default_rng(5)
    data = census_of(drawn(np.ones((2, 64)), [800] * 14, 4, rng), NARROW)
    result = evaluate(data, NARROW, {})
    found = evidence(data, NARROW, place(data.decode(), FINGERPRINT, NARROW))
    assert judgement.word(result) == judgement.word(result, found) == "no_skew"
    assert found.skew.gini <= found.skew.gini_uniform and found.skew.entropy > 0.999
    assert judgement.decide(result, Acceptance(), found)[0] == "NoSkew"


def test_skewed_traffic_is_not_called_flat() -> None:
    rng = np.random.default_rng(6)
    data = census_of(drawn(popular(2, 64, 0), [800] * 14, 4, rng), NARROW)
    found = evidence(data, NARROW, place(data.decode(), FINGERPRINT, NARROW))
    assert judgement.word(evaluate(data, NARROW, {}), found) == "ready"
    assert found.skew.gini > 5 * found.skew.gini_uniform


def test_a_blend_that_is_fine_on_its_mixture_is_refused_on_the_lane() -> None:
    """50/25/25 of three classes: 2.1% cold on its own mix, and 10 to 17% slower on the lane."""
    rng = np.random.default_rng(7)
    classes = {
        name: census_of(
            drawn(popular(2, 64, seed), [200] * 12, 4, rng, noise=0.3), NARROW, traffic_class=name
        )
        for seed, name in enumerate(("agent", "prose", "ja"))
    }
    agent = classes["agent"]
    profiles = {name: data.decode() for name, data in classes.items()}
    mixture = 2 * profiles["agent"] + profiles["prose"] + profiles["ja"]
    blend = place(mixture, FINGERPRINT, NARROW)
    active = place(profiles["agent"], FINGERPRINT, NARROW)
    # On the mixture the blend wins clearly over the lane's map,
    on_mixture = [
        cold_under(mixture[None], hot_mask(counts, NARROW)).sum() / mixture.sum()
        for counts in (mixture, profiles["agent"])
    ]
    assert on_mixture[0] < 0.7 * on_mixture[1]
    # and on the lane's class it loses, surely.
    found = change(agent, NARROW, active, candidate=blend)
    assert found.improvement < 0 and found.interval.high < 0
    better, line = judgement.improves(found)
    assert not better and blend.digest in line and active.digest in line
