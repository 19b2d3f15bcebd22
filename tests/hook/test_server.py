"""The hook in `vllm serve`: several processes, requests over HTTP, a mounted ConfigMap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layout
import numpy as np
import pytest

from rowmap_jobs.formats import status as contract
from rowmap_jobs.hook import manifest
from tests.children import end_with_parent
from tests.ports import free_ports

pytestmark = [pytest.mark.hook, pytest.mark.engine]

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
MODEL = Path(__file__).parents[1] / "model" / "moe"
BOOT_SECONDS = 1200
PROMPT = list(range(100, 130))


API_SERVER = ("vllm.entrypoints.openai.api_server", "--model")
SERVE = ("vllm.entrypoints.cli.main", "serve")
"""Modules that start a server, each with what stands before the model."""


class Server:
    """One `vllm serve` in count mode."""

    def __init__(self, folder: Path, start: tuple[str, str] = API_SERVER, *more: str) -> None:
        self.port, self.status_port = free_ports(2)
        self.folder = folder
        mount = folder / "mount"
        mount.mkdir()
        layout.mount(mount)
        # A CPU build has a name of its own, and `vllm serve` asks for the version by "vllm".
        metadata = folder / "named" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        self.log = (folder / "log").open("wb")
        self.seen: list[str] = []
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(mount), str(folder / "named")]),
            "EXPERTMAPS_MODE": "count",
            "EXPERTMAPS_DIR": str(folder / "run"),
            "EXPERTMAPS_STATUS_PORT": str(self.status_port),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        arguments = [
            "-m", *start, str(MODEL), *more,
            "--served-model-name", "moe", "--port", str(self.port),
            "--enforce-eager", "--max-model-len", "1024", "--shutdown-timeout", "20",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["flock", "--no-fork", "/tmp/vllm.lock", PYTHON, *arguments],
            env=env,
            cwd=folder,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    def wait(self) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "log").read_text()[-4000:]
            self.note()
            try:
                if self.get(self.port, "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(1)
        raise AssertionError("vLLM did not start")

    def note(self) -> None:
        """Remember the phases seen while the engine starts."""
        try:
            phase = self.status().phase
        except OSError:
            return
        if not self.seen or self.seen[-1] != phase:
            self.seen.append(phase)

    @staticmethod
    def get(port: int, path: str) -> tuple[int, bytes]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read()

    def status(self) -> contract.HookStatus:
        try:
            raw = self.get(self.status_port, "/status")[1]
        except OSError as error:
            tail = (self.folder / "log").read_text(errors="replace")[-4000:]
            raise OSError(f"port {self.status_port}: {error}; the server's log: {tail}") from error
        return contract.parse(raw, "status")

    def post(self, path: str, **body: Any) -> Any:
        """The open answer to a request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps({"model": "moe", "temperature": 0, "max_tokens": 1, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=300)

    def complete(self, **body: Any) -> dict[str, Any]:
        with self.post("/v1/completions", **body) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def result(self, name: str) -> Path:
        path = self.folder / "run" / "transcripts" / name
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.05)
        return path

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def test_status_is_served_by_one_process(server: Server) -> None:
    found = server.status()
    assert (found.mode, found.error, found.runner) == ("count", None, "v1")
    assert found.phase in ("Ready", "Serving")
    assert found.hook_digest == manifest.digest()
    assert found.pid != server.process.pid
    assert found.boot_seconds is not None and found.boot_seconds > 1
    assert set(server.seen) <= {"Loading", "Ready", "Serving"}
    written = contract.parse((server.folder / "run" / "status.json").read_bytes(), "file")
    assert written.pid == found.pid
    assert b"expertmaps_hook_info" in server.get(server.status_port, "/metrics")[1]


def test_a_forced_transcript_over_http(server: Server) -> None:
    xargs = {"expertmaps_t": "forced", "expertmaps_seg": [4, 10, 20, 30]}
    server.complete(prompt=PROMPT, cache_salt="f1", vllm_xargs=xargs, ignore_eos=True)
    path = server.result("forced.npz")
    assert path.stat().st_mode & 0o777 == 0o644
    assert path.parent.stat().st_mode & 0o055 == 0o055
    with np.load(path, allow_pickle=False) as file:
        assert file["rows"].tolist() == [14, 16]
        assert (file["counts"].sum(2) == np.array([[14], [16]]) * 4).all()
        assert int(file["bad"]) == 0


def test_a_live_transcript_over_http(server: Server) -> None:
    answer = server.complete(
        prompt=PROMPT, cache_salt="l1", max_tokens=9, ignore_eos=True,
        vllm_xargs={"expertmaps_t": "live"},
    )  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 9
    with np.load(server.result("live.npz"), allow_pickle=False) as file:
        assert file["rows"].tolist() == [30, 8]


def test_a_forced_count_equals_the_live_one(server: Server) -> None:
    answer = server.complete(
        prompt=PROMPT, cache_salt="e1", max_tokens=33, ignore_eos=True, return_token_ids=True,
        vllm_xargs={"expertmaps_t": "e-live"},
    )  # fmt: skip
    fed = PROMPT + answer["choices"][0]["token_ids"][:-1]
    xargs = {"expertmaps_t": "e-forced", "expertmaps_seg": [len(PROMPT), len(fed)]}
    server.complete(prompt=fed, cache_salt="e2", vllm_xargs=xargs)
    with (
        np.load(server.result("e-live.npz")) as live,
        np.load(server.result("e-forced.npz")) as forced,
    ):
        assert live["rows"].tolist() == forced["rows"].tolist() == [30, 32]
        assert np.abs(live["counts"] - forced["counts"]).sum() / 2 <= 0.01 * 62 * 16


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2, "temperature": 0.5}, "ParallelSampling"),
        ({"vllm_xargs": {"expertmaps_t": "s2", "expertmaps_seg": [4, 99]}}, "SegmentsInvalid"),
    ],
)
def test_a_request_that_is_not_counted_leaves_a_reason(
    server: Server, body: dict[str, Any], reason: str
) -> None:
    xargs = {"expertmaps_t": "s1", "expertmaps_seg": [4, 10]}
    merged = {"vllm_xargs": xargs, **body}
    server.complete(prompt=PROMPT, cache_salt="s", **merged)
    path = server.result(f"{merged['vllm_xargs']['expertmaps_t']}.skip")
    assert path.read_text().strip() == reason
    counting = server.status().counting
    assert counting is not None and counting.skipped[reason] >= 1


def test_untagged_requests_count_in_totals_only(server: Server) -> None:
    before = server.status().counting
    server.complete(prompt=PROMPT, cache_salt="untagged", max_tokens=3, ignore_eos=True)
    after = server.status().counting
    assert before is not None and after is not None
    assert after.prefill_rows - before.prefill_rows == 30
    assert after.decode_rows - before.decode_rows == 2
    assert after.transcripts == before.transcripts


def test_stopping_leaves_whole_files(server: Server) -> None:
    server.stop()
    folder = server.folder / "run"
    written = contract.parse((folder / "status.json").read_bytes(), "file")
    assert written.phase == "Stopped"
    for path in (folder / "transcripts").iterdir():
        assert path.suffix in (".npz", ".skip") and not path.name.startswith(".")
    with pytest.raises(urllib.error.URLError):
        server.get(server.status_port, "/status")
