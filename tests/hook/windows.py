"""An engine that runs windows of the same work when it is told to; a script for its Python.

`windows.py MODEL REQUESTS TOKENS` boots vLLM in this process with the EXPERTMAPS_* environment it
is given, prints `{"status": ...}`, then answers each line of its input with one window:
`{"seconds", "cpu", "faults", "tokens"}`: wall clock, CPU seconds of all threads, major page faults
and generated tokens. The last line is `{"ids", "logprobs"}` of the first window.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import urllib.request
from typing import Any

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


def main() -> None:
    model, requests, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, max_model_len=512, enforce_eager=True, enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )  # fmt: skip
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, logprobs=1)
    prompts = [
        {"prompt_token_ids": [(7 * index + 13 * place) % 2500 + 300 for place in range(24)]}
        for index in range(requests)
    ]
    first: Any = None
    say({"status": status() if "EXPERTMAPS_STATUS_PORT" in os.environ else None})
    for _ in sys.stdin:
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
