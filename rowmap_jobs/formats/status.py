"""What the hook says of itself: status.json in EXPERTMAPS_DIR and GET /status on its port."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import Digest, FormatError, Strict
from .rowmap import Fingerprint, PerLayer

Phase = Literal["Loading", "Ready", "Serving", "Failed", "Stopped"]
"""Loading: weights are not in place. Ready: hooked (or un-hooked by mode), no step yet.
Serving: at least one real step. Failed: the hook undid its work and vLLM serves un-hooked."""

MAX_STATUS_BYTES = 1 << 20


class HookError(Strict):
    """Why the hook gave up."""

    reason: str = Field(pattern=r"^[A-Z][A-Za-z0-9]{0,63}$")
    message: str = Field(max_length=1024)


class ModelGeometry(Strict):
    """What the hook found in the loaded model."""

    experts: PerLayer
    top_k: int = Field(ge=1)
    moe_layers: tuple[int, ...]
    whole_layers: tuple[int, ...] = ()
    row_bytes: PerLayer


class KernelUse(Strict):
    """A kernel of the engine that reads moved rows."""

    name: str
    """Its class in the engine."""
    layers: int = Field(ge=1)
    ran_on: str | None = None
    """Hardware on which the makers of the hook ran it with this kernel; null: on none."""


class Residency(Strict):
    """Rows and bytes in each tier; all zero when nothing was re-homed."""

    hot_rows: int = Field(ge=0)
    cold_rows: int = Field(ge=0)
    hot_bytes: int = Field(ge=0)
    cold_bytes: int = Field(ge=0)
    locked_bytes: int = Field(ge=0)
    tier: Literal["overlay", "mlock", "uva", "none"]
    """overlay, mlock: a CPU's cold rows in a mapped file. uva: a GPU's in pinned host memory."""
    move_bytes_per_second: int | None = Field(default=None, ge=0)
    """How fast rows were copied into the tiers, where that was measured."""
    kernels: tuple[KernelUse, ...] = ()


class CompileEvidence(Strict):
    """Compile-cache counters of the engine's process (torch inductor's FX graph cache, AOT)."""

    cache_hits: int = Field(ge=0)
    cache_misses: int = Field(ge=0)
    aot_loaded: int = Field(default=0, ge=0)
    aot_compiled: int = Field(default=0, ge=0)
    autotune_files: int = Field(default=0, ge=0)
    autotune_written: int = Field(default=0, ge=0)
    """Files that the kernel autotuner keeps for this launch, and how many this boot wrote."""
    autotune_digest: Digest | None = None
    """Over all of them: equal between boots that tuned nothing."""

    @property
    def hit(self) -> bool | None:
        """True: loaded, nothing compiled or tuned. False: something was. None: no compiler ran."""
        if self.cache_misses or self.aot_compiled or self.autotune_written:
            return False
        if self.cache_hits or self.aot_loaded:
            return True
        return None


class Counting(Strict):
    """Totals of count mode."""

    prefill_rows: int = Field(ge=0)
    decode_rows: int = Field(ge=0)
    recomputed_rows: int = Field(ge=0)
    """Rows fed once more: after a preemption, or to rebuild a window after a cache hit."""
    verify_rows: int = Field(default=0, ge=0)
    """Rows of drafted tokens, accepted or not; in no transcript."""
    missed: int = Field(ge=0)
    transcripts: int = Field(ge=0)
    skipped: dict[str, int] = Field(default_factory=dict)


class HookStatus(Strict):
    """One engine process group of a pod, as rank 0 reports it; another rank's own file is alike."""

    version: Literal[1] = 1
    hook_version: str
    hook_digest: Digest
    engine: Literal["vLLM"]
    engine_version: str
    runner: str
    """Model runner of the engine: v1 or v2."""
    mode: Literal["off", "serve", "count"]
    phase: Phase
    generation: int = Field(ge=0)
    """How often rows were re-homed in this process: 0 is un-hooked."""
    rank: int = Field(ge=0)
    pid: int = Field(ge=1)
    started_at: int
    updated_at: int
    """Unix seconds."""
    map_digest: Digest | None = None
    """The map in force; absent when none is."""
    row_set_digest: Digest | None = None
    fingerprint: Fingerprint | None = None
    geometry: ModelGeometry | None = None
    residency: Residency | None = None
    compile: CompileEvidence | None = None
    counting: Counting | None = None
    steps: int = Field(default=0, ge=0)
    boot_seconds: float | None = Field(default=None, ge=0)
    """From process start of the engine to the first ready state."""
    error: HookError | None = None


def parse(raw: bytes, source: str) -> HookStatus:
    """Read a status whole. Raises FormatError."""
    if len(raw) > MAX_STATUS_BYTES:
        raise FormatError(source, "size", f"{len(raw)} bytes", f"at most {MAX_STATUS_BYTES}")
    return HookStatus.from_bytes(raw, source)
