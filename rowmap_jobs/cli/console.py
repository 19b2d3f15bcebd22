"""Results on stdout; notes, refusals and a progress line on stderr.

Names and values from files may hold anything, terminal escapes included: what is not printable is
escaped here, in one place, whatever was written by whom.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_WIDTH = 20
_TICK = 0.2
_PATIENCE = 0.5
"""Seconds before a step is worth a line: a quick command prints none."""


def printable(text: str, keep: str = "") -> str:
    """`text` with every character that is not printable escaped; those of `keep` are kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


class OutputError(Exception):
    """Results could not be written to stdout."""


class Console:
    """Where a command writes. Streams that are closed (None) swallow what they are given."""

    def __init__(self, out: TextIO | None, err: TextIO | None, quiet: bool = False) -> None:
        self._out, self._err, self.quiet = out, err, quiet

    @classmethod
    def of_process(cls, quiet: bool = False) -> Console:
        return cls(sys.stdout, sys.stderr, quiet)

    def say(self, text: str) -> None:
        """Write a result, ending in a newline. Raises OutputError, or BrokenPipeError."""
        if self._out is not None:
            with _writing():
                self._out.write(printable(text.rstrip("\n"), keep="\n") + "\n")

    def json(self, value: object) -> None:
        """Write a value as one line of JSON."""
        self.say(json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True))

    def note(self, text: str) -> None:
        """What a reader should know, on stderr; nothing when quiet."""
        if not self.quiet:
            self.error(f"note: {text}")

    def error(self, text: str) -> None:
        """One line on stderr, if there is anybody to read it."""
        if self._err is not None:
            with suppress(OSError):
                self._err.write(f"rowmap: {printable(' '.join(text.split()))}\n")
                self._err.flush()

    def flush(self) -> None:
        """Raises as `say`."""
        if self._out is not None:
            with _writing():
                self._out.flush()

    @contextmanager
    def progress(self, steps: int) -> Iterator[Progress]:
        """A progress line for so many steps, where stderr is a terminal and not quiet."""
        shown = self._err is not None and self._err.isatty() and not self.quiet
        line = Progress(self._err if shown else None, steps)
        try:
            yield line
        finally:
            line.close()


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error.strerror or type(error).__name__) from None


class Progress:
    """One line that says which step runs and for how long: `[####....] 2/5 reading a.npz  3 s`.

    A thread keeps the seconds going while a step computes.
    """

    def __init__(self, stream: TextIO | None, steps: int) -> None:
        self._stream, self._steps, self._done = stream, max(steps, 1), -1
        self._text, self._since = "", time.monotonic()
        self._drawn = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if stream is not None:
            self._thread = threading.Thread(target=self._tick, daemon=True)
            self._thread.start()

    def step(self, text: str) -> None:
        """The next step begins."""
        with self._lock:
            self._done += 1
            self._text, self._since = text, time.monotonic()
        self._draw()

    def hide(self) -> None:
        """Take the line away until the next step: a result is printed."""
        with self._lock:
            self._text = ""
            if self._drawn:
                self._write("\r\x1b[K")
                self._drawn = False

    def close(self) -> None:
        """Take the line away."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._stream is not None and self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def _tick(self) -> None:
        while not self._stop.wait(_TICK):
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            seconds = time.monotonic() - self._since
            if self._stream is None or not self._text or (seconds < _PATIENCE and not self._drawn):
                return
            done = min(max(self._done, 0), self._steps)
            bar = "#" * (done * _WIDTH // self._steps)
            text = f"[{bar:.<{_WIDTH}}] {min(done + 1, self._steps)}/{self._steps} {self._text}"
            self._drawn = True
            self._write(f"\r\x1b[K{printable(text)[:100]}  {seconds:.0f} s")

    def _write(self, text: str) -> None:
        try:
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):
            # A terminal that went away takes the progress with it, not the work.
            self._stream = None


def wire(value: Any) -> Any:
    """Tuples as lists and numpy numbers as Python's, for JSON."""
    if isinstance(value, dict):
        return {str(key): wire(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [wire(item) for item in value]
    return value.item() if hasattr(value, "item") else value
