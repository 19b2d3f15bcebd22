"""A layer split over two tiers computes the whole layer's bits, without an engine or a GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

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


def test_triton_experts(tmp_path: Path) -> None:
    assert len(cases_of("split_cases.py", tmp_path / "work")) == 11


def test_marlin_experts(tmp_path: Path) -> None:
    assert len(cases_of("split_marlin_cases.py", tmp_path / "work")) == 6
