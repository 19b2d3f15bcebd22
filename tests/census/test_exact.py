"""Totals of others become int64 exactly, or are refused: never wrapped, never rounded."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.census.exact import exact_counts, exact_int64
from rowmap_jobs.formats.base import FormatError


def refused(array: npt.NDArray[Any]) -> str:
    with pytest.raises(FormatError) as error:
        exact_int64(array, "m.gguf", "counts")
    return str(error.value)


def test_sixty_two_profiles_do_not_wrap() -> None:
    """An int32 total wraps after 62 profiles of 34.4 million selections; ours does not."""
    profile = np.full((40, 384), 2239, dtype=np.int32)  # 34.4 million selections
    total = sum(exact_int64(profile, "m.gguf", "counts") for _ in range(63))
    assert int(np.sum(total)) == 63 * 40 * 384 * 2239 > 2**31


def test_a_total_that_did_wrap_is_negative_and_refused() -> None:
    wrapped = np.array([[3, 2**31 - 1], [5, 1]], dtype=np.int32) + np.int32(1)
    with pytest.raises(FormatError) as error:
        exact_counts(wrapped, "m.gguf", "counts")
    assert str(error.value).startswith("m.gguf: counts[0,1]: found -2147483648, expected counts of")


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float16", 2**11), ("float32", 2**24), ("float64", 2**53)]
)
def test_floats_are_exact_below_a_power_of_two(dtype: str, limit: int) -> None:
    """imatrix counts are float32: 16,777,216 + 1 is 16,777,216 (llama.cpp#9400)."""
    exact = np.array([0, 1, limit - 1], dtype=dtype)
    assert exact_int64(exact, "m.gguf", "counts").tolist() == [0, 1, limit - 1]
    text = refused(np.array([1, limit], dtype=dtype))
    assert text == (
        f"m.gguf: counts[1]: found {float(limit)}, expected a whole number below {limit} "
        f"(as far as {dtype} is exact)"
    )


@pytest.mark.parametrize("value", [0.5, np.nan, np.inf, -np.inf, -1.5])
def test_what_is_no_whole_number_is_refused(value: float) -> None:
    assert f"counts[0,1]: found {value}" in refused(np.array([[1, value]], dtype=np.float32))


def test_unsigned_totals_beyond_63_bits_are_refused() -> None:
    assert "found 18446744073709551615" in refused(np.array([1, 2**64 - 1], dtype=np.uint64))
    top = np.array([2**63 - 1], dtype=np.uint64)
    assert exact_int64(top, "m.gguf", "counts").tolist() == [2**63 - 1]


@pytest.mark.parametrize("dtype", ["bool", "complex64", "U3", "O"])
def test_other_types_are_refused_by_name(dtype: str) -> None:
    assert "expected integers, or floats that are whole" in refused(np.zeros(3, dtype=dtype))


def test_counts_are_bounded_so_that_sums_fit() -> None:
    with pytest.raises(FormatError, match="expected counts of at most 1099511627776"):
        exact_counts(np.array([1 << 41]), "m.gguf", "counts")
    with pytest.raises(FormatError, match="found -1, expected counts of 0 or more"):
        exact_counts(np.array(-1), "m.gguf", "counts")


@given(
    st.one_of(
        hnp.arrays(
            st.one_of(hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes()),
            hnp.array_shapes(min_dims=0, max_dims=3, max_side=4),
        )
    )
)
def test_random_numbers_are_kept_exactly_or_refused(array: npt.NDArray[Any]) -> None:
    try:
        out = exact_int64(array, "m.gguf", "counts")
    except FormatError as error:
        assert "\n" not in str(error)
        return
    assert out.dtype == np.int64
    assert [int(v) for v in out.ravel().tolist()] == [int(v) for v in array.ravel().tolist()]
