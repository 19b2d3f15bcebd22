"""Engines that run windows of the same work in turns; the side that asks (see windows.py)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hook import layout
from tests.hook.serving import MODEL, PYTHON
from tests.ports import free_ports

SCRIPT = Path(__file__).parent / "windows.py"


class Engine:
    """One engine that waits for its turn."""

    def __init__(
        self,
        folder: Path,
        size: tuple[int, int],
        env: dict[str, str] | None,
        model: Path = MODEL,
        before: Callable[[], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True)
        given = {name: value for name, value in os.environ.items() if "EXPERTMAPS" not in name}
        given.pop("PYTHONPATH", None)
        if env is not None:
            layout.mount(_made(folder / "mount"))
            given |= {
                "PYTHONPATH": str(folder / "mount"),
                "EXPERTMAPS_DIR": str(folder / "run"),
                "EXPERTMAPS_STATUS_PORT": str(free_ports(1)[0]),
                **env,
            }
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [PYTHON, str(SCRIPT), str(model), *map(str, size)],
            env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            preexec_fn=before,
        )  # fmt: skip
        self.status = self._read()["status"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("WINDOW "):
                found: dict[str, Any] = json.loads(line.removeprefix("WINDOW "))
                return found
        raise RuntimeError(f"the engine ended; see {self._log.name}")

    def window(self) -> dict[str, Any]:
        """Run one window and wait for it."""
        return self._ask("go")

    def pages(self) -> dict[str, list[int]]:
        """Pages of hot and cold rows: [resident, all]."""
        return self._ask("pages")

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> dict[str, Any]:
        """The first window's answers; the engine stops."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        answers = self._read()
        self._process.wait(60)
        return answers

    def kill(self) -> None:
        """End it at once."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
