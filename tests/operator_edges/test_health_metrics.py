"""/healthz, /metrics and log lines."""

from __future__ import annotations

import io
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from expertmaps_operator import log as logs
from expertmaps_operator.health import Health, HealthServer
from expertmaps_operator.metrics import Metrics
from expertmaps_operator.queue import Key
from tests.operator_edges.objects import NS

LANE = Key("ExpertLane", NS, "lane-a")
MAP = Key("ExpertMap", NS, "lane-a.agent")
CONDITION = {"namespace": NS, "lane": "lane-a", "condition": "Ready"}


@pytest.fixture
def problems() -> list[str]:
    return []


@pytest.fixture
def url(problems: list[str]) -> Iterator[str]:
    metrics = Metrics()
    health = Health({"queue": lambda: problems[0] if problems else None}, lambda: {"acting": True})
    server = HealthServer(0, health, metrics.render)
    server.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


def get(url: str) -> tuple[int, str, bytes]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_healthz(url: str, problems: list[str]) -> None:
    code, _, body = get(f"{url}/healthz")
    assert (code, json.loads(body)) == (200, {"ok": True, "problems": {}, "acting": True})
    problems.append("a worker ended")
    code, _, body = get(f"{url}/healthz")
    assert code == 503
    assert json.loads(body)["problems"] == {"queue": "a worker ended"}


def test_metrics_and_nothing_else(url: str) -> None:
    code, content_type, body = get(f"{url}/metrics")
    assert code == 200
    assert content_type.startswith("text/plain; version=")
    assert b"expertmaps_queue_depth 0.0" in body
    assert get(f"{url}/")[0] == 404
    assert get(f"{url}/healthz?verbose")[0] == 200


def test_a_lane_shows_its_map_and_its_conditions_and_nothing_older() -> None:
    metrics = Metrics()
    value = metrics.registry.get_sample_value
    info = {"namespace": NS, "lane": "lane-a", "traffic_class": "agent", "digest": "sha256:a"}
    ready = {"type": "Ready", "status": "True"}
    metrics.state(
        LANE, {"active": {"trafficClass": "agent", "digest": "sha256:a"}, "conditions": [ready]}
    )
    assert value("expertmaps_lane_info", info) == 1
    assert value("expertmaps_lane_condition", {**CONDITION, "status": "True"}) == 1
    assert value("expertmaps_lane_condition", {**CONDITION, "status": "False"}) == 0
    metrics.state(LANE, {"conditions": [{**ready, "status": "False"}]})
    assert value("expertmaps_lane_info", info) is None
    assert value("expertmaps_lane_condition", {**CONDITION, "status": "False"}) == 1
    metrics.forget(LANE)
    assert value("expertmaps_lane_condition", {**CONDITION, "status": "False"}) is None
    assert b'lane="lane-a"' not in metrics.render()


def test_a_map_shows_its_cold_share_and_age() -> None:
    metrics = Metrics()
    labels = {"namespace": NS, "map": "lane-a.agent"}
    accepted = {"coldSharePercent": "1.55", "acceptedAt": "1970-01-01T00:01:00Z"}
    metrics.state(MAP, {"accepted": accepted})
    value = metrics.registry.get_sample_value
    assert value("expertmaps_map_cold_selection_ratio", labels) == pytest.approx(0.0155)
    assert value("expertmaps_map_accepted_timestamp_seconds", labels) == 60
    metrics.state(MAP, {"accepted": {"coldSharePercent": "x"}})
    assert value("expertmaps_map_cold_selection_ratio", labels) is None


def test_runs_and_rollouts_count_once_when_they_end() -> None:
    metrics = Metrics()
    running = {"run": {"name": "r"}}
    ended = {
        "run": {"name": "r", "finishedAt": "t", "outcome": "Rejected", "reason": "TooFewTokens"}
    }
    metrics.moved(MAP, running, running)
    metrics.moved(MAP, running, ended)
    metrics.moved(MAP, ended, ended)
    metrics.moved(MAP, ended, {"run": {**ended["run"], "name": "s"}})
    labels = {"outcome": "Rejected", "reason": "TooFewTokens"}
    assert metrics.registry.get_sample_value("expertmaps_profile_runs_total", labels) == 2
    value = metrics.registry.get_sample_value
    back = {"rollout": {"id": "x", "state": "RollingBack"}}
    for state in ("Stopped", "RolledBack", "RollbackFailed"):
        ended = {"rollout": {"id": "x", "state": state, "finishedAt": "t"}}
        metrics.moved(LANE, {}, back)
        metrics.moved(LANE, back, ended)
        metrics.moved(LANE, ended, ended)
        assert value("expertmaps_rollouts_total", {"result": state}) == 1
    assert value("expertmaps_rollouts_total", {"result": "RollingBack"}) is None


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_log_line_is_one_line(form: str) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.configure(form)
        stream = io.StringIO()
        handler = root.handlers[0]
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(stream)
        logging.getLogger("expertmaps_operator.queue").error("two\nlines %s", "x")
        logging.getLogger("kubernetes.client.rest").debug("response body: secret")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert "secret" not in lines[0]
    if form == "json":
        assert json.loads(lines[0])["message"] == "two\nlines x"
        assert json.loads(lines[0])["logger"] == "queue"
    else:
        assert lines[0].endswith("ERROR   queue: two lines x")
