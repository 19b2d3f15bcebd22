"""A layer split over two tiers computes the whole layer's bits, without an engine or a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.hook

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
HERE = Path(__file__).parent
HOOK = HERE.parents[1] / "rowmap_jobs" / "hook"


def cases_of(script: str, work: Path) -> list[str]:
    done = subprocess.run(
        [PYTHON, str(HERE / script), str(HOOK), str(work)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *cases, last = done.stdout.split()
    assert last == "done", done.stdout
    return cases


@pytest.mark.parametrize("examples", ["18", pytest.param("60", marks=pytest.mark.full)])
def test_triton_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: str) -> None:
    monkeypatch.setenv("SPLIT_EXAMPLES", examples)
    assert len(cases_of("split_cases.py", tmp_path / "work")) == 12


def test_one_scale_over_all_rows(tmp_path: Path) -> None:
    assert len(cases_of("split_scale_cases.py", tmp_path / "work")) == 3


def test_marlin_experts(tmp_path: Path) -> None:
    assert len(cases_of("split_marlin_cases.py", tmp_path / "work")) == 6


def test_trtllm_experts_and_the_two_kernels(tmp_path: Path) -> None:
    assert len(cases_of("split_trtllm_cases.py", tmp_path / "work")) == 7


def test_kernels_compile_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ampere, Hopper and Blackwell; the sum is fused multiply-adds alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cases_of("split_compile.py", tmp_path / "work") == ["sm_80", "sm_90", "sm_100"]
