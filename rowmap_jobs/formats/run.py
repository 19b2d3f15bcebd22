"""What the operator tells a runner (RunSpec, in EXPERTMAPS_RUN) and what it answers (Verdict).

A verdict is the container's termination message, so it stays under 4096 bytes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Digest, FormatError, Strict, canonical_json, load_json
from .rowmap import Fingerprint, Geometry
from .s3 import S3Location

MAX_VERDICT_BYTES = 4096
EXIT_FINAL = 42
"""Exit code of a runner whose verdict another try would not change (podFailurePolicy: FailJob)."""

Outcome = Literal["Accepted", "Rejected", "Failed", "Probed", "Fetched"]


class Replay(Strict):
    """How recorded transcripts are counted."""

    max_transcripts: int = Field(default=500, ge=1, le=20000)
    max_response_tokens: int = Field(default=8192, ge=1)
    sampling: Literal["Uniform"] = "Uniform"
    seed: int = Field(default=0, ge=0)
    concurrency: int = Field(default=8, ge=1, le=256)


class Acceptance(Strict):
    """When a map is good enough (percent and shares as numbers here)."""

    min_decode_tokens: int = Field(default=8000, ge=0)
    max_cold_share_percent: float | None = None
    max_cold_share_vs_positional: float | None = None
    min_improvement_points: float = Field(default=0.2, ge=0)
    """Against the active map on the same transcripts, in percentage points."""


class Owner(Strict):
    """The workload that will own the map's ConfigMap (not as controller)."""

    api_version: str
    kind: str
    name: str
    uid: str


class RunSpec(Strict):
    """One run of a runner."""

    version: Literal[1] = 1
    kind: Literal["Profile", "Fetch"]
    namespace: str
    run: str
    """Name of the Job."""
    lane: str
    map: str | None = None
    traffic_class: str | None = None
    store: S3Location
    owner: Owner
    digest: Digest | None = None
    """Fetch: the map to make again."""
    transcripts: S3Location | None = None
    window_seconds: int | None = Field(default=None, ge=1)
    min_transcripts: int = Field(default=12, ge=1)
    replay: Replay = Replay()
    acceptance: Acceptance = Acceptance()
    hot_experts_per_layer: int | None = Field(default=None, ge=0)
    hot_bytes: int | None = Field(default=None, ge=0)
    frozen_geometry: Geometry | None = None
    """The lane's geometry; the map must have exactly this one."""
    active_map_digest: Digest | None = None
    """The class's accepted map: a new one must beat it on the same transcripts."""
    other_map_digests: dict[str, Digest] = Field(default_factory=dict)
    """Accepted maps of the lane's other classes: the report compares against them."""
    server_url: str = "http://127.0.0.1:8000"
    status_url: str = "http://127.0.0.1:9477/status"
    pending_seconds: int = Field(default=3600, ge=1)
    """How long the engine may take to answer before the run gives up."""


class ColdShares(Strict):
    """Share of decode selections that a map leaves in slow memory, 0 to 1."""

    own: float
    """Leave-one-session-out."""
    in_sample: float
    positional: float
    others: dict[str, float] = Field(default_factory=dict)
    """This class's traffic under the map of another class, by class."""


class Counted(Strict):
    """What was counted."""

    sessions: int = Field(ge=0)
    transcripts: int = Field(ge=0)
    decode_tokens: int = Field(ge=0)
    prefill_tokens: int = Field(ge=0)
    considered: int = Field(ge=0)
    skipped: dict[str, int] = Field(default_factory=dict)
    fidelity: dict[str, int] = Field(default_factory=dict)


class Verdict(Strict):
    """The answer of a run."""

    version: Literal[1] = 1
    run: str
    outcome: Outcome
    reason: str = Field(pattern=r"^[A-Z][A-Za-z0-9]{0,63}$")
    message: str = Field(max_length=1024)
    digest: Digest | None = None
    row_set_digest: Digest | None = None
    config_map: str | None = None
    census_digest: Digest | None = None
    report_key: str | None = None
    fingerprint: Fingerprint | None = None
    geometry: Geometry | None = None
    cold: ColdShares | None = None
    counted: Counted | None = None
    engine_seconds: float | None = None
    count_seconds: float | None = None

    def to_message(self) -> bytes:
        """Canonical bytes for the termination message; the largest parts go when it is too long."""
        wire = self.to_wire()
        if self.geometry is not None:
            wire["geometry"] = self.geometry.to_wire()
        for part in ("geometry", "counted", "cold"):
            raw = canonical_json(wire)
            if len(raw) <= MAX_VERDICT_BYTES:
                return raw
            wire.pop(part, None)
        wire["message"] = self.message[:256]
        return canonical_json(wire)


def parse_verdict(raw: str | bytes, source: str) -> Verdict:
    """Read a termination message whole. Raises FormatError."""
    data = raw.encode("utf-8") if isinstance(raw, str) else raw
    if len(data) > MAX_VERDICT_BYTES:
        raise FormatError(source, "size", f"{len(data)} bytes", f"at most {MAX_VERDICT_BYTES}")
    return Verdict.from_wire(load_json(data, source), source)
