"""How much throughput a lane loses to the hook: paired windows on the small model.

    python -m tests.bench.bench_hook_throughput [--blocks 40] [--requests 8] [--tokens 32]

Boots four vLLMs (un-hooked; hook mounted with mode off; a map in force that keeps every row hot;
counting), each on one CPU thread, and gives them turns: in a block the un-hooked engine and a
hooked one run a window each in the order A B B A, so that what drifts with time hits both. Only
one engine runs at any moment. A window is the same greedy decode of `--requests` prompts. The loss
of a block is 1 - (un-hooked / hooked), in CPU seconds per token and in wall clock. Prints JSON: the
median of the blocks, its 95% bootstrap interval, all blocks, and whether the answers were the same
bits. Bars: 3% idle and all-hot, 10% counting.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats import status as contract
from tests.hook.turns import Engine

BARS = {"idle": 0.03, "all-hot": 0.03, "count": 0.10}
RESAMPLES = 2000


def every_row_hot(found: contract.HookStatus, path: Path) -> None:
    """Write a map of the counted engine's model that has no cold row."""
    assert found.geometry is not None and found.fingerprint is not None
    geometry = found.geometry
    assert isinstance(geometry.experts, int)
    rows = list(range(geometry.experts))
    made = rowmap.build(
        found.fingerprint,
        rowmap.Geometry(
            experts=geometry.experts, top_k=geometry.top_k, hot_rows=geometry.experts,
            moe_layers=geometry.moe_layers, row_bytes=geometry.row_bytes,
        ),
        {layer: (rows, []) for layer in geometry.moe_layers},
    )  # fmt: skip
    path.write_bytes(made.to_bytes())


def loss(plain: list[dict[str, Any]], hooked: list[dict[str, Any]], key: str) -> float:
    """Share of tokens per unit of `key` that a block's hooked windows lost."""
    rates = [
        sum(window["tokens"] for window in windows) / sum(window[key] for window in windows)
        for windows in (plain, hooked)
    ]
    return 1 - rates[1] / rates[0]


def summary(losses: list[float]) -> dict[str, Any]:
    """Median and its bootstrap interval."""
    chance = random.Random(0)
    drawn = sorted(
        statistics.median(chance.choices(losses, k=len(losses))) for _ in range(RESAMPLES)
    )
    low, high = drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40]
    return {
        "median": round(statistics.median(losses), 4),
        "interval95": [round(low, 4), round(high, 4)],
        "blocks": [round(value, 4) for value in losses],
    }


def compare(plain: Engine, hooked: dict[str, Engine], blocks: int) -> dict[str, dict[str, Any]]:
    """Blocks of A B B A for each hooked engine in turn."""
    for engine in (plain, *hooked.values()):
        engine.window()  # warm
    found: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "seconds": []} for name in hooked}
    for _ in range(blocks):
        for name, engine in hooked.items():
            turns = [plain.window(), engine.window(), engine.window(), plain.window()]
            for key, values in found[name].items():
                values.append(loss([turns[0], turns[3]], [turns[1], turns[2]], key))
    return {
        name: {key: summary(values) for key, values in by_key.items()}
        for name, by_key in found.items()
    }


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    size = (args.requests, args.tokens)
    engines: dict[str, Engine] = {}
    try:
        plain = engines["plain"] = Engine(folder / "plain", size, None)
        engines["count"] = Engine(folder / "count", size, {"EXPERTMAPS_MODE": "count"})
        every_row_hot(
            contract.HookStatus.from_wire(engines["count"].status, "count"), folder / "map.json"
        )
        engines["idle"] = Engine(folder / "idle", size, {"EXPERTMAPS_MODE": "off"})
        serve = {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": str(folder / "map.json")}
        engines["all-hot"] = Engine(folder / "hot", size, serve)
        said = {name: engine.status or {} for name, engine in engines.items()}
        failed = {name: found["error"] for name, found in said.items() if "error" in found}
        if failed:
            raise RuntimeError(f"the hook gave up: {failed}")
        found = compare(plain, {name: engines[name] for name in BARS}, args.blocks)
        answers = {name: engine.end() for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.kill()
    for name, bar in BARS.items():
        found[name]["bar"] = bar
        found[name]["within"] = found[name]["cpu"]["median"] <= bar
        found[name]["sameBits"] = answers[name] == answers["plain"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    if "EXPERTMAPS_BENCH_LOCKED" not in os.environ:
        # One vLLM at a time on a machine: the whole bench holds the lock.
        os.environ["EXPERTMAPS_BENCH_LOCKED"] = "1"
        again = [sys.executable, "-m", "tests.bench.bench_hook_throughput", *sys.argv[1:]]
        return subprocess.run(["flock", "/tmp/vllm.lock", *again], check=False).returncode
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name), args)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
