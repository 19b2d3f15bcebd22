"""A part of a census is a census: its checks hold, parts make up the whole, none is empty."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.census import filters
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.census import FIDELITY, Census, CensusHeader, check
from tests.census.samples import census, header

Filter = Callable[[Census], Census]


def sample(**over: object) -> Census:
    return census("a", "b", "c", "d", **over)  # type: ignore[arg-type]


def ids(data: Census) -> list[bytes]:
    return [row.tobytes() for row in data.transcript_id]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(FormatError) as error:
        call()
    return str(error.value)


def test_a_window_has_its_start_and_not_its_end() -> None:
    data = header(sample(created=[10, 20, 20, 30]), window=(0, 40))
    part = filters.by_window(data, 20, 30)
    assert part.created.tolist() == [20, 20] and part.header.window == (20, 30)
    assert filters.by_window(data, start=30).header.window == (30, 40)
    assert filters.by_window(data, end=11).header.window == (0, 11)
    assert part.header.selection.used == 2
    assert part.header.selection.skipped == {"OutsideWindow": 2}


def test_a_window_that_the_header_did_not_say_is_not_claimed() -> None:
    data = header(sample(created=[10, 20, 20, 90]), window=(5, 40))
    assert filters.by_window(data, 0, 50).header.window == (5, 40)
    assert filters.by_window(data, 50).header.window == (50, 90)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: filters.by_window(sample(), 100, 200),
            "census: window [100, 200): found 0 of 4 transcripts, expected at least one "
            "(created 0 to 3)",
        ),
        (
            lambda: filters.by_session(sample(), [0, 9]),
            "census: session: found 9, expected one of the 4 sessions (0 to 3)",
        ),
        (
            lambda: filters.by_session(sample(), []),
            "census: sessions []: found 0 of 4 transcripts, expected at least one",
        ),
        (
            lambda: filters.by_fidelity(sample(fidelity=[0, 0, 1, 1]), ["live"]),
            "census: fidelity live: found 0 of 4 transcripts, expected at least one "
            "(it has tokens, rendered)",
        ),
        (
            lambda: filters.by_fidelity(sample(), ["Tokens"]),
            "census: fidelity: found Tokens, expected one of tokens, rendered, generated, live",
        ),
        (
            lambda: filters.by_prompt_length(sample(), 2, None),
            "census: prompt length [2, ): found 0 of 4 transcripts, expected at least one "
            "(tokens 1 to 1)",
        ),
        (
            lambda: filters.by_phase(sample(), "verify"),  # type: ignore[arg-type]
            "census: phase: found verify, expected prefill or decode",
        ),
        (
            lambda: filters.by_window(census(), 0, 1),
            "census: window [0, 1): found 0 of 0 transcripts, expected at least one",
        ),
        (
            lambda: filters.by_phase(filters.by_phase(sample(), "decode"), "prefill"),
            "census: phase prefill: found no rows, expected at least one",
        ),
    ],
)
def test_an_empty_part_is_refused_by_its_filter(call: Callable[[], object], text: str) -> None:
    assert refused(call) == text


def test_sessions_are_taken_whole() -> None:
    """Even and odd rows of one session agree too well (imp#1358, struck by its author)."""
    data = sample(session=[4, 7, 4, 9])
    part = filters.by_session(data, {4, 9})
    assert ids(part) == [ids(data)[i] for i in (0, 2, 3)]
    assert part.session.tolist() == [4, 4, 9]
    assert (part.rows == data.rows[[0, 2, 3]]).all()


def test_fidelity_and_prompt_length() -> None:
    data = sample(fidelity=[0, 1, 2, 3], prompt_len=[10, 100, 1000, 10000])
    assert ids(filters.by_fidelity(data, ["tokens", "live"])) == [ids(data)[i] for i in (0, 3)]
    assert filters.by_prompt_length(data, 100, 10000).prompt_len.tolist() == [100, 1000]
    assert filters.by_prompt_length(data, to_tokens=11).prompt_len.tolist() == [10]


def test_a_phase_is_a_view_for_placement() -> None:
    data = sample()
    decode, prefill = filters.by_phase(data, "decode"), filters.by_phase(data, "prefill")
    assert (filters.totals(data) == data.decode()).all()
    assert (filters.totals(data, "prefill") == data.counts[:, 0].sum(axis=0)).all()
    assert (filters.totals(data, "all") == data.counts.sum(axis=(0, 1))).all()
    assert (filters.totals(decode) == filters.totals(data)).all()
    assert not filters.totals(decode, "prefill").any() and not prefill.decode().any()
    assert (decode.counts + prefill.counts == data.counts).all()
    assert (decode.rows + prefill.rows == data.rows).all()


def test_touched_experts_go_with_the_transcripts() -> None:
    data = census("a", "b")
    data = type(data)(**{**data.__dict__, "steps": np.array([3]), "touched": np.array([[6, 6]])})
    assert filters.by_phase(data, "decode").steps is not None
    assert filters.by_phase(data, "prefill").steps is None
    assert filters.by_window(data, 0).touched is not None
    assert filters.by_window(data, 1).touched is None
    assert filters.by_window(data, 1).steps is None


PARTITIONS: list[tuple[str, Callable[[Census], list[Filter]]]] = [
    (
        "window",
        lambda _: [lambda d: filters.by_window(d, None, 2), lambda d: filters.by_window(d, 2)],
    ),
    (
        "session",
        lambda data: [
            lambda d, s=s: filters.by_session(d, [s])  # type: ignore[misc]
            for s in sorted(set(data.session.tolist()))
        ],
    ),
    (
        "fidelity",
        lambda _: [lambda d, n=n: filters.by_fidelity(d, [n]) for n in FIDELITY],  # type: ignore[misc]
    ),
    (
        "prompt length",
        lambda _: [
            lambda d: filters.by_prompt_length(d, None, 1),
            lambda d: filters.by_prompt_length(d, 1, 3),
            lambda d: filters.by_prompt_length(d, 3, None),
        ],
    ),
]


@pytest.mark.parametrize(
    "parts_of", [parts for _, parts in PARTITIONS], ids=[n for n, _ in PARTITIONS]
)
@given(st.data())
def test_filters_partition_a_census(
    parts_of: Callable[[Census], list[Filter]], data: st.DataObject
) -> None:
    numbers = st.lists(st.integers(0, 3), min_size=4, max_size=4)
    whole = sample(
        seed=data.draw(st.integers(0, 9)),
        session=data.draw(numbers),
        created=data.draw(numbers),
        fidelity=data.draw(numbers),
        prompt_len=data.draw(numbers),
    )
    found: list[bytes] = []
    totals = np.zeros_like(whole.counts[0])
    for choose in parts_of(whole):
        try:
            part = choose(whole)
        except FormatError as error:
            assert "found 0 of 4 transcripts" in str(error)
            continue
        check(part, "part")
        assert CensusHeader.from_wire(part.header.to_wire(), "part") == part.header
        found += ids(part)
        totals += part.counts.sum(axis=0)
        selection = part.header.selection
        assert selection.used + sum(selection.skipped.values()) == selection.considered
    assert sorted(found) == sorted(ids(whole))
    assert (totals == whole.counts.sum(axis=0)).all()
