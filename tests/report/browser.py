"""Headless Chromium over its debugging pipe: no driver, no port, no library.

Messages of the DevTools protocol are JSON, ended by a zero byte, on file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)
PATIENCE = 60.0
"""Seconds for one answer: the machine may be busy."""


def find() -> str:
    """Path of the browser. Raises FileNotFoundError that says what to install."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    raise FileNotFoundError(
        f"PATH: found none of {', '.join(NAMES)}, expected one "
        "(apt-get install --no-install-recommends chromium)"
    )


class Browser:
    """One running browser; `call` speaks to it, events gather until they are taken."""

    def __init__(self, profile: Path) -> None:
        down, self._write = os.pipe()
        self._read, up = os.pipe()
        # bash moves the pipes to the descriptors that the browser expects.
        shell = ("bash", "-c", f'exec "$@" 3<&{down} 4>&{up}', "bash")
        command = (*shell, find(), *FLAGS, f"--user-data-dir={profile}", "about:blank")
        self._process = subprocess.Popen(
            command,
            pass_fds=(down, up),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(profile), "XDG_CONFIG_HOME": str(profile)},
        )
        os.close(down)
        os.close(up)
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the browser and all of its processes."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._read)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command; returns its result. Raises RuntimeError when the browser refuses it."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        raw = json.dumps(message).encode() + b"\0"
        while raw:
            raw = raw[os.write(self._write, raw) :]
        found = self._until(lambda m: m.get("id") == number, method)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return dict(found.get("result", {}))

    def wait(self, method: str, session: str) -> None:
        """Wait for an event of a session."""
        wanted = {"method": method, "sessionId": session}
        if not any(wanted.items() <= event.items() for event in self.events):
            self._until(lambda m: wanted.items() <= m.items(), method)

    def _until(self, fits: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while True:
            while b"\0" in self._rest:
                raw, _, self._rest = self._rest.partition(b"\0")
                message: dict[str, Any] = json.loads(raw)
                if "method" in message:
                    self.events.append(message)
                if fits(message):
                    return message
            if not select.select([self._read], [], [], max(end - time.monotonic(), 0))[0]:
                raise TimeoutError(f"{what}: no answer in {PATIENCE:.0f} seconds")
            more = os.read(self._read, 1 << 20)
            if not more:
                raise RuntimeError(f"{what}: the browser ended ({self._process.poll()})")
            self._rest += more


class Page:
    """One open page."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self.session: str = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def look(self, width: int, scheme: str, height: int = 900) -> None:
        """Size in CSS pixels and colour scheme: light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media="screen", features=features)

    def open(self, path: Path) -> None:
        """Load a file and wait until it is all there."""
        self.browser.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self.browser.wait("Page.loadEventFired", self.session)

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives. Raises RuntimeError when it throws."""
        return self._evaluate(script, False)

    def value_of_promise(self, script: str) -> Any:
        """What a promise is kept with. Raises RuntimeError when it is broken."""
        return self._evaluate(script, True)

    def _evaluate(self, script: str, promise: bool) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=promise
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def press(self, name: str, code: int) -> None:
        """Press and release a key."""
        key = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="rawKeyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def events(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of this page since it was opened."""
        return [
            event["params"]
            for event in self.browser.events
            if event["method"] == method and event.get("sessionId") == self.session
        ]

    def tree(self) -> list[dict[str, Any]]:
        """Nodes of the accessibility tree that are not ignored."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node.get("ignored")]

    def picture(self, width: int, height: int) -> bytes:
        """PNG of the top left part of the page."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self._target)


@contextmanager
def running(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile below `profile`."""
    browser = Browser(profile)
    try:
        yield browser
    finally:
        browser.close()
