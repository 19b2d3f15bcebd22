"""Runs vLLM in this process as a JSON plan says; a script for the engine's Python.

Plan: {"out": path, "runs": [{"name", "model", "env", "kwargs", "generate": [...], "rpc", "occupy",
"memlock", "metrics", "broken"}]}. Each run is an engine of its own with the given EXPERTMAPS_*
environment.
A generate entry has `texts` or `prompts` (lists of ids), `params` (SamplingParams), `salt` (a
cache salt for each prompt), `tags` (extra_args for each prompt) and `concurrency` (how many prompts
run at a time; all by default); or `forced`, the prefix of
transcript ids with which the first answers of the first run are fed again as prompts. The result
holds ids and logprobs of each. The entries of `broken` run after the counting has failed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import sys
import time
import traceback
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def forced(entry: dict[str, Any], prompts: Any, answers: Any) -> dict[str, Any]:
    """Prompt and answer as one prompt, the last generated id left out, tagged."""
    fed = [ids + answer["ids"][:-1] for ids, answer in zip(prompts, answers, strict=True)]
    tags = [
        {"expertmaps_t": f"{entry['forced']}{index}", "expertmaps_seg": [len(ids), len(whole)]}
        for index, (ids, whole) in enumerate(zip(prompts, fed, strict=True))
    ]
    return {**entry, "prompts": fed, "tags": tags}


def generate(llm: Any, entry: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    base = {"temperature": 0, "ignore_eos": True, "max_tokens": 1, **entry.get("params", {})}
    tags = entry.get("tags") or [None] * len(entry["prompts"])
    prompts, params = [], []
    for index, ids in enumerate(entry["prompts"]):
        prompt = {"prompt_token_ids": ids}
        if entry.get("salt"):
            prompt["cache_salt"] = f"{entry['salt']}-{index}"
        prompts.append(prompt)
        params.append(SamplingParams(**base, extra_args=tags[index]))
    together = entry.get("concurrency") or len(prompts)
    found = [
        item
        for first in range(0, len(prompts), together)
        for item in llm.generate(
            prompts[first : first + together], params[first : first + together], use_tqdm=False
        )
    ]
    return [answer(item) for item in found]


def answer(item: Any) -> dict[str, Any]:
    """Ids and logprobs of the first output, and the experts that vLLM itself returns, if any."""
    first = item.outputs[0]
    steps = zip(first.logprobs or [], first.token_ids, strict=False)
    told = {
        "ids": list(first.token_ids),
        "logprobs": [step[token].logprob for step, token in steps],
    }
    parts = (getattr(item, "prompt_routed_experts", None), getattr(first, "routed_experts", None))
    routed = [part.tolist() for part in parts if part is not None]
    return {**told, "routed": routed} if routed else told


def called(llm: Any, name: str) -> str:
    """What a method of the workers answers, or how it fails."""
    try:
        return repr(llm.collective_rpc(name))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def status() -> dict[str, Any] | None:
    port = os.environ.get("EXPERTMAPS_STATUS_PORT")
    if not port:
        return None
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10) as answer:
        return json.load(answer)


def run(plan: dict[str, Any], first: tuple[Any, Any] | None) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith("EXPERTMAPS_")]:
        if not name.startswith("EXPERTMAPS_PRIVATE"):
            del os.environ[name]
    os.environ.update(plan.get("env", {}))
    from vllm import LLM

    kwargs = {
        "max_model_len": 1024,
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        **plan.get("kwargs", {}),
    }
    if "memlock" in plan:
        hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (plan["memlock"], hard))
    started = time.monotonic()
    with ExitStack() as stack:
        if "occupy" in plan:
            taken = stack.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("", plan["occupy"]))
            taken.listen()
        llm = LLM(model=plan["model"], **kwargs)
    result: dict[str, Any] = {"boot": time.monotonic() - started}
    result["ready"] = None if "occupy" in plan else status()
    for entry in (*plan.get("generate", []), *plan.get("broken", [])):
        if "texts" in entry:
            tokenizer = llm.get_tokenizer()
            entry["prompts"] = [tokenizer.encode(text) for text in entry["texts"]]
    entries = [
        forced(entry, *first) if "forced" in entry and first is not None else entry
        for entry in plan.get("generate", [])
    ]
    result["results"] = [generate(llm, entry) for entry in entries]
    if plan.get("metrics"):
        result["metrics"] = {
            item.name: item.value
            for item in llm.get_metrics()
            if item.name in plan["metrics"] and hasattr(item, "value")
        }
    if plan.get("rpc"):
        calls = [plan["rpc"]] if isinstance(plan["rpc"], str) else plan["rpc"]
        result["rpc"] = "\n".join(called(llm, name) for name in calls)
    time.sleep(0.5)
    if "occupy" in plan:
        path = Path(os.environ["EXPERTMAPS_DIR"], "status.json")
        deadline = time.monotonic() + 30
        while True:
            result["status"] = json.loads(path.read_text())
            if result["status"]["phase"] == "Serving" or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    else:
        result["status"] = status()
    if plan.get("broken"):
        llm.collective_rpc(break_counting)
        result["broken"] = [generate(llm, entry) for entry in plan["broken"]], status()
    llm.llm_engine.engine_core.shutdown()
    return result


def break_counting(worker: Any) -> None:
    """What the hook does when a step of its own counting fails."""
    worker._expertmaps_session._fail(RuntimeError("broken by a test"), "CountFailed")


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, Any] = {}
    first = None
    for item in plan["runs"]:
        try:
            results[item["name"]] = found = run(item, first)
            found["prompts"] = item["generate"][0].get("prompts")
            if first is None:
                first = (item["generate"][0]["prompts"], found["results"][0])
        except Exception:
            results[item["name"]] = {"failed": traceback.format_exc()}
            traceback.print_exc()
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        gc.collect()
        cleanup_dist_env_and_memory()
    Path(plan["out"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
