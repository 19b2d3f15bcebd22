"""How much throughput a lane loses to the hook: paired windows on the small model.

    python -m tests.bench.bench_hook_throughput [--rounds 5] [--blocks 8] [--requests 8]
        [--tokens 32]

Boots five vLLMs (un-hooked twice; hook mounted with mode off; a map in force that keeps every row
hot; counting), each on one CPU thread, and gives them turns: in a block the un-hooked engine and
another one run a window each in the order A B B A, so that what drifts with time hits both. Only
one engine runs at any moment. A window is the same greedy decode of `--requests` prompts. Where a
process's memory lies makes it faster or slower for its whole life, so each round boots all of them
anew, in another order; the second un-hooked one (`same`) shows how much of a loss is chance.

The loss of a block is 1 - (rate of the other / rate of the un-hooked), by tokens per CPU second and
per second. Prints JSON: the median over rounds of their median blocks, its 95% interval (rounds
drawn again, then their blocks), all blocks, and whether the answers were the same bits. Bars: 3%
idle and all-hot, 10% counting.
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
SAME = "same"
ORDER = ("plain", "idle", "all-hot", "count", SAME)
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


def summary(rounds: list[list[float]]) -> dict[str, Any]:
    """Median over rounds of their medians, and its bootstrap interval."""
    chance = random.Random(0)

    def again() -> float:
        drawn = chance.choices(rounds, k=len(rounds))
        return statistics.median(
            statistics.median(chance.choices(blocks, k=len(blocks))) for blocks in drawn
        )

    drawn = sorted(again() for _ in range(RESAMPLES))
    low, high = drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40]
    return {
        "median": round(statistics.median(map(statistics.median, rounds)), 4),
        "interval95": [round(low, 4), round(high, 4)],
        "rounds": [[round(value, 4) for value in blocks] for blocks in rounds],
    }


def compare(
    plain: Engine, others: dict[str, Engine], blocks: int
) -> dict[str, dict[str, list[float]]]:
    """Losses in blocks of A B B A for each other engine in turn."""
    for engine in (plain, *others.values()):
        engine.window()  # warm
    found: dict[str, dict[str, list[float]]] = {name: {"cpu": [], "seconds": []} for name in others}
    for _ in range(blocks):
        for name, engine in others.items():
            turns = [plain.window(), engine.window(), engine.window(), plain.window()]
            for key, values in found[name].items():
                values.append(loss([turns[0], turns[3]], [turns[1], turns[2]], key))
    return found


def a_round(
    folder: Path, args: argparse.Namespace, place: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
    """Losses and answers of engines that are booted for this round alone."""
    envs = {
        "plain": None, SAME: None, "idle": {"EXPERTMAPS_MODE": "off"},
        "count": {"EXPERTMAPS_MODE": "count"},
        "all-hot": {
            "EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": str(folder.parent / "map.json"),
        },
    }  # fmt: skip
    engines: dict[str, Engine] = {}
    try:
        turn = place % len(ORDER)
        for name in ORDER[turn:] + ORDER[:turn]:
            size = (args.requests, args.tokens)
            engines[name] = Engine(folder / name, size, envs[name])
        said = {name: engine.status or {} for name, engine in engines.items()}
        failed = {name: found["error"] for name, found in said.items() if "error" in found}
        if failed:
            raise RuntimeError(f"the hook gave up: {failed}")
        others = {name: engines[name] for name in (SAME, *BARS)}
        found = compare(engines["plain"], others, args.blocks)
        return found, {name: engine.end() for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.kill()


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    counting = Engine(folder / "map", (1, 1), {"EXPERTMAPS_MODE": "count"})
    try:
        status = contract.HookStatus.from_wire(counting.status, "count")
        every_row_hot(status, folder / "map.json")
    finally:
        counting.kill()
    rounds = [a_round(folder / str(place), args, place) for place in range(args.rounds)]
    found: dict[str, Any] = {
        name: {
            key: summary([losses[name][key] for losses, _ in rounds]) for key in ("cpu", "seconds")
        }
        for name in (SAME, *BARS)
    }
    for name, bar in BARS.items():
        found[name]["bar"] = bar
        found[name]["within"] = found[name]["cpu"]["median"] <= bar
        found[name]["sameBits"] = all(said[name] == said["plain"] for _, said in rounds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=8)
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
