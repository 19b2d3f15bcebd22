"""What a step of the engine pays for the hook, in what can be counted: calls and memory."""

from __future__ import annotations

import os

import cost
import pytest

STEPS = 200


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.parametrize("mode", ["off", "serve"])
@pytest.mark.parametrize("requests", [1, 32])
def test_a_step_makes_a_handful_of_calls_whatever_the_batch(mode: str, requests: int) -> None:
    found = cost.measure(mode, requests, STEPS, repeats=1)
    assert found["calls"] == {"python": 5, "c": 2}


@pytest.mark.parametrize("mode", ["off", "serve"])
def test_a_step_leaves_nothing_behind(mode: str) -> None:
    found = cost.measure(mode, 8, STEPS, repeats=1)
    # The publisher's thread may hold a few blocks of its own at any instant.
    assert found["keptBlocks"] < 0.5
    assert found["peakBytes"] < 1024


def test_a_call_that_is_added_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import expertmaps_hook_status as status

    stepped = status.Status.stepped
    monkeypatch.setattr(status.Status, "stepped", lambda self: [stepped(self), str(self)][0])
    found = cost.measure("off", 1, STEPS, repeats=1)
    assert found["calls"]["python"] > 5
