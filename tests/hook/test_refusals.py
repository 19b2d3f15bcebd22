"""Engines that the hook refuses, really booted: each answers as without the hook and says why.

These are the ones that boot on a CPU: LoRA of experts needs kernels that a CPU build has not, and
vLLM refuses sleep mode, EPLB and DBO there. The other refusals are in test_config.py and, for what
is in the loaded layers, in test_model.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.hook import test_engine as engines
from tests.hook import test_v2 as second

pytestmark = [pytest.mark.hook, pytest.mark.full]

ANSWERS = {"texts": second.TEXTS[:2], "params": {"max_tokens": 8, "logprobs": 2}}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "transfer": ("WeightReloadUnsupported", {"weight_transfer_config": {"backend": "nccl"}}),
    "ranks": (
        "ParallelismUnsupported",
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
}
CASES = [("transfer", "serve"), ("transfer", "count"), ("ranks", "count")]
"""Two ranks are booted for one mode only: the check is the same, and they are slow."""


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # two ranks share what there is
    runs = [
        {
            "name": f"{name}-{mode}", "env": {"EXPERTMAPS_MODE": mode, **threads},
            "kwargs": {**second.SMALL, **kwargs}, "generate": [ANSWERS],
        }
        for name, (_, kwargs) in REFUSED.items()
        for mode in ("off", "serve", "count")
        if mode == "off" or (name, mode) in CASES
    ]  # fmt: skip
    return engines.run(tmp_path_factory.mktemp("refusals") / "all", runs)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_refused_engine_serves_and_says_why(booted: dict[str, Any], name: str, mode: str) -> None:
    plain, result = booted[f"{name}-off"], booted[f"{name}-{mode}"]
    before = engines.status_of(plain)
    assert (before.phase, before.error) == ("Serving", None)
    found = engines.status_of(result)
    assert found.error is not None and found.error.reason == REFUSED[name][0]
    assert (found.mode, found.phase, found.generation) == (mode, "Failed", 0)
    assert found.counting is None and found.steps > 0
    assert result["results"] == plain["results"]
    assert all(len(answer["ids"]) == 8 for answer in result["results"][0])
