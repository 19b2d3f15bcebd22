"""The status in Prometheus text format. Names, labels and meanings are part of the interface.

`METRICS` is the whole table; a status without residency, compiler or counting leaves its rows out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

PHASES = ("Loading", "Ready", "Serving", "Failed", "Stopped")


class Metric(NamedTuple):
    """A row of the table."""

    kind: str
    labels: tuple[str, ...]
    text: str


METRICS: Mapping[str, Metric] = {
    "expertmaps_hook_info": Metric(
        "gauge",
        ("mode", "runner", "engine_version", "hook_version", "hook_digest", "map_digest", "rank"),
        "Always 1: what this hook is.",
    ),
    "expertmaps_hook_phase": Metric("gauge", ("phase",), "1 for the phase it is in, else 0."),
    "expertmaps_hook_error": Metric("gauge", ("reason",), "1 when the hook has an error."),
    "expertmaps_generation": Metric("gauge", (), "Re-homings in this process; 0 is un-hooked."),
    "expertmaps_steps_total": Metric("counter", (), "Steps of the model after warm-up."),
    "expertmaps_boot_seconds": Metric("gauge", (), "From the engine's start to ready."),
    "expertmaps_hot_rows": Metric("gauge", ("tier",), "Expert rows in fast memory."),
    "expertmaps_cold_rows": Metric("gauge", ("tier",), "Expert rows in slow memory."),
    "expertmaps_hot_bytes": Metric("gauge", ("tier",), "Bytes of the hot rows."),
    "expertmaps_cold_bytes": Metric("gauge", ("tier",), "Bytes of the cold rows."),
    "expertmaps_locked_bytes": Metric("gauge", ("tier",), "Bytes locked in memory."),
    "expertmaps_compile_cache_hits": Metric("gauge", (), "Graphs loaded from the cache."),
    "expertmaps_compile_cache_misses": Metric("gauge", (), "Graphs compiled in this boot."),
    "expertmaps_aot_loaded": Metric("gauge", (), "AOT artifacts loaded."),
    "expertmaps_aot_compiled": Metric("gauge", (), "AOT artifacts compiled in this boot."),
    "expertmaps_autotune_files": Metric("gauge", (), "Files of the kernel autotuner."),
    "expertmaps_autotune_written": Metric("gauge", (), "Of them, written in this boot."),
    "expertmaps_counted_rows_total": Metric("counter", ("phase",), "Rows counted."),
    "expertmaps_recomputed_rows_total": Metric("counter", (), "Rows fed once more."),
    "expertmaps_verify_rows_total": Metric("counter", (), "Rows of drafted tokens."),
    "expertmaps_missed_rows_total": Metric("counter", (), "Rows whose selection is not whole."),
    "expertmaps_transcripts_total": Metric("counter", (), "Transcripts counted."),
    "expertmaps_skipped_total": Metric("counter", ("reason",), "Transcripts not counted."),
    "expertmaps_major_faults_total": Metric("counter", (), "Pages that this process waited for."),
}

_RESIDENCY = {
    "expertmaps_hot_rows": "hotRows",
    "expertmaps_cold_rows": "coldRows",
    "expertmaps_hot_bytes": "hotBytes",
    "expertmaps_cold_bytes": "coldBytes",
    "expertmaps_locked_bytes": "lockedBytes",
}
_COMPILE = {
    "expertmaps_compile_cache_hits": "cacheHits",
    "expertmaps_compile_cache_misses": "cacheMisses",
    "expertmaps_aot_loaded": "aotLoaded",
    "expertmaps_aot_compiled": "aotCompiled",
    "expertmaps_autotune_files": "autotuneFiles",
    "expertmaps_autotune_written": "autotuneWritten",
}
_COUNTING = {
    "expertmaps_recomputed_rows_total": "recomputedRows",
    "expertmaps_verify_rows_total": "verifyRows",
    "expertmaps_missed_rows_total": "missed",
    "expertmaps_transcripts_total": "transcripts",
}

Sample = tuple[str, dict[str, str], float | int]
"""Name, labels, value."""


def render_metrics(wire: Mapping[str, Any]) -> str:
    """A status in Prometheus text format."""
    lines: list[str] = []
    last = ""
    for name, labels, value in _samples(wire):
        if name != last:
            metric = METRICS[name]
            lines += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}"]
            last = name
        shown = ",".join(f'{key}="{_escape(item)}"' for key, item in labels.items())
        lines.append(f"{name}{'{' + shown + '}' if shown else ''} {value!r}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _samples(wire: Mapping[str, Any]) -> Iterator[Sample]:
    info = {
        "mode": wire["mode"], "runner": wire["runner"], "engine_version": wire["engineVersion"],
        "hook_version": wire["hookVersion"], "hook_digest": wire["hookDigest"],
        "map_digest": wire.get("mapDigest", ""), "rank": str(wire["rank"]),
    }  # fmt: skip
    yield "expertmaps_hook_info", info, 1
    for phase in PHASES:
        yield "expertmaps_hook_phase", {"phase": phase}, int(wire["phase"] == phase)
    if "error" in wire:
        yield "expertmaps_hook_error", {"reason": wire["error"]["reason"]}, 1
    yield "expertmaps_generation", {}, wire["generation"]
    yield "expertmaps_steps_total", {}, wire["steps"]
    if "bootSeconds" in wire:
        yield "expertmaps_boot_seconds", {}, wire["bootSeconds"]
    residency = wire.get("residency")
    if residency is not None:
        for name, key in _RESIDENCY.items():
            yield name, {"tier": residency["tier"]}, residency[key]
    for name, key in _COMPILE.items():
        if key in wire.get("compile", {}):
            yield name, {}, wire["compile"][key]
    yield from _counting_samples(wire.get("counting"))
    faults = major_faults()
    if faults is not None:
        yield "expertmaps_major_faults_total", {}, faults


def _counting_samples(counting: Mapping[str, Any] | None) -> Iterator[Sample]:
    if counting is None:
        return
    for phase in ("prefill", "decode"):
        yield "expertmaps_counted_rows_total", {"phase": phase}, counting[f"{phase}Rows"]
    for name, key in _COUNTING.items():
        yield name, {}, counting[key]
    for reason, count in sorted(counting["skipped"].items()):
        yield "expertmaps_skipped_total", {"reason": reason}, count


def major_faults() -> int | None:
    """Major page faults of this process: reads that memory did not have."""
    try:
        text = Path("/proc/self/stat").read_text("ascii", "replace")
        return int(text.rpartition(")")[2].split()[9])
    except (OSError, ValueError, IndexError):
        return None
