"""Sums of other systems: what was counted before the traffic, for a draft model or by mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.census.baseline import cross_check, split_draft, subtract
from rowmap_jobs.exchange.base import Counts, Layout
from rowmap_jobs.formats.base import FormatError
from tests.census.samples import sums


def plus(one: Counts, two: Counts) -> Counts:
    rows = one.rows + two.rows if one.rows is not None and two.rows is not None else None
    return replace(one, decode=one.decode + two.decode, rows=rows)


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(FormatError) as error:
        call(*args, "counts.npz")
    return str(error.value)


def test_warm_up_rows_are_subtracted() -> None:
    """A dump before any traffic had 106,887 decode selections of warm-up in it."""
    traffic, warm_up = sums(rows=50), sums(rows=17, seed=1)
    clean = subtract(plus(traffic, warm_up), warm_up, "counts.npz")
    assert (clean.decode == traffic.decode).all()
    assert clean.rows is not None and clean.rows.tolist() == [[0, 50]]
    assert clean.notes == (f"baseline of {17 * 2 * 3} decode selections subtracted",)
    cross_check(clean, "counts.npz")


@given(st.integers(0, 9), st.integers(0, 9))
def test_what_was_added_is_taken_off_again(one: int, two: int) -> None:
    traffic, before = sums(seed=one), sums(seed=two, rows=7)
    assert (subtract(plus(traffic, before), before, "x").decode == traffic.decode).all()


def test_a_usage_file_that_accumulates_is_taken_off() -> None:
    """The usage file of earlier sessions was loaded at start and written back (colibri#218)."""
    earlier, today = sums(rows=900, seed=2), sums(rows=60, seed=3)
    loaded = replace(earlier, rows=None)
    clean = subtract(plus(loaded, today), loaded, "counts.npz")
    assert (clean.decode == today.decode).all() and clean.rows is None


def test_swapped_dumps_are_refused_at_the_expert() -> None:
    traffic, before = sums(rows=50), sums(rows=5)
    t, layer, expert = (
        int(i) for i in np.argwhere(before.decode < plus(traffic, before).decode)[0]
    )
    text = refused(subtract, before, plus(traffic, before))
    assert text.startswith(
        f"counts.npz: decode[dump,layer {layer},expert {expert}]: found "
        f"{before.decode[t, layer, expert]} after a baseline of"
    )
    assert text.endswith(
        "expected no less than the baseline (one process, not restarted in between)"
    )


@pytest.mark.parametrize(
    ("final", "zero", "text"),
    [
        (sums(3), sums(2), "baseline layer_ids: found [0, 1], expected [0, 1, 2]"),
        (sums(3), sums(3, experts=9), "baseline experts: found [9, 9, 9], expected [8, 8, 8]"),
        (sums(), sums(), "counts: found none beyond the baseline, expected selections after"),
        (
            replace(plus(sums(), sums()), prefill=sums().decode),
            sums(),
            "baseline prefill: found none, expected counts, as in the final dump",
        ),
        (
            sums(),
            replace(sums(), decode=np.repeat(sums().decode, 2, axis=0)),
            "baseline counts: found [2, 3, 8], expected shape [1, 3, 8]",
        ),
        (
            plus(sums(), sums()),
            replace(sums(), rows=np.array([[0, 81]])),
            "rows[dump,decode]: found 80 after a baseline of 81, expected no less",
        ),
        (
            plus(sums(), sums()),
            replace(sums(), rows=np.zeros((2, 2), np.int64)),
            "baseline rows: found [2, 2], expected shape [1, 2]",
        ),
    ],
)
def test_dumps_that_do_not_belong_together(final: Counts, zero: Counts, text: str) -> None:
    assert refused(subtract, final, zero).startswith(f"counts.npz: {text}")


def test_prefill_and_steps_are_subtracted_too() -> None:
    def dump(n: int) -> Counts:
        return replace(
            sums(rows=40 * n),
            decode=n * sums().decode,
            prefill=n * sums(seed=1).decode,
            rows=np.array([[40 * n, 40 * n]]),
            steps=np.array([40 * n, 0]),
            touched=np.array([[80 * n] * 3, [0] * 3]),
        )

    clean = subtract(dump(3), dump(1), "x")
    assert clean.prefill is not None and (clean.prefill == dump(2).prefill).all()
    assert clean.steps is not None and clean.steps.tolist() == [80, 0]
    assert clean.touched is not None and clean.touched[0].tolist() == [160] * 3
    assert subtract(dump(3), replace(dump(1), steps=None, touched=None), "x").steps is None
    text = refused(subtract, dump(3), replace(dump(1), steps=np.array([121, 0])))
    assert "steps: found fewer than in the baseline" in text
    text = refused(subtract, dump(3), replace(dump(1), steps=np.array([1])))
    assert "baseline touched: found [2, 3], expected steps x layers within" in text


def test_draft_layers_behind_the_target_are_split_off() -> None:
    """43 rows in a dump of a 40-layer model: 3 are the draft's (vllm#48622, sglang#16044)."""
    target, draft = split_draft(sums(layers=43), range(40), "counts.npz")
    assert target.layout.layer_ids == tuple(range(40)) and target.decode.shape == (1, 40, 8)
    assert draft is not None and draft.layout.layer_ids == (40, 41, 42)
    assert (target.decode == sums(layers=43).decode[:, :40]).all()
    assert target.notes == ("draft layers 40-42 split off",) and draft.rows is None
    assert target.rows is not None and target.rows.tolist() == [[0, 40]]


def test_a_file_without_draft_layers_stays_as_it_is() -> None:
    counts = sums(layers=4)
    assert split_draft(counts, range(4), "counts.npz") == (counts, None)


def test_both_complete_shapes_of_one_model_become_the_same() -> None:
    """GLM-5.2: 19,456 experts in the title (76 x 256), 19,200 slots below it (colibri#175)."""
    ids = tuple(range(3, 79))
    whole = sums(layers=76, experts=16, rows=30)
    with_mtp = replace(whole, layout=Layout(ids, (16,) * 76, (2,) * 76))
    without = replace(
        whole, layout=Layout(ids[:75], (16,) * 75, (2,) * 75), decode=whole.decode[:, :75]
    )
    one, draft = split_draft(with_mtp, range(3, 78), "counts.npz")
    two, none = split_draft(without, range(3, 78), "counts.npz")
    assert one.layout == two.layout and (one.decode == two.decode).all()
    assert draft is not None and draft.layout.layer_ids == (78,) and none is None


def test_a_missing_layer_is_named() -> None:
    """KeyError: layer_idx 61: the file had 0 to 60, the MTP layer is 61 (TRT-LLM#13974)."""
    text = refused(split_draft, sums(layers=61), range(62))
    assert "no layer 61" in text and "expected layers 0-61" in text
    gap = replace(sums(layers=3), layout=Layout((0, 2, 3), (8,) * 3, (2,) * 3))
    assert "no layer 1" in refused(split_draft, gap, range(4))
    assert "layer 0" in refused(split_draft, sums(layers=3), (1, 2))


def test_a_draft_layer_at_a_place_of_the_target_is_refused() -> None:
    """The draft ran first and took index 0, so every layer stands one too high (sglang#26980)."""
    names = ["mtp.layers.0.mlp", *(f"model.layers.{i}.mlp.experts" for i in range(3))]
    with pytest.raises(FormatError) as error:
        split_draft(sums(layers=4), range(3), "counts.npz", names)
    assert str(error.value).startswith("counts.npz: layer 0: found mtp.layers.0.mlp, expected a")
    behind = [*names[1:], names[0]]
    assert split_draft(sums(layers=4), range(3), "counts.npz", behind)[1] is not None
    with pytest.raises(FormatError, match="names: found 2 names, expected 4, one a layer"):
        split_draft(sums(layers=4), range(3), "counts.npz", names[:2])


def test_sums_tell_the_rows() -> None:
    assert cross_check(sums(rows=40), "x").tolist() == [[0, 40]]
    assert cross_check(replace(sums(rows=40), rows=None), "x").tolist() == [[0, 40]]
    told = replace(sums(), layout=replace(sums().layout, top_k=None))
    assert cross_check(told, "x").tolist() == [[0, 40]]
    both = replace(sums(), prefill=sums(rows=9).decode, rows=np.array([[9, 40]]))
    assert cross_check(both, "x").tolist() == [[9, 40]]
    assert cross_check(replace(both, rows=None), "x").tolist() == [[9, 40]]


def changed(counts: Counts, layer: int, by: int) -> Counts:
    decode = counts.decode.copy()
    decode[0, layer, int(decode[0, layer].argmin())] += by
    return replace(counts, decode=decode)


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        # DP=4 with naive dispatch gave every rank all counts (vllm#22167).
        (
            replace(sums(), decode=4 * sums().decode),
            "decode[dump,layer 0]: found 320 selections, expected rows x top-k = 80 "
            "(all layers 4 x: counted by each of 4 data-parallel ranks?)",
        ),
        # 3 real rows padded to 8 (vllm#38128): 5 phantom rows in every layer.
        (
            replace(sums(rows=8), rows=np.array([[0, 3]])),
            "decode[dump,layer 0]: found 16 selections, expected rows x top-k = 6 "
            "(5 rows more: padding, warm-up or rejected drafts?)",
        ),
        # Only local experts were counted (vllm#21883); --topp removed 43% (colibri#175).
        (
            replace(sums(rows=57), rows=np.array([[0, 100]])),
            "decode[dump,layer 0]: found 114 selections, expected rows x top-k = 200 "
            "(43% missing: local experts only, or a router that drops choices?)",
        ),
        (
            replace(changed(sums(), 0, 1), rows=None),
            "decode[dump,layer 0]: found 81 selections, expected a multiple of top-k 2",
        ),
        # The draft's rows were added to the target's layer 0 (vllm#48622).
        (
            replace(changed(sums(), 0, 12), rows=None),
            "decode[dump,layer 1]: found 80 selections, expected 92 as in layer 0",
        ),
        (
            changed(sums(), 2, 2),
            "decode[dump,layer 2]: found 82 selections, expected rows x top-k = 80 (1 rows more",
        ),
        (
            replace(sums(), layout=replace(sums().layout, top_k=None), rows=None),
            "layout: found neither top-k nor rows, expected top-k, or rows of decode",
        ),
        (
            replace(sums(), decode=0 * sums().decode, rows=None),
            "counts: found no selection, expected counts of real traffic",
        ),
        # A placeholder in sums: expert 0 in every choice.
        (
            replace(sums(), decode=np.array([[[80] + [0] * 7] * 3])),
            "decode[dump,layer 0]: found an expert 80 times, expected at most once a row (40 rows)",
        ),
    ],
)
def test_sums_that_tell_how_they_were_counted(counts: Counts, text: str) -> None:
    assert refused(cross_check, counts).startswith(f"counts.npz: {text}")


@given(st.integers(2, 9), st.integers(1, 30), st.integers(0, 9))
def test_every_multiple_is_named(times: int, rows: int, seed: int) -> None:
    one = sums(rows=rows, seed=seed)
    text = refused(cross_check, replace(one, decode=times * one.decode))
    assert f"all layers {times} x" in text
