"""Waiting for an engine: bounded, and every way it can disappoint has a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rowmap_jobs.engine import Deadlines, Engine, RefusedError, forced, wait_ready
from rowmap_jobs.reasons import RunError
from tests.jobs.fake_engine import FakeEngine
from tests.jobs.world import QUICK


class Clock:
    """Time that passes only by sleeping; `events` change the world at given seconds."""

    def __init__(self, events: dict[int, Callable[[], object]] | None = None) -> None:
        self.time, self.events = 0.0, dict(events or {})

    def __call__(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for at in [at for at in self.events if at <= self.time]:
            self.events.pop(at)()


def client(engine: FakeEngine, **over: Any) -> Engine:
    return Engine(engine.url + "/", engine.url + "/status", None, Deadlines(**over))


def refused(engine: FakeEngine, clock: Clock, seconds: float = 100) -> RunError:
    with pytest.raises(RunError) as caught:
        wait_ready(client(engine), seconds, clock, clock.sleep)
    return caught.value


def test_ready_once_server_and_hook_are(engine: FakeEngine) -> None:
    engine.health_code = 503
    engine.status["phase"] = "Loading"
    clock = Clock(
        {
            5: lambda: engine.status.update(phase="Ready"),
            9: lambda: setattr(engine, "health_code", 200),
        }
    )
    ready = wait_ready(client(engine), 100, clock, clock.sleep)
    assert (ready.seconds, ready.model.name, ready.model.max_model_len) == (9, "fake", 4096)


def test_an_engine_that_never_comes(engine: FakeEngine) -> None:
    engine.health_code, engine.status_code = 503, 404
    error = refused(engine, Clock(), 30)
    assert error.reason == "EngineNotReady" and not error.final
    assert "after 30 s (server not healthy, hook silent)" in error.message


def test_a_healthy_server_without_a_hook(engine: FakeEngine) -> None:
    engine.status_code = 404
    clock = Clock()
    error = refused(engine, clock, 3600)
    assert error.reason == "HookNotLoaded" and error.final and 60 <= clock.time < 63


def test_a_hook_that_comes_late_is_waited_for(engine: FakeEngine) -> None:
    engine.status_code = 404
    clock = Clock({50: lambda: setattr(engine, "status_code", 200)})
    assert wait_ready(client(engine), 100, clock, clock.sleep).seconds == 50


@pytest.mark.parametrize(
    ("status", "reason", "part"),
    [
        ({"mode": "serve"}, "HookNotLoaded", "mode: found serve, expected count"),
        (
            {"phase": "Failed", "error": {"reason": "NotMoE", "message": "no MoE layer"}},
            "NoExperts",
            "hook: found NotMoE: no MoE layer",
        ),
        (
            {"phase": "Failed", "error": {"reason": "HookUnsupported", "message": "vLLM: found 9"}},
            "HookFailed",
            "hook: found HookUnsupported: vLLM: found 9",
        ),
        ({"geometry": None}, "NoExperts", "found no MoE layer"),
        ({"version": 2}, "HookNotLoaded", "/status: version: found 2, expected Input should be 1"),
    ],
)
def test_a_hook_that_cannot_count_is_final(
    engine: FakeEngine, status: dict[str, Any], reason: str, part: str
) -> None:
    engine.status.update(status)
    error = refused(engine, Clock())
    assert (error.reason, error.final) == (reason, True)
    assert part in error.message and "\n" not in error.message


def test_an_error_beside_the_work_does_not_stop_it(engine: FakeEngine) -> None:
    engine.status["error"] = {"reason": "PortTaken", "message": "9477"}
    clock = Clock()
    assert wait_ready(client(engine), 10, clock, clock.sleep).seconds == 0


def test_a_broken_answer_of_a_healthy_engine_is_tried_once_more(engine: FakeEngine) -> None:
    engine.faults.failing_posts = 1
    body = {"model": "fake", "prompt": "x", "add_special_tokens": False}
    assert Engine(engine.url, "", None, QUICK).tokenize(body) == [136]
    engine.faults.failing_posts = 2
    with pytest.raises(RunError) as caught:
        Engine(engine.url, "", None, QUICK).tokenize(body)
    assert caught.value.reason == "EngineFailed" and "HTTP 500" in caught.value.message


def test_an_engine_that_is_gone(engine: FakeEngine) -> None:
    engine.close()
    with pytest.raises(RunError) as caught:
        Engine(engine.url, "", None, QUICK).tokenize({"model": "fake", "prompt": "x"})
    assert caught.value.reason == "EngineFailed" and not caught.value.final


def test_one_refused_request_is_no_failure_of_the_engine(engine: FakeEngine) -> None:
    with pytest.raises(RefusedError):
        Engine(engine.url, "", None, QUICK).complete(forced("m", [1] * 5000, "a", "b", [1, 2]))
