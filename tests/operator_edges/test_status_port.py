"""The reader of status ports against local servers that misbehave."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from expertmaps_operator.observe.status_port import StatusPorts, read
from expertmaps_operator.snapshot import PodReport
from tests.operator_edges.objects import DIGEST

GOOD = {
    "version": 1, "hookVersion": "1", "hookDigest": DIGEST, "engine": "vLLM",
    "engineVersion": "0", "runner": "v1", "mode": "serve", "phase": "Serving", "generation": 1,
    "rank": 0, "pid": 1, "startedAt": 1, "updatedAt": 2, "mapDigest": DIGEST,
}  # fmt: skip
Serve = Callable[[socket.socket], None]


@contextmanager
def server(serve: Serve) -> Iterator[int]:
    """Accepts connections one by one; `serve` answers each."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.recv(4096)
                    serve(connection)
                except OSError:
                    pass

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)


def answer(body: bytes, head: str = "HTTP/1.0 200 OK") -> Serve:
    length = f"Content-Length: {len(body)}"
    return lambda to: to.sendall(f"{head}\r\n{length}\r\n\r\n".encode() + body)


def ask(serve: Serve, timeout: float = 2.0) -> PodReport:
    with server(serve) as port:
        return read("p", "127.0.0.1", port, timeout)


def test_a_good_status() -> None:
    report = ask(answer(json.dumps(GOOD).encode()))
    assert report.reachable
    assert report.error is None
    assert report.status is not None
    assert report.status.map_digest == DIGEST


def test_without_a_length_the_end_of_the_stream_counts() -> None:
    report = ask(lambda to: to.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(GOOD).encode()))
    assert report.error is None


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    report = read("p", "127.0.0.1", port)
    assert not report.reachable
    assert report.error == "status of pod p: Connection refused"


@pytest.mark.parametrize("ip", ["", "example.com", "169.254.169.254/x"])
def test_only_an_address_is_asked(ip: str) -> None:
    report = read("p", ip, 80)
    assert not report.reachable


@pytest.mark.parametrize(
    "trickle", [b"", b"HTTP/1.0 200 OK\r\nX: ", b"HTTP/1.0 200 OK\r\nContent-Length: 99999\r\n\r\n"]
)
def test_a_trickle_gets_no_more_time_than_silence(trickle: bytes) -> None:
    over = threading.Event()

    def drip(to: socket.socket) -> None:
        to.sendall(trickle)
        while not over.wait(0.02):
            to.sendall(b" ")

    began = time.monotonic()
    with server(drip) as port:
        report = read("p", "127.0.0.1", port, timeout=0.3)
        over.set()
    assert time.monotonic() - began < 2
    assert not report.reachable
    assert report.error == "status of pod p: no answer within 0.3 s"


def test_a_huge_body_is_not_read_to_its_end() -> None:
    sent = [0]

    def flood(to: socket.socket) -> None:
        to.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        while sent[0] < 64 << 20:
            sent[0] += to.send(b"x" * 65536)

    report = ask(flood)
    assert report.reachable
    assert report.error is not None
    assert "size" in report.error
    assert sent[0] < 32 << 20


def test_a_redirect_is_not_followed() -> None:
    report = ask(answer(b"", "HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/"))
    assert report == PodReport(None, "status of pod p: HTTP 302, expected 200", reachable=True)


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert ask(answer(json.dumps(GOOD).encode())).error is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b'{"version": 2}',
        json.dumps({**GOOD, "extra": 1}).encode(),
        json.dumps({**GOOD, "mapDigest": "short"}).encode(),
    ],
)
def test_a_bad_body_is_told_and_reachable(body: bytes) -> None:
    report = ask(answer(body))
    assert report.reachable
    assert report.status is None
    assert report.error is not None
    assert report.error.startswith("status of pod p: ")
    assert "\n" not in report.error


def test_garbage_instead_of_http() -> None:
    report = ask(lambda to: to.sendall(b"\x00\x01\x02\r\n\r\n"))
    assert report.reachable
    assert report.error == "status of pod p: BadStatusLine"


def test_an_end_without_an_answer() -> None:
    report = ask(lambda _: None)
    assert report.status is None
    assert report.error is not None


def test_many_pods_at_a_time_keep_their_names() -> None:
    def reader(pod: str, ip: str, port: int) -> PodReport:
        return PodReport(None, f"{pod} {ip} {port}", reachable=False)

    ports = StatusPorts(reader)
    reports = ports.read_all([(f"p{index}", "10.0.0.1", index) for index in range(20)])
    assert [reports[f"p{index}"].error for index in range(20)] == [
        f"p{index} 10.0.0.1 {index}" for index in range(20)
    ]
    assert ports.read_all([]) == {}
    ports.close()
