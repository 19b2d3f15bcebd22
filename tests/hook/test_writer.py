"""Results on a disk that fills and in a process that is killed: whole files, or their absence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HOOK = Path(__file__).parents[2] / "rowmap_jobs" / "hook"

WRITER = """
import resource, signal, sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
import numpy as np
import expertmaps_hook_capture as capture
import expertmaps_hook_env as env
import expertmaps_hook_http as http
import expertmaps_hook_positions as positions
import expertmaps_hook_status as status

class Host:  # as much of a tensor as the writer needs
    def __init__(self, value): self.value = value
    def cpu(self): return self
    def numpy(self): return self.value
    def __int__(self): return int(self.value)

folder = Path(sys.argv[2])
settings = env.Settings(mode="count", directory=folder)
said = status.Status(settings, "0.32.0")
published = http.publish(said, settings)
writer = capture.Writer(folder / "transcripts")
counts = np.random.default_rng(0).integers(0, 1 << 40, (2, 94, 512))
snapshot = SimpleNamespace(counts=Host(counts), bad=Host(0), copied=None)
tracked = positions.Tracked(9, prefill=3, decode=6)
"""
FULL = """
writer.put("before", snapshot, tracked)
while writer.written < 1: pass
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))  # status.json has room, counts have not
for index in range(3):
    writer.put(f"full{index}", snapshot, tracked)
writer.put_skip("told", "NoSlot")
writer.end(); writer.join()
said.set(phase="Serving")
published.close()
print(writer.written, writer.failed)
"""
ENDLESS = """
index = 0
while True:
    writer.put(f"t{index}", snapshot, tracked)
    while writer.written <= index: pass
    said.stepped(); published.changed()
    print(index, flush=True)
    index += 1
"""


def start(folder: Path, body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER + body, str(HOOK), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def whole(path: Path) -> bool:
    with np.load(path, allow_pickle=False) as file:
        return (
            file["counts"].shape == (2, 94, 512)
            and file["rows"].tolist() == [3, 6]
            and int(file["bad"]) == int(file["recomputed"]) == 0
        )


def test_a_full_disk_loses_what_has_no_room_and_says_so(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the same write fails, at the same place."""
    process = start(tmp_path, FULL)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out.split() == ["1", "3"]
    folder = tmp_path / "transcripts"
    names = {path.name for path in folder.iterdir()}
    assert names == {"before.npz", "full0.skip", "full1.skip", "full2.skip", "told.skip"}
    assert whole(folder / "before.npz")
    assert (folder / "full0.skip").read_text() == "WriteFailed\n"
    assert b'"phase": "Serving"' in (tmp_path / "status.json").read_bytes()


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 13, 21])
def test_a_kill_leaves_whole_files_and_loses_the_last_one_at_most(
    tmp_path: Path, after: int
) -> None:
    process = start(tmp_path, ENDLESS)
    assert process.stdout is not None
    last = -1
    while last < after:
        last = int(process.stdout.readline())
    process.kill()
    rest = process.communicate(timeout=60)[0].split()
    last = int(rest[-1]) if rest else last
    folder = tmp_path / "transcripts"
    results = [path for path in folder.iterdir() if not path.name.startswith(".")]
    assert all(path.suffix == ".npz" and whole(path) for path in results)
    assert {f"t{index}.npz" for index in range(last + 1)} <= {path.name for path in results}
    assert len([path for path in folder.iterdir() if path.name.endswith(".tmp")]) <= 1
    assert (tmp_path / "status.json").read_bytes().endswith(b"}\n")
