"""Lanes whose rollouts fail, for tests (a stand-in: see lane_world)."""

from __future__ import annotations

from typing import Any

from tests.operator.lane_objects import PROSE
from tests.operator.lane_world import World

FAST = {"progressDeadlineSeconds": 60, "minReadySeconds": 10}


def adopted(replicas: int = 3, **more: Any) -> World:
    """A lane that serves the map of agent and is about to be switched to prose."""
    world = World(replicas=replicas, **more).until("Verified").run(3)
    world.edit(activeTrafficClass="prose")
    return world


def failing(replicas: int = 3, position: int = 1, how: str = "hook", **more: Any) -> World:
    """The same, and a pod with the map of prose will fail."""
    return adopted(replicas, bad={(PROSE.digest, position): how}, **more)


def no_pod_lost(world: World, turns: int = 120) -> World:
    """Run on; one pod at most serves nothing at any time."""
    for _ in range(turns):
        world.turn()
        assert world.not_ready() <= 1
        world.tick()
    return world
