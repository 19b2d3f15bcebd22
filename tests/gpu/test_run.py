"""`tests/gpu/run`, the part that needs no GPU: it holds, and it sees a fault in the hook."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.hook

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
ROOT = Path(__file__).parents[2]


def interpreted(root: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [PYTHON, str(root / "tests" / "gpu" / "run"), "--interpret"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stderr[-4000:]
    return done.returncode, json.loads(lines[0])


def test_split_is_the_whole_without_vllm() -> None:
    code, report = interpreted(ROOT)
    assert (code, report["wrong"]) == (0, [])
    assert report["compared"] >= 24 and report["device"] == "interpreter"
    assert os.access(ROOT / "tests" / "gpu" / "run", os.X_OK)


@pytest.mark.parametrize(
    ("module", "right", "fault", "seen"),
    [
        ("kernels", "- hot + cold_offset", "- hot + cold_offset + 1", "id split: 64 tokens"),
        ("kernels", "range(top_k)", "range(top_k - 1, -1, -1)", "finalize: 64 tokens"),
        ("split_triton", "ignore_invalid_experts=True", "ignore_invalid_experts=0", "split: 1 hot"),
    ],
)  # fmt: skip
def test_a_fault_of_the_hook_is_seen(
    tmp_path: Path, module: str, right: str, fault: str, seen: str
) -> None:
    """Numbered one off; summed backwards; blocks of the other side's experts not left out."""
    hook = tmp_path / "rowmap_jobs" / "hook"
    shutil.copytree(ROOT / "rowmap_jobs" / "hook", hook)
    shutil.copytree(ROOT / "tests" / "gpu", tmp_path / "tests" / "gpu")
    (tmp_path / "tests" / "hook").mkdir()
    shutil.copy(ROOT / "tests" / "hook" / "cpu_triton.py", tmp_path / "tests" / "hook")
    path = hook / f"expertmaps_hook_{module}.py"
    text = path.read_text("utf-8")
    assert text.count(right) == 1
    path.write_text(text.replace(right, fault), "utf-8")
    code, report = interpreted(tmp_path)
    assert code == 1 and any(seen in line for line in report["wrong"]), report
