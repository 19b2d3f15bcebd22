"""Canonical JSON, refusals in one line, and readers that survive any bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats.base import (
    FormatError,
    canonical_json,
    load_json,
    sha256_digest,
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_canonical_json_is_read_back_and_stable(value: Any) -> None:
    raw = canonical_json(value)
    assert raw.endswith(b"\n") and raw.count(b"\n") == 1
    assert load_json(raw, "file") == value
    assert canonical_json(load_json(raw, "file")) == raw


@given(st.binary(max_size=200))
def test_any_bytes_are_json_that_can_be_written_back_or_refused_in_a_line(raw: bytes) -> None:
    try:
        value = load_json(raw, "file")
    except FormatError as error:
        assert "\n" not in str(error) and str(error).startswith("file: ")
    else:
        canonical_json(value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\xff", "file: byte 0: found not UTF-8, expected UTF-8 JSON"),
        (b"{", "file: line 1 column 2: found Expecting property name enclosed in double quotes,"),
        (b'{"a":1,"a":2}', "file: a: found the key twice, expected each key once"),
        (b"[NaN]", "file: a number: found NaN, expected a finite number"),
        (b"-Infinity", "file: a number: found -Infinity, expected a finite number"),
        (b"1e999", "file: a number: found a number beyond a double, expected a finite number"),
        (b"9" * 5000, "file: a number: found too many digits, expected a number"),
        (b'"\\ud800"', "file: a string: found a lone surrogate, expected whole characters"),
        (b'{"\\uDC00":1}', "file: a string: found a lone surrogate, expected whole characters"),
        (b"[" * 200000, "file: top level: found too deep a nesting, expected flat JSON"),
    ],
)
def test_refusals_name_file_place_found_and_expected(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError) as refused:
        load_json(raw, "file")
    assert str(refused.value).startswith(message)


def test_escaped_pairs_of_surrogates_are_characters() -> None:
    assert load_json(b'"\\ud83d\\ude00"', "file") == "\U0001f600"


def test_the_digest_is_spelled_in_full() -> None:
    empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_digest(b"") == empty
