"""The command as a process of its own: signals, pipes that close, and disks that are full."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rowmap_jobs.cli import console
from tests.cli.made import HOT, MODEL, ROOT, good

ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
ROWMAP = (sys.executable, "-m", "rowmap_jobs.cli")
STOPPED = """
import os, sys, time
from rowmap_jobs.cli.main import main
def wait(handle):
    print("ready", flush=True)
    time.sleep(60)
os.fsync = wait
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Children inherit an ignored SIGINT, which is what a job in a script's background has."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def place(made: Path, *more: object) -> list[str]:
    what = ("place", made / "code.npz", "--model", MODEL, "--hot", HOT, *more)
    return [str(part) for part in what]


def run(arguments: Sequence[object], **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*ROWMAP, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(command, env=ENV, text=True, check=False, timeout=60, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_writing_leaves_nothing(
    number: signal.Signals, code: int, made: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", STOPPED, *place(made, "-o", tmp_path / "rows.json")]
    with subprocess.Popen(
        command, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        assert len(names(tmp_path)) == 1 and "rows.json" not in names(tmp_path)
        process.send_signal(number)
        assert process.wait(30) == code
        assert process.stderr.read() == "rowmap: interrupted\n"
    assert names(tmp_path) == []


def test_an_interruption_while_modules_load_is_quiet(tmp_path: Path) -> None:
    """A module that never finishes loading stands in for slow disks."""
    (tmp_path / "traceback.py").write_text(
        "import time\nprint('here', flush=True)\ntime.sleep(60)\n"
    )
    code = (
        "import sys; from rowmap_jobs.cli.start import main; "
        f"sys.path.insert(0, {str(tmp_path)!r}); sys.modules.pop('traceback', None); main()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"here\n"
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGINT and said == b""


def test_a_reader_that_goes_away_is_no_error() -> None:
    first = subprocess.Popen([*ROWMAP, "formats"], env=ENV, stdout=subprocess.PIPE, stderr=-1)
    assert first.stdout is not None and first.stderr is not None
    first.stdout.close()
    assert first.stderr.read() == b"" and first.wait(30) == 141
    first.stderr.close()


def test_a_device_that_is_full_is_one_refusal() -> None:
    with Path("/dev/full").open("w") as full:
        ran = run(["formats"], stdout=full)
    assert ran.returncode == 3
    assert ran.stderr == (
        "rowmap: stdout: output: found No space left on device, expected room for it\n"
    )


def test_streams_that_are_closed_do_no_harm(made: Path, tmp_path: Path) -> None:
    arguments = place(made, "-o", tmp_path / "rows.json")
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *ROWMAP, *arguments]
    ran = subprocess.run(command, env=ENV, capture_output=True, check=False, timeout=60)
    assert ran.returncode == 0 and ran.stderr == b""
    assert (tmp_path / "rows.json").read_bytes() == (made / "code.json").read_bytes()


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, 256))


BOTH = """
import sys
from rowmap_jobs.cli.main import main
print(main(sys.argv[1].split()), main(sys.argv[2].split()))
"""


def test_a_disk_without_room_is_one_refusal_and_leaves_nothing(made: Path, tmp_path: Path) -> None:
    outputs = (tmp_path / "rows.json", tmp_path / "code.npz")
    exported = f"export recipe {made / 'code.npz'} -o {outputs[1]}"
    lines = (" ".join(place(made, "-o", outputs[0])), exported)
    command = [sys.executable, "-c", BOTH, *lines]
    ran = subprocess.run(
        command, env=ENV, text=True, capture_output=True, check=False, preexec_fn=small_files
    )
    assert ran.stdout == "3 3\n" and ran.stderr == "".join(
        f"rowmap: {out}: output: found File too large, expected a folder that can be written to, "
        "with room in it\n"
        for out in outputs
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [0, 4000, 12_000])
def test_a_report_is_written_whole_or_not_at_all(size: int, made: Path, tmp_path: Path) -> None:
    """At 12,000 bytes report.json has room, the page has not."""
    what = ("evaluate", made / "code.npz", "--map", made / "code.json", "--report-dir")
    (tmp_path / "old").mkdir()
    for folder in (tmp_path / "new", tmp_path / "old"):
        ran = subprocess.run(
            [*ROWMAP, *map(str, (*what, folder))],
            env=ENV,
            text=True,
            capture_output=True,
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )
        assert ran.returncode == 3 and ran.stderr.count("\n") == 1
        assert f"{folder}: output: found File too large" in ran.stderr
    assert names(tmp_path) == ["old"] and names(tmp_path / "old") == []


def test_a_small_census_needs_little_memory(made: Path) -> None:
    """A read makes room for what it is asked for: a limit is no size."""
    limit = 600 << 20
    ran = subprocess.run(
        [*ROWMAP, "compare", *[str(made / "code.json")] * 2, "--census", str(made / "code.npz")],
        env={**ENV, "OPENBLAS_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_class_whose_name_is_no_text_is_refused(made: Path, tmp_path: Path) -> None:
    command = ["import", "auto", made / "code", "--model", MODEL, "-o", tmp_path / "x.npz"]
    ran = subprocess.run(
        [*ROWMAP, *map(str, command), "--class", b"a\xe4"],
        env=ENV,
        capture_output=True,
        check=False,
    )
    assert ran.returncode == 2 and ran.stderr.count(b"\n") == 1
    assert b"--class: found 'a\\udce4', expected some text in UTF-8" in ran.stderr


def test_a_folder_that_takes_no_file_is_one_refusal(made: Path) -> None:
    # Of the kernel: not even root may make a file there.
    ran = run(place(made, "-o", Path("/sys/kernel/rows.json")))
    assert ran.returncode == 3 and ran.stderr.count("\n") == 1
    assert "/sys/kernel" in ran.stderr


def test_a_name_that_is_no_text_is_printed_as_escapes(made: Path, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.json")
    Path(name).write_bytes((made / "code.json").read_bytes())
    assert "\\udcff\\udcfe.json: row map" in good("inspect", name).out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, quiet: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What two steps show on stderr, the first of them a long one."""
    monkeypatch.setattr(console, "_PATIENCE", 0.05)
    monkeypatch.setattr(console, "_TICK", 0.01)
    with console.Console(None, stream, quiet).progress(2) as progress:
        progress.step("reading a\x1bb.npz")
        time.sleep(0.3)
        progress.hide()
        progress.step("placing")
        time.sleep(0.1)
    return stream.getvalue()


def test_a_terminal_sees_progress_of_what_takes_long_and_keeps_none_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    text = shown(Terminal(), False, monkeypatch)
    assert "\r\x1b[K[....................] 1/2 reading a\\x1bb.npz  0 s" in text
    assert "[##########..........] 2/2 placing" in text
    assert text.endswith("\r\x1b[K") and threading.active_count() == before


@pytest.mark.parametrize(("stream", "quiet"), [(Terminal, True), (io.StringIO, False)])
def test_quiet_and_files_see_none(
    stream: type[io.StringIO], quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(stream(), quiet, monkeypatch) == ""


def test_a_terminal_that_goes_away_takes_only_the_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(Terminal):
        def write(self, _text: str) -> int:
            raise OSError(5, "Input/output error")

    assert shown(Gone(), False, monkeypatch) == ""
