"""Every expert weight format of vLLM's CPU backend: served with a map, the answers are the same.

`cpu_formats.py` makes the checkpoints, and says where it stands in for kernels of a CPU with AMX.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import layout
import pytest

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats import status as contract
from tests.ports import free_ports

pytestmark = [pytest.mark.hook, pytest.mark.full]

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
HERE = Path(__file__).parent
MODEL = HERE.parent / "model" / "moe"
HOT = 20
FORMATS: dict[str, tuple[str, str]] = {
    "bfloat16": ("plain", "bfloat16"),
    "float16": ("plain", "float16"),
    "float32": ("plain", "float32"),
    "fp8": ("fp8", "bfloat16"),
    "int8": ("int8", "bfloat16"),
    "mxfp4": ("mxfp4", "bfloat16"),
    "awq": ("awq", "bfloat16"),
    "gptq": ("gptq", "bfloat16"),
    "int4": ("int4", "bfloat16"),
}
"""Name: format of the experts, type of everything else."""

GENERATE = {
    "prompts": [
        [(31 * index + 7 * place) % 2700 + 300 for place in range(9)] for index in range(5)
    ],
    "params": {"max_tokens": 10, "logprobs": 1},
}


def run(folder: Path, environments: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Boot each format in turn; results by name."""
    (folder / "mount").mkdir(parents=True)
    layout.mount(folder / "mount")
    port = str(free_ports(1)[0])
    runs = [
        {
            "name": name, "format": kind, "base": str(MODEL),
            "model": str(folder.parent / "models" / kind),
            "env": {
                "EXPERTMAPS_DIR": str(folder / name), "EXPERTMAPS_STATUS_PORT": port,
                **environments[name],
            },
            "kwargs": {"dtype": dtype, "max_model_len": 256, "max_num_batched_tokens": 256},
            "generate": [GENERATE],
        }
        for name, (kind, dtype) in FORMATS.items()
    ]  # fmt: skip
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"out": str(folder / "out.json"), "runs": runs}))
    done = subprocess.run(
        ["flock", "/tmp/vllm.lock", PYTHON, str(HERE / "cpu_formats.py"), str(plan)],
        env={**os.environ, "PYTHONPATH": str(folder / "mount"), "EXPERTMAPS_MODE": "off"},
        cwd=folder, capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    (folder / "log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(scope="module")
def plain(work: Path) -> dict[str, Any]:
    """Without a map: the hook names what is missing, says what the model is, and stays away."""
    missing = {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": str(work / "none.json")}
    return run(work / "plain", dict.fromkeys(FORMATS, missing))


@pytest.fixture(scope="module")
def served(work: Path, plain: dict[str, Any]) -> dict[str, Any]:
    """With a map for each, every third expert cold."""
    environments = {}
    for name in FORMATS:
        path = work / f"{name}.json"
        path.write_bytes(made(plain[name]).to_bytes())
        environments[name] = {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": str(path)}
    return run(work / "served", environments)


def made(result: dict[str, Any]) -> rowmap.RowMap:
    assert "failed" not in result, result["failed"]
    found = contract.HookStatus.from_wire(result["status"], "status")
    assert found.geometry is not None and found.fingerprint is not None
    geometry = rowmap.Geometry(
        experts=found.geometry.experts, top_k=found.geometry.top_k, hot_rows=HOT,
        moe_layers=found.geometry.moe_layers, row_bytes=found.geometry.row_bytes,
    )  # fmt: skip
    orders = {
        layer: sorted(range(32), key=lambda expert: (expert * 11 + 5 * layer) % 32)
        for layer in geometry.moe_layers
    }
    return rowmap.build(
        found.fingerprint,
        geometry,
        {layer: (order[:HOT], order[HOT:]) for layer, order in orders.items()},
    )


@pytest.mark.parametrize("name", FORMATS)
def test_answers_of_a_format_are_the_same_bits(
    plain: dict[str, Any], served: dict[str, Any], name: str
) -> None:
    assert "failed" not in served[name], served[name]["failed"]
    found = contract.HookStatus.from_wire(served[name]["status"], "status")
    assert (found.phase, found.error, found.generation) == ("Serving", None, 1)
    assert found.residency is not None
    assert (found.residency.hot_rows, found.residency.cold_rows) == (4 * HOT, 4 * (32 - HOT))
    assert served[name]["results"] == plain[name]["results"]
    answers = plain[name]["results"][0]
    assert len({token for answer in answers for token in answer["ids"]}) > 20
    assert all(value < 0 for answer in answers for value in answer["logprobs"])


@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_zero_points_are_counted_as_bytes_of_the_row(
    plain: dict[str, Any], name: str
) -> None:
    found = contract.HookStatus.from_wire(plain[name]["status"], "status")
    assert found.error is not None and found.error.reason == "MapMissing"
    assert found.geometry is not None
    weights = 3 * 256 * 128
    assert (
        found.geometry.row_bytes
        == {
            "bfloat16": 2 * weights,
            "float16": 2 * weights,
            "float32": 4 * weights,
            "fp8": weights + weights // 128**2 * 4,
            "int8": weights + (2 * 128 + 256) * 4,
            "mxfp4": weights // 2 + weights // 32,
            **dict.fromkeys(("awq", "gptq", "int4"), weights + weights // 64 * 3),
        }[name]
    )
