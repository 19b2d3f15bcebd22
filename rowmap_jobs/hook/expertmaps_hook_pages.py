"""Pages: which byte ranges of a mapped tensor are hot, and the calls that place them.

The arithmetic is pure. `Libc` holds the few calls that Python's mmap module does not offer.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
else:
    from expertmaps_hook_env import HookError

PAGE = mmap.PAGESIZE
PROT_READ, PROT_READ_WRITE = 1, 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x1, 0x2, 0x10, 0x20
MADV_DONTNEED, MADV_DONTFORK, MADV_HUGEPAGE = 4, 10, 14
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")

Range = tuple[int, int]


class Segment(NamedTuple):
    """One expert tensor inside the mapped file."""

    layer: int
    name: str
    offset: int
    size: int
    row_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def page_up(value: int) -> int:
    """The next multiple of the page size."""
    return -(-value // PAGE) * PAGE


def lay_out(tensors: Iterable[tuple[int, str, int, int]]) -> tuple[list[Segment], int]:
    """Give each (layer, name, bytes, row bytes) a page-aligned place; also the total size."""
    segments, offset = [], 0
    for layer, name, size, row_bytes in tensors:
        segments.append(Segment(layer, name, offset, size, row_bytes))
        offset += page_up(size)
    return segments, offset


def hot_ranges(segment: Segment, hot: Iterable[int]) -> list[Range]:
    """Page ranges that hold the hot rows: rounded outward, merged, ascending.

    A page that a hot row shares with a cold one is hot, so a hot row is never partly cold.
    """
    ranges: list[Range] = []
    for row in sorted(set(hot)):
        start = segment.offset + row * segment.row_bytes
        low, high = start // PAGE * PAGE, page_up(start + segment.row_bytes)
        if ranges and low <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(high, ranges[-1][1]))
        else:
            ranges.append((low, high))
    return ranges


def cold_ranges(segment: Segment, hot: Sequence[Range]) -> list[Range]:
    """The pages of a segment that are not in its hot ranges."""
    cold, position = [], segment.offset
    for low, high in [*hot, (page_up(segment.end), page_up(segment.end))]:
        if low > position:
            cold.append((position, low))
        position = max(position, high)
    return cold


def check_map_count(ranges: int) -> None:
    """Each hot range splits a mapping: refuse what the kernel would refuse halfway.

    Raises HookError (MapCountExceeded).
    """
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text("ascii"))
        used = Path("/proc/self/maps").read_bytes().count(b"\n")
    except (OSError, ValueError):
        return
    needed = used + 2 * ranges
    if needed > limit - 256:
        raise HookError(
            "MapCountExceeded", f"vm.max_map_count: found {limit}, expected at least {needed + 256}"
        )


ESCAPED = re.compile(r"\\([0-7]{3})")
"""How the kernel writes blanks and backslashes of a mount point."""


def filesystem_of(folder: Path, mounts: str) -> str:
    """Filesystem type that holds a folder, from the text of /proc/self/mounts."""
    best, kind = -1, ""
    target = folder.resolve()
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[1]))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind


class Libc:
    """mmap, mprotect, mlock and madvise on addresses. Failures raise OSError."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        void, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._libc.mmap.restype = void
        self._libc.mmap.argtypes = [void, size, integer, integer, integer, ctypes.c_int64]
        for name, arguments in (
            ("munmap", [void, size]), ("mlock", [void, size]), ("mprotect", [void, size, integer]),
            ("madvise", [void, size, integer]), ("malloc_trim", [size]),
        ):  # fmt: skip
            getattr(self._libc, name).argtypes = arguments

    def map_file(self, descriptor: int, size: int) -> int:
        """Address of a shared, writable mapping of a whole file."""
        return self._map(None, size, MAP_SHARED, descriptor)

    def map_anonymous(self, size: int) -> int:
        """Address of fresh memory of its own, exactly sized to pages, that no fork copies.

        The kernel copies pinned pages at a fork at once, and a child has no use for them.
        """
        address = self._map(None, size, MAP_PRIVATE | MAP_ANONYMOUS, -1)
        self._libc.madvise(address, size, MADV_DONTFORK)
        self._libc.madvise(address, size, MADV_HUGEPAGE)  # a hint: kernels without it refuse
        return address

    def overlay(self, address: int, size: int) -> None:
        """Put fresh anonymous memory over part of a mapping."""
        self._map(address, size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1)
        self._libc.madvise(address, size, MADV_HUGEPAGE)  # a hint: kernels without it refuse

    def _map(self, address: int | None, size: int, flags: int, descriptor: int) -> int:
        found = self._libc.mmap(address, size, PROT_READ_WRITE, flags, descriptor, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise self._error("mmap")
        return int(found)

    def unmap(self, address: int, size: int) -> None:
        """Give a range back; locks and overlays inside go with it."""
        self._check(self._libc.munmap(address, size), "munmap")

    def lock(self, address: int, size: int) -> None:
        """Pin pages in memory."""
        self._check(self._libc.mlock(address, size), "mlock")

    def protect(self, address: int, size: int) -> None:
        """Make pages read-only: a stray write ends the process instead of changing a weight."""
        self._check(self._libc.mprotect(address, size, PROT_READ), "mprotect")

    def forget(self, address: int, size: int) -> None:
        """Drop the page-table entries of file pages, so that the page cache may evict them."""
        self._check(self._libc.madvise(address, size, MADV_DONTNEED), "madvise")

    def trim(self) -> None:
        """Ask the allocators to return freed memory to the system."""
        self._libc.malloc_trim(0)
        release = getattr(self._libc, "MallocExtension_ReleaseFreeMemory", None)
        if release is not None:  # tcmalloc, which vLLM's CPU images preload
            release()

    @staticmethod
    def _check(result: int, call: str) -> None:
        if result != 0:
            raise Libc._error(call)

    @staticmethod
    def _error(call: str) -> OSError:
        number = ctypes.get_errno()
        return OSError(number, f"{call}: {os.strerror(number)}")


def create_cold_file(folder: Path, size: int) -> int:
    """Descriptor of a preallocated file without a name: nothing is left behind by a kill.

    Raises HookError: ColdDirInMemory, ColdDirFull or ColdDirUnusable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kind = filesystem_of(folder, Path("/proc/self/mounts").read_text("utf-8", "replace"))
        free = os.statvfs(folder)
    except OSError as error:
        raise HookError("ColdDirUnusable", f"{folder}: {error.strerror}") from None
    if kind in MEMORY_FILESYSTEMS:
        raise HookError("ColdDirInMemory", f"{folder}: found {kind}, expected a disk")
    available = free.f_bavail * free.f_frsize
    if available < size:
        raise HookError("ColdDirFull", f"{folder}: found {available} bytes free, need {size}")
    descriptor = -1
    try:
        descriptor = _nameless(folder)
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "ColdDirFull" if full else "ColdDirUnusable"
        raise HookError(reason, f"{folder}: {size} bytes: {error.strerror}") from None
    return descriptor


def _nameless(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE, 0o600)
    except OSError:
        # Filesystems without O_TMPFILE: the name lives for an instant, before any bytes.
        path = folder / f".expertmaps-{secrets.token_hex(8)}.bin"
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        return descriptor
