"""A lane's pod under a memory limit below its model's size: it serves, and its hot rows stay.

The pod boots under a limit that holds all of the model, which vLLM loads first. Then Kubernetes
lowers the limit of the running pod, in place, to what cannot be evicted and a small part of the
cold rows. Prints the numbers.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.demo.kube import Kube, Object, cluster_environment
from tests.demo.lanes import USER
from tests.e2e import memory_pod
from tests.hook import skewed_maps, skewed_size

pytestmark = pytest.mark.full

NAMESPACE = "expertmaps-memory"
WINDOWS = 2
NOT_TOLD = ("ids", "logprobs", "windows", "pod")
MAPS = ("positional", "measured")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Model and caches on the node."""
    state = Path(os.environ.get("EXPERTMAPS_STATE", "/var/lib/expertmaps-cluster"))
    folder = state / "memory"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cache").mkdir(parents=True)
    os.chown(folder / "cache", USER, USER)
    try:
        skewed_maps.write_model(folder / "model")
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def found(folder: Path) -> Iterator[dict[str, Any]]:
    """What was seen of each lane."""
    kube = Kube(NAMESPACE, cluster_environment(), lambda text: print(text, flush=True))
    kube.run("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait")
    kube.run("kubectl", "create", "namespace", NAMESPACE)
    try:
        with skewed_maps.alone():
            memory_pod.deployment(kube, folder / "model", folder / "cache")
            yield measure(kube)
    finally:
        kube.run("kubectl", "delete", "namespace", NAMESPACE, "--wait")


def measure(kube: Kube) -> dict[str, Any]:
    with memory_pod.pod(kube) as plain:
        results: dict[str, Any] = {"plain": plain.window() | {"after": plain.inside()}}
    memory_pod.adopt(kube, None)
    with memory_pod.pod(kube) as counting:
        said = counting.status()
        counting.window(tag=True)
        counting.window()  # a step later the engine tells that the first one's requests ended
        counts = counting.counts()
    for name, order in skewed_maps.orders(said, counts).items():
        memory_pod.adopt(kube, skewed_maps.made(said, order))
        with memory_pod.pod(kube) as pod:
            results[name] = lane(pod)
    report = {
        name: {key: value for key, value in result.items() if key not in NOT_TOLD}
        for name, result in results.items()
    }
    print(json.dumps(report, indent=1))
    return results


def lane(pod: memory_pod.Pod) -> dict[str, Any]:
    """Serve, lower the limit, serve."""
    said = pod.status()
    assert said.error is None and said.residency is not None, said.error
    before = pod.window()
    there = pod.inside()
    room = int(skewed_maps.COLD_PART * said.residency.cold_bytes)
    limit = there["kept"] + room >> 20 << 20
    result = {"before": there, "limit": limit, "resize": pod.lower(limit)}
    windows = [before, *(pod.window() for _ in range(WINDOWS))]
    for name in ("tokensPerSecond", "majorFaultsPerToken"):
        result[name] = statistics.median(item[name] for item in windows[1:])
    return result | {
        "windows": windows,
        "after": pod.inside(),
        "hotBytes": said.residency.hot_bytes,
        "coldBytes": said.residency.cold_bytes,
        "pod": pod.get(),
    }


def container(result: dict[str, Any]) -> Object:
    status: Object = result["pod"]["status"]["containerStatuses"][0]
    return status


@pytest.mark.parametrize("name", MAPS)
def test_the_pod_s_limit_is_below_the_model_s_size_and_holds(
    found: dict[str, Any], name: str
) -> None:
    result = found[name]
    told = memory_pod.quantity_bytes(container(result)["resources"]["limits"]["memory"])
    assert told == result["after"]["limit"] == result["limit"] < skewed_size.BYTES
    assert found["plain"]["after"]["kept"] > skewed_size.BYTES, "an un-hooked lane cannot fit"
    assert result["after"]["usage"] <= result["limit"]


@pytest.mark.parametrize("name", MAPS)
def test_the_pod_goes_on(found: dict[str, Any], name: str) -> None:
    status = container(found[name])
    assert status["restartCount"] == 0 and status["lastState"] == {} and status["ready"]
    assert found[name]["after"]["oomKills"] == 0


@pytest.mark.parametrize("name", MAPS)
def test_a_lowered_limit_changes_no_bit(found: dict[str, Any], name: str) -> None:
    plain = found["plain"]
    for window in found[name]["windows"]:
        assert (window["ids"], window["logprobs"]) == (plain["ids"], plain["logprobs"])
    assert len({token for ids in plain["ids"] for token in ids}) > 10


@pytest.mark.parametrize("name", MAPS)
def test_hot_rows_stay_and_cold_ones_go(found: dict[str, Any], name: str) -> None:
    result = found[name]
    hot, cold = result["after"]["engine"]["hot"], result["after"]["engine"]["cold"]
    assert hot[0] == hot[1] == result["hotBytes"] > 0
    assert cold[1] == result["coldBytes"]
    assert cold[0] < 0.5 * cold[1]


def test_a_measured_map_reads_less_from_the_disk(found: dict[str, Any]) -> None:
    measured, positional = found["measured"], found["positional"]
    assert measured["majorFaultsPerToken"] < 0.5 * positional["majorFaultsPerToken"]
    assert found["plain"]["majorFaultsPerToken"] < 0.1 * measured["majorFaultsPerToken"]


@pytest.mark.parametrize("name", MAPS)
def test_no_privilege_is_needed(found: dict[str, Any], name: str) -> None:
    after = found[name]["after"]
    assert after["readOnly"]
    assert after["engine"]["uid"] == USER
    assert after["engine"]["capabilities"] == after["engine"]["locked"] == 0
