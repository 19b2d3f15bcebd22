"""A lane in less memory than its model: it serves the same bits, and hot rows stay.

A model of 4.5 GiB of experts boots un-limited (vLLM loads all of it first), then its memory cgroup
is limited to what cannot be evicted and a small part of the cold rows: less than the experts take,
so nobody could hold the model in it. Prints the numbers.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs.formats import status as contract
from tests.hook import memory_group, skewed_maps, skewed_size
from tests.hook.turns import Engine

pytestmark = [pytest.mark.hook, pytest.mark.full]

SIZE = (4, 8)
WINDOWS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("memory")
    skewed_maps.write_model(folder / "model")
    try:
        with skewed_maps.alone():
            yield measure(folder)
    finally:
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
    written = folder / "count" / "run" / "transcripts"
    counts = [skewed_maps.counted(written / f"w{index}.npz") for index in range(SIZE[0])]
    for name, order in skewed_maps.orders(said, counts).items():
        path = folder / f"{name}.json"
        path.write_bytes(skewed_maps.made(said, order).to_bytes())
        env = {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": str(path)}
        results[name] = lane(folder / name, model, env)
    report = {
        name: {key: value for key, value in result.items() if key != "answers"}
        for name, result in results.items()
    }
    print(json.dumps(report, indent=1))
    return results


def lane(folder: Path, model: Path, env: dict[str, str] | None) -> dict[str, Any]:
    """Boot, limit, serve; an un-hooked lane stays un-limited, since nothing of it can go.

    Raises OSError where this machine gives no memory cgroup.
    """
    group = memory_group.Group.make(f"expertmaps-test-{os.getpid()}-{folder.name}")
    engine = None
    try:
        engine = Engine(folder, SIZE, env, model, group.enter)
        engine.window()  # warm, and the answers that are compared
        result: dict[str, Any] = {"anonymous": group.anonymous()}
        if env is not None:
            said = contract.HookStatus.from_wire(engine.status, "serve")
            assert said.error is None and said.residency is not None, said.error
            result["hotBytes"] = said.residency.hot_bytes
            result["limit"] = result["anonymous"] + int(
                skewed_maps.COLD_PART * said.residency.cold_bytes
            )
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
