"""Free loopback ports for servers that tests start."""

from __future__ import annotations

import socket


def free_ports(number: int) -> list[int]:
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
