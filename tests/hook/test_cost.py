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
def test_a_step_makes_a_handful_of_calls_whatever_the_batch(mode: str) -> None:
    one, many = (cost.measure(mode, requests, STEPS, repeats=1)["calls"] for requests in (1, 32))
    assert one == many
    assert 2 <= one["python"] <= 6 and one["c"] <= 4


@pytest.mark.parametrize("mode", ["off", "serve"])
def test_a_step_leaves_nothing_behind(mode: str) -> None:
    found = cost.measure(mode, 8, STEPS, repeats=1)
    # The publisher's thread may hold a few blocks of its own at any instant.
    assert found["keptBlocks"] < 0.5
    assert found["peakBytes"] < 1024


def test_a_call_that_is_added_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import expertmaps_hook_status as status

    before = cost.measure("off", 1, STEPS, repeats=1)["calls"]
    stepped = status.Status.stepped
    monkeypatch.setattr(status.Status, "stepped", lambda self: [stepped(self), dir()][0])
    after = cost.measure("off", 1, STEPS, repeats=1)["calls"]
    assert after == {"python": before["python"] + 1, "c": before["c"] + 1}


def test_a_block_that_is_kept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import expertmaps_hook_status as status

    kept: list[object] = []
    stepped = status.Status.stepped
    monkeypatch.setattr(
        status.Status, "stepped", lambda self: [stepped(self), kept.append(object())][0]
    )
    assert cost.measure("off", 1, STEPS, repeats=1)["keptBlocks"] > 0.9
