"""Free loopback ports for servers that tests start."""

from __future__ import annotations

import random
import socket

RANGE = range(20000, 30000)
"""Below the ports that the kernel gives to whoever asks for any (ip_local_port_range), among them
an engine's own listeners, and below a cluster's node ports: until the server binds, nobody takes
them by chance."""
TRIES = 200

_chance = random.SystemRandom()


def free_ports(number: int) -> list[int]:
    """Ports of this machine that nobody listens on. Raises OSError when there are none."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(number * TRIES):
            if len(sockets) == number:
                break
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", _chance.choice(RANGE)))
            except OSError:
                one.close()
            else:
                sockets.append(one)
        else:
            raise OSError(f"no {number} free ports in {RANGE}")
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
