"""Engines that the hook refuses, really booted: each answers as without the hook and says why.

These are the ones that boot on a CPU; the other refusals are in test_config.py and, for what is in
the loaded layers, in test_model.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.hook import test_engine as engines

pytestmark = pytest.mark.e2e

ANSWERS = {"texts": engines.TEXTS[:4], "params": {"max_tokens": 12, "logprobs": 2}}
SMALL = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 8}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraUnsupported", {"enable_lora": True, "max_lora_rank": 8}),
    "transfer": ("WeightReloadUnsupported", {"weight_transfer_config": {"backend": "nccl"}}),
    "ranks": (
        "ParallelismUnsupported",
        {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
}
CASES = [
    ("lora", "serve"), ("lora", "count"), ("transfer", "serve"), ("transfer", "count"),
    ("ranks", "count"),
]  # fmt: skip
"""Two ranks are booted for one mode only: the check is the same, and the boots are long."""


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs = [
        {
            "name": f"{name}-{mode}", "env": {"EXPERTMAPS_MODE": mode}, "generate": [ANSWERS],
            "kwargs": {**SMALL, **kwargs},
        }
        for name, (_, kwargs) in REFUSED.items()
        for mode in ("off", "serve", "count")
        if mode == "off" or (name, mode) in CASES
    ]  # fmt: skip
    return engines.run(tmp_path_factory.mktemp("refusals") / "all", runs)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_refused_engine_serves_and_says_why(booted: dict[str, Any], name: str, mode: str) -> None:
    plain, result = booted[f"{name}-off"], booted[f"{name}-{mode}"]
    assert engines.status_of(plain).error is None
    found = engines.status_of(result)
    assert found.error is not None and found.error.reason == REFUSED[name][0]
    assert (found.phase, found.generation, found.counting) == ("Failed", 0, None)
    assert result["results"] == plain["results"]
    assert all(len(answer["ids"]) == 12 for answer in result["results"][0])
