"""What the hook adds to one step of the engine, on stand-ins of the engine's own objects.

`cost.py HOOK_FOLDER` prints JSON; a script for the engine's Python, since counting needs torch.
The wrappers are the real ones, put there by `patch_worker`; the runner below them does nothing,
so what a wrapped step takes more than a bare one is the hook's. Units: microseconds of CPU time of
the calling thread; calls as `sys.setprofile` sees them; blocks and bytes of Python's allocator.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEPS, REPEATS, WARM = 2000, 7, 50
LAYERS, EXPERTS, TOP_K = 40, 384, 6
"""Shape of the counted model."""

Step = Callable[[Any], Any]


class Runner:
    """The engine's model runner, without a model."""

    device = SimpleNamespace(type="cpu")

    def __init__(self, requests: int) -> None:
        self.input_batch = SimpleNamespace(
            req_ids=[f"r{index}" for index in range(requests)], num_reqs=requests
        )

    def execute_model(self, scheduled: Any) -> None:
        """A step that costs nothing."""


class Worker:
    """The engine's worker, without an engine."""

    rank = 0
    use_v2_model_runner = False
    vllm_config = SimpleNamespace()
    requests = 1

    def load_model(self) -> None:
        self.model_runner = Runner(self.requests)

    def compile_or_warm_up_model(self) -> None:
        """Warm at once."""

    def shutdown(self) -> None:
        """Nothing to stop."""


def scheduled(requests: int, step: int) -> Any:
    """A decode step: one row of each request, all of them known to the engine."""
    names = [f"r{index}" for index in range(requests)]
    return SimpleNamespace(
        total_num_scheduled_tokens=requests,
        num_scheduled_tokens=dict.fromkeys(names, 1),
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(),
        scheduled_new_reqs=[] if step else [new_request(name) for name in names],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names if step else [],
            num_computed_tokens=[16 + step] * requests if step else [],
            resumed_req_ids=set(),
        ),
    )


def new_request(name: str) -> Any:
    return SimpleNamespace(
        req_id=name, prompt_len=16, num_computed_tokens=16, replay_start=0,
        sampling_params=SimpleNamespace(extra_args=None),
    )  # fmt: skip


def hooked(mode: str, requests: int, folder: str) -> tuple[Step, Any]:
    """A wrapped `execute_model` in the given mode, and its session."""
    os.environ.update(EXPERTMAPS_MODE=mode, EXPERTMAPS_DIR=folder)
    os.environ.pop("EXPERTMAPS_STATUS_PORT", None)
    module = importlib.import_module("expertmaps_hook_worker")
    base = module.Session

    class Session(base):  # type: ignore[misc]
        """What a mode does before the first step, without a model."""

        def load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
            original(*args, **kwargs)
            if mode == "count":
                self.capture = counting(folder)
            self._follow()

    worker_class = type("Worker", (Worker,), {"requests": requests})
    module.Session = Session
    try:
        module.patch_worker(worker_class, "0.32.0")
        worker = worker_class()
        worker.load_model()
    finally:
        module.Session = base
    worker.compile_or_warm_up_model()
    return worker.model_runner.execute_model, getattr(worker, module.ATTRIBUTE)


def counting(folder: str) -> Any:
    """Real counters over a real buffer."""
    import torch

    torch.set_num_threads(1)
    capture = importlib.import_module("expertmaps_hook_capture")
    counts = importlib.import_module("expertmaps_hook_counts")
    buffer = torch.zeros((1024, LAYERS, TOP_K), dtype=torch.int32)
    made = counts.Counters(buffer, dict.fromkeys(range(LAYERS), EXPERTS), TOP_K, 8)
    return capture.Capture(made, Path(folder) / "transcripts")


def calls(step: Step, plan: list[Any]) -> dict[str, float]:
    """Calls of Python functions and of C functions a step."""
    found = {"call": 0, "c_call": 0}

    def count(_: Any, event: str, __: Any) -> None:
        if event in found:
            found[event] += 1

    sys.setprofile(count)
    try:
        for item in plan:
            step(item)
    finally:
        sys.setprofile(None)
    # One C call is setprofile's own, which ends the measurement.
    return {"python": found["call"] / len(plan), "c": (found["c_call"] - 1) / len(plan)}


def memory(step: Step, plan: list[Any]) -> dict[str, float]:
    """Blocks that a step leaves behind, and the most bytes it holds meanwhile."""
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for item in plan:
            step(item)
        kept = sys.getallocatedblocks() - before
        tracemalloc.start()
        step(plan[-1])
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        step(plan[-1])
        peak = tracemalloc.get_traced_memory()[1] - held
        tracemalloc.stop()
    finally:
        gc.enable()
    return {"keptBlocks": kept / len(plan), "peakBytes": peak}


def timed(step: Step, plan: list[Any]) -> float:
    """Microseconds of this thread a step."""
    start = time.thread_time_ns()
    for item in plan:
        step(item)
    return (time.thread_time_ns() - start) / 1000 / len(plan)


def measure(mode: str, requests: int, steps: int = STEPS, repeats: int = REPEATS) -> dict[str, Any]:
    """The cost of a mode for decode steps of so many requests."""
    with tempfile.TemporaryDirectory() as folder:
        step, session = hooked(mode, requests, folder)
        bare = Runner(requests).execute_model
        plan = [scheduled(requests, number) for number in range(1 + WARM + steps)]
        for item in plan[: WARM + 1]:
            step(item)
            bare(item)
        if session.status.phase == "Failed" or (mode == "count") != (session.capture is not None):
            raise RuntimeError(f"{mode}: found a hook that gave up, expected one that works")
        plan = plan[WARM + 1 :]
        pairs = [(timed(step, plan), timed(bare, plan)) for _ in range(repeats)]
        added = [hook - nothing for hook, nothing in pairs]
        result = {
            "mode": mode,
            "requests": requests,
            "microseconds": {
                "median": round(statistics.median(added), 3),
                "lowest": round(min(added), 3),
                "highest": round(max(added), 3),
            },
            "calls": {
                key: value - nothing
                for (key, value), nothing in zip(
                    calls(step, plan).items(), calls(bare, plan).values(), strict=True
                )
            },
            **memory(step, plan),
        }
        session.close()
    return result


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    found = [measure("off", 1), measure("serve", 1), measure("serve", 32)]
    found += [measure("count", requests) for requests in (1, 32)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
