"""Memory of a lane's container, told from inside of it; a script for any Python 3 in the pod.

`inside.py FOLDER`, the folder of the cold rows, prints JSON: `limit`, `usage` and `kept` (what no
file on a disk backs) of the container's cgroup in bytes, `faults` (major page faults) and
`oomKills` since it began, whether the root is `readOnly`, and of the process with the moved rows
(null if there is none) `engine`: its `uid`, `capabilities` (a mask), `memlock` (its limit),
`locked` bytes, and `hot` and `cold`: [resident, all] bytes. The hook's cold rows are pages of a
file without a name, its hot rows lie between them as memory of the process. Needs no capability:
it runs as the user of the server.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

RUN_DIR = str(Path(sys.argv[1]).resolve())
ROOT = Path("/sys/fs/cgroup")
RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)$")


def words(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def group() -> dict[str, int]:
    old = ROOT / "memory"
    if (old / "memory.limit_in_bytes").exists():
        stat = words(old / "memory.stat")
        return {
            "limit": int((old / "memory.limit_in_bytes").read_text()),
            "usage": int((old / "memory.usage_in_bytes").read_text()),
            "kept": stat["total_rss"] + stat["total_shmem"],
            "faults": stat["total_pgmajfault"],
            "oomKills": words(old / "memory.oom_control")["oom_kill"],
        }
    stat = words(ROOT / "memory.stat")
    return {
        "limit": int((ROOT / "memory.max").read_text()),
        "usage": int((ROOT / "memory.current").read_text()),
        "kept": stat["anon"] + stat["shmem"],
        "faults": stat["pgmajfault"],
        "oomKills": words(ROOT / "memory.events")["oom_kill"],
    }


def mappings(text: str) -> list[dict[str, int | str]]:
    """Mappings of /proc/PID/smaps in order; bytes."""
    found: list[dict[str, int | str]] = []
    for line in text.splitlines():
        match = RANGE.match(line)
        if match:
            low, high = int(match[1], 16), int(match[2], 16)
            found.append({"low": low, "high": high, "mode": match[3], "path": match[4], "rss": 0})
        elif line.startswith("Rss:"):
            found[-1]["rss"] = int(line.split()[1]) * 1024
    return found


def pages(text: str) -> dict[str, list[int]] | None:
    """Hot and cold bytes of one process; None when it has no moved rows."""
    found = mappings(text)
    cold = [
        place
        for place, one in enumerate(found)
        if str(one["path"]).startswith(RUN_DIR) and str(one["path"]).endswith("(deleted)")
    ]
    if not cold:
        return None
    first, last = cold[0], cold[-1]
    # Hot rows may begin or end the file: read-only memory of the process that touches it.
    while first and overlays(found[first - 1]) and found[first - 1]["high"] == found[first]["low"]:
        first -= 1
    while last + 1 < len(found) and overlays(found[last + 1]):
        if found[last + 1]["low"] != found[last]["high"]:
            break
        last += 1
    sums = {"hot": [0, 0], "cold": [0, 0]}
    for place in range(first, last + 1):
        one, name = found[place], "cold" if place in cold else "hot"
        sums[name][0] += int(one["rss"])
        sums[name][1] += int(one["high"]) - int(one["low"])
    return sums


def overlays(one: dict[str, int | str]) -> bool:
    return one["path"] == "" and one["mode"] == "r--p"


def engine(folder: Path) -> dict[str, object] | None:
    """One process, if it has moved rows."""
    rows = pages((folder / "smaps").read_text())
    if rows is None:
        return None
    pairs = (line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    status = {name: value.split() for name, value in pairs}
    limits = (folder / "limits").read_text().splitlines()
    memlock = next(line for line in limits if line.startswith("Max locked memory"))
    return {
        "uid": int(status["Uid"][1]),
        "capabilities": int(status["CapEff"][0], 16),
        "memlock": memlock.split()[3],
        "locked": int(status["VmLck"][0]) * 1024,
        **rows,
    }


def main() -> None:
    found = None
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and found is None:
            try:
                found = engine(folder)
            except OSError:  # ended, or another user's
                continue
    closed = bool(os.statvfs("/").f_flag & os.ST_RDONLY)
    print(json.dumps({**group(), "readOnly": closed, "engine": found}))


if __name__ == "__main__":
    main()
