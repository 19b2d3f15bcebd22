"""The command: RunSpec in, verdict and exit code out, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs import runner
from rowmap_jobs.formats import names, run
from rowmap_jobs.formats.run import RunSpec, Verdict
from rowmap_jobs.reasons import RETRYABLE, Reason, RunError
from rowmap_jobs.services import Services
from tests.formats.samples import row_map
from tests.jobs.world import World, chat

ROOT = Path(__file__).parents[2]


def execute(world: World, command: str, **over: Any) -> tuple[Verdict, int]:
    environ = {names.ENV_RUN: json.dumps(world.wire(**over))}
    return runner.execute(command, environ, world.services())


def test_a_probe_that_finds_enough(world: World) -> None:
    world.record([chat(1), chat(2, session="s1"), chat(3), b"{"])
    verdict, code = execute(world, "probe")
    assert (verdict.outcome, verdict.reason, code) == ("Probed", "Probed", 0)
    assert verdict.counted is not None
    assert (verdict.counted.sessions, verdict.counted.considered) == (2, 3)
    assert verdict.counted.skipped == {"Broken": 1}
    assert world.engine.requests == [] and world.keys("store/") == []


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ([], "NoTranscripts"),
        ([b"{", b"}"], "OnlyBrokenTranscripts"),
        ([chat(1), chat(2, session="s1")], "TooFewTranscripts"),
    ],
)
def test_a_probe_that_finds_too_little_is_final(
    world: World, records: list[Any], reason: str
) -> None:
    if records:
        world.record(records)
    for command in ("probe", "profile"):
        verdict, code = execute(world, command)
        assert (verdict.outcome, verdict.reason, code) == ("Failed", reason, 42)


def test_a_store_without_write_access_ends_before_the_engine(world: World) -> None:
    world.record([chat(1), chat(2)])
    world.credentials("store", "ro")
    verdict, code = execute(world, "probe")
    assert (verdict.reason, code) == ("AccessDenied", 42)


def test_a_rejected_map_is_a_successful_run(world: World) -> None:
    world.record([chat(i) for i in range(3)])
    verdict, code = execute(world, "profile", acceptance={"minDecodeTokens": 10**6})
    assert (verdict.outcome, verdict.reason, code) == ("Rejected", "TooFewDecodeTokens", 0)


def test_fetch_makes_the_config_map_again(world: World) -> None:
    rows = row_map()
    world.put(names.map_key(world.store, rows.digest), rows.to_bytes())
    verdict, code = execute(world, "fetch", kind="Fetch", digest=rows.digest)
    assert (verdict.outcome, code, verdict.digest) == ("Fetched", 0, rows.digest)
    assert world.created[0]["data"]["rowmap.json"].encode() == rows.to_bytes()
    assert verdict.config_map == names.map_configmap("lane", rows.digest)


@pytest.mark.parametrize(
    ("stored", "reason"), [(None, "ObjectNotFound"), (b"{}\n", "ChecksumMismatch")]
)
def test_fetch_trusts_only_the_digest(world: World, stored: bytes | None, reason: str) -> None:
    digest = row_map().digest
    if stored is not None:
        world.put(names.map_key(world.store, digest), stored)
    verdict, code = execute(world, "fetch", kind="Fetch", digest=digest)
    assert (verdict.outcome, verdict.reason, code) == ("Failed", reason, 42)
    assert world.created == []


@pytest.mark.parametrize(
    ("command", "raw", "message"),
    [
        ("probe", "", "EXPERTMAPS_RUN: found nothing, expected a RunSpec as JSON"),
        ("probe", "{", "EXPERTMAPS_RUN: line 1 column 2: found Expecting property name"),
        ("probe", "{}", "EXPERTMAPS_RUN: kind: found none, expected a value (the key is required)"),
        ("fetch", None, "EXPERTMAPS_RUN: kind: found Profile, expected Fetch for fetch"),
    ],
)
def test_a_wrong_run_spec_is_final(command: str, raw: str | None, message: str) -> None:
    wire = {
        "kind": "Profile",
        "namespace": "ns",
        "run": "r",
        "lane": "l",
        "store": {"bucket": "maps"},
        "owner": {"apiVersion": "v1", "kind": "D", "name": "n", "uid": "u"},
    }
    environ = {names.ENV_RUN: json.dumps(wire) if raw is None else raw}
    verdict, code = runner.execute(command, environ)
    assert (verdict.reason, code) == ("InvalidRunSpec", 42)
    assert verdict.message.startswith(message)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_its_exit_code(reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_spec: RunSpec, _services: Services) -> Verdict:
        raise RunError(reason, "two\nlines")

    monkeypatch.setitem(runner.COMMANDS, "probe", ("Profile", fail))  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "read_spec", lambda *_: RunSpec.model_construct(run="r"))
    verdict, code = runner.execute("probe", {})
    assert code == (1 if reason in RETRYABLE else 42)
    assert (verdict.outcome, verdict.message) == ("Failed", "two lines")


def test_a_programming_error_tells_its_place_and_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_spec: RunSpec, _services: Services) -> Verdict:
        raise KeyError("somebody's words")

    monkeypatch.setitem(runner.COMMANDS, "probe", ("Profile", fail))  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "read_spec", lambda *_: RunSpec.model_construct(run="r"))
    verdict, code = runner.execute("probe", {})
    assert (verdict.reason, code) == ("InternalError", 1)
    assert verdict.message.startswith("found KeyError at test_runner.py:")
    assert "somebody" not in verdict.message


def test_an_unwritable_termination_log_is_only_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = Verdict(run="r", outcome="Probed", reason="Probed", message="m")
    runner.publish(verdict, {names.ENV_TERMINATION_LOG: str(tmp_path / "no" / "log")})
    assert "not written" in capsys.readouterr().err


def start(world: World, command: str, **over: Any) -> tuple[subprocess.Popen[bytes], Path]:
    log = world.folder / "termination-log"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        names.ENV_RUN: json.dumps(world.wire(**over)),
        names.ENV_TERMINATION_LOG: str(log),
        names.ENV_S3_DIR: str(world.folder / "creds"),
        names.ENV_DIR: str(world.engine.folder.parent),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "rowmap_jobs.runner", command],
        env=environ,
        cwd=world.folder,
        stderr=subprocess.PIPE,
    )
    return process, log


def test_the_command_counts_the_window_by_the_clock(world: World) -> None:
    """A run of the real process; the records are of a fixed day, so the window leaves them out."""
    world.record([chat(1, created="2020-01-01T00:00:00Z")])
    process, log = start(world, "probe")
    _, stderr = process.communicate(timeout=60)
    verdict = run.parse_verdict(log.read_bytes(), "log")
    assert (process.returncode, verdict.reason) == (42, "NoTranscripts")
    assert "the newest of 2020-01-01T00:00Z" in verdict.message
    assert b"Failed NoTranscripts" in stderr


def test_sigterm_ends_a_waiting_run_at_once(world: World) -> None:
    world.record([chat(1), chat(2)])
    world.engine.health_code = 503
    process, log = start(world, "profile", windowSeconds=10**9, pendingSeconds=600)
    assert process.stderr is not None
    while b"sessions" not in process.stderr.readline():
        assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 1
    assert time.monotonic() - began < 10
    assert run.parse_verdict(log.read_bytes(), "log").reason == "Interrupted"
    process.stderr.close()
