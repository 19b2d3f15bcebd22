"""Merging never counts twice, mixes models or shows order; age is a weight beside the counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.census import merge as merging
from rowmap_jobs.census.merge import merge, weighted, weights
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.census import Census, OffPolicy, Speculation, check, to_bytes
from tests.census.samples import census, header, transcript
from tests.formats.samples import digest

NAMES = st.lists(st.sampled_from("abcdef"), max_size=4, unique=True)


@st.composite
def some(draw: st.DrawFn) -> Census:
    """A census of a few of six transcripts, in sessions and times by lot."""
    names = draw(NAMES)
    numbers = st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names))
    return census(
        *names,
        seed=draw(st.integers(0, 5)),
        session=draw(numbers),
        created=draw(numbers),
        fidelity=draw(numbers),
    )


def refused(*censuses: Census) -> str:
    with pytest.raises(FormatError) as error:
        merge(censuses)
    return str(error.value)


def groups(data: Census) -> set[frozenset[bytes]]:
    """Sessions as sets of transcript ids."""
    out: dict[int, set[bytes]] = {}
    for session, name in zip(data.session.tolist(), data.transcript_id, strict=True):
        out.setdefault(session, set()).add(name.tobytes())
    return {frozenset(names) for names in out.values()}


def test_transcripts_of_two_windows_come_together() -> None:
    one = header(census("a", "b"), window=(0, 10))
    two = header(census("c", "d", seed=1, created=[7, 3]), window=(5, 30))
    both = merge([one, two])
    assert len(both.created) == 4 and both.created.tolist() == [0, 1, 3, 7]
    assert (both.counts.sum(axis=0) == one.counts.sum(axis=0) + two.counts.sum(axis=0)).all()
    assert both.header.window == (0, 30)
    assert both.header.selection.used == both.header.selection.considered == 4


def test_sessions_of_two_runs_stay_apart() -> None:
    """Both runs number their sessions from 0; these are not the same people."""
    both = merge([census("a", "b", session=[0, 0]), census("c", "d", session=[0, 1])])
    assert groups(both) == {
        frozenset({transcript("a").tobytes(), transcript("b").tobytes()}),
        frozenset({transcript("c").tobytes()}),
        frozenset({transcript("d").tobytes()}),
    }


def test_a_session_seen_in_two_runs_is_one() -> None:
    """A split that leaves half of a session in training looks steadier than it is (imp#1358)."""
    both = merge([census("a", "b", session=[3, 3]), census("b", "c", "d", session=[0, 0, 1])])
    assert {len(group) for group in groups(both)} == {3, 1}
    chain = merge(
        [
            census("a", "b", session=[0, 0]),
            census("c", "d", session=[0, 0]),
            census("d", "a", session=[0, 0]),
        ]
    )
    assert len(groups(chain)) == 1


def test_a_transcript_counted_twice_is_taken_once_and_the_newer() -> None:
    old = census("a", "b", created=[5, 5])
    new = census("b", seed=3, created=[9])
    for order in ([old, new], [new, old]):
        both = merge(order)
        assert both.created.tolist() == [5, 9]
        assert (both.counts[1] == new.counts[0]).all()
        assert both.header.selection.used == 2
        assert both.header.selection.skipped == {"CountedTwice": 1}


def test_of_two_counts_at_one_time_recorded_ids_win() -> None:
    recorded, generated = census("a", fidelity=[0]), census("a", seed=4, fidelity=[2])
    both = merge([generated, recorded])
    assert both.fidelity.tolist() == [0] and (both.counts == recorded.counts).all()


def test_a_census_merged_with_itself_is_itself() -> None:
    one = census("a", "b", "c", session=[1, 0, 1])
    both, alone = merge([one, one]), merge([one])
    assert (both.counts == alone.counts).all() and groups(both) == groups(alone)


def test_transcripts_without_ids_cannot_be_told_apart() -> None:
    nameless = replace(census("a", "b"), transcript_id=np.zeros((2, 32), np.uint8))
    assert "transcript_id: found 2 transcripts without an id (zeros)" in refused(nameless)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            header(
                census("b"),
                fingerprint=census("b").header.fingerprint.model_copy(
                    update={"router": digest("tuned")}
                ),
            ),
            "merge: census 1 fingerprint.router: found " + digest("tuned"),
        ),
        (header(census("b"), traffic_class="chat"), "merge: census 1 class: found chat, expected"),
        (
            header(
                census("b"),
                capture=census("b").header.capture.model_copy(update={"method": "native"}),
            ),
            "merge: census 1 capture.method: found native, expected forced as in census 0",
        ),
        (
            replace(census("b"), layer_ids=np.array([3, 8], np.int32)),
            "merge: census 1 layer_ids: found [3, 8], expected [3, 7] as in census 0",
        ),
        (
            # 76 layers of 256 with the MTP layer, 75 without: both complete (colibri#175).
            replace(
                census("b"),
                counts=census("b").counts[:, :, :1],
                **{n: getattr(census("b"), n)[:1] for n in ("layer_ids", "experts", "top_k")},
            ),
            "merge: census 1 layer_ids: found [3], expected [3, 7] as in census 0",
        ),
    ],
)
def test_what_is_not_alike_is_not_merged(other: Census, text: str) -> None:
    assert refused(census("a"), other).startswith(text)


def test_nothing_to_merge() -> None:
    assert refused() == "merge: censuses: found none, expected at least one"
    assert len(merge([census(), census()]).created) == 0


def test_a_merge_that_no_file_could_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_TRANSCRIPTS", 3)
    text = refused(census("a", "b"), census("c", "d"))
    assert "transcripts: found 4 transcripts" in text and "at most 3" in text
    monkeypatch.setattr(merging, "MAX_UNPACKED", (1 << 20) + 500)
    assert "bytes, expected at most 3 within 1049076 bytes" in refused(census("a", "b"))


def test_headers_are_added() -> None:
    base = census("a").header
    one = header(
        census("a"),
        window=(5, 9),
        off_policy=OffPolicy(top1=0.5, mean_logprob=-1.0, n=30),
        speculation=Speculation(k=3, acceptance=0.6),
        capture=base.capture.model_copy(update={"missed": 2, "engine_version": "0.31.0"}),
        selection=base.selection.model_copy(update={"seed": 4, "skipped": {"Echo": 2, "X": 1}}),
    )
    two = header(
        census("b"),
        window=(2, 20),
        off_policy=OffPolicy(top1=0.9, mean_logprob=-2.0, n=10),
        speculation=Speculation(k=3, acceptance=0.6),
        capture=base.capture.model_copy(update={"missed": 3, "hook_digest": digest("newer")}),
        selection=base.selection.model_copy(update={"seed": 1, "skipped": {"Echo": 5}}),
    )
    both = merge([one, two]).header
    assert both == merge([two, one]).header
    assert both.window == (2, 20) and both.capture.missed == 5
    assert both.capture.engine_version == "0.31.0, 0.32.0"
    assert both.capture.hook_digest == digest("newer")
    assert both.selection.seed == 1 and both.selection.skipped == {"Echo": 7, "X": 1}
    assert both.off_policy == OffPolicy(top1=0.6, mean_logprob=-1.25, n=40)
    assert both.speculation == Speculation(k=3, acceptance=0.6)
    third = merge([header(one, speculation=Speculation(k=5, acceptance=0.6)), two])
    assert third.header.speculation is None


def test_touched_experts_are_added() -> None:
    short = replace(census("a"), steps=np.array([4]), touched=np.array([[8, 8]]))
    long = replace(
        census("b"), steps=np.array([1, 2, 0]), touched=np.array([[2, 2], [7, 6], [0, 0]])
    )
    both = merge([short, long, census("c")])
    assert both.steps is not None and both.steps.tolist() == [5, 2, 0]
    assert both.touched is not None and both.touched.tolist() == [[10, 10], [7, 6], [0, 0]]
    assert merge([census("a")]).steps is None


@given(st.lists(some(), min_size=1, max_size=3), st.randoms())
def test_order_of_censuses_and_transcripts_does_not_show(parts: list[Census], random: Any) -> None:
    expected = to_bytes(merge(parts))
    shuffled = []
    for part in parts:
        order = list(range(len(part.created)))
        random.shuffle(order)
        names = ("counts", "rows", "session", "transcript_id", "fidelity", "prompt_len", "created")
        shuffled.append(replace(part, **{n: getattr(part, n)[order] for n in names}))
    for some_order in permutations(shuffled):
        assert to_bytes(merge(some_order)) == expected


@given(some(), some(), some())
def test_merging_in_steps_gives_the_same(a: Census, b: Census, c: Census) -> None:
    whole = merge([a, b, c])
    for stepwise in (merge([merge([a, b]), c]), merge([a, merge([b, c])])):
        assert to_bytes(stepwise) == to_bytes(whole)
    check(whole, "whole")


@given(some())
def test_totals_are_those_of_the_distinct_transcripts(a: Census) -> None:
    assert (merge([a, a]).counts.sum(axis=0) == a.counts.sum(axis=0)).all()


def test_a_half_life_halves() -> None:
    data = census("a", "b", "c", created=[1000, 900, 800])
    assert weights(data, 1000, 100).tolist() == [1.0, 0.5, 0.25]
    assert weights(data, 500, 100).tolist() == [1.0, 1.0, 1.0]  # clocks may differ
    assert weights(data, 10**6, 10**6).shape == (3,)


@pytest.mark.parametrize("half_life", [0, -1, float("nan"), float("inf")])
def test_half_lives_are_above_zero(half_life: float) -> None:
    with pytest.raises(FormatError, match="half-life: found"):
        weights(census("a"), 10, half_life)


def test_weights_that_are_all_lost_are_refused() -> None:
    with pytest.raises(FormatError, match="created: found the newest transcript 999999 seconds"):
        weights(census("a", "b"), 10**6, 100)
    extremes = census("a", "b", created=[-(2**63), 2**63 - 1])
    assert weights(extremes, 0, 1e-300).tolist() == [0.0, 1.0]


def test_weighted_counts_are_decode_counts_by_weight() -> None:
    data = census("a", "b")
    got = weighted(data, np.array([0.5, 2.0]))
    assert got.dtype == np.float64
    assert np.allclose(got, 0.5 * data.counts[0, 1] + 2.0 * data.counts[1, 1])
    assert data.counts.dtype == np.int64


@given(st.integers(1, 6), st.floats(0.01, 10), st.integers(0, 9))
def test_equal_weights_keep_ties(transcripts: int, weight: float, seed: int) -> None:
    """0.3 x 1 + 0.3 x 2 in another order differs in the last bit, and would break a tie."""
    data = census(*(str(i) for i in range(transcripts)), seed=seed)
    got = weighted(data, np.full(transcripts, weight))
    assert (got == weight * data.decode()).all()


@given(st.integers(1, 6), st.integers(0, 9), st.randoms())
def test_weights_follow_their_transcripts(transcripts: int, seed: int, random: Any) -> None:
    data = census(*(str(i) for i in range(transcripts)), seed=seed)
    order = list(range(transcripts))
    random.shuffle(order)
    values = weights(data, 10, 2.5)
    moved = replace(data, counts=data.counts[order])
    assert (weighted(moved, values[order]) == weighted(data, values)).all()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0], r"shape: found \[1\], expected \[2\]"),
        ([1.0, -1.0], "values: found a negative or no number"),
        ([1.0, np.nan], "values: found a negative or no number"),
        ([0.0, 0.0], "values: found no weight above 0"),
    ],
)
def test_weights_that_mean_nothing(values: list[float], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        weighted(census("a", "b"), np.array(values))
