"""Status: its wire form, its files, its server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import expertmaps_hook_env as env
import expertmaps_hook_files as files
import expertmaps_hook_http as http
import expertmaps_hook_metrics as metrics
import expertmaps_hook_status as hook_status
import pytest

from rowmap_jobs.formats import names
from rowmap_jobs.formats import status as contract
from tests.api.apiserver import wait_for
from tests.ports import free_ports

DIGEST = "sha256:" + "b" * 64
FULL: dict[str, Any] = {
    "mapDigest": DIGEST, "rowSetDigest": DIGEST, "generation": 1, "runner": "v1",
    "fingerprint": {"shape": DIGEST, "router": DIGEST, "quant": "bf16", "tokenizer": DIGEST},
    "geometry": {"experts": 32, "topK": 4, "moeLayers": [0, 1], "wholeLayers": [],
                 "rowBytes": {"0": 10, "1": 12}},
    "residency": {"hotRows": 3, "coldRows": 1, "hotBytes": 30, "coldBytes": 10, "lockedBytes": 0,
                  "tier": "overlay",
                  "kernels": [{"name": "TritonExperts", "layers": 2, "ranOn": None}]},
    "compile": {"cacheHits": 2, "cacheMisses": 1, "aotLoaded": 0, "aotCompiled": 0,
                "autotuneFiles": 2, "autotuneWritten": 1, "autotuneDigest": DIGEST},
    "counting": {"prefillRows": 5, "decodeRows": 6, "recomputedRows": 1, "verifyRows": 2,
                 "missed": 0, "transcripts": 2, "skipped": {"NoSlot": 1}},
}  # fmt: skip


def make(mode: str = "serve") -> hook_status.Status:
    return hook_status.Status(env.Settings(mode=mode), "0.32.0")


def parse(status: hook_status.Status) -> contract.HookStatus:
    return contract.parse(status.to_bytes(), "status")


def test_a_new_and_a_full_status_are_of_the_contract() -> None:
    status = make()
    assert parse(status).phase == "Loading"
    status.set(**FULL)
    status.ready()
    found = parse(status)
    assert found.geometry is not None and found.counting is not None and found.compile is not None
    assert found.boot_seconds is not None
    assert found.to_wire()["counting"] == FULL["counting"]


def test_phases_go_forward_and_the_first_failure_stays() -> None:
    status = make()
    status.ready()
    assert status.phase == "Ready"
    status.stepped()
    status.stepped()
    assert (status.phase, parse(status).steps) == ("Serving", 2)
    status.fail(env.HookError("MapInvalid", "one\ntwo  " + "x" * 2000))
    status.fail(env.HookError("Other", "later"))
    status.ready()
    status.stepped()
    found = parse(status)
    assert found.phase == "Failed" and found.error is not None
    assert found.error.reason == "MapInvalid" and found.error.message.startswith("one two x")


def test_what_else_went_wrong_is_at_the_end_of_the_message() -> None:
    status = make()
    status.fail(env.HookError("SelfTestFailed", "x" * 1024))
    status.add(env.HookError("UndoIncomplete", "layers [0]"))
    error = parse(status).error
    assert error is not None and (error.reason, len(error.message)) == ("SelfTestFailed", 1024)
    assert error.message.endswith("xx; UndoIncomplete: layers [0]")
    status = make()
    status.add(env.HookError("UndoIncomplete", "layers [0]"))
    error = parse(status).error
    assert error is not None and error.reason == "UndoIncomplete"


def test_a_gpus_residency_is_of_the_contract() -> None:
    status = make()
    status.set(residency={**FULL["residency"], "tier": "uva", "moveBytesPerSecond": 5 << 30})
    found = parse(status).residency
    assert found is not None and (found.tier, found.move_bytes_per_second) == ("uva", 5 << 30)


def test_a_warning_keeps_the_phase() -> None:
    status = make()
    status.warn(env.HookError("StatusPortInUse", "port 1"))
    status.ready()
    found = parse(status)
    assert found.phase == "Ready" and found.error is not None
    assert found.error.reason == "StatusPortInUse"


def test_compile_evidence_reads_counters_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = {"cacheHits": 0, "cacheMisses": 0, "aotLoaded": 0, "aotCompiled": 0}
    assert hook_status.compile_evidence() == zero
    dynamo = SimpleNamespace(
        counters={"inductor": {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1,
                               "fxgraph_cache_bypass": 1}}
    )  # fmt: skip
    counter = SimpleNamespace(
        compilation_counter=SimpleNamespace(
            num_aot_artifacts_loaded=1, num_aot_compiles=2, num_compiled_artifacts_loaded=3
        )
    )
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    monkeypatch.setitem(sys.modules, "vllm.compilation.counter", counter)
    found = hook_status.compile_evidence()
    assert found == {"cacheHits": 5, "cacheMisses": 2, "aotLoaded": 1, "aotCompiled": 2}


def test_names_are_those_of_the_contract() -> None:
    import expertmaps_hook_capture as capture
    import expertmaps_hook_positions as positions

    assert (positions.XARG_TRANSCRIPT, positions.XARG_SEGMENTS) == (
        names.XARG_TRANSCRIPT,
        names.XARG_SEGMENTS,
    )
    assert capture.FOLDER == names.COUNTS_DIR
    assert hook_status.STATUS_FILE == names.STATUS_FILE
    assert (env.DEFAULT_MAP, env.DEFAULT_DIR) == (names.MAP_PATH, names.RUN_DIR)
    assert env.MODES == (names.MODE_OFF, names.MODE_SERVE, names.MODE_COUNT)
    assert env.TIERS == (names.TIER_OVERLAY, names.TIER_MLOCK)
    found = env.read_settings(
        {
            names.ENV_MODE: "count",
            names.ENV_MAP: "/m",
            names.ENV_DIR: "/d",
            names.ENV_COLD_DIR: "/c",
            names.ENV_TIER: "mlock",
            names.ENV_STATUS_PORT: "9477",
            names.ENV_CAPTURE_SLOTS: "8",
        }
    )
    assert found == env.Settings("count", Path("/m"), Path("/d"), Path("/c"), "mlock", 9477, 8)
    found = env.read_settings({names.ENV_DEVICE_GUARD: "0", names.ENV_HOST_GUARD: "10737418241"})
    assert (found.device_guard, found.host_guard, found.problem) == (0, (10 << 30) + 1, None)


def test_settings_default_and_are_refused_by_name() -> None:
    found = env.read_settings({names.ENV_DIR: "/d"})
    assert (found.mode, found.cold_directory, found.capture_slots) == ("off", Path("/d"), 64)
    assert (found.device_guard, found.host_guard) == (8 << 30, 10 << 30)
    for name, value in (
        (names.ENV_MODE, "rowmap"), (names.ENV_TIER, "gpu"), (names.ENV_STATUS_PORT, "0"),
        (names.ENV_STATUS_PORT, "70000"), (names.ENV_CAPTURE_SLOTS, "-1"),
        (names.ENV_DEVICE_GUARD, "8Gi"), (names.ENV_HOST_GUARD, "1125899906842625"),
    ):  # fmt: skip
        problem = env.read_settings({name: value}).problem
        assert problem is not None and problem.reason == "SettingInvalid"
        assert name in problem.message and value in problem.message


def test_engine_versions() -> None:
    env.check_engine("0.32.0")
    env.check_engine("0.32.0+cpu")
    for version in ("0.32.1", "0.31.0", "0.32.0rc1", "dev", ""):
        with pytest.raises(env.HookError) as caught:
            env.check_engine(version)
        assert caught.value.reason == "HookUnsupported"


def test_boot_time_is_that_of_the_first_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hook_status.BOOT_MARK, raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    hook_status.mark_boot()
    first = os.environ[hook_status.BOOT_MARK]
    assert abs(float(first) - env.process_start()) < 0.01
    assert 0 < time.time() - float(first) < 3600
    hook_status.mark_boot()
    assert os.environ[hook_status.BOOT_MARK] == first


def test_files_are_whole_readable_and_leave_nothing(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        files.make_folder(tmp_path / "sub")
        target = tmp_path / "sub" / "status.json"
        files.write_atomic(target, b"one")
        files.write_atomic(target, b"two")
    finally:
        os.umask(old)
    assert target.read_bytes() == b"two"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert stat.S_IMODE(target.parent.stat().st_mode) & 0o055 == 0o055
    assert [path.name for path in target.parent.iterdir()] == ["status.json"]


def test_a_write_that_fails_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t.npz"
    files.write_atomic(target, b"old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        files.write_atomic(target, b"new and longer")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]


def test_readers_see_whole_files_while_they_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "status.json"
    bodies = {bytes([letter]) * 50_000 for letter in b"ab"}
    files.write_atomic(target, next(iter(bodies)))
    stop = threading.Event()

    def replace() -> None:
        while not stop.is_set():
            for body in bodies:
                files.write_atomic(target, body)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(300):
            assert target.read_bytes() in bodies
    finally:
        stop.set()
        writer.join()


def test_publisher_writes_changes_and_survives_a_bad_folder(tmp_path: Path) -> None:
    status = make()
    publisher = hook_status.Publisher(status, tmp_path / "run")
    publisher.start()
    target = tmp_path / "run" / "status.json"
    wait_for("the file", target.exists, 30)
    assert contract.parse(target.read_bytes(), "f").phase == "Loading"
    before = target.stat().st_ino
    publisher.write()
    assert target.stat().st_ino == before
    status.ready()
    publisher.close()
    assert contract.parse(target.read_bytes(), "f").phase == "Ready"
    (tmp_path / "file").write_text("")
    hook_status.Publisher(status, tmp_path / "file").write()


def test_a_disk_that_hangs_holds_up_nobody_but_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine boots, fails and ends while the status file's fsync never returns."""
    hung, release = threading.Event(), threading.Event()

    def fsync(_: int) -> None:
        hung.set()
        release.wait(60)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(hook_status, "CLOSE_SECONDS", 0.1)
    publisher = hook_status.Publisher(make(), tmp_path / "run")
    start = time.monotonic()
    publisher.start()
    assert hung.wait(30)
    publisher.changed()
    publisher.close()
    assert time.monotonic() - start < 30
    release.set()
    publisher._thread.join(30)
    assert not publisher._thread.is_alive()


def test_a_forked_child_gives_no_port_back(tmp_path: Path) -> None:
    """It has none of the threads that would have to stop for it."""
    port = free_ports(1)[0]
    settings = env.Settings(mode="serve", directory=tmp_path, status_port=port)
    published = http.publish(make(), settings)
    child = os.fork()
    if not child:
        signal.alarm(20)  # rather than waiting for ever
        try:
            published.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert get(f"http://127.0.0.1:{port}/status")[0] == 200
    published.close()


def test_a_publisher_that_never_started_can_be_closed(tmp_path: Path) -> None:
    hook_status.Publisher(make(), tmp_path).close()


def test_what_changed_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_status, "REFRESH_SECONDS", 3600)
    said, target = make(), tmp_path / "status.json"
    publisher = hook_status.Publisher(said, tmp_path)
    publisher.start()
    wait_for("the file", target.exists, 30)
    said.ready()
    publisher.changed()
    wait_for("the change", lambda: contract.parse(target.read_bytes(), "f").phase == "Ready", 30)
    publisher.close()


@pytest.fixture
def served() -> Iterator[tuple[str, hook_status.Status]]:
    status = make()
    status.set(**FULL)
    server = http.StatusServer(0, status)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", status
    server.shutdown()
    server.server_close()


def get(url: str, method: str = "GET") -> tuple[int, bytes]:
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_server_answers_status_and_metrics(served: tuple[str, hook_status.Status]) -> None:
    url, status = served
    code, body = get(url + "/status")
    assert (code, contract.parse(body, "http").map_digest) == (200, DIGEST)
    status.fail(env.HookError("MapInvalid", 'a "quoted" \\ reason'))
    code, body = get(url + "/metrics?x=1")
    text = body.decode()
    assert code == 200
    for line in (
        'expertmaps_hook_phase{phase="Failed"} 1',
        'expertmaps_hook_phase{phase="Ready"} 0',
        'expertmaps_hook_error{reason="MapInvalid"} 1',
        'expertmaps_hot_rows{tier="overlay"} 3',
        'expertmaps_counted_rows_total{phase="decode"} 6',
        'expertmaps_skipped_total{reason="NoSlot"} 1',
        "expertmaps_compile_cache_misses 1",
        "expertmaps_steps_total 0",
    ):
        assert line in text.splitlines(), text


SAMPLE = re.compile(r"([a-z_]+)(?:\{(.*)\})? [0-9.]+")
NAMES = (
    "expertmaps_aot_compiled", "expertmaps_aot_loaded", "expertmaps_autotune_files",
    "expertmaps_autotune_written", "expertmaps_boot_seconds", "expertmaps_cold_bytes",
    "expertmaps_cold_rows", "expertmaps_compile_cache_hits", "expertmaps_compile_cache_misses",
    "expertmaps_counted_rows_total", "expertmaps_generation", "expertmaps_hook_error",
    "expertmaps_hook_info", "expertmaps_hook_phase", "expertmaps_hot_bytes", "expertmaps_hot_rows",
    "expertmaps_locked_bytes", "expertmaps_major_faults_total", "expertmaps_missed_rows_total",
    "expertmaps_recomputed_rows_total", "expertmaps_skipped_total", "expertmaps_steps_total",
    "expertmaps_transcripts_total", "expertmaps_verify_rows_total",
)  # fmt: skip
"""Dashboards and alerts know these names: one that is renamed or removed breaks them."""


def test_metrics_are_exactly_the_table(served: tuple[str, hook_status.Status]) -> None:
    assert tuple(sorted(metrics.METRICS)) == NAMES
    url, status = served
    status.ready()
    status.fail(env.HookError("MapInvalid", "x"))
    lines = get(url + "/metrics")[1].decode().splitlines()
    typed = {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}
    assert typed == {name: row.kind for name, row in metrics.METRICS.items()}
    for name, row in metrics.METRICS.items():
        assert f"# HELP {name} {row.text}" in lines
        assert row.kind == ("counter" if name.endswith("_total") else "gauge")
    for line in (line for line in lines if not line.startswith("#")):
        found = SAMPLE.fullmatch(line)
        assert found is not None, line
        labels = re.findall(r'(\w+)="', found[2] or "")
        assert tuple(labels) == metrics.METRICS[found[1]].labels, line


def test_the_readme_has_the_table_of_metrics() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for name, row in metrics.METRICS.items():
        assert f"| `{name}` | {', '.join(row.labels)} | {row.text} |" in readme


def test_big_numbers_keep_their_digits() -> None:
    wire = make().wire()
    wire["residency"] = {**FULL["residency"], "hotBytes": 123_456_789_012}
    assert 'expertmaps_hot_bytes{tier="overlay"} 123456789012' in metrics.render_metrics(wire)


def test_server_is_read_only(served: tuple[str, hook_status.Status]) -> None:
    url, _ = served
    for path in ("/", "/status/", "/metrics/x", "/../etc/passwd"):
        assert get(url + path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        assert get(url + "/status", method)[0] == 405


def test_silent_clients_do_not_block_the_server(
    served: tuple[str, hook_status.Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http._Handler, "timeout", 0.3)
    url, _ = served
    host, port = url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(http.MAX_CONNECTIONS + 4)]

    def answered() -> bool:
        try:
            return get(url + "/status")[0] == 200
        except OSError:  # closed at once: all places are taken
            return False

    wait_for("the silent ones lost their places", answered, 30)
    for connection in idle:
        connection.close()


def test_a_process_without_file_descriptors_does_not_spin(
    served: tuple[str, hook_status.Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection waits in the backlog, where the server finds it again and again."""
    tries: list[float] = []
    accept = http.ThreadingHTTPServer.get_request

    def full(server: Any) -> Any:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise OSError(24, "Too many open files")
        return accept(server)

    monkeypatch.setattr(http.ThreadingHTTPServer, "get_request", full)
    monkeypatch.setattr(http, "ACCEPT_PAUSE_SECONDS", 0.2)
    url, _ = served
    assert get(url + "/status")[0] == 200
    assert len(tries) == 3 and tries[2] - tries[0] >= 0.4


def test_clients_that_dribble_lose_their_places(
    served: tuple[str, hook_status.Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line comes in time for one read; together they would keep the port for good."""
    monkeypatch.setattr(http, "LIFE_SECONDS", 1.0)
    url, _ = served
    host, port = url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(http.MAX_CONNECTIONS)]
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.2):
            for connection in slow:
                with suppress(OSError):
                    connection.sendall(b"X-Slow: 1\r\n")

    for connection in slow:
        connection.sendall(b"GET /status HTTP/1.1\r\n")
    thread = threading.Thread(target=dribble)
    thread.start()

    def answered() -> bool:
        try:
            return get(url + "/status")[0] == 200
        except OSError:
            return False

    try:
        wait_for("the slow ones lost their places", answered, 30)
    finally:
        over.set()
        thread.join()
        for connection in slow:
            connection.close()


def test_a_server_without_threads_answers_again_later(
    served: tuple[str, hook_status.Status], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = served
    with monkeypatch.context() as limited:
        limited.setattr(ThreadingHTTPServer, "process_request", lambda *_: 1 / 0)
        for _ in range(http.MAX_CONNECTIONS + 3):
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                get(url + "/status")
    assert get(url + "/status")[0] == 200


def test_a_port_in_use_has_a_name() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(env.HookError) as caught:
            http.start_server(taken.getsockname()[1], make())
    assert caught.value.reason == "StatusPortInUse"


def test_metrics_of_a_bare_status_have_no_gaps() -> None:
    text = metrics.render_metrics(json.loads(make("off").to_bytes()))
    assert "expertmaps_hot_rows" not in text and text.endswith("\n")
