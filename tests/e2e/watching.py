"""What a user of a lane sees while something is tried: requests answered, pods left alone."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.demo.kube import Kube
from tests.e2e import stubs


@contextmanager
def untouched(kube: Kube, workload: str = stubs.WORKLOAD) -> Iterator[list[str]]:
    """The body leaves pods (UIDs, restarts) and template as they are, and no request fails.

    `/health` five times a second and one completion a second, through a port-forward to one pod.
    Yields the failures seen so far.
    """
    before = _pods(kube, workload), _generation(kube, workload)
    name = sorted(uid_name[1] for uid_name in before[0])[0]
    failures: list[str] = []
    with kube.forward(f"pod/{name}", 8000) as url, _requests(url, failures) as asked:
        yield failures
    after = _pods(kube, workload), _generation(kube, workload)
    assert after == before, (before, after)
    assert failures == []
    assert asked[0] > 0, "the probe never asked"


def _pods(kube: Kube, workload: str) -> set[tuple[str, str, int]]:
    """(UID, name, restarts) of each pod."""
    return {
        (
            pod["metadata"]["uid"],
            pod["metadata"]["name"],
            sum(c["restartCount"] for c in pod["status"].get("containerStatuses", [])),
        )
        for pod in kube.list("pods", f"app={workload}")
    }


def _generation(kube: Kube, workload: str) -> tuple[int, Any]:
    item = kube.get("deployment", workload) or {}
    return item["metadata"]["generation"], item["spec"]["template"]


@contextmanager
def _requests(url: str, failures: list[str]) -> Iterator[list[int]]:
    asked, stop = [0], threading.Event()

    def probe() -> None:
        ended = False
        while not ended:
            if asked[0] % 5 == 0:
                _ask(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1}, failures)
            _ask(f"{url}/health", None, failures)
            asked[0] += 1
            ended = stop.wait(0.2)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield asked
    finally:
        stop.set()
        thread.join()


def _ask(url: str, body: Any, failures: list[str]) -> None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
    except (urllib.error.URLError, OSError) as error:
        failures.append(f"{time.strftime('%X')} {url}: {error}")


def engine_started(kube: Kube, expert_map: str, container: str = "engine") -> bool:
    """Whether an engine ever ran in a run of the map."""
    for pod in kube.list("pods", f"expertmaps.dev/map={expert_map}"):
        for status in pod["status"].get("initContainerStatuses", []):
            if status["name"] != container:
                continue
            if status["restartCount"] or status["state"].keys() & {"running", "terminated"}:
                return True
    return False
