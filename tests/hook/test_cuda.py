"""The CUDA residency on real tensors, without a GPU: device and driver are stand-ins."""

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


@pytest.mark.parametrize(("script", "least"), [("cuda_cases.py", 17), ("tensor_cases.py", 10)])
def test_cases(script: str, least: int) -> None:
    hook = HERE.parents[1] / "rowmap_jobs" / "hook"
    done = subprocess.run(
        [PYTHON, str(HERE / script), str(hook)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    *cases, last = done.stdout.split()
    assert last == "done" and len(cases) >= least, done.stdout
