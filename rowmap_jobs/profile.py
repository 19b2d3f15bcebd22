"""`profile`: count the recorded traffic of a class, build its map, judge it, store everything."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import dataclass

from . import assemble, selection
from .assemble import Facts
from .checks import off_policy, trick_check
from .conclusion import Counted, conclude
from .counts import Shape, shape_of
from .engine import Engine, Ready, check_status, wait_ready
from .formats.base import FormatError, canonical_json
from .formats.rowmap import Fingerprint, Geometry
from .formats.run import RunSpec, Verdict
from .formats.status import HookStatus
from .formats.transcript import TranscriptRecord
from .geometry import check_frozen, resolve
from .ids import DroppedError, Limits, Reader
from .log import say
from .reasons import Reason, RunError
from .replay import ForcedCounter, Replayed, fresh_id, in_parallel, replay
from .sequences import Sequence, Turn, build
from .services import Services

CAPTURE_SLOTS = 64
"""Requests that the hook counts at a time; more would come back uncounted."""


@dataclass(frozen=True)
class Bench:
    """A ready engine and what it serves."""

    engine: Engine
    ready: Ready
    fingerprint: Fingerprint
    geometry: Geometry
    shape: Shape
    workers: int


def run(spec: RunSpec, services: Services) -> Verdict:
    """One profile. Raises RunError for whatever keeps it from a verdict on a map."""
    if spec.traffic_class is None:
        raise RunError(
            Reason.INVALID_RUN_SPEC, "EXPERTMAPS_RUN: trafficClass: found none, expected one"
        )
    bucket = services.store(spec)
    picked, facts = sample(spec, services)
    bench = prepare(spec, services)
    started = time.monotonic()
    turns = read_ids(spec, bench, picked, facts)
    del picked  # the text is not needed any more
    replayed = count(spec, services, bench, turns, facts)
    seconds = time.monotonic() - started
    data = assemble.census(
        spec, replayed, bench.shape, last_status(bench), bench.fingerprint, facts
    )
    counted = Counted(data, replayed.sequences, facts, bench.fingerprint, bench.geometry)
    verdict = conclude(spec, services, bucket, counted)
    return verdict.model_copy(
        update={
            "engine_seconds": round(bench.ready.seconds, 1),
            "count_seconds": round(seconds, 1),
        }
    )


def sample(spec: RunSpec, services: Services) -> tuple[selection.Picked, Facts]:
    """The transcripts that are counted, and the window they come from."""
    bucket = services.transcripts(spec)
    now = services.now()
    since = selection.window_start(now, spec.window_seconds)
    tally = selection.Tally()
    records = selection.read(bucket, since, tally)
    picked = selection.pick(records, spec.replay.seed, spec.replay.max_transcripts, tally)
    place_ = bucket.url(bucket.location.prefix)
    selection.check_enough(tally, place_, since, spec.min_transcripts)
    say(
        f"{place_}: {picked.records} of {tally.in_window} transcripts taken, "
        f"{len(picked.sessions)} of {len(tally.sessions)} sessions, {tally.broken} broken lines"
    )
    window = (int(since.timestamp()), int(now.timestamp()))
    facts = Facts(window, considered=tally.in_window, skipped=Counter(tally.skipped))
    if tally.broken:
        facts.notes.append(f"{tally.broken} lines were broken; the first: {tally.first_break}")
    return picked, facts


def prepare(spec: RunSpec, services: Services) -> Bench:
    """Wait for the engine; its geometry must be the lane's before anything is counted."""
    engine = Engine(spec.server_url, spec.status_url, services.api_key, services.deadlines)
    ready = wait_ready(engine, spec.pending_seconds)
    model, fingerprint = ready.status.geometry, ready.status.fingerprint
    if model is None or fingerprint is None:
        raise RunError(Reason.NO_EXPERTS, "hook: geometry: found none, expected MoE layers")
    geometry = resolve(model, spec.hot_experts_per_layer, spec.hot_bytes)
    check_frozen(geometry, spec.frozen_geometry)
    workers = min(spec.replay.concurrency, CAPTURE_SLOTS)
    return Bench(engine, ready, fingerprint, geometry, shape_of(model), workers)


def count(
    spec: RunSpec, services: Services, bench: Bench, turns: list[Turn], facts: Facts
) -> Replayed:
    """Sequences, counts and the checks on a sample. Raises RunError when nothing is left."""
    model = bench.ready.model
    sequences, dropped = build(
        turns, model.max_model_len, spec.replay.max_response_tokens, spec.replay.seed
    )
    facts.skipped.update(dropped)
    sequences = within(sequences, assemble.room(bench.shape), facts)
    say(f"{len(turns)} transcripts with ids make {len(sequences)} sequences")
    counter = ForcedCounter(bench.engine, model.name, services.counts_dir, bench.shape)
    replayed = replay(counter, sequences, bench.workers)
    facts.skipped.update(replayed.dropped)
    if not replayed.sequences:
        reasons = ", ".join(f"{name} {n}" for name, n in sorted(facts.skipped.items()))
        raise RunError(
            Reason.COUNTING_FAILED,
            f"transcripts: found none that could be counted ({reasons}), expected at least one",
        )
    say(f"counted {len(replayed.sequences)} sequences, {replayed.retried} tried twice")
    facts.off_policy = off_policy(bench.engine, model.name, replayed.sequences, spec.replay.seed)
    facts.trick_check = trick_check(counter, replayed.sequences, spec.replay.seed)
    return replayed


def within(sequences: list[Sequence], limit: int, facts: Facts) -> list[Sequence]:
    """As many sequences as a census holds; sessions come in sampling order."""
    left = sum(sequence.turns for sequence in sequences[limit:])
    if left:
        facts.skipped["CensusFull"] += left
    return sequences[:limit]


def read_ids(spec: RunSpec, bench: Bench, picked: selection.Picked, facts: Facts) -> list[Turn]:
    """Ids of every sampled record; those without are counted in `facts`."""
    model = bench.ready.model
    limits = Limits(model.max_model_len, spec.replay.max_response_tokens, spec.replay.seed)
    reader = Reader(bench.engine, model.name, bench.fingerprint.tokenizer, limits)
    reader.prepare()

    def one(item: tuple[int, TranscriptRecord]) -> tuple[Turn | None, str | None]:
        session, record = item
        try:
            ids = reader.read(record, fresh_id())
        except DroppedError as error:
            return None, error.reason
        created = int(record.created.timestamp()) if record.created else 0
        turn = Turn(transcript_id(record), session, ids.prompt, ids.response, ids.fidelity, created)
        return turn, ids.refused

    items = [(index, r) for index, turns in enumerate(picked.sessions) for r in turns]
    out = []
    for turn, word in in_parallel(one, items, bench.workers):
        if turn is not None:
            out.append(turn)
        if word is not None:
            (facts.skipped if turn is None else facts.refused)[word] += 1
    return out


def transcript_id(record: TranscriptRecord) -> bytes:
    """32 bytes that stand for a record and tell nothing of it: sha256 of session and id."""
    return hashlib.sha256(canonical_json([record.session, record.id])).digest()


def last_status(bench: Bench) -> HookStatus:
    """The hook's status after counting: the same model as before, not failed.

    Raises RunError EngineFailed when another one answers, for a restart loses its counts.
    """
    try:
        status = bench.engine.status()
    except FormatError as error:
        raise RunError(Reason.ENGINE_FAILED, str(error)) from None
    if status is None:
        raise RunError(
            Reason.ENGINE_FAILED,
            f"{bench.engine.status_url}: found no answer after counting, expected the hook's",
        )
    check_status(status)
    if status.fingerprint != bench.fingerprint or status.pid != bench.ready.status.pid:
        raise RunError(
            Reason.ENGINE_FAILED,
            f"hook: found process {status.pid}, expected {bench.ready.status.pid} with the same "
            "model: the engine restarted while it was counting",
        )
    return status
