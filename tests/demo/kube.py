"""kubectl and helm as a person would use them, with waiting that says what it waits for."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.demo.settings import CLUSTER_TOOL, DemoError

Object = dict[str, Any]


NOT_REACHED = ("Unable to connect to the server", "connection refused", "TLS handshake timeout")
"""What kubectl says when a request did not get to the API server, as on a busy machine."""
TRIES = 4


class Kube:
    """One namespace of one cluster."""

    def __init__(self, namespace: str, env: dict[str, str], say: Callable[[str], None]) -> None:
        self.namespace, self.env, self.say = namespace, env, say

    def run(self, *command: str, stdin: str | None = None, check: bool = True) -> str:
        """Run a command with the cluster's environment; stdout. Raises DemoError."""
        for attempt in range(TRIES):
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, env=self.env, check=False
            )
            if not done.returncode or not any(word in done.stderr for word in NOT_REACHED):
                break
            time.sleep(2 * attempt)
        if check and done.returncode:
            raise DemoError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True) -> str:
        """kubectl in the namespace."""
        return self.run("kubectl", "-n", self.namespace, *args, stdin=stdin, check=check)

    def apply(self, manifests: str) -> None:
        """kubectl apply of YAML text."""
        self.kubectl("apply", "-f", "-", stdin=manifests)

    def get(self, kind: str, name: str) -> Object | None:
        """One object, or None."""
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """All objects of a kind, by label selector."""
        extra = ("-l", selector) if selector else ()
        items: list[Object] = json.loads(self.kubectl("get", kind, "-o", "json", *extra))["items"]
        return items

    def until(
        self, what: str, look: Callable[[], tuple[bool, str]], seconds: float, every: float = 2.0
    ) -> float:
        """Look until it holds; say every half minute what is still missing. Seconds it took."""
        start = said = time.monotonic()
        while True:
            done, detail = look()
            now = time.monotonic()
            if done:
                return now - start
            if now - start > seconds:
                raise DemoError(f"{what}: not after {seconds:.0f} s; last seen: {detail}")
            if now - said >= 30:
                self.say(f"  ... waiting, {now - start:.0f} s, until {what}: {detail}")
                said = now
            time.sleep(every)

    @contextlib.contextmanager
    def forward(self, target: str, port: int) -> Iterator[str]:
        """`kubectl port-forward` to a free loopback port; yields the base URL."""
        process = subprocess.Popen(
            ["kubectl", "-n", self.namespace, "port-forward", target, f":{port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.search(r"127\.0\.0\.1:(\d+)", line)
            if match is None:
                raise DemoError(f"port-forward to {target}: {line.strip()}")
            # It writes a line for each connection, and stops when nobody reads them.
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield f"http://127.0.0.1:{match.group(1)}"
        finally:
            process.terminate()
            process.wait(timeout=10)


def condition(item: Object | None, kind: str) -> Object:
    """A condition of an object; empty when it is not there."""
    conditions = ((item or {}).get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})


def describe(item: Object | None, *kinds: str) -> str:
    """Conditions in a few words: `Ready=False/NoMapYet: message`."""
    parts, told = [], set()
    for found in (condition(item, kind) for kind in kinds):
        if not found:
            continue
        text = f"{found['type']}={found['status']}/{found['reason']}"
        message = found.get("message", "")
        # Two conditions often have the same cause: it is told once.
        if message and message not in told:
            told.add(message)
            text = f"{text}: {message}"[:240]
        parts.append(text)
    return "; ".join(parts) or "no conditions yet"


def cluster_environment() -> dict[str, str]:
    """The environment of the local cluster: KUBECONFIG and PATH as `cluster env` prints them."""
    text = subprocess.run(
        ["bash", "-c", f'eval "$({CLUSTER_TOOL} env)" && env -0'],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    wanted = dict(line.split("=", 1) for line in text.split("\0") if "=" in line)
    return {**os.environ, **{k: wanted[k] for k in ("KUBECONFIG", "PATH") if k in wanted}}
