"""Forced counting: the prefix-cache trap, tries, order, and the trick against a real decode."""

from __future__ import annotations

import threading
from array import array

import numpy as np
import pytest

from rowmap_jobs.checks import logprobs, off_policy, trick_check
from rowmap_jobs.counts import Shape
from rowmap_jobs.engine import Engine, forced
from rowmap_jobs.hook.expertmaps_hook_positions import read_tag
from rowmap_jobs.ids import GENERATED
from rowmap_jobs.replay import ForcedCounter, fresh_id, in_parallel, replay
from rowmap_jobs.sequences import Sequence
from tests.jobs.fake_engine import EXPERTS, LAYERS, TOP_K, FakeEngine, count, encode
from tests.jobs.world import QUICK

SHAPE = Shape(LAYERS, (EXPERTS,) * len(LAYERS), TOP_K)


def counter(engine: FakeEngine) -> ForcedCounter:
    client = Engine(engine.url, engine.url + "/status", None, QUICK)
    return ForcedCounter(client, "fake", engine.folder, SHAPE)


def sequence(number: int, text: str = "a long enough text", fidelity: int = 0) -> Sequence:
    tokens = array("i", encode(f"{text} {number}"))
    return Sequence(
        bytes([number]) * 32, number, tokens, ((4, 9), (12, len(tokens))), fidelity, 0, 2
    )


def test_counts_are_those_of_a_real_decode_by_segment(engine: FakeEngine) -> None:
    one = sequence(1)
    result = replay(counter(engine), [one], 4)
    mask = np.zeros(len(one.tokens), dtype=bool)
    for start, end in one.segments:
        mask[start:end] = True
    counts, rows = count(one.tokens.tolist(), mask, np.ones(len(one.tokens), dtype=bool))
    assert (result.counts[0].counts == counts).all() and (result.counts[0].rows == rows).all()


def test_a_turn_replayed_after_its_successor_loses_nothing(engine: FakeEngine) -> None:
    long = sequence(1, "the same beginning and more of it")
    short = Sequence(b"2" * 32, 0, long.tokens[:20], ((5, 20),), 0, 0, 1)
    result = replay(counter(engine), [long, short, long], 1)
    assert not result.dropped and result.retried == 0
    assert [int(c.rows.sum()) for c in result.counts] == [len(long.tokens), 20, len(long.tokens)]


def test_without_a_fresh_salt_the_prefix_cache_would_swallow_rows(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(f"id{i}" for i in range(100))
    salts = threading.local()

    def fresh() -> str:
        # Called for the id, then for the salt: give every request the same salt.
        salts.odd = not getattr(salts, "odd", False)
        return next(names) if salts.odd else "salt"

    monkeypatch.setattr("rowmap_jobs.replay.fresh_id", fresh)
    result = replay(counter(engine), [sequence(1), sequence(1)], 1)
    assert result.dropped == {"RowsLost": 2} and len(result.counts) == 1


def test_dropped_sequences_count_all_their_turns(engine: FakeEngine) -> None:
    engine.faults.skip = ["NoSlot", "Aborted"]
    result = replay(counter(engine), [sequence(i) for i in range(3)], 1)
    assert result.dropped == {"Aborted": 2} and len(result.sequences) == 2


def test_a_refused_request_is_not_tried_twice(engine: FakeEngine) -> None:
    engine.faults.refuse_over = 22
    result = replay(counter(engine), [sequence(1), sequence(2, "far longer than that is")], 1)
    assert result.dropped == {"RequestRefused": 2} and len(engine.forced()) == 2


def test_the_hook_reads_the_tag_that_is_sent() -> None:
    one = sequence(1)
    body = forced("fake", one.tokens.tolist(), fresh_id(), fresh_id(), one.flat_segments)
    tag = read_tag(body["vllm_xargs"], len(one.tokens))
    assert tag is not None and tag.segments == one.segments


def test_results_keep_the_order_of_the_items() -> None:
    gate = threading.Barrier(4, timeout=10)

    def late(item: int) -> int:
        gate.wait()
        return item * item

    assert in_parallel(late, list(range(4)), 4) == [0, 1, 4, 9]
    assert in_parallel(late, [], 4) == []


def test_the_first_error_ends_the_rest() -> None:
    done = []

    def work(item: int) -> None:
        if item == 0:
            raise ValueError("first")
        done.append(item)

    with pytest.raises(ValueError, match="first"):
        in_parallel(work, list(range(1000)), 1)
    assert len(done) < 1000


def test_no_count_files_are_left(engine: FakeEngine) -> None:
    replay(counter(engine), [sequence(i) for i in range(3)], 2)
    assert list(engine.folder.iterdir()) == []


def test_off_policy_reads_the_recorded_response_only(engine: FakeEngine) -> None:
    client = Engine(engine.url, engine.url + "/status", None, QUICK)
    recorded, fresh = sequence(1), sequence(2, fidelity=GENERATED)
    found = off_policy(client, "fake", [recorded, fresh], 0)
    assert found is not None and found.n == recorded.decode_rows
    fed = [recorded.tokens[i] for start, end in recorded.segments for i in range(start, end)]
    assert found.top1 == pytest.approx(sum(1 for t in fed if t % 2 == 0) / len(fed))
    assert off_policy(client, "fake", [fresh], 0) is None


def test_odd_log_probabilities_are_left_out() -> None:
    one = Sequence(b"1" * 32, 0, array("i", [5, 6, 7, 8]), ((1, 4),), 0, 0, 1)
    answer = [None, {"6": {"logprob": -1.0, "rank": 1}}, {"9": {"logprob": -2.0}}, "?"]
    assert logprobs(answer, one) == [(-1.0, True)]
    assert logprobs(answer[:3], one) == [] and logprobs(None, one) == []
    assert logprobs([None, {"6": {"logprob": float("-inf")}}, None, None], one) == []


def test_the_trick_is_checked_against_a_real_decode(engine: FakeEngine) -> None:
    found = trick_check(counter(engine), [sequence(i) for i in range(6)], 0)
    assert found == {"selections": 4 * 31 * len(LAYERS) * TOP_K, "moved": 0}
    lives = [
        b
        for b in engine.posts("/v1/completions")
        if "expertmaps_seg" not in b.get("vllm_xargs", {"expertmaps_seg": 0})
    ]
    assert len(lives) == 4 and all(b["ignore_eos"] for b in lives)
