"""A memory cgroup of one's own, version 1 or 2, that a process enters and that is then limited."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
FOLDERS = (ROOT / "memory", ROOT)
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_rss"),
    2: ("memory.max", "memory.current", "anon"),
}


class Group:
    """Raises OSError where this machine gives no memory cgroup."""

    def __init__(self, name: str) -> None:
        for folder in FOLDERS:
            version = 1 if (folder / "memory.limit_in_bytes").exists() else 2
            if version == 1 or "memory" in _words(folder / "cgroup.subtree_control"):
                break
        else:
            raise OSError("no memory controller below /sys/fs/cgroup")
        self.version, self.folder = version, folder / name
        self._limit, self._usage, self._anonymous = FILES[version]
        self.folder.mkdir()
        if version == 2 and (self.folder / "memory.swap.max").exists():
            (self.folder / "memory.swap.max").write_text("0")

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

    def remove(self) -> None:
        self.folder.rmdir()


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
