"""Several ranks in a pod: files of their own, and one word for the pod."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import expertmaps_hook_env as env
import expertmaps_hook_http as http
import expertmaps_hook_ranks as ranks
import expertmaps_hook_status as hook_status
import pytest

from rowmap_jobs.formats import status as contract
from tests.ports import free_ports

A, B = ("sha256:" + letter * 64 for letter in "ab")
IN_FORCE: dict[str, Any] = {"phase": "Ready", "generation": 1, "mapDigest": A, "rowSetDigest": A}


def wire(rank: int, **fields: Any) -> dict[str, Any]:
    return {"rank": rank, "startedAt": 100, **IN_FORCE, **fields}


FAILED = {"phase": "Failed", "error": {"reason": "LockFailed", "message": "no memory"}}


@pytest.mark.parametrize(
    ("own", "others", "phase", "message"),
    [
        (wire(0), [wire(1), wire(2)], "Ready", None),
        (wire(0, phase="Serving"), [wire(1), wire(2, phase="Serving")], "Serving", None),
        (wire(0), [wire(1)], "Loading", None),
        (wire(0), [wire(1), wire(2, phase="Loading", mapDigest=None)], "Loading", None),
        (wire(0, phase="Loading"), [wire(1), wire(2)], "Loading", None),
        (wire(0), [wire(1), wire(2, **FAILED)], "Failed", "rank 2: LockFailed: no memory"),
        (wire(0, phase="Loading"), [wire(1, **FAILED)], "Failed", "rank 1: LockFailed: no memory"),
        (wire(0), [wire(1, mapDigest=B)], "Failed", f"rank 1: map: found {B}, rank 0 has {A}"),
        (wire(0), [wire(1, mapDigest=None)], "Failed", f"rank 1: map: found None, rank 0 has {A}"),
        (wire(0, **FAILED), [wire(1), wire(2)], "Failed", "no memory"),
        (wire(0, phase="Stopped"), [wire(1)], "Stopped", None),
    ],
)  # fmt: skip
def test_the_pod_is_what_all_of_its_ranks_are(
    own: dict[str, Any], others: list[dict[str, Any]], phase: str, message: str | None
) -> None:
    found = ranks.of_pod(own, others, 3)
    assert found["phase"] == phase
    assert found.get("error", {}).get("message") == message
    if phase == "Failed" and own["phase"] != "Failed":
        assert found["error"]["reason"] == "RankFailed"
        assert found["generation"] == 0 and not set(ranks.IN_FORCE) & set(found)


def test_a_single_rank_is_as_it_says() -> None:
    assert ranks.of_pod(wire(0), [], 1) == wire(0)


def test_files_of_an_earlier_boot_or_half_a_file_are_no_rank(tmp_path: Path) -> None:
    for rank, text in (
        (1, json.dumps(wire(1))),
        (2, json.dumps(wire(2, startedAt=99))),
        (3, json.dumps(wire(3))[:20]),
        (4, json.dumps(wire(5))),
        (5, "[]"),
    ):
        (tmp_path / ranks.file_name(rank)).write_text(text)
    assert [item["rank"] for item in ranks.read(tmp_path, 8, 100.7)] == [1]


def test_a_pipe_of_a_ranks_name_is_no_status(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ranks.file_name(1))
    assert ranks.read(tmp_path, 2, 0.0) == []


def test_a_rank_that_fails_fails_the_pod_on_its_port(tmp_path: Path) -> None:
    """Both sides as the workers run them: rank 1 writes its file, rank 0 answers."""
    port = free_ports(1)[0]
    settings = env.Settings(mode="serve", directory=tmp_path, status_port=port)
    states = [hook_status.Status(settings, "0.32.0", rank, 2) for rank in (0, 1)]
    published = [http.publish(state, settings) for state in states]
    try:
        for state in states:
            state.set(mapDigest=A, rowSetDigest=A, generation=1)
            state.ready()
        published[1]._publisher.write()
        assert contract.parse(states[0].to_bytes(), "pod").phase == "Ready"
        states[1].fail(env.HookError("SelfTestFailed", "layer 3"))
        published[1]._publisher.write()
        published[0]._publisher.write()
        for raw in (states[0].to_bytes(), (tmp_path / "status.json").read_bytes()):
            found = contract.parse(raw, "pod")
            assert (found.phase, found.rank, found.map_digest) == ("Failed", 0, None)
            assert found.error is not None
            assert found.error.reason == "RankFailed"
            assert found.error.message == "rank 1: SelfTestFailed: layer 3"
        own = contract.parse((tmp_path / "status-rank1.json").read_bytes(), "rank 1")
        assert own.rank == 1 and own.error is not None and own.error.reason == "SelfTestFailed"
        assert own.started_at <= time.time()
    finally:
        for item in published:
            item.close()
