"""Counters and re-homing on real tensors, without an engine."""

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


def test_cases(tmp_path: Path) -> None:
    hook = HERE.parents[1] / "rowmap_jobs" / "hook"
    done = subprocess.run(
        [PYTHON, str(HERE / "torch_cases.py"), str(hook), str(tmp_path / "work")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *cases, last = done.stdout.split()
    assert last == "done" and len(cases) >= 10, done.stdout
