"""The command as a process of its own: signals, pipes that close, and disks that are full."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.made import HOT, MODEL, ROOT

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


@pytest.mark.parametrize("closed", [(0,), (0, 1, 2)])
def test_streams_that_are_closed_do_no_harm(
    closed: tuple[int, ...], made: Path, tmp_path: Path
) -> None:
    arguments = place(made, "-o", tmp_path / "rows.json")
    words = " ".join(f"{handle}>&-" for handle in closed)
    command = ["sh", "-c", f'exec "$@" {words}', "sh", *ROWMAP, *arguments]
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_one_refusal(made: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    ran = run(place(made, "-o", tmp_path / "rows.json"))
    tmp_path.chmod(0o755)
    assert ran.returncode == 3 and "found Permission denied" in ran.stderr


def test_a_name_that_is_no_text_is_printed_as_escapes(made: Path, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff\xfe.json"
    Path(os.fsdecode(name)).write_bytes((made / "code.json").read_bytes())
    ran = run(["inspect", os.fsdecode(name)])
    assert ran.returncode == 0 and "\\udcff\\udcfe.json: row map" in ran.stdout


SLOW = """
import sys, time
from rowmap_jobs.cli.console import Console
with Console.of_process({quiet}).progress(2) as progress:
    progress.step("reading a\\x1bb.npz")
    time.sleep(0.9)
    progress.step("placing")
print("done")
"""


def terminal(quiet: bool) -> bytes:
    """What a program shows on a terminal at stderr."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", SLOW.format(quiet=quiet)]
    subprocess.run(command, env=ENV, stdout=subprocess.DEVNULL, stderr=slave, check=True)
    os.close(slave)
    shown = b""
    try:
        while piece := os.read(master, 4096):
            shown += piece
    except OSError:
        pass
    os.close(master)
    return shown


def test_a_terminal_sees_progress_of_what_takes_long_and_keeps_none_of_it() -> None:
    shown = terminal(quiet=False)
    assert b"[....................] 1/2 reading a\\x1bb.npz  1 s" in shown
    assert b"[##########..........] 2/2 placing" in shown
    assert shown.endswith(b"\r\x1b[K")


def test_quiet_and_files_see_none() -> None:
    assert terminal(quiet=True) == b""
    command = [sys.executable, "-c", SLOW.format(quiet=False)]
    ran = subprocess.run(command, env=ENV, capture_output=True, check=True)
    assert ran.stderr == b"" and ran.stdout == b"done\n"
