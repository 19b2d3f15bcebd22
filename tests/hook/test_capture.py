"""Count mode without an engine: steps as vLLM plans them, results as the runner reads them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import expertmaps_hook_capture as capture
import numpy as np
import pytest

from rowmap_jobs.formats import status as contract
from tests.api.apiserver import wait_for


class Array:
    """As much of a tensor as the writer needs."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)

    def cpu(self) -> Array:
        return self

    def numpy(self) -> Any:
        return self.value

    def __int__(self) -> int:
        return int(self.value)


class Counters:
    """Counts rows of each bucket instead of experts."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows = dict.fromkeys(range(-1, 2 * slots), 0)
        self.cleared: list[int] = []

    def clear_rows(self, rows: int) -> None:
        self.cleared.append(rows)

    def add(self, runs: list[tuple[int, int]]) -> None:
        for bucket, rows in runs:
            self.rows[bucket] += rows

    def take(self, slot: int) -> SimpleNamespace:
        counts = np.array([[[self.rows[2 * slot]]], [[self.rows[2 * slot + 1]]]])
        self.clear_slot(slot)
        return SimpleNamespace(counts=Array(counts), bad=Array(0), copied=None)

    def clear_slot(self, slot: int) -> None:
        self.rows[2 * slot] = self.rows[2 * slot + 1] = 0

    def missed(self) -> int:
        return 0


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[int], capture.Capture]]:
    made: list[capture.Capture] = []

    def build(slots: int = 2) -> capture.Capture:
        made.append(capture.Capture(Counters(slots), tmp_path / capture.FOLDER))
        return made[-1]

    yield build
    for item in made:
        item.writer.end()
        item.writer.join()


def new(name: str, length: int, tag: dict[str, Any] | None = None, **more: Any) -> SimpleNamespace:
    fields = {
        "req_id": name, "prompt_len": length, "num_computed_tokens": 0, "lora_request": None,
        "prompt_embeds": None, "mm_features": [], "pooling_params": None, "replay_start": 0,
        "sampling_params": SimpleNamespace(extra_args=tag), **more,
    }  # fmt: skip
    return SimpleNamespace(**fields)


def plan(
    *fresh: SimpleNamespace,
    cached: dict[str, int] | None = None,
    rows: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
    resumed: tuple[str, ...] = (),
    drafts: dict[str, list[int]] | None = None,
) -> SimpleNamespace:
    rows = rows if rows is not None else {item.req_id: item.prompt_len for item in fresh}
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=list(cached.values()),
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=rows,
        total_num_scheduled_tokens=sum(rows.values()),
        finished_req_ids=set(finished),
        scheduled_spec_decode_tokens=drafts or {},
    )  # fmt: skip


def tag(name: str, *segments: int) -> dict[str, Any]:
    return {"expertmaps_t": name, "expertmaps_seg": list(segments)}


def feed(item: capture.Capture, step: SimpleNamespace) -> None:
    item.before(step)
    item.after(step, list(step.num_scheduled_tokens))


def result(item: capture.Capture, name: str) -> dict[str, Any]:
    path = item.writer.folder / name
    wait_for(str(path), path.exists, 30, 0.01)
    assert path.stat().st_mode & 0o777 == 0o644
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as loaded:
        return {key: loaded[key] for key in loaded.files}


def reason(item: capture.Capture, name: str) -> str:
    path = item.writer.folder / f"{name}.skip"
    wait_for(str(path), path.exists, 30, 0.01)
    return path.read_text().strip()


def test_a_forced_transcript_is_written_when_its_prompt_is_fed(make: Any) -> None:
    item = make()
    feed(item, plan(new("r", 10, tag("t", 4, 10)), rows={"r": 6}))
    assert item.wire()["transcripts"] == 0
    feed(item, plan(cached={"r": 6}, rows={"r": 4}))
    found = result(item, "t.npz")
    assert found["rows"].tolist() == [4, 6] and found["rows"].dtype == np.int64
    assert found["counts"].shape == (2, 1, 1) and found["counts"].dtype == np.int64
    assert found["counts"].ravel().tolist() == [4, 6]
    assert int(found["bad"]) == 0 and int(found["recomputed"]) == 0
    feed(item, plan(finished=("r",)))
    item.writer.end()
    item.writer.join()
    assert contract.Counting.from_wire(item.wire(), "counting").to_wire() == {
        "prefillRows": 4, "decodeRows": 6, "recomputedRows": 0, "verifyRows": 0, "missed": 0,
        "transcripts": 1, "skipped": {},
    }  # fmt: skip


def test_rows_follow_the_order_of_the_batch(make: Any) -> None:
    item = make()
    step = plan(new("a", 3, tag("ta", 0, 3)), new("b", 5, tag("tb", 4, 5)))
    item.before(step)
    item.after(step, ["b", "a"])
    assert item.counters.cleared == [8]
    assert result(item, "ta.npz")["rows"].tolist() == [0, 3]
    assert result(item, "tb.npz")["rows"].tolist() == [4, 1]


def test_preempted_rows_are_apart(make: Any) -> None:
    item = make()
    feed(item, plan(new("r", 10, tag("t", 4, 10)), rows={"r": 6}))
    feed(item, plan(cached={"r": 0}, rows={"r": 10}, resumed=("r",)))
    found = result(item, "t.npz")
    assert found["rows"].tolist() == [4, 6] and int(found["recomputed"]) == 6


def test_a_preempted_request_that_comes_back_as_new_keeps_its_slot(make: Any) -> None:
    """V2 adds it once more, under its own id; its rows so far are recomputed and count once."""
    item = make(1)
    feed(item, plan(new("r", 10, tag("t", 4, 10)), rows={"r": 6}))
    feed(item, plan(new("r", 10, tag("t", 4, 10)), rows={"r": 7}))
    feed(item, plan(cached={"r": 7}, rows={"r": 3}))
    found = result(item, "t.npz")
    assert found["counts"].ravel().tolist() == [4, 6] and int(found["recomputed"]) == 6
    assert item.wire()["skipped"] == {}


def test_a_live_transcript_that_is_preempted_in_its_answer_counts_each_row_once(make: Any) -> None:
    item = make()
    feed(item, plan(new("r", 3, {"expertmaps_t": "t"})))
    feed(item, plan(cached={"r": 3}, rows={"r": 1}))
    again = new("r", 3, {"expertmaps_t": "t"})
    feed(item, plan(again, rows={"r": 5}))  # prompt, what it had said, and one row more
    feed(item, plan(finished=("r",)))
    found = result(item, "t.npz")
    assert found["rows"].tolist() == [3, 2] and int(found["recomputed"]) == 4


def test_a_live_transcript_with_drafts_is_skipped_and_verify_rows_are_apart(make: Any) -> None:
    item = make()
    feed(item, plan(new("r", 3, {"expertmaps_t": "t"})))
    feed(item, plan(cached={"r": 3}, rows={"r": 3}, drafts={"r": [7, 8]}))
    assert reason(item, "t") == "Speculation"
    feed(item, plan(cached={"r": 4}, rows={"r": 1}))
    feed(item, plan(finished=("r",)))
    item.writer.end()
    item.writer.join()
    assert not (item.writer.folder / "t.npz").exists()
    wire = item.wire()
    assert (wire["prefillRows"], wire["decodeRows"], wire["verifyRows"]) == (3, 2, 2)
    assert wire["skipped"] == {"Speculation": 1}


def test_a_forced_transcript_beside_drafts_is_exact(make: Any) -> None:
    item = make()
    feed(item, plan(new("a", 3), new("r", 8, tag("t", 4, 8)), rows={"a": 3, "r": 7}))
    step = plan(cached={"a": 3, "r": 7}, rows={"a": 4, "r": 3}, drafts={"a": [1] * 3, "r": [0, 0]})
    feed(item, step)
    assert result(item, "t.npz")["counts"].ravel().tolist() == [4, 4]
    assert item.wire()["verifyRows"] == 5


def test_a_prompt_that_is_streamed_is_skipped(make: Any) -> None:
    item = make()
    feed(item, plan(new("r", 4, tag("t", 2, 4)), rows={"r": 3}))
    feed(item, plan(new("r", 9, tag("t", 2, 4), num_computed_tokens=3), rows={"r": 6}))
    assert reason(item, "t") == "StreamingInput"
    assert item.wire()["prefillRows"] + item.wire()["decodeRows"] == 9


def test_counts_that_find_no_room_leave_their_reason(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    item, original = make(), capture.write_atomic

    def full(path: Path, data: bytes) -> None:
        if path.suffix == ".npz":
            raise OSError(28, "No space left on device")
        original(path, data)

    monkeypatch.setattr(capture, "write_atomic", full)
    feed(item, plan(new("r", 4, tag("t", 0, 4))))
    assert reason(item, "t") == "WriteFailed"
    item.writer.end()
    item.writer.join()
    assert item.wire()["skipped"] == {"WriteFailed": 1} and item.wire()["transcripts"] == 0
    monkeypatch.setattr(capture, "write_atomic", original)
    assert [path.name for path in item.writer.folder.iterdir()] == ["t.skip"]


def test_the_writer_waits_for_the_device_before_it_reads(make: Any) -> None:
    """A stand-in for a CUDA event: what is not yet copied must not be read."""
    steps: list[str] = []

    class Counts(Array):
        def cpu(self) -> Array:
            steps.append("read")
            return self

    event = SimpleNamespace(synchronize=lambda: steps.append("waited"))
    snapshot = SimpleNamespace(counts=Counts([[[1]], [[2]]]), bad=Array(0), copied=event)
    capture.encode(snapshot, capture.positions.Tracked(1))
    assert steps == ["waited", "read"]


def test_results_that_wait_for_a_hung_disk_are_not_without_end(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them holds counters in the device's memory."""
    item, hung = make(), threading.Event()
    original = capture.write_atomic

    def write(path: Path, data: bytes) -> None:
        hung.wait(60)
        original(path, data)

    monkeypatch.setattr(capture, "write_atomic", write)
    snapshot = SimpleNamespace(counts=Array([[[1]], [[2]]]), bad=Array(0), copied=None)
    for index in range(capture.MAX_QUEUED + 9):
        item.writer.put(f"t{index}", snapshot, capture.positions.Tracked(1))
    hung.set()
    item.writer.end()
    item.writer.join()
    counts = list(item.writer.folder.glob("*.npz"))
    reasons = {path.read_text() for path in item.writer.folder.glob("*.skip")}
    assert len(counts) <= capture.MAX_QUEUED + 1 and item.writer.failed >= 8
    assert len(counts) + item.writer.failed == capture.MAX_QUEUED + 9
    assert reasons == {"WriteFailed\n"}


def engine(**changes: Any) -> SimpleNamespace:
    """As much of vLLM's configuration as count mode looks at."""
    found = SimpleNamespace(
        aux_output_config=SimpleNamespace(enabled=False),
        speculative_config=None,
        kv_transfer_config=None,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False),
        model_config=SimpleNamespace(is_diffusion=False, runner_type="generate"),
    )
    for name, value in changes.items():
        setattr(found if hasattr(found, name) else found.model_config, name, value)
    return found


def drafting(method: str, adaptive: bool = False) -> SimpleNamespace:
    return SimpleNamespace(method=method, enable_adaptive_verification=adaptive)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"aux_output_config": SimpleNamespace(enabled=True)},
            "ReturnRoutedExpertsUnsupported",
        ),
        ({"speculative_config": drafting("dspark", True)}, "SpeculationUnsupported"),
        ({"speculative_config": drafting("custom_class")}, "SpeculationUnsupported"),
        ({"speculative_config": drafting("ngram_gpu")}, "SpeculationUnsupported"),
        (
            {"kv_transfer_config": SimpleNamespace(kv_load_failure_policy="recompute")},
            "KvRecomputeUnsupported",
        ),
        (
            {"cache_config": SimpleNamespace(kv_sharing_fast_prefill=True)},
            "FastPrefillUnsupported",
        ),
        ({"is_diffusion": True}, "DiffusionUnsupported"),
        ({"runner_type": "pooling"}, "PoolingUnsupported"),
    ],
)
def test_engines_that_cannot_be_counted_are_refused_by_name(
    changes: dict[str, Any], expected: str
) -> None:
    capture.check_config(engine(), "v1")
    capture.check_config(engine(speculative_config=drafting("ngram")), "v1")
    capture.check_config(engine(speculative_config=drafting("ngram_gpu")), "v2")
    loads = SimpleNamespace(kv_load_failure_policy="fail")
    capture.check_config(engine(kv_transfer_config=loads), "v1")
    with pytest.raises(capture.env.HookError) as caught:
        capture.check_config(engine(**changes), "v1")
    assert caught.value.reason == expected


def test_a_prefix_cache_hit_is_visible_in_rows(make: Any) -> None:
    item = make()
    feed(item, plan(new("r", 10, tag("t", 4, 10), num_computed_tokens=8), rows={"r": 2}))
    assert result(item, "t.npz")["rows"].tolist() == [0, 2]


def test_a_live_transcript_is_written_when_it_ends(make: Any) -> None:
    item = make()
    feed(item, plan(new("r", 3, {"expertmaps_t": "t"})))
    feed(item, plan(cached={"r": 3}, rows={"r": 1}))
    feed(item, plan(cached={"r": 4}, rows={"r": 1}))
    assert item.wire()["transcripts"] == 0
    feed(item, plan(finished=("r",)))
    assert result(item, "t.npz")["rows"].tolist() == [3, 2]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (new("r", 4, tag("t", 0, 4), lora_request=object()), "Lora"),
        (new("1_r", 4, tag("t", 0, 4)), "ParallelSampling"),
        (new("r", 4, tag("t", 0, 4), prompt_embeds=object()), "PromptEmbeds"),
        (new("r", 4, tag("t", 0, 4), mm_features=[1]), "Multimodal"),
        (new("r", 4, tag("t", 0, 5)), "SegmentsInvalid"),
    ],
)
def test_what_cannot_be_counted_is_skipped_by_name(make: Any, request_: Any, expected: str) -> None:
    item = make()
    feed(item, plan(request_))
    assert reason(item, "t") == expected
    assert item.wire()["skipped"] == {expected: 1}
    assert item.wire()["prefillRows"] + item.wire()["decodeRows"] == 4
    assert not (item.writer.folder / "t.npz").exists()


def test_pooling_and_bad_ids_leave_no_file(make: Any) -> None:
    item = make()
    feed(item, plan(new("p", 4, sampling_params=None), new("q", 2, tag("../t", 0, 1))))
    assert item.wire()["skipped"] == {"TranscriptIdInvalid": 1, "Pooling": 1}
    item.writer.end()
    item.writer.join()
    assert list(item.writer.folder.iterdir()) == []


def test_every_step_of_a_beam_is_skipped_by_name(make: Any) -> None:
    item = make()
    feed(item, plan(new("cmpl-1-0-5f-beam-0", 4), new("cmpl-1-0-5f-beam-1-0a1b2c3d", 4)))
    feed(item, plan(new("cmpl-2-beam", 4)))
    assert item.wire()["skipped"] == {"BeamSearch": 2}


def test_more_than_the_slots_is_skipped_and_slots_come_back(make: Any) -> None:
    item = make(1)
    feed(
        item, plan(new("a", 4, tag("a", 0, 4)), new("b", 4, tag("b", 0, 4)), rows={"a": 2, "b": 4})
    )
    assert reason(item, "b") == "NoSlot"
    feed(item, plan(cached={"a": 2}, rows={"a": 2}))
    feed(item, plan(new("c", 2, tag("b", 0, 2)), finished=("a", "b")))
    assert result(item, "b.npz")["rows"].tolist() == [0, 2]
    item.writer.end()
    item.writer.join()
    assert not (item.writer.folder / "b.skip").exists()


def test_the_same_id_at_once_is_counted_once(make: Any) -> None:
    item = make()
    both = (new("a", 4, tag("t", 0, 4)), new("b", 4, tag("t", 0, 4)))
    feed(item, plan(*both))
    assert result(item, "t.npz")["rows"].tolist() == [0, 4]
    assert item.wire()["skipped"] == {"Duplicate": 1}


def test_an_aborted_transcript_is_skipped_and_leaves_no_rows_behind(make: Any) -> None:
    item = make(1)
    feed(item, plan(new("a", 9, tag("a", 0, 9)), rows={"a": 4}))
    feed(item, plan(new("b", 2, tag("b", 0, 2)), finished=("a",)))
    assert reason(item, "a") == "Aborted"
    assert result(item, "b.npz")["counts"].ravel().tolist() == [0, 2]


def test_a_batch_that_is_not_the_plan_raises(make: Any) -> None:
    item = make()
    step = plan(new("a", 4, tag("a", 0, 4)))
    with pytest.raises(RuntimeError):
        item.after(step, [])


def test_closing_tells_the_readers(make: Any) -> None:
    item = make()
    feed(item, plan(new("a", 9, tag("a", 0, 9)), rows={"a": 4}))
    item.end("CountFailed")
    item.writer.join()
    assert reason(item, "a") == "CountFailed"
