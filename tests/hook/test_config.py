"""What the hook refuses, on vLLM's own configurations; and what it leaves alone: the compile hash.

vLLM builds the configurations as `vllm serve` would; no engine starts. Where vLLM refuses to build
one on a CPU, a field of a real one is set instead, and `STAND_INS` names it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import layout
import pytest

pytestmark = pytest.mark.hook

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
HERE = Path(__file__).parent
HOOK = HERE.parents[1] / "rowmap_jobs" / "hook"
MODEL = HERE.parent / "model" / "moe"


def ask(folder: Path, what: str, **env: str) -> Any:
    """Run the script in the engine's Python; what it prints last."""
    done = subprocess.run(
        [PYTHON, str(HERE / "config_cases.py"), str(HOOK), str(MODEL), what],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return ask(tmp_path_factory.mktemp("refusals"), "refusals")


REFUSED: dict[str, tuple[str | None, str | None]] = {
    "plain": (None, None),
    "one expert parallel rank": (None, None),
    "ngram": (None, None),
    "lora": ("LoraUnsupported", "LoraUnsupported"),
    "tensor parallel": ("ParallelismUnsupported", "ParallelismUnsupported"),
    "pipeline parallel": ("ParallelismUnsupported", "ParallelismUnsupported"),
    "data parallel": ("ParallelismUnsupported", "ParallelismUnsupported"),
    "expert parallel": ("ExpertParallelUnsupported", "ExpertParallelUnsupported"),
    "weight transfer": ("WeightReloadUnsupported", "WeightReloadUnsupported"),
    "sleep mode": ("SleepModeUnsupported", "SleepModeUnsupported"),
    "eplb": ("EplbUnsupported", "EplbUnsupported"),
    "dbo": ("DboUnsupported", "DboUnsupported"),
    "prefetch offload": ("PrefetchOffloadUnsupported", "PrefetchOffloadUnsupported"),
    "prefetch offload by name": ("PrefetchOffloadUnsupported", "PrefetchOffloadUnsupported"),
    "shared weights": ("SharedWeightsUnsupported", "SharedWeightsUnsupported"),
    "pooling": (None, "PoolingUnsupported"),
    "return routed experts": (None, "ReturnRoutedExpertsUnsupported"),
    "adaptive verification": (None, "SpeculationUnsupported"),
    "custom drafts": (None, "SpeculationUnsupported"),
    "hidden states": (None, "SpeculationUnsupported"),
    "drafts that are trimmed": (None, "SpeculationUnsupported"),
    "fast prefill": (None, "FastPrefillUnsupported"),
    "loads that are computed again": (None, "KvRecomputeUnsupported"),
}
STAND_INS = {
    "sleep mode", "eplb", "dbo", "return routed experts", "adaptive verification",
    "custom drafts", "hidden states", "drafts that are trimmed", "fast prefill",
    "loads that are computed again",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_is_refused_by_name(refusals: Any, name: str) -> None:
    found = refusals["configs"][name]
    assert (found["serve"], found["count"]) == REFUSED[name]


def test_the_table_is_whole_and_stand_ins_are_named(refusals: Any) -> None:
    assert set(refusals["configs"]) == set(REFUSED)
    assert {name for name, found in refusals["configs"].items() if not found["built"]} == STAND_INS


def test_kernels_without_a_capture_are_refused_by_name(refusals: Any) -> None:
    """vLLM's own binding says that it has nothing to bind to."""
    assert refusals["captures"] == dict.fromkeys(
        ("monolithic kernel", "unknown router", "no expert layer"), "KernelUnsupported"
    )


def test_what_would_break_a_move_between_memories_is_refused_by_name(refusals: Any) -> None:
    assert refusals["devices"] == {
        "plain": None,
        "custom allocator": "CumemAllocatorUnsupported",
        "tuned": "AutotuneUnsupported",
    }


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """vLLM's own hash factors with the hook in each mode, and without it."""
    work = tmp_path_factory.mktemp("hashes")
    (work / "mount").mkdir()
    mount = {"PYTHONPATH": str(layout.mount(work / "mount")), "EXPERTMAPS_DIR": str(work / "run")}
    serve = {**mount, "EXPERTMAPS_MODE": "serve", "EXPERTMAPS_STATUS_PORT": "9489"}
    cases = {
        "without": {"PYTHONPATH": ""},
        "off": {**mount, "EXPERTMAPS_MODE": "off"},
        "a": {**serve, "EXPERTMAPS_MAP": "/maps/a.json", "EXPERTMAPS_TIER": "mlock"},
        "b": {**serve, "EXPERTMAPS_MAP": "/maps/b.json"},
        "count": {**mount, "EXPERTMAPS_MODE": "count", "EXPERTMAPS_CAPTURE_SLOTS": "8"},
        "vLLM's own": {**mount, "EXPERTMAPS_MODE": "count", "VLLM_PLUGINS": "expertmaps"},
    }
    return {name: ask(work, "hashes", **env) for name, env in cases.items()}


@pytest.mark.parametrize("name", ["off", "a", "b", "count"])
def test_no_mode_and_no_map_is_in_the_compile_hash(hashes: Any, name: str) -> None:
    assert hashes[name] == hashes["without"] and len(hashes[name]) >= 3


def test_a_variable_of_vllms_own_would_be(hashes: Any) -> None:
    """The comparison above can fail: VLLM_PLUGINS is in the hash, so the hook sets none."""
    assert hashes["vLLM's own"] != hashes["without"]
