"""Small valid artifacts that the format tests bend."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.census import Capture, Census, CensusHeader, Selection
from rowmap_jobs.formats.rowmap import Fingerprint, Geometry, RowMap


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


FINGERPRINT = Fingerprint(
    shape=digest("shape"), router=digest("router"), quant="bf16", tokenizer=digest("tokenizer")
)


def geometry(**over: Any) -> Geometry:
    values: dict[str, Any] = {
        "experts": 4,
        "top_k": 2,
        "hot_rows": 2,
        "moe_layers": (0, 2),
        "row_bytes": 10,
    }
    return Geometry(**{**values, **over})


def row_map() -> RowMap:
    rows = {0: ([3, 1], [0, 2]), 2: ([0, 1], [3, 2])}
    return rowmap.build(FINGERPRINT, geometry(), rows)


def census(transcripts: int = 3, seed: int = 0) -> Census:
    """A random census of 2 layers x 5 experts (layer 7 has 4 of them), top-2."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 9, size=(transcripts, 2)).astype(np.int64)
    counts = np.zeros((transcripts, 2, 2, 5), dtype=np.int64)
    for t, p in np.ndindex(transcripts, 2):
        for layer, experts in enumerate((5, 4)):
            for _ in range(int(rows[t, p])):
                counts[t, p, layer, rng.choice(experts, 2, replace=False)] += 1
    header = CensusHeader(
        fingerprint=FINGERPRINT,
        traffic_class="agent",
        window=(0, 10),
        capture=Capture(
            method="forced",
            engine="vLLM",
            engine_version="0.32.0",
            runner="v1",
            hook_digest=digest("hook"),
            missed=0,
            recomputed=0,
        ),
        selection=Selection(seed=0, considered=transcripts, used=transcripts),
    )
    return Census(
        header=header,
        counts=counts,
        rows=rows,
        layer_ids=np.array([3, 7], dtype=np.int32),
        experts=np.array([5, 4], dtype=np.int32),
        top_k=np.array([2, 2], dtype=np.int32),
        session=np.arange(transcripts, dtype=np.int32),
        transcript_id=np.zeros((transcripts, 32), dtype=np.uint8),
        fidelity=np.zeros(transcripts, dtype=np.uint8),
        prompt_len=np.ones(transcripts, dtype=np.int32),
        created=np.zeros(transcripts, dtype=np.int64),
    )
