"""A lane in less memory than its model: it serves the same bits, and hot rows stay.

A model of 4.5 GiB of experts boots un-limited (vLLM loads all of it first), then its memory cgroup
is limited to what cannot be evicted and a small part of the cold rows: less than the experts take,
so nobody could hold the model in it. Prints the numbers.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats import status as contract
from tests.hook import memory_group, skewed_size
from tests.hook.serving import MODEL, PYTHON
from tests.hook.turns import Engine

pytestmark = [pytest.mark.hook, pytest.mark.full]

HERE = Path(__file__).parent
SIZE = (4, 8)
WINDOWS = 3
HOT = 16
COLD_PART = 0.15
"""Share of the cold bytes that the limit leaves room for."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("memory")
    model = folder / "model"
    subprocess.run([PYTHON, str(HERE / "skewed.py"), str(MODEL), str(model)], check=True)
    lock = subprocess.Popen(["flock", "/tmp/vllm.lock", "cat"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert lock.stdin is not None and lock.stdout is not None
    lock.stdin.write("held\n")
    lock.stdin.flush()
    lock.stdout.readline()
    try:
        yield measure(folder)
    finally:
        lock.stdin.close()
        lock.wait()
        for path in folder.glob("model/*"):
            path.unlink()


def measure(folder: Path) -> dict[str, Any]:
    model = folder / "model"
    counting = Engine(folder / "count", SIZE, {"EXPERTMAPS_MODE": "count"}, model)
    try:
        counting.window()
        counting.window()  # a step later the engine tells that the first one's requests ended
        counting.end()
    finally:
        counting.kill()
    said = contract.HookStatus.from_wire(counting.status, "count")
    results = {"plain": lane(folder / "plain", model, None)}
    for name, order in orders(said, folder / "count").items():
        path = folder / f"{name}.json"
        path.write_bytes(made(said, order).to_bytes())
        env = {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": str(path)}
        results[name] = lane(folder / name, model, env)
    report = {
        name: {key: value for key, value in result.items() if key != "answers"}
        for name, result in results.items()
    }
    print(json.dumps(report, indent=1))
    return results


def orders(said: contract.HookStatus, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Experts of each layer, hottest first: by position, and by what was counted."""
    counts = []
    for index in range(SIZE[0]):
        path = folder / "run" / "transcripts" / f"w{index}.npz"
        with np.load(path, allow_pickle=False) as file:
            counts.append(file["counts"].sum(0))
    total = np.sum(counts, 0)
    assert said.geometry is not None and isinstance(said.geometry.experts, int)
    positional = np.tile(np.arange(said.geometry.experts), (len(total), 1))
    return {"positional": positional, "measured": np.argsort(-total, kind="stable")}


def made(said: contract.HookStatus, order: np.ndarray[Any, Any]) -> rowmap.RowMap:
    assert said.geometry is not None and said.fingerprint is not None
    geometry = rowmap.Geometry(
        experts=said.geometry.experts, top_k=said.geometry.top_k, hot_rows=HOT,
        moe_layers=said.geometry.moe_layers, row_bytes=said.geometry.row_bytes,
    )  # fmt: skip
    rows = order.tolist()
    return rowmap.build(
        said.fingerprint,
        geometry,
        {
            layer: (rows[index][:HOT], rows[index][HOT:])
            for index, layer in enumerate(geometry.moe_layers)
        },
    )


def lane(folder: Path, model: Path, env: dict[str, str] | None) -> dict[str, Any]:
    """Boot, limit, serve; an un-hooked lane stays un-limited, since nothing of it can go.

    Raises OSError where this machine gives no memory cgroup.
    """
    group = memory_group.Group(f"expertmaps-test-{os.getpid()}-{folder.name}")
    engine = None
    try:
        engine = Engine(folder, SIZE, env, model, group.enter)
        engine.window()  # warm, and the answers that are compared
        result: dict[str, Any] = {"anonymous": group.anonymous()}
        if env is not None:
            said = contract.HookStatus.from_wire(engine.status, "serve")
            assert said.error is None and said.residency is not None, said.error
            result["hotBytes"] = said.residency.hot_bytes
            result["limit"] = result["anonymous"] + int(COLD_PART * said.residency.cold_bytes)
            group.limit(result["limit"])
        windows = [engine.window() for _ in range(WINDOWS)]
        result["tokensPerSecond"] = round(
            statistics.median(item["tokens"] / item["seconds"] for item in windows), 2
        )
        result["majorFaultsPerToken"] = round(
            statistics.median(item["faults"] / item["tokens"] for item in windows), 1
        )
        if env is not None:
            result["pages"] = engine.pages()
        result["usage"] = group.usage()
        result["answers"] = engine.end()
    finally:
        if engine is not None:
            engine.kill()
        remove(group)
    return result


def remove(group: memory_group.Group) -> None:
    """The kernel takes a moment to leave an ended process's group."""
    deadline = time.monotonic() + 30
    while True:
        try:
            group.remove()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


MAPS = ("positional", "measured")


@pytest.mark.parametrize("name", MAPS)
def test_the_limit_is_below_the_model_s_size_and_holds(found: dict[str, Any], name: str) -> None:
    result = found[name]
    assert result["limit"] < skewed_size.BYTES < found["plain"]["anonymous"]
    assert result["usage"] <= result["limit"]


@pytest.mark.parametrize("name", MAPS)
def test_a_limited_lane_gives_the_same_bits(found: dict[str, Any], name: str) -> None:
    assert found[name]["answers"] == found["plain"]["answers"]
    assert len({token for ids in found["plain"]["answers"]["ids"] for token in ids}) > 10


@pytest.mark.parametrize("name", MAPS)
def test_hot_rows_stay_and_cold_ones_go(found: dict[str, Any], name: str) -> None:
    pages = found[name]["pages"]
    assert pages["hot"][0] == pages["hot"][1] > 0
    assert pages["cold"][0] < 0.5 * pages["cold"][1]


def test_a_measured_map_reads_less_from_the_disk(found: dict[str, Any]) -> None:
    measured, positional = found["measured"], found["positional"]
    assert measured["majorFaultsPerToken"] < 0.5 * positional["majorFaultsPerToken"]
    assert found["plain"]["majorFaultsPerToken"] < 1
