"""Routed ids become counts only when they are routing; what other engines wrote instead is named.

The cases quote what users of other systems found in their files, and the thread that tells it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.census import routing
from rowmap_jobs.census.routing import count, dense_layers, layout, tally, touched
from rowmap_jobs.formats.base import FormatError
from tests.census.samples import routed

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", ">i4")


def by_hand(ids: npt.NDArray[Any], experts: int) -> npt.NDArray[np.int64]:
    out = np.zeros((ids.shape[1], experts), dtype=np.int64)
    for row in ids.tolist():
        for layer, chosen in enumerate(row):
            for expert in chosen:
                out[layer, expert] += 1
    return out


def refused(ids: npt.NDArray[Any], experts: int, **more: Any) -> str:
    with pytest.raises(FormatError) as error:
        tally(ids, experts, "r.npy", "ids", **more)
    return str(error.value)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_type_counts_the_same(dtype: str) -> None:
    ids = routed(300, experts=100, k=3)
    counted = count(ids.astype(dtype), 100, "r.npy", "ids")
    assert counted.dtype == np.int64
    assert (counted == by_hand(ids, 100)).all()


@pytest.mark.parametrize("rows", [1, 7, 5000, 20001])
def test_chunks_do_not_show(rows: int) -> None:
    ids = routed(rows, layers=5, experts=300, k=4, dtype=np.uint16)
    keys = np.arange(5)[None, :, None] * 300 + ids.astype(np.int64)
    want = np.bincount(keys.reshape(-1), minlength=1500).reshape(5, 300)
    result = tally(ids, 300, "r.npy", "ids", rows=rows)
    assert (result.counts == want).all() and result.rows == rows and result.padding == 0


def test_layers_may_have_different_numbers_of_experts() -> None:
    ids = routed(50, layers=2, experts=4)
    assert count(ids, [4, 6], "r.npy", "ids").shape == (2, 6)
    assert "ids[layer 0]: found id 3, expected ids 0 to 2" in refused(ids, [3, 6])  # type: ignore[arg-type]


def test_layers_and_experts_are_never_swapped() -> None:
    """Balancedness was reduced over the wrong axis, unseen on square data (vllm#39178)."""
    ids = np.array([[[0, 1], [2, 1]], [[0, 2], [1, 2]], [[1, 0], [2, 0]]], dtype=np.uint8)
    assert count(ids, 3, "r.npy", "ids").tolist() == [[3, 2, 1], [1, 2, 3]]


def test_floats_are_refused_by_name() -> None:
    text = refused(routed(9).astype(np.float32), 8)
    assert text == "r.npy: ids: found float32, expected integer expert ids"


def test_zeros_from_a_kernel_that_records_nothing_never_make_expert_0_hot() -> None:
    """A response's array of (T, 48, 8) zeros, from a monolithic kernel (vllm#44116)."""
    text = refused(np.zeros((37, 48, 8), dtype=np.uint8), 128)
    assert text.startswith("r.npy: ids: found id 0 in all 37 rows and layers, expected 8 distinct")
    assert "not recorded" in text
    stated = refused(np.zeros((37, 48, 8), dtype=np.uint8), 128, dense=())
    assert "ids[row 0,layer 0]" in stated and "never written" in stated
    assert "not recorded" in refused(np.zeros((37, 48, 1), dtype=np.uint8), 128)
    assert "not recorded" in refused(np.zeros((37, 48, 1), dtype=np.uint8), 128, dense=(3,))


def test_a_dense_layer_is_dropped_and_the_others_keep_their_ids() -> None:
    """Shape (10, 4, 2) with all of layer 0 zero: a dense first layer (abliterix#24)."""
    ids = routed(10)
    ids[:, 0] = 0
    assert dense_layers(ids, "r.npy", "ids") == (0,)
    counts = count(ids, 8, "r.npy", "ids")
    assert not counts[0].any() and (counts[1:] == by_hand(ids, 8)[1:]).all()
    kept = layout(ids, 8, (0,))
    assert kept.layer_ids == (1, 2, 3) and kept.experts == (8, 8, 8) and kept.top_k == (2, 2, 2)


def test_dense_layers_between_others() -> None:
    ids = routed(50, layers=6, experts=300, dtype=np.int32)
    ids[:, [0, 2, 5]] = 0
    counts = count(ids, 300, "r.npy", "ids")
    assert counts.sum(axis=1).tolist() == [0, 100, 0, 100, 100, 0]
    assert (count(ids, 300, "r.npy", "ids", dense=(5, 0, 2)) == counts).all()
    # The model says that layer 2 has experts: then zeros are a layer that was not captured.
    assert "ids[row 0,layer 2]: found ids [0, 0]" in refused(ids, 300, dense=(0, 5))


def test_a_layer_called_dense_has_no_ids() -> None:
    ids = routed(10)
    text = refused(ids, 8, dense=(1,))
    assert "ids[layer 1]: found id " in text and "expected zeros (a layer without experts)" in text
    assert "fewer than all of the layers" in refused(ids, 8, dense=(0, 1, 2, 3))


def test_with_one_choice_a_row_expert_0_may_be_chosen() -> None:
    ids = np.array([[[0], [3]], [[0], [1]], [[0], [0]]], dtype=np.uint8)
    assert count(ids, 4, "r.npy", "ids").tolist() == [[3, 0, 0, 0], [1, 1, 0, 1]]
    many = np.concatenate([ids] * 3)
    assert dense_layers(many, "r.npy", "ids") == (0,)


def test_physical_ids_of_replicated_experts_are_refused_by_the_greatest() -> None:
    """Ids 0..287 of a model of 256 experts, captured after load balancing (vllm#33013)."""
    ids = routed(200, experts=288, k=8, dtype=np.uint16)
    ids[5, 2, 0] = 287
    text = refused(ids, 256)
    assert "found id 287, expected ids 0 to 255 (physical ids of replicated experts?)" in text


@pytest.mark.parametrize(
    ("dtype", "experts", "text"),
    [
        ("uint8", 128, "found id 255, expected ids 0 to 127 (-1 as uint8?)"),
        ("uint16", 384, "found id 65535, expected ids 0 to 383 (-1 as uint16?)"),
        ("uint8", 256, "found ids [255, 255], expected 2 distinct ids"),
        ("uint16", 1 << 16, "found ids [65535, 65535], expected 2 distinct ids"),
    ],
)
def test_padding_that_was_narrowed_is_no_expert(dtype: str, experts: int, text: str) -> None:
    """-1 became 255 in uint8, which looks valid with 256 experts (NeMo-RL#4240)."""
    ids = routed(40)
    padded = np.concatenate([ids.astype(np.int64), np.full((3, 4, 2), -1)])
    assert text in refused(padded.astype(dtype), experts)


def test_an_id_that_wrapped_repeats_another_or_is_beyond() -> None:
    """512 experts in uint8: id 300 became 44 (NeMo-RL#4240); a repeated id shows it."""
    ids = np.array([[[300, 44]] * 4] * 9, dtype=np.int64)
    assert "found ids [44, 44], expected 2 distinct ids" in refused(ids.astype(np.uint8), 512)


@pytest.mark.parametrize(("experts", "wrap"), [(8, 256), (300, 65536)])
def test_an_id_that_would_wrap_into_range_is_beyond(experts: int, wrap: int) -> None:
    """Wide ids are narrowed for speed: only once they are known to fit."""
    ids = routed(40, experts=experts, dtype=np.int64)
    ids[7, 1, 0] += wrap
    assert f"ids[layer 1]: found id {int(ids[7, 1, 0])}, expected" in refused(ids, experts)


def test_ids_are_widened_before_any_arithmetic() -> None:
    """uint16 ids of 512 experts broke on max and arange (NeMo-RL#4240)."""
    ids = routed(2000, layers=3, experts=512, k=10, dtype=np.uint16)
    assert (count(ids, 512, "r.npy", "ids") == by_hand(ids, 512)).all()
    # 70,000 choices of one expert: a 16-bit total would wrap.
    same = np.tile(np.array([[[7, 8]], [[7, 9]], [[9, 7]]], dtype=np.uint16), (23334, 1, 1))
    assert count(same, 16, "r.npy", "ids")[0, 7] == 3 * 23334


def test_whole_rows_of_padding_are_skipped_and_numbered() -> None:
    """3 real rows padded to 8 for a CUDA graph counted 5 phantom rows (vllm#38128)."""
    ids = np.full((8, 4, 2), -1, dtype=np.int32)
    ids[:3] = routed(3)
    result = tally(ids, 8, "r.npy", "ids", rows=3)
    assert (result.counts == by_hand(ids[:3], 8)).all()
    assert (result.rows, result.padding) == (3, 5)
    # Written without a mask, padding is one more real row, again and again.
    ids[3:] = ids[2]
    assert "5 of 8 rows equal to the row before" in refused(ids, 8)
    assert "found 8 rows, expected 3 rows" in refused(routed(8), 8, rows=3)


def test_padding_beside_dense_layers() -> None:
    ids = routed(20, dtype=np.int16)
    ids[:, 0] = 0
    ids[15:, 1:] = -1
    assert dense_layers(ids, "r.npy", "ids") == (0,)
    result = tally(ids, 8, "r.npy", "ids")
    assert (result.rows, result.padding) == (15, 5)
    ids[15:, 0] = -1
    assert (tally(ids, 8, "r.npy", "ids").counts == result.counts).all()


@pytest.mark.parametrize("bad", [-1, -2, -128])
def test_a_negative_id_beside_real_ones_is_refused(bad: int) -> None:
    ids = routed(60, dtype=np.int8)
    ids[50, 2, 1] = bad
    text = refused(ids, 8)
    assert f"ids[row 50,layer 2]: found ids [{int(ids[50, 2, 0])}, {bad}], expected no neg" in text


def test_rows_missing_from_a_response_are_noticed() -> None:
    """The array of a request was shorter than its tokens (sglang#12162)."""
    assert refused(routed(40), 8, rows=45) == "r.npy: ids: found 40 rows, expected 45 rows"


def test_one_row_written_for_all_output_tokens_is_no_routing() -> None:
    """With CUDA graphs "experts of all output tokens duplicated" (sglang#12162)."""
    ids = np.repeat(routed(1), 20, axis=0)
    text = refused(ids, 8)
    assert text.startswith("r.npy: ids: found 19 of 20 rows equal to the row before in every layer")


def test_repeated_rows_across_chunks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_CHUNK_BYTES", 800)  # 100 rows
    ids = np.repeat(routed(10000, experts=64), 3, axis=0)
    assert "found 20000 of 30000 rows equal" in refused(ids, 64)


def test_some_repeats_are_what_text_does() -> None:
    ids = np.repeat(routed(20, experts=64), 2, axis=0)[:39]  # 19 repeats of 38: half, not more
    assert tally(ids, 64, "r.npy", "ids").rows == 39
    few_layers = np.repeat(routed(1, layers=3), 20, axis=0)
    assert tally(few_layers, 8, "r.npy", "ids").rows == 20
    few_rows = np.repeat(routed(1), 7, axis=0)
    assert tally(few_rows, 8, "r.npy", "ids").rows == 7
    # A layer that routes by token id repeats with the token; the others do not.
    one = routed(50, experts=64)
    one[:, 0] = one[0, 0]
    assert tally(one, 64, "r.npy", "ids").rows == 50


def test_a_model_that_chooses_all_its_experts_repeats_rows() -> None:
    ids = np.tile(np.arange(2, dtype=np.uint8), (30, 4, 1))
    assert tally(ids, 2, "r.npy", "ids").counts.tolist() == [[30, 30]] * 4


def test_prompt_rows_that_an_external_cache_never_computed_are_refused() -> None:
    """Tokens of an external KV cache had rows of zeros, decode rows were right (vllm#39568)."""
    ids = routed(30)
    ids[:12] = 0
    text = refused(ids, 8)
    assert "ids[row 0,layer 0]: found ids [0, 0] in every layer" in text
    assert "the row was never written" in text
    assert tally(ids[12:], 8, "r.npy", "decode").rows == 18


def test_a_draft_layer_written_over_the_first_is_seen_where_it_repeats() -> None:
    """The draft's buffer overwrote layer 0 of the target (vllm#48622): half-written rows repeat."""
    ids = routed(30)
    ids[::2, 0] = ids[::2, 0, :1]
    text = refused(ids, 8)
    assert "ids[row 0,layer 0]" in text and "a duplicate is a placeholder" in text


@pytest.mark.parametrize(
    ("ids", "experts", "text"),
    [
        (np.zeros((3, 2), np.uint8), 8, "found [3, 2], expected [rows, 1 to 4096 layers, top-k]"),
        (np.zeros((0, 9999, 1), np.uint8), 8, "found [0, 9999, 1], expected [rows"),
        (np.zeros((3, 2, 0), np.uint8), 8, "found [3, 2, 0], expected [rows"),
        (np.zeros((0, 2, 9), np.uint8), 8, "found 9 ids a row, expected at most 8 ids"),
        (np.zeros((0, 2, 1 << 40), np.uint8), 8, "ids a row, expected at most 8 ids"),
        (np.zeros((0, 2, 2), np.uint8), [8], "found 2 layers, expected 1 layers"),
        (np.zeros((0, 2, 2), np.uint8), 1 << 20, "experts, expected 1 to 65536"),
        (np.zeros((2, 2, 2), np.bool_), 8, "found bool, expected integer expert ids"),
        (np.zeros((2, 2, 2), np.object_), 8, "found object, expected integer expert ids"),
    ],
)
def test_shapes_and_types(ids: npt.NDArray[Any], experts: Any, text: str) -> None:
    assert text in refused(ids, experts)


@given(
    st.sampled_from(INTEGERS).flatmap(
        lambda t: hnp.arrays(t, hnp.array_shapes(min_dims=1, max_dims=4, max_side=5))
    ),
    st.integers(1, 300),
)
def test_random_integers_never_crash(ids: npt.NDArray[Any], experts: int) -> None:
    try:
        result = tally(ids, experts, "r.npy", "ids")
    except FormatError as error:
        assert "\n" not in str(error) and str(error).startswith("r.npy: ids")
        return
    assert result.rows + result.padding == len(ids)
    dense = dense_layers(ids, "r.npy", "ids")
    for layer, total in enumerate(result.counts.sum(axis=1)):
        assert total == (0 if layer in dense else result.rows * ids.shape[2])


@given(
    st.integers(1, 40),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 99),
    st.sampled_from(INTEGERS),
)
def test_routing_is_counted_as_by_hand(
    rows: int, layers: int, k: int, seed: int, dtype: str
) -> None:
    ids = routed(rows, layers, 50, k, dtype, seed)
    counts = count(ids, 60, "r.npy", "ids", dense=())
    assert (counts == by_hand(ids, 60)).all()
    order = np.random.default_rng(seed).permutation(rows)
    assert (count(ids[order], 60, "r.npy", "ids", dense=()) == counts).all()


@given(st.data())
def test_one_damaged_id_of_a_row_never_passes(data: st.DataObject) -> None:
    ids = routed(30, 3, 40, 3, np.int32, seed=data.draw(st.integers(0, 9)))
    at = tuple(data.draw(st.integers(0, n - 1)) for n in ids.shape)
    other = int(ids[at[0], at[1], (at[2] + 1) % 3])
    ids[at] = data.draw(st.sampled_from([-1, -7, 40, 255, 65535, 2**31 - 1, other]))
    text = refused(ids, 40)
    assert f"layer {at[1]}]" in text


def distinct(ids: npt.NDArray[Any], size: int) -> tuple[int, list[int]]:
    windows = len(ids) // size
    sums = [
        sum(len(np.unique(ids[w * size : (w + 1) * size, layer])) for w in range(windows))
        for layer in range(ids.shape[1])
    ]
    return windows, sums


@given(st.integers(0, 70), st.integers(1, 3), st.integers(0, 9), st.sampled_from(INTEGERS))
def test_touched_counts_distinct_experts_of_each_window(
    rows: int, k: int, seed: int, dtype: str
) -> None:
    ids = routed(rows, 3, 9, k, dtype, seed)
    steps, sums = touched(ids, (1, 2, 3, 8, 64))
    assert steps.shape == (64,) and sums.shape == (64, 3)
    for size in range(1, 65):
        windows, want = distinct(ids, size) if size in (1, 2, 3, 8, 64) else (0, [0, 0, 0])
        assert int(steps[size - 1]) == windows and sums[size - 1].tolist() == want


def test_touched_over_chunks_padding_and_dense_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_CHUNK_BYTES", 1 << 12)
    ids = routed(9000, layers=4, experts=300, k=4, dtype=np.int64)
    padded = np.insert(ids, [5, 17, 17, 8000], -1, axis=0)
    padded[:, 2] = 0
    steps, sums = touched(padded, (2, 7), dense=(2,))
    for size in (2, 7):
        windows, want = distinct(ids, size)
        want[2] = 0
        assert int(steps[size - 1]) == windows and sums[size - 1].tolist() == want


@pytest.mark.parametrize("sizes", [(), (0, 1), (65,)])
def test_touched_window_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes: found"):
        touched(routed(9), sizes)


@given(
    st.sampled_from(INTEGERS).flatmap(
        lambda t: hnp.arrays(t, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5))
    )
)
def test_touched_never_crashes(ids: npt.NDArray[Any]) -> None:
    steps, sums = touched(ids, (1, 3))
    assert int(steps[0]) <= len(ids) and (sums >= 0).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda ids: np.asfortranarray(ids),
        lambda ids: np.repeat(ids, 2, axis=1)[:, ::2],
        lambda ids: ids[::-1][::-1],
    ],
)
def test_memory_layout_does_not_matter(
    change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
) -> None:
    ids = routed(500)
    assert (count(change(ids), 8, "r.npy", "ids") == by_hand(ids, 8)).all()
