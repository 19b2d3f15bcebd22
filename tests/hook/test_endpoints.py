"""Counting as clients really ask: chat, streams, aborts, beams, many at once, several API servers.

One `vllm serve --api-server-count 2`, which is killed in the end.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rowmap_jobs.formats import status as contract
from tests.hook.test_server import PROMPT, SERVE, Server

pytestmark = [pytest.mark.hook, pytest.mark.engine]

TOP_K = 4


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("endpoints"), SERVE, "--api-server-count", "2")
    try:
        made.wait()
        yield made
    finally:
        made.stop()


def counted(server: Server, name: str) -> dict[str, Any]:
    """A transcript's file; another request first, with which the engine hears of an end."""
    server.complete(prompt=PROMPT[:4], cache_salt=f"flush-{name}")
    with np.load(server.result(f"{name}.npz"), allow_pickle=False) as file:
        found = {key: file[key] for key in file.files}
    assert int(found["bad"]) == 0
    assert (found["counts"].sum(2) == found["rows"][:, None] * TOP_K).all()
    return found


def skipped(server: Server) -> dict[str, int]:
    counting = server.status().counting
    assert counting is not None
    return dict(counting.skipped)


def lines(answer: Any) -> Iterator[dict[str, Any]]:
    """Events of a stream."""
    for raw in answer:
        text = raw.decode().strip()
        if text.startswith("data: {"):
            yield json.loads(text.removeprefix("data: "))


def test_several_api_servers_report_one_status(server: Server) -> None:
    log = (server.folder / "log").read_text()
    assert "ApiServer_0" in log and "ApiServer_1" in log
    found = [server.status() for _ in range(5)]
    assert {(one.pid, one.rank, one.mode, one.error) for one in found} == {
        (found[0].pid, 0, "count", None)
    }
    assert sorted(path.name for path in (server.folder / "run").iterdir()) == [
        "status.json", "transcripts",
    ]  # fmt: skip
    assert found[0].pid != server.process.pid


def test_a_chat_is_counted(server: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "def wrap(text, width):"}],
        "max_tokens": 9, "ignore_eos": True, "cache_salt": "chat",
        "vllm_xargs": {"expertmaps_t": "chat"},
    }  # fmt: skip
    with server.post("/v1/chat/completions", **body) as answer:
        usage = json.load(answer)["usage"]
    assert usage["completion_tokens"] == 9
    assert counted(server, "chat")["rows"].tolist() == [usage["prompt_tokens"], 8]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_counted_like_an_answer(server: Server, path: str) -> None:
    name = f"stream{'-chat' if 'chat' in path else ''}"
    asked: dict[str, Any] = {"prompt": PROMPT}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "import textwrap"}]}
    with server.post(
        path, **asked, stream=True, stream_options={"include_usage": True}, max_tokens=7,
        ignore_eos=True, cache_salt=name, vllm_xargs={"expertmaps_t": name},
    ) as answer:  # fmt: skip
        usage = list(lines(answer))[-1]["usage"]
    assert usage["completion_tokens"] == 7
    assert counted(server, name)["rows"].tolist() == [usage["prompt_tokens"], 6]


def test_an_aborted_stream_counts_what_was_fed(server: Server) -> None:
    tokens = 900
    with server.post(
        "/v1/completions", prompt=PROMPT, stream=True, max_tokens=tokens, ignore_eos=True,
        cache_salt="aborted", vllm_xargs={"expertmaps_t": "aborted"},
    ) as answer:  # fmt: skip
        said = [next(lines(answer)) for _ in range(3)]
    assert len(said) == 3
    prompt, decode = counted(server, "aborted")["rows"].tolist()
    assert prompt == len(PROMPT) and 2 <= decode < tokens - 1


def test_a_beam_search_is_skipped_by_name(server: Server) -> None:
    before = skipped(server).get("BeamSearch", 0)
    server.complete(
        prompt=PROMPT, use_beam_search=True, n=2, max_tokens=3, cache_salt="beams",
        vllm_xargs={"expertmaps_t": "beams"},
    )  # fmt: skip
    assert skipped(server).get("BeamSearch", 0) >= before + 3
    assert not list((server.folder / "run" / "transcripts").glob("beams*"))


def test_many_at_once_are_each_counted_alone(server: Server) -> None:
    """Forced transcripts that run in one batch have the counts that they have one by one."""

    def feed(name: str, size: int) -> None:
        xargs = {"expertmaps_t": name, "expertmaps_seg": [5, size]}
        server.complete(
            prompt=list(range(40, 40 + 3 * size, 3)), cache_salt=name, vllm_xargs=xargs
        )  # fmt: skip

    sizes = list(range(20, 68, 6))
    with ThreadPoolExecutor(len(sizes)) as pool:
        list(pool.map(lambda size: feed(f"many{size}", size), sizes))
    moved = total = 0
    for size in sizes:
        feed(f"one{size}", size)
        many, one = counted(server, f"many{size}"), counted(server, f"one{size}")
        assert many["rows"].tolist() == one["rows"].tolist() == [5, size - 5]
        moved += int(np.abs(many["counts"] - one["counts"]).sum()) // 2
        total += int(one["counts"].sum())
    assert moved <= 0.01 * total


def test_a_kill_leaves_whole_files(server: Server) -> None:
    """SIGKILL of every process while a transcript is decoded: it has no file, the others are."""
    answer = server.post(
        "/v1/completions", prompt=PROMPT, stream=True, max_tokens=900, ignore_eos=True,
        cache_salt="killed", vllm_xargs={"expertmaps_t": "killed"},
    )  # fmt: skip
    next(lines(answer))
    before = {path.name for path in (server.folder / "run" / "transcripts").iterdir()}
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    answer.close()
    folder = server.folder / "run"
    assert contract.parse((folder / "status.json").read_bytes(), "file").phase == "Serving"
    after = {path.name for path in (folder / "transcripts").iterdir()}
    assert after == before and not any(name.startswith("killed") for name in after)
    for path in (folder / "transcripts").glob("*.npz"):
        with np.load(path, allow_pickle=False) as file:
            assert (file["counts"].sum(2) == file["rows"][:, None] * TOP_K).all()
    gone(server.port)


def gone(port: int) -> None:
    """Until nothing answers: the lock for the next engine is free then."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            Server.get(port, "/health")
        except OSError:
            return
    raise AssertionError(f"port {port} still answers")
