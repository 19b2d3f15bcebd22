"""Memory cgroups, version 1 or 2: one that a process enters and is then limited, or a pod's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
FOLDERS = (ROOT / "memory", ROOT)
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_rss"),
    2: ("memory.max", "memory.current", "anon"),
}


class Group:
    """A group that is there: a pod's, for one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.version = 1 if (folder / "memory.limit_in_bytes").exists() else 2
        self._limit, self._usage, self._anonymous = FILES[self.version]

    @classmethod
    def make(cls, name: str) -> Group:
        """A new group without swap. Raises OSError where this machine gives no memory cgroup."""
        folder = _root() / name
        folder.mkdir()
        group = cls(folder)
        if group.version == 2 and (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")
        return group

    @classmethod
    def of_pod(cls, uid: str) -> Group:
        """The group of a pod on this machine, by the pod's uid. Raises OSError without it."""
        found = next((path for path in _root().rglob(f"*pod{uid}*") if path.is_dir()), None)
        if found is None:
            raise OSError(f"no memory cgroup of pod {uid}")
        return cls(found)

    def enter(self) -> None:
        """Move the calling process in; what it allocates from now on is charged here."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, size: int) -> None:
        """No more memory than this. Version 1 raises OSError when that much cannot be freed."""
        (self.folder / self._limit).write_text(str(size))

    def usage(self) -> int:
        """Bytes charged, file pages included."""
        return int((self.folder / self._usage).read_text())

    def anonymous(self) -> int:
        """Bytes that no file backs; without swap they cannot be evicted."""
        for line in (self.folder / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == self._anonymous:
                return int(value)
        raise OSError(f"{self.folder}: no {self._anonymous} in memory.stat")

    def reclaim(self) -> None:
        """Evict what can be evicted: file pages, where there is no swap."""
        if self.version == 1:
            (self.folder / "memory.force_empty").write_text("0")
            return
        with contextlib.suppress(OSError):  # told when it was less than was asked for
            (self.folder / "memory.reclaim").write_text(str(self.usage()))

    def remove(self) -> None:
        self.folder.rmdir()


def _root() -> Path:
    for folder in FOLDERS:
        old = (folder / "memory.limit_in_bytes").exists()
        if old or "memory" in _words(folder / "cgroup.subtree_control"):
            return folder
    raise OSError("no memory controller below /sys/fs/cgroup")


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
