"""Positions into phases: segments, preemption, prefix-cache hits, drafts."""

from __future__ import annotations

from typing import Any

import expertmaps_hook_positions as positions
import pytest
from hypothesis import given
from hypothesis import strategies as st


def forced(length: int, *segments: tuple[int, int], slot: int | None = 0) -> positions.Tracked:
    return positions.Tracked(length, positions.Tag("t", segments), slot)


def labels(tracked: positions.Tracked, start: int, count: int) -> str:
    """One letter for each row: p, d, or - for dropped."""
    base = None if tracked.slot is None else 2 * tracked.slot
    runs = positions.phase_runs(tracked, start, count, base)[0]
    names = {positions.DROPPED: "-", base: "p", (base or 0) + 1: "d"}
    return "".join(names[bucket] * rows for bucket, rows in runs)


def test_segments_are_decode_and_the_rest_prefill() -> None:
    tracked = forced(10, (3, 5), (8, 10))
    assert labels(tracked, 0, 10) == "pppddpppdd"
    assert labels(tracked, 4, 3) == "dpp"
    assert labels(tracked, 10, 1) == "d"  # what it generates by itself


def test_untagged_rows_go_to_no_slot_but_are_phased() -> None:
    tracked = positions.Tracked(4)
    runs, prefill, decode, recomputed = positions.phase_runs(tracked, 2, 4, None)
    assert {bucket for bucket, _ in runs} == {positions.DROPPED}
    assert (prefill, decode, recomputed) == (2, 2, 0)


def test_preemption_counts_each_position_once() -> None:
    ledger = positions.Ledger()
    tracked = ledger.add("r", 8)
    tracked.tag, tracked.slot = positions.Tag("t", ((4, 8),)), 0
    assert ledger.step([("r", 0, 6, 0)]).complete == []
    ledger.resume("r")
    step = ledger.step([("r", 0, 8, 0)])
    assert step.complete == ["r"]
    assert step.runs == [(positions.DROPPED, 6), (1, 2)]
    assert (tracked.prefill, tracked.decode, tracked.recomputed) == (4, 4, 6)


def test_preemption_replays_generated_rows_too() -> None:
    ledger = positions.Ledger()
    ledger.add("r", 4)
    ledger.step([("r", 0, 4, 0)])
    ledger.step([("r", 4, 1, 0)])
    ledger.add("r", 4)  # the V2 runner adds a preempted request as a new one
    ledger.step([("r", 0, 6, 0)])
    totals = ledger.totals
    assert (totals.prefill, totals.decode, totals.recomputed) == (4, 2, 5)


def test_drafts_are_verified_and_are_no_ones_decode() -> None:
    """Two drafts a step, the first step's both rejected, the second's first one accepted."""
    ledger = positions.Ledger()
    tracked = ledger.add("r", 4)
    tracked.tag, tracked.slot = positions.Tag("t", None), 0
    ledger.step([("r", 0, 4, 0)])
    step = ledger.step([("r", 4, 3, 2)])
    assert step.runs == [(1, 1), (positions.DROPPED, 2)]
    ledger.step([("r", 5, 3, 2)])
    ledger.step([("r", 7, 3, 2)])
    totals = ledger.totals
    assert (totals.prefill, totals.decode, totals.verify, totals.recomputed) == (4, 3, 6, 0)


def test_drafts_after_the_last_prompt_row_are_not_in_a_forced_transcript() -> None:
    ledger = positions.Ledger()
    tracked = ledger.add("r", 8)
    tracked.tag, tracked.slot = positions.Tag("t", ((4, 8),)), 0
    assert ledger.step([("r", 0, 7, 0)]).complete == []
    step = ledger.step([("r", 7, 3, 2)])
    assert step.complete == ["r"] and step.runs == [(1, 1), (positions.DROPPED, 2)]
    assert (tracked.prefill, tracked.decode) == (4, 4)


def test_a_preemption_replays_no_position_that_only_a_draft_had() -> None:
    ledger = positions.Ledger()
    ledger.add("r", 4)
    ledger.step([("r", 0, 4, 0)])
    ledger.step([("r", 4, 3, 2)])  # both rejected: position 5 was never the transcript's
    ledger.resume("r")
    ledger.step([("r", 0, 6, 0)])
    totals = ledger.totals
    assert (totals.decode, totals.verify, totals.recomputed) == (2, 2, 5)


def test_rows_that_rebuild_a_window_after_a_cache_hit_are_apart() -> None:
    """A hit of 6 of 9 tokens, rewound by a window of 4: positions 2 to 5 are fed once more."""
    ledger = positions.Ledger()
    ledger.replayed = 4
    ledger.add("r", 9, replay_start=2)
    ledger.step([("r", 2, 7, 0)])
    assert (ledger.totals.prefill, ledger.totals.recomputed) == (3, 4)
    ledger.add("s", 9)
    ledger.step([("s", 0, 9, 0)])
    assert (ledger.totals.prefill, ledger.totals.recomputed) == (12, 4)


def test_a_prompt_that_a_client_streams_grows() -> None:
    ledger = positions.Ledger()
    ledger.add("r", 4)
    ledger.step([("r", 0, 4, 0)])
    ledger.step([("r", 4, 1, 0)])
    ledger.add("r", 9)
    ledger.step([("r", 5, 4, 0)])
    assert (ledger.totals.prefill, ledger.totals.decode) == (8, 1)


class Decoder:
    """A request that decodes with drafts: plans as a scheduler makes them, and the truth."""

    def __init__(self, prompt: int) -> None:
        self.ledger, self.prompt, self.at = positions.Ledger(), prompt, 0
        self.ledger.add("r", prompt)
        self.decode = self.verify = 0

    def step(self, drafts: int, accepted: int) -> None:
        rows = 1 + drafts if self.at >= self.prompt else self.prompt - self.at
        if self.at < self.prompt:
            drafts = accepted = 0
            self.at = self.prompt
            start = self.prompt - rows
        else:
            start = self.at
            self.decode += 1
            self.at += 1 + accepted
        self.verify += drafts
        self.ledger.step([("r", start, rows, drafts)])


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_no_draft_ever_counts_as_decode(prompt: int, steps: list[tuple[int, int]]) -> None:
    decoder = Decoder(prompt)
    for drafts, accepted in steps:
        decoder.step(drafts, min(drafts, accepted))
    totals = decoder.ledger.totals
    assert (totals.decode, totals.verify) == (decoder.decode, decoder.verify)
    assert totals.prefill == (prompt if steps else 0) and totals.recomputed == 0


def test_prefix_cache_hit_shows_as_missing_rows() -> None:
    ledger = positions.Ledger()
    tracked = ledger.add("r", 8)
    tracked.tag, tracked.slot = positions.Tag("t", ((4, 8),)), 0
    assert ledger.step([("r", 6, 2, 0)]).complete == ["r"]
    assert (tracked.prefill, tracked.decode) == (0, 2)


def test_an_unknown_request_is_dropped() -> None:
    assert positions.Ledger().step([("x", 0, 3, 0)]).runs == [(positions.DROPPED, 3)]


@given(
    st.integers(1, 60),
    st.lists(st.integers(0, 60), max_size=8, unique=True),
    st.lists(st.integers(1, 9), min_size=1),
    st.integers(0, 59),
    st.sampled_from(["v1", "v2"]),
)
def test_any_chunking_and_preemption_counts_every_row_once(
    length: int, cuts: list[int], chunks: list[int], preempt: int, runner: str
) -> None:
    points = sorted(cut for cut in cuts if cut <= length)
    segments = tuple(zip(points[::2], points[1::2], strict=False))
    ledger = positions.Ledger()
    tracked = ledger.add("r", length)
    tracked.tag, tracked.slot = positions.Tag("t", segments), 3
    table = {6: 0, 7: 0, positions.DROPPED: 0}
    done, at, index, preempted = [], 0, 0, False
    while at < length:
        count = min(chunks[index % len(chunks)], length - at)
        step = ledger.step([("r", at, count, 0)])
        done += step.complete
        for bucket, rows in step.runs:
            table[bucket] += rows
        at, index = at + count, index + 1
        if at > preempt and not preempted and at < length:
            if runner == "v1":
                ledger.resume("r")
            else:
                assert ledger.add("r", length) is tracked
            at, preempted = 0, True
    expected = sum(end - start for start, end in segments)
    assert done == ["r"]
    assert (tracked.decode, tracked.prefill) == (expected, length - expected)
    assert (table[7], table[6]) == (expected, length - expected)
    assert table[positions.DROPPED] == tracked.recomputed


def test_a_tag_from_xargs() -> None:
    tag = positions.read_tag({"expertmaps_t": "a-B_9", "expertmaps_seg": [2, 5, 7, 9]}, 9)
    assert tag == positions.Tag("a-B_9", ((2, 5), (7, 9)))
    assert positions.read_tag({"expertmaps_t": "x"}, 9) == positions.Tag("x", None)
    assert positions.read_tag({"expertmaps_t": "x", "expertmaps_seg": []}, 9) == positions.Tag(
        "x", ()
    )
    assert positions.read_tag({"other": 1}, 9) is None
    assert positions.read_tag(None, 9) is None


@pytest.mark.parametrize("name", ["", "a/b", "../x", "ü", "a" * 65, 5, None, "a\n"])
def test_an_id_that_is_no_file_name_is_refused(name: Any) -> None:
    with pytest.raises(positions.TagError) as caught:
        positions.read_tag({"expertmaps_t": name}, 9)
    assert caught.value.transcript is None


@pytest.mark.parametrize(
    "segments", [[1], [1, 1], [3, 2], [0, 10], [2, 4, 3, 5], [-1, 2], ["1", 2], [True, 2], "12", 5]
)
def test_segments_that_do_not_fit_are_refused(segments: Any) -> None:
    with pytest.raises(positions.TagError) as caught:
        positions.read_tag({"expertmaps_t": "x", "expertmaps_seg": segments}, 9)
    assert (caught.value.reason, caught.value.transcript) == ("SegmentsInvalid", "x")


def test_children_of_parallel_sampling() -> None:
    assert positions.is_child("1_cmpl-abc")
    assert not positions.is_child("cmpl-abc-0")
    assert not positions.is_child("12")
