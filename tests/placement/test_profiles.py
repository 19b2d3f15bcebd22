"""Several classes: small ones lean on the pool, and a blend must beat the single maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.evidence import Matrix
from rowmap_jobs.placement import hot_mask, profiles
from rowmap_jobs.placement.profiles import (
    best_blend,
    blend,
    blended,
    judge,
    matrix,
    regret,
    require_blend,
    shrink,
)
from tests.formats.samples import geometry

ONE = geometry(moe_layers=(0,), top_k=1)


def test_shrinkage_by_hand() -> None:
    # 4 tokens of top-2; q = (6, 2, 2, 2) x 2 / 12 of a token's two choices; kappa 2.
    got = shrink(np.array([[4, 4, 0, 0]]), np.array([[6, 2, 2, 2]]), 2, top_k=2)
    wanted = [(4 + 2 * 1.0) / 6, (4 + 2 / 3) / 6, (2 / 3) / 6, (2 / 3) / 6]
    assert got[0].tolist() == pytest.approx(wanted)


@given(st.integers(0, 1 << 30), st.integers(1, 3), st.sampled_from([None, 0.0, 0.5, 100.0]))
def test_shrunk_choices_of_a_token_sum_to_top_k(seed: int, top_k: int, kappa: Any) -> None:
    rng = np.random.default_rng(seed)
    own, pool = rng.integers(0, 5, (3, 6)), rng.integers(1, 9, (3, 6))
    own[:, 0] += 1
    assert shrink(own, pool, kappa, top_k=top_k).sum(axis=1) == pytest.approx([top_k] * 3)


def test_many_tokens_do_not_change_and_few_follow_the_pool() -> None:
    rng = np.random.default_rng(2)
    own, pool = rng.integers(1, 100, (4, 8)), rng.integers(1, 100, (4, 8))
    many = shrink(own * 10**6, pool, top_k=2)
    assert many == pytest.approx(own / own.sum(axis=1, keepdims=True) * 2, rel=1e-4)
    few = shrink(own * 1e-9, pool, top_k=2)
    assert few == pytest.approx(pool / pool.sum(axis=1, keepdims=True) * 2, rel=1e-4)
    none = shrink(own, pool, 0, top_k=2)
    assert none == pytest.approx(own / own.sum(axis=1, keepdims=True) * 2)


def test_the_pool_weighs_as_many_tokens_as_there_are_experts() -> None:
    own, pool = np.array([[3, 1, 0], [3, 1, 0]]), np.array([[1, 1, 2], [1, 1, 0]])
    assert (shrink(own, pool, top_k=1) == shrink(own, pool, 3, top_k=1)).all()
    narrow = shrink(own, pool, top_k=1, experts=[3, 2])
    assert (narrow[0] == shrink(own, pool, 3, top_k=1)[0]).all()
    assert (narrow[1] == shrink(own, pool, 2, top_k=1)[1]).all()


def test_layers_without_counts() -> None:
    own = np.array([[0, 0], [3, 1], [0, 0]])
    pool = np.array([[1, 3], [0, 0], [0, 0]])
    assert shrink(own, pool, top_k=1).tolist() == [[0.25, 0.75], [0.75, 0.25], [0, 0]]


@pytest.mark.parametrize(
    ("pool", "kappa", "top_k", "message"),
    [
        ([[1, 2, 3]], None, 1, r"pooled: shape: found \[1, 3\], expected \[1, 2\], as the counts"),
        ([[1, -2]], None, 1, "profile: array: found -2 to 1"),
        ([[1, 2]], -1.0, 1, "shrinkage: kappa: found -1.0, expected a finite number of 0 or more"),
        ([[1, 2]], float("nan"), 1, "shrinkage: kappa: found nan"),
        ([[1, 2]], None, 0, "shrinkage: top-k: found 0, expected 1 or more"),
    ],
)
def test_shrinkage_refusals(pool: Any, kappa: Any, top_k: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        shrink(np.array([[1, 2]]), np.array(pool), kappa, top_k=top_k)


def test_a_blend_weighs_classes_and_not_their_volume() -> None:
    small, large = np.array([[3, 1]]), np.array([[1000, 3000]])
    assert blend({"a": small, "b": large}, {"a": 1, "b": 1}).tolist() == [[0.5, 0.5]]
    assert blend({"a": small, "b": large}, {"a": 3, "b": 1}).tolist() == [[0.625, 0.375]]
    assert blend({"a": small, "b": large}, {"a": 2, "b": 0}).tolist() == [[0.75, 0.25]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, r"blend: weights: found \['a'\], expected one for each of \['a', 'b'\]"),
        ({"a": 0, "b": 0}, "not all 0"),
        ({"a": -1, "b": 2}, "finite numbers of 0 or more"),
        ({"a": float("inf"), "b": 2}, "finite numbers of 0 or more"),
        ({"a": float("nan"), "b": 2}, "finite numbers of 0 or more"),
    ],
)
def test_blend_refusals(weights: dict[str, float], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        blend({"a": np.ones((1, 2)), "b": np.ones((1, 2))}, weights)
    with pytest.raises(FormatError, match=r"b: shape: found \[1, 3\], expected \[1, 2\], as a"):
        blend({"a": np.ones((1, 2)), "b": np.ones((1, 3))}, {"a": 1, "b": 1})
    with pytest.raises(FormatError, match="profiles: classes: found none"):
        blend({}, {})


# Two hot rows of four. Own: a keeps {0, 1}, 25% cold; b keeps {0, 3}, 15% cold.
A, B = np.array([[40, 35, 25, 0]]), np.array([[450, 0, 150, 400]])


def test_the_matrix_by_hand() -> None:
    masks = {"a": hot_mask(A, ONE), "b": hot_mask(B, ONE)}
    shares = matrix(masks, {"a": A, "b": B})
    assert shares == pytest.approx(np.array([[0.25, 0.55], [0.60, 0.15]]))
    assert regret(shares, np.diag(shares)) == pytest.approx([0.40, 0.35])


def test_the_matrix_is_of_maps_by_classes_in_the_order_of_names() -> None:
    """Asymmetric on purpose: reducing over the wrong axis is a known mistake."""
    layers = geometry(moe_layers=(0, 2), top_k=1, experts=3, hot_rows=1)
    one, two = np.array([[5, 3, 2], [1, 1, 8]]), np.array([[0, 9, 1], [8, 1, 1]])
    mask = hot_mask(one, layers)
    shares = matrix({"z": mask, "c": ~mask, "m": mask | True}, {"two": two, "one": one})
    # Rows c, m, z; columns one, two.
    assert shares == pytest.approx(np.array([[0.65, 0.05], [0, 0], [0.35, 0.95]]))


def test_a_matrix_with_its_regrets() -> None:
    got = judge({"b": B, "a": A}, ONE)
    assert got.classes == ("a", "b") and got.minimax == "b"
    assert got.regret == pytest.approx((0.40, 0.35))
    # The best blend keeps {0, 3} of b's half and beats both single maps.
    assert got.blend_regret is not None and got.blend_regret < 0.35 and not got.blend_refused
    require_blend(got)
    assert Matrix.from_wire(got.to_wire(), "report.json") == got


def test_left_out_shares_take_the_diagonal() -> None:
    got = judge({"a": A, "b": B}, ONE, own={"a": 0.55, "b": 0.51})
    assert got.shares[0] == pytest.approx((0.55, 0.55))
    assert got.shares[1] == pytest.approx((0.60, 0.51))
    assert got.regret == pytest.approx((0.04, 0.05)) and got.minimax == "a"
    assert got.blend_refused
    with pytest.raises(FormatError) as refused:
        require_blend(got)
    assert str(refused.value) == (
        "blend: regret: found 25.00% for its worst class, expected at most 4.00%, what the map of "
        "class a loses; use one map per class"
    )


def test_one_class_has_nothing_to_blend() -> None:
    got = judge({"a": A}, ONE)
    assert got.regret == (0.0,) and got.blend_regret is None and got.blend_refused is None
    require_blend(got)


def test_a_blend_by_volume_that_forgets_a_class_is_refused() -> None:
    mixed = blended({"a": A, "b": B}, {"a": 0.9, "b": 0.1}, ONE)
    losses = np.array(judge({"a": A, "b": B}, ONE).regret)
    assert mixed.regret == pytest.approx(0.40) and profiles.refused(mixed.regret, losses)
    even = blended({"a": A, "b": B}, {"a": 1, "b": 1}, ONE)
    assert even.regret == pytest.approx(0.25) and not profiles.refused(even.regret, losses)


@given(st.integers(0, 1 << 30), st.integers(2, 4))
def test_the_best_blend_is_no_worse_than_equal_weights(seed: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    shape = geometry(moe_layers=(0, 1), top_k=1, experts=8, hot_rows=3)
    many = {f"c{i}": rng.integers(0, 9, (2, 8)) + 1 for i in range(classes)}
    equal = blended(many, dict.fromkeys(many, 1.0), shape)
    best = best_blend(many, shape)
    assert 0 <= best.regret <= equal.regret + 1e-12
    again = blended(many, best.weights, shape)
    assert again.regret == pytest.approx(best.regret)
    assert sum(best.weights.values()) == pytest.approx(1)


def test_maps_and_shares_must_be_of_the_same_classes() -> None:
    with pytest.raises(FormatError, match=r"classes: own shares: found \['a'\], expected exactly"):
        judge({"a": A, "b": B}, ONE, own={"a": 0.1})
    with pytest.raises(FormatError, match=r"classes: maps: found \['x'\], expected exactly"):
        judge({"a": A}, ONE, maps={"x": hot_mask(A, ONE)})
    with pytest.raises(FormatError, match=r"a: map: found \[1, 3\], expected \[1, 4\]"):
        matrix({"a": np.ones((1, 3), dtype=np.bool_)}, {"a": A})
    with pytest.raises(FormatError, match="a: profile: found no selections"):
        matrix({"a": hot_mask(A, ONE)}, {"a": A * 0})
