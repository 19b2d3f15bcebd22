"""Threads of the hook keep off the one CPU that OpenMP binds an engine's main thread to."""

from __future__ import annotations

import os
import threading

import expertmaps_hook_env as env
import pytest

OWN, PARENT = {3}, {0, 1, 2, 3}


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """Masks that are set, on a machine whose parent process may use four CPUs."""
    found: list[set[int]] = []
    masks = {0: OWN, os.getppid(): PARENT}
    monkeypatch.setattr(env.os, "sched_getaffinity", lambda pid: set(masks[pid]))
    monkeypatch.setattr(env.os, "sched_setaffinity", lambda _, mask: found.append(set(mask)))
    for name in env.CPU_BINDINGS:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.parametrize("name", env.CPU_BINDINGS)
def test_a_thread_of_a_bound_worker_gets_the_cpus_of_its_engine(
    set_to: list[set[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "0 1 2 3")
    env.leave_bound_cpu()
    assert set_to == [PARENT]


def test_what_somebody_else_limited_stays_limited(set_to: list[set[int]]) -> None:
    env.leave_bound_cpu()
    assert set_to == [OWN]


def test_a_process_that_is_not_bound_keeps_its_cpus(
    set_to: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0 1")
    monkeypatch.setattr(env.os, "sched_getaffinity", lambda _: {0, 1})
    assert env.cpus() == {0, 1}


def test_only_the_calling_thread_moves() -> None:
    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=env.leave_bound_cpu)
    thread.start()
    thread.join()
    assert os.sched_getaffinity(0) == before
