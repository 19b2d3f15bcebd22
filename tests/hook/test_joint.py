"""Rows that the residency moved are what the split kernels of vLLM read, bit for bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.hook, pytest.mark.full]

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "cases", [("triton_layers",), ("marlin_layers", "trtllm_layers"), ("mistakes_are_seen",)]
)
def test_cases(cases: tuple[str, ...], tmp_path: Path) -> None:
    hook = HERE.parents[1] / "rowmap_jobs" / "hook"
    done = subprocess.run(
        [PYTHON, str(HERE / "joint_cases.py"), str(hook), str(tmp_path), *cases],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [*cases, "done"]
