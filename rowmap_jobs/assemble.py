"""Puts a run's results together: the census, and the report of it. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from .counts import Shape
from .evaluation import Evaluation
from .formats.census import (
    DECODE,
    FIDELITY,
    MAX_TRANSCRIPTS,
    MAX_UNPACKED,
    PREFILL,
    Capture,
    Census,
    CensusHeader,
    OffPolicy,
    Selection,
)
from .formats.evidence import Evidence
from .formats.report import Report
from .formats.rowmap import Fingerprint, Geometry, RowMap
from .formats.run import Counted, RunSpec
from .formats.status import HookStatus
from .judgement import word
from .reasons import Reason
from .replay import Replayed
from .sequences import Sequence

LIKELY_TOP1 = 0.6
LIKELY_LOGPROB = -2.0
FEW_RECORDED = 0.5


@dataclass
class Facts:
    """What a run found on its way, for the census header and the report."""

    window: tuple[int, int]
    considered: int
    skipped: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    off_policy: OffPolicy | None = None
    trick_check: dict[str, int] | None = None


def room(shape: Shape) -> int:
    """How many sequences a census of this shape can hold (a little is left for its header)."""
    return min(MAX_TRANSCRIPTS, (MAX_UNPACKED - (64 << 20)) // (shape.bytes_per_sequence + 256))


def census(
    spec: RunSpec,
    replayed: Replayed,
    shape: Shape,
    status: HookStatus,
    fingerprint: Fingerprint,
    facts: Facts,
) -> Census:
    """The census of counted sequences; `status` is the hook's last word."""
    sequences = replayed.sequences
    used = sum(sequence.turns for sequence in sequences)
    header = CensusHeader(
        fingerprint=fingerprint,
        traffic_class=spec.traffic_class or "",
        window=facts.window,
        capture=Capture(
            method="forced",
            engine=status.engine,
            engine_version=status.engine_version,
            runner=status.runner,
            hook_digest=status.hook_digest,
            missed=status.counting.missed if status.counting else 0,
            recomputed=sum(counts.recomputed for counts in replayed.counts),
        ),
        selection=Selection(
            seed=spec.replay.seed,
            considered=facts.considered,
            used=used,
            skipped=dict(sorted(facts.skipped.items())),
        ),
        off_policy=facts.off_policy,
    )
    layers = len(shape.layers)
    return Census(
        header=header,
        counts=np.stack([counts.counts for counts in replayed.counts]),
        rows=np.stack([counts.rows for counts in replayed.counts]),
        layer_ids=np.array(shape.layers, dtype=np.int32),
        experts=np.array(shape.experts, dtype=np.int32),
        top_k=np.full(layers, shape.top_k, dtype=np.int32),
        session=np.array([s.session for s in sequences], dtype=np.int32),
        transcript_id=np.frombuffer(b"".join(s.id for s in sequences), dtype=np.uint8).reshape(
            -1, 32
        ),
        fidelity=np.array([s.fidelity for s in sequences], dtype=np.uint8),
        prompt_len=np.array([s.prompt_len for s in sequences], dtype=np.int32),
        created=np.array([s.created for s in sequences], dtype=np.int64),
    )


def counted(data: Census, sequences: list[Sequence], facts: Facts) -> Counted:
    """The numbers of a census as a verdict carries them; fidelity is by transcript."""
    fidelity: Counter[str] = Counter()
    for sequence in sequences:
        fidelity[FIDELITY[sequence.fidelity]] += sequence.turns
    return Counted(
        sessions=len(np.unique(data.session)),
        transcripts=data.header.selection.used,
        decode_tokens=int(data.rows[:, DECODE].sum()),
        prefill_tokens=int(data.rows[:, PREFILL].sum()),
        considered=facts.considered,
        skipped=dict(sorted(facts.skipped.items())),
        fidelity=dict(sorted(fidelity.items())),
    )


def notes(evaluation: Evaluation, numbers: Counted, facts: Facts, geometry: Geometry) -> list[str]:
    """What a reader should know, in sentences."""
    out = list(facts.notes)
    off = facts.off_policy
    if off is not None and (off.top1 < LIKELY_TOP1 or off.mean_logprob < LIKELY_LOGPROB):
        out.append(
            f"The recorded text is unlikely under this model (top-1 {off.top1:.0%}, "
            f"{off.mean_logprob:.2f} nats a token): it may be another model's, or sampled hot."
        )
    generated = numbers.fidelity.get("generated", 0)
    if generated > FEW_RECORDED * max(numbers.transcripts, 1):
        out.append(
            f"{generated} of {numbers.transcripts} transcripts were decoded afresh: record token "
            "ids (return_token_ids) to count what was really written."
        )
    unseen = sum(layer.never_seen for layer in evaluation.layers)
    if unseen:
        out.append(f"{unseen} experts were never chosen in decode; they rank last, by id.")
    if isinstance(geometry.hot_rows, int) and geometry.hot_rows < geometry.top_k:
        out.append("Fewer hot rows than experts a token: every token reads slow memory.")
    trick = facts.trick_check
    if trick is not None and trick["moved"] > 0.01 * trick["selections"]:
        out.append(
            f"Forced counting moved {trick['moved']} of {trick['selections']} selections against "
            "a real decode: the engine's numerics depend strongly on the batch."
        )
    return out


def report(
    spec: RunSpec,
    created: int,
    data: Census,
    census_digest: str,
    rows: RowMap,
    evaluation: Evaluation,
    found: Evidence,
    numbers: Counted,
    facts: Facts,
    decision: tuple[Reason, str],
) -> Report:
    """report.json of a run that built a map."""
    reason, message = decision
    return Report(
        run=spec.run,
        lane=spec.lane,
        traffic_class=spec.traffic_class or "",
        created=created,
        window=facts.window,
        digest=rows.digest,
        row_set_digest=rows.row_set_digest,
        census_digest=census_digest,
        verdict=word(evaluation, found),
        accepted=reason is Reason.ACCEPTED,
        reason=str(reason),
        message=message,
        fingerprint=rows.fingerprint,
        geometry=rows.geometry,
        capture=data.header.capture,
        selection=data.header.selection,
        off_policy=facts.off_policy,
        trick_check=facts.trick_check,
        counted=numbers,
        rendering_refused=dict(sorted(facts.refused.items())),
        cold=evaluation.shares(),
        own_interval=evaluation.interval,
        headroom=evaluation.headroom,
        notes=tuple(notes(evaluation, numbers, facts, rows.geometry)),
        layers=evaluation.layers,
        evidence=found,
    )


def comparable(rows: RowMap, geometry: Geometry) -> bool:
    """True when a map speaks of the same layers and experts."""
    ours = (geometry.moe_layers, geometry.experts)
    return (rows.geometry.moe_layers, rows.geometry.experts) == ours
