"""An engine that runs windows of the same work when it is told to; a script for its Python.

`windows.py MODEL REQUESTS TOKENS` boots vLLM in this process with the EXPERTMAPS_* environment it
is given, prints `{"status": ...}`, then answers each line of its input: `go` with one window,
`{"seconds", "cpu", "faults", "tokens"}`: wall clock, CPU seconds of all threads, major page faults
and generated tokens; `pages` with `{"hot", "cold"}`, [resident, all] pages of the moved rows. The
last line is `{"ids", "logprobs"}` of the first window, whose requests carry the transcript ids
w0, w1, ... for an engine that counts.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import time
import urllib.request
from typing import Any

from window_prompts import prompt

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def say(value: Any) -> None:
    print("WINDOW " + json.dumps(value), flush=True)


def status() -> Any:
    port = os.environ["EXPERTMAPS_STATUS_PORT"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10) as answer:
        return json.load(answer)


def pages(llm: Any) -> dict[str, list[int]]:
    """mincore over the page ranges of the session's rows."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    residency = worker._expertmaps_session.residency
    libc, page = ctypes.CDLL(None, use_errno=True), resource.getpagesize()
    import expertmaps_hook_pages as arithmetic

    found = {"hot": [0, 0], "cold": [0, 0]}
    for segment in residency.segments:
        hot = residency._ranges[segment.layer, segment.name]
        for name, ranges in (("hot", hot), ("cold", arithmetic.cold_ranges(segment, hot))):
            for low, high in ranges:
                marks = (ctypes.c_ubyte * ((high - low) // page))()
                address, size = ctypes.c_void_p(residency._base + low), ctypes.c_size_t(high - low)
                if libc.mincore(address, size, marks):
                    raise OSError(ctypes.get_errno(), "mincore")
                found[name][0] += sum(mark & 1 for mark in marks)
                found[name][1] += len(marks)
    return found


def main() -> None:
    model, requests, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, max_model_len=512, enforce_eager=True, enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )  # fmt: skip
    common = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens, "logprobs": 1}
    tagged = [
        SamplingParams(**common, extra_args={"expertmaps_t": f"w{index}"})
        for index in range(requests)
    ]
    prompts = [{"prompt_token_ids": prompt(index, 24)} for index in range(requests)]
    first: Any = None
    say({"status": status() if "EXPERTMAPS_STATUS_PORT" in os.environ else None})
    for line in sys.stdin:
        if line.strip() == "pages":
            say(pages(llm))
            continue
        params = SamplingParams(**common) if first else tagged
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        start, cpu = time.monotonic(), time.process_time()
        found = [item.outputs[0] for item in llm.generate(prompts, params, use_tqdm=False)]
        window = {
            "seconds": time.monotonic() - start,
            "cpu": time.process_time() - cpu,
            "faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
            "tokens": sum(len(item.token_ids) for item in found),
        }
        first = first or found
        say(window)
    say(
        {
            "ids": [list(item.token_ids) for item in first],
            "logprobs": [
                [step[token].logprob for step, token in zip(o.logprobs, o.token_ids, strict=True)]
                for o in first
            ],
        }
    )


if __name__ == "__main__":
    main()
