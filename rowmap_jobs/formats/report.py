"""report.json: provenance and evaluation of one run; it names the digest it speaks of."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from pydantic import Field

from .base import Digest, Strict
from .census import Capture, OffPolicy, Selection
from .evidence import Evidence
from .rowmap import Fingerprint, Geometry
from .run import ColdShares, Counted

VerdictWord = Literal["insufficient", "provisional", "ready", "no_skew"]


class LayerReport(Strict):
    """One MoE layer, in the order of geometry.moeLayers."""

    layer: int
    own: float
    positional: float
    others: dict[str, float] = Field(default_factory=dict)
    never_seen: int = Field(ge=0)
    """Experts without a decode selection."""
    undecided: int = Field(ge=0)
    """Border rows whose side is within two standard errors: |z| < 2."""


class Report(Strict):
    """What one run measured, built and decided."""

    format: Literal["expertmaps-report"] = "expertmaps-report"
    version: Literal[1] = 1
    run: str | None = None
    lane: str | None = None
    """Job and lane; none for a report that was made from files."""
    traffic_class: str = Field(alias="class")
    created: int
    window: tuple[int, int]
    digest: Digest | None = None
    """The map's digest; null when none was built."""
    row_set_digest: Digest | None = None
    census_digest: Digest
    verdict: VerdictWord
    accepted: bool
    reason: str
    message: str
    fingerprint: Fingerprint
    geometry: Geometry | None = None
    capture: Capture
    selection: Selection
    off_policy: OffPolicy | None = None
    trick_check: dict[str, int] | None = None
    """Forced counting against real decode on a sample: selections, moved."""
    counted: Counted
    rendering_refused: dict[str, int] = Field(default_factory=dict)
    """Transcripts whose rendering by the server was not accepted, by reason; then generated."""
    cold: ColdShares | None = None
    own_interval: tuple[float, float] | None = None
    """95% interval of cold.own: sessions resampled."""
    headroom: float | None = None
    """(random - own) / (random - in sample): the part of what a map can gain that this one does."""
    notes: tuple[str, ...] = ()
    """What a reader should know, in sentences."""
    layers: tuple[LayerReport, ...] = ()
    evidence: Evidence | None = None
    """What was computed beyond the shares that decide."""


def schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of report.json; `report.schema.json` beside this module holds it.

    `python -m rowmap_jobs.formats.report > rowmap_jobs/formats/report.schema.json` writes it anew.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Report.model_json_schema(by_alias=True),
    }


def schema_text() -> str:
    """The schema as the committed file spells it."""
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
