"""Count mode: reads the experts that each fed row chose, and writes a file for each transcript.

The runner tags a request with `vllm_xargs`: `expertmaps_t` names the transcript, `expertmaps_seg`
lists the positions that are response ([start, end, start, end, ...], half-open, in the prompt).
When the prompt is fed whole, `transcripts/<id>.npz` appears with `counts` int64[2, L, E], `rows`
int64[2], `bad` int64 and `recomputed` int64. A request that cannot be counted leaves
`transcripts/<id>.skip` with the reason. Without `expertmaps_seg` the request's own output is the
response, and the file appears when the request ends; with asynchronous scheduling such a request
may have fed its last token as well, where a stop word ended it.

Reasons: Aborted, Duplicate, Lora, Multimodal, NoSlot, ParallelSampling, PromptEmbeds,
SegmentsInvalid, Speculation (a live request with drafts), Stopped, StreamingInput, WriteFailed, or
why counting ended; and, in the status alone, BeamSearch, Pooling and TranscriptIdInvalid, whose
requests name no transcript.
"""

from __future__ import annotations

import io
import queue
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from . import expertmaps_hook_env as env
    from . import expertmaps_hook_positions as positions
    from .expertmaps_hook_counts import Counters, Snapshot
    from .expertmaps_hook_files import make_folder, write_atomic
    from .expertmaps_hook_runner import V1
else:
    import expertmaps_hook_env as env
    import expertmaps_hook_positions as positions
    from expertmaps_hook_counts import Counters, Snapshot
    from expertmaps_hook_files import make_folder, write_atomic
    from expertmaps_hook_runner import V1

FOLDER = "transcripts"
CLOSE_SECONDS = 3.0
WRITE_FAILED = "WriteFailed"
UNPLANNED_METHODS = ("custom_class", "extract_hidden_states")
"""Speculative methods of vLLM that do not verify plain drafts."""
TRIMMED_METHOD = "ngram_gpu"
"""V1 drops invalid drafts of this one from a step after the plan was made."""
MAX_QUEUED = 256
"""Results that wait for the disk; each holds its counters on the device."""


class Writer:
    """Writes results from a thread of its own, so that no step waits for a disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = 0
        self._lost = self._turned_away = 0  # one is the writer's own thread's, one its caller's
        self._queue: queue.Queue[tuple[str, Snapshot, positions.Tracked] | tuple[str, str] | None]
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="expertmaps-writer", daemon=True)
        make_folder(folder)
        self._thread.start()

    @property
    def failed(self) -> int:
        """Results that could not be written, as on a full disk."""
        return self._lost + self._turned_away

    def put(self, transcript: str, snapshot: Snapshot, tracked: positions.Tracked) -> None:
        if self._queue.qsize() >= MAX_QUEUED:
            self._turned_away += 1
            self.put_skip(transcript, WRITE_FAILED)
        else:
            self._queue.put((transcript, snapshot, tracked))

    def put_skip(self, transcript: str, reason: str) -> None:
        self._queue.put((transcript, reason))

    def end(self) -> None:
        """Nothing more comes; what is queued is still written."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait until what is queued is written, for a bounded time."""
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        env.leave_bound_cpu()
        while (item := self._queue.get()) is not None:
            try:
                if len(item) == 2:
                    self._write_skip(*item)
                else:
                    self._write_counts(*item)
            except Exception:
                env.logger.exception("expertmaps: result of transcript %s not written", item[0])
                if len(item) == 3:
                    self._write_failed(item[0])

    def _write_failed(self, transcript: str) -> None:
        """Say that counts are lost, where a few bytes still have room: no reader then waits."""
        self._lost += 1
        try:
            self._write_skip(transcript, WRITE_FAILED)
        except OSError:
            env.logger.warning("expertmaps: nor the reason for it")

    def _write_skip(self, transcript: str, reason: str) -> None:
        write_atomic(self.folder / f"{transcript}.skip", reason.encode() + b"\n")

    def _write_counts(
        self, transcript: str, snapshot: Snapshot, tracked: positions.Tracked
    ) -> None:
        write_atomic(self.folder / f"{transcript}.npz", encode(snapshot, tracked))
        # A second try under the same name is the one that holds.
        (self.folder / f"{transcript}.skip").unlink(missing_ok=True)
        self.written += 1


def encode(snapshot: Snapshot, tracked: positions.Tracked) -> bytes:
    """The bytes of a transcript's file."""
    if snapshot.copied is not None:
        snapshot.copied.synchronize()  # this is the writer's thread: no step waits
    stream = io.BytesIO()
    np.savez(
        stream,
        counts=snapshot.counts.cpu().numpy().astype(np.int64),
        rows=np.array([tracked.prefill, tracked.decode], np.int64),
        bad=np.array(int(snapshot.bad), np.int64),
        recomputed=np.array(tracked.recomputed, np.int64),
    )
    return stream.getvalue()


class Capture:
    """Ties vLLM's steps to the ledger, the counters and the writer."""

    def __init__(self, counters: Counters, folder: Path) -> None:
        self.counters = counters
        self.ledger = positions.Ledger()
        self.writer = Writer(folder)
        self.skipped: Counter[str] = Counter()
        self._free = list(range(counters.slots))
        self._active: set[str] = set()

    def before(self, scheduled: Any) -> None:
        """Before the engine runs a step."""
        if scheduled.total_num_scheduled_tokens:
            self.counters.clear_rows(scheduled.total_num_scheduled_tokens)

    def after(self, scheduled: Any, order: list[str]) -> None:
        """After a step: `order` is the batch's requests in the order of their rows."""
        for request_id in scheduled.finished_req_ids:
            self._ended(request_id)
        if not scheduled.total_num_scheduled_tokens:
            return
        starts = self._admit(scheduled)
        counts, drafted = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        batch = [
            (name, starts[name], counts[name], len(drafted.get(name, ())))
            for name in order
            if counts.get(name)
        ]
        if sum(rows for _, _, rows, _ in batch) != scheduled.total_num_scheduled_tokens:
            raise RuntimeError("the batch is not what the scheduler planned")
        for name in drafted:
            self._drafted(name)
        step = self.ledger.step(batch)
        self.counters.add(step.runs)
        for request_id in step.complete:
            tracked = self.ledger.requests[request_id]
            if tracked.tag is not None and tracked.tag.segments is not None:
                self._finish(tracked)

    def _admit(self, scheduled: Any) -> dict[str, int]:
        """Take in new requests; returns the first position of each scheduled one."""
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            known = self.ledger.requests.get(new.req_id)
            if known is None:
                tracked = self.ledger.add(new.req_id, new.prompt_len, new.replay_start)
                self._tag(new, tracked)
            else:
                if new.prompt_len != known.prompt_len:
                    self._give_up(known, "StreamingInput")
                self.ledger.add(new.req_id, new.prompt_len, new.replay_start)
            starts[new.req_id] = int(new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                self.ledger.resume(request_id)
            starts[request_id] = int(computed)
        return starts

    def _tag(self, new: Any, tracked: positions.Tracked) -> None:
        untagged = "Pooling" if new.sampling_params is None else None
        if positions.is_beam(new.req_id):
            untagged = "BeamSearch"
        if untagged is not None:
            self._skip(untagged, None)
            return
        try:
            tag = positions.read_tag(new.sampling_params.extra_args, tracked.prompt_len)
        except positions.TagError as error:
            self._skip(error.reason, error.transcript)
            return
        if tag is None:
            return
        if tag.transcript in self._active:
            self._skip("Duplicate", None)  # the file of this name belongs to the other request
            return
        reason = unsupported(new)
        if reason is None and not self._free:
            reason = "NoSlot"
        if reason is not None:
            self._skip(reason, tag.transcript)
            return
        self._active.add(tag.transcript)
        tracked.tag, tracked.slot = tag, self._free.pop()

    def _ended(self, request_id: str) -> None:
        tracked = self.ledger.remove(request_id)
        if tracked is None or tracked.slot is None or tracked.tag is None:
            return
        if tracked.tag.segments is None and tracked.fed >= tracked.prompt_len:
            self._finish(tracked)
            return
        self._give_up(tracked, "Aborted")

    def _drafted(self, request_id: str) -> None:
        """A live transcript with drafts is not whole: its accepted rows are not known as such."""
        tracked = self.ledger.requests.get(request_id)
        if tracked is not None and tracked.tag is not None and tracked.tag.segments is None:
            self._give_up(tracked, "Speculation")

    def _give_up(self, tracked: positions.Tracked, reason: str) -> None:
        """Leave a transcript's reason instead of its counts."""
        if tracked.slot is None or tracked.tag is None:
            return
        self._skip(reason, tracked.tag.transcript)
        self.counters.clear_slot(tracked.slot)
        self._release(tracked)

    def _finish(self, tracked: positions.Tracked) -> None:
        if tracked.slot is None or tracked.tag is None:
            return
        snapshot = self.counters.take(tracked.slot)
        rows = positions.Tracked(
            tracked.prompt_len, prefill=tracked.prefill, decode=tracked.decode,
            recomputed=tracked.recomputed,
        )  # fmt: skip
        self.writer.put(tracked.tag.transcript, snapshot, rows)
        self._release(tracked)

    def _release(self, tracked: positions.Tracked) -> None:
        if tracked.slot is not None and tracked.tag is not None:
            self._free.append(tracked.slot)
            self._active.discard(tracked.tag.transcript)
            tracked.slot = None

    def _skip(self, reason: str, transcript: str | None) -> None:
        self.skipped[reason] += 1
        if transcript is not None:
            self.writer.put_skip(transcript, reason)

    def end(self, reason: str) -> None:
        """Tell waiting readers that no file will come; what is queued is still written."""
        for tracked in self.ledger.requests.values():
            if tracked.slot is not None and tracked.tag is not None:
                self._skip(reason, tracked.tag.transcript)
        self.writer.end()

    def join(self) -> None:
        """Wait until everything is written, for a bounded time."""
        self.writer.join()

    def wire(self) -> dict[str, Any]:
        """Counting, as the status carries it."""
        totals, skipped = self.ledger.totals, dict(self.skipped)
        if self.writer.failed:
            skipped[WRITE_FAILED] = self.writer.failed
        return {
            "prefillRows": totals.prefill,
            "decodeRows": totals.decode,
            "recomputedRows": totals.recomputed,
            "verifyRows": totals.verify,
            "missed": self.counters.missed(),
            "transcripts": self.writer.written,
            "skipped": skipped,
        }


def unsupported(new: Any) -> str | None:
    """Why a tagged request cannot be counted; None when it can."""
    if new.lora_request is not None:
        return "Lora"
    if positions.is_child(new.req_id):
        return "ParallelSampling"
    if new.prompt_embeds is not None:
        return "PromptEmbeds"
    if new.mm_features:
        return "Multimodal"
    return None


def check_config(config: Any, runner: str) -> None:
    """Refuse engines whose rows cannot be told apart, on a runner. Raises HookError."""
    speculative, transfer = config.speculative_config, config.kv_transfer_config
    method = None if speculative is None else str(speculative.method)
    refusals = (
        (
            config.aux_output_config.enabled,
            "ReturnRoutedExpertsUnsupported",
            "--enable-return-routed-experts puts its own capture over this one",
        ),
        (
            speculative is not None and bool(speculative.enable_adaptive_verification),
            "SpeculationUnsupported",
            "adaptive verification feeds other rows than the scheduler planned",
        ),
        (
            method in UNPLANNED_METHODS or (method == TRIMMED_METHOD and runner == V1),
            "SpeculationUnsupported",
            f"speculative method: found {method} on runner {runner}, which does not always feed "
            "the rows that the scheduler planned",
        ),
        (
            transfer is not None and transfer.kv_load_failure_policy == "recompute",
            "KvRecomputeUnsupported",
            "kv_load_failure_policy=recompute feeds rows again without a preemption",
        ),
        (
            bool(config.cache_config.kv_sharing_fast_prefill),
            "FastPrefillUnsupported",
            "--kv-sharing-fast-prefill leaves rows of the prompt out of some layers",
        ),
        (
            bool(config.model_config.is_diffusion),
            "DiffusionUnsupported",
            "a diffusion model feeds the same positions many times",
        ),
        (
            config.model_config.runner_type != "generate",
            "PoolingUnsupported",
            f"runner: found {config.model_config.runner_type}, expected generate",
        ),
    )
    for refused, reason, message in refusals:
        if refused:
            raise env.HookError(reason, message)


def bind(model: Any, config: Any) -> Any:
    """Have vLLM's own capturer record the experts of every MoE layer; returns it.

    Raises HookError where vLLM has no capture for a router or a kernel.
    """
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_capturer

    try:
        capturer = vllm_capturer.RoutedExpertsCapturer(
            config.scheduler_config.max_num_batched_tokens, config
        )
        vllm_capturer.bind_routed_experts_capturer(model, capturer)
    except ValueError as error:
        raise env.HookError("KernelUnsupported", f"vLLM captures nothing: {error}") from error
    return capturer


def unbind(model: Any) -> None:
    """Take the capture off again."""
    for module in model.modules():
        router: Any = getattr(module, "router", None)
        if getattr(router, "capture_fn", None) is not None:
            router.capture_fn = None
