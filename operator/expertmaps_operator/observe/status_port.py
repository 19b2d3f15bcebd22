"""Reads what the hook says of itself: GET http://<pod IP>:<status port>/status.

The answer comes from a pod, so it is bounded in time and size, followed nowhere, and no proxy of
the environment is asked.
"""

from __future__ import annotations

import io
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from typing import cast

from rowmap_jobs.formats import status
from rowmap_jobs.formats.base import FormatError

from ..snapshot import PodReport

TIMEOUT_SECONDS = 2.0
MAX_THREADS = 8

Address = tuple[str, str, int]
"""Name of the pod, its IP, its status port."""


class _DeadlineReader(io.RawIOBase):
    """A socket's bytes until a moment; a peer that trickles does not get more time."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("too slow")
        self._sock.settimeout(left)
        return self._sock.recv_into(cast(bytearray, buffer))


class _ReadOnly:
    """What HTTPResponse wants of a socket."""

    def __init__(self, reader: _DeadlineReader) -> None:
        self._reader = reader

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._reader)


def read(pod: str, ip: str, port: int, timeout: float = TIMEOUT_SECONDS) -> PodReport:
    """The report of one pod, within `timeout` seconds in all. Never raises."""
    source = f"status of pod {pod}"
    deadline = time.monotonic() + timeout
    try:
        ipaddress.ip_address(ip)
    except ValueError:
        return PodReport(None, f"{source}: found no IP address", reachable=False)
    try:
        with socket.create_connection((ip, port), timeout=timeout) as sock:
            host = f"[{ip}]" if ":" in ip else ip
            sock.sendall(
                f"GET /status HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: application/json\r\n"
                "Connection: close\r\n\r\n".encode("ascii")
            )
            code, body = _answer(sock, deadline)
    except (TimeoutError, OSError) as error:
        return PodReport(None, f"{source}: {_why(error, timeout)}", reachable=False)
    except (HTTPException, ValueError) as error:
        return PodReport(None, f"{source}: {type(error).__name__}", reachable=True)
    if code != 200:
        return PodReport(None, f"{source}: HTTP {code}, expected 200", reachable=True)
    try:
        return PodReport(status.parse(body, source), None, reachable=True)
    except FormatError as error:
        return PodReport(None, str(error), reachable=True)


def _answer(sock: socket.socket, deadline: float) -> tuple[int, bytes]:
    fake = cast(socket.socket, _ReadOnly(_DeadlineReader(sock, deadline)))
    response = HTTPResponse(fake, method="GET")
    response.begin()
    # One byte more than allowed: the parser then refuses the size by its own words.
    return response.status, response.read(status.MAX_STATUS_BYTES + 1)


def _why(error: OSError, timeout: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout:g} s"
    return error.strerror or type(error).__name__


class StatusPorts:
    """Reads many pods at a time in a bounded pool of threads."""

    def __init__(self, reader: Callable[[str, str, int], PodReport] = read) -> None:
        self._reader = reader
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="status-port")

    def read_all(self, addresses: Sequence[Address]) -> dict[str, PodReport]:
        """Reports by pod name."""
        names = [name for name, _, _ in addresses]
        reports = self._pool.map(lambda address: self._reader(*address), addresses)
        return dict(zip(names, reports, strict=True))

    def close(self) -> None:
        """Start no further reads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
