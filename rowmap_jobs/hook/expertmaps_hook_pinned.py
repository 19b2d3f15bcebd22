"""Host memory that the device reads: exactly sized, on the device's NUMA node, known to CUDA.

An anonymous mapping of whole pages is first touched by threads that run on the CPUs next to the
device, so that the kernel puts its pages there, and is then registered (cudaHostRegister). No
other allocator is asked: torch's own pinned memory comes in powers of two, and a second pinned
copy of cold rows does not fit a machine that needs tiers.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_pages as pages
    from .expertmaps_hook_env import HookError
else:
    import expertmaps_hook_pages as pages
    from expertmaps_hook_env import HookError

REGISTER_MAPPED = 0x02
CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file", "active_file"),
    (
        "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
        "total_inactive_file", "total_active_file",
    ),
)  # fmt: skip
"""Limit, use, statistics and the names of page cache there: of cgroup v2 and of v1. A checkpoint
that was read and then mapped is active, and dropped like the rest."""
BIND = re.compile(r" bind(?:=[a-z]+)?:([0-9,-]+)")
"""The memory policy of a mapping in /proc/self/numa_maps that no other node may stand in for."""
NODE_FREE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
TOUCH_THREADS = 4


@dataclass(frozen=True)
class Block:
    """One registered range of host memory."""

    address: int
    size: int
    device_address: int
    """Where the device sees it."""


class CudaRuntime:
    """The calls of libcudart that pinning needs. A code other than 0 is a HookError (PinFailed)."""

    def __init__(self, library: Any) -> None:
        self._library = library
        void, size = ctypes.c_void_p, ctypes.c_size_t
        for name, arguments in (
            ("cudaHostRegister", [void, size, ctypes.c_uint]),
            ("cudaHostGetDevicePointer", [ctypes.POINTER(void), void, ctypes.c_uint]),
            ("cudaHostUnregister", [void]),
            ("cudaGetErrorName", [ctypes.c_int]),
            ("cudaGetLastError", []),
        ):
            function = getattr(self._library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_char_p if name == "cudaGetErrorName" else ctypes.c_int

    def register(self, address: int, size: int) -> None:
        """Pin pages and let the device read them."""
        code = self._library.cudaHostRegister(address, size, REGISTER_MAPPED)
        self._check(code, f"cudaHostRegister of {size} bytes")

    def device_pointer(self, address: int) -> int:
        """Where the device sees a registered address."""
        found = ctypes.c_void_p()
        code = self._library.cudaHostGetDevicePointer(ctypes.byref(found), address, 0)
        self._check(code, "cudaHostGetDevicePointer")
        if not found.value:
            raise HookError("PinFailed", "cudaHostGetDevicePointer: found no address")
        return found.value

    def unregister(self, address: int) -> None:
        """Unpin what was registered at an address."""
        self._check(self._library.cudaHostUnregister(address), "cudaHostUnregister")

    def _check(self, code: int, call: str) -> None:
        if code == 0:
            return
        # Else torch would take this error for one of its own next call.
        self._library.cudaGetLastError()
        name = self._library.cudaGetErrorName(code) or b"unknown"
        raise HookError("PinFailed", f"{call}: error {code}, {name.decode('ascii', 'replace')}")


def load_cudart(version: str | None = None, maps: Path = Path("/proc/self/maps")) -> Any:
    """The CUDA runtime this process already runs on: another copy would have another state.

    `version` is that of torch, as in `13.0`: where several runtimes are loaded, its major number
    says which one is torch's. Raises HookError (HookUnsupported).
    """
    lines = maps.read_text("utf-8", "replace").splitlines()
    paths = [Path(line[line.find("/") :]) for line in lines if "/" in line]
    found = sorted({path for path in paths if path.name.startswith("libcudart")})
    major = f".so.{(version or '').partition('.')[0]}"
    fitting = [path for path in found if major in path.name] or found
    if len(fitting) != 1:
        names = ", ".join(path.name for path in fitting) or "none"
        raise HookError(
            "HookUnsupported", f"libcudart: found {names} in this process, expected torch's alone"
        )
    return ctypes.CDLL(str(fitting[0]))


class Pinned:
    """All registered memory of a residency. Every block is given back by `free`."""

    def __init__(self, runtime: CudaRuntime, cpus: frozenset[int] | None, libc: Any = None) -> None:
        self._runtime, self._cpus = runtime, cpus
        self._libc = pages.Libc() if libc is None else libc
        self._blocks: list[Block] = []

    @property
    def size(self) -> int:
        """Bytes registered now."""
        return sum(block.size for block in self._blocks)

    def allocate(self, size: int) -> Block:
        """A registered block of whole pages. Raises HookError (PinFailed) with nothing left."""
        size = pages.page_up(size)
        with ExitStack() as undo:
            try:
                address = self._libc.map_anonymous(size)
                undo.callback(self._libc.unmap, address, size)
                touch(address, size, self._cpus)
            except OSError as error:
                raise HookError("PinFailed", f"{size} bytes of host memory: {error}") from None
            self._runtime.register(address, size)
            undo.callback(self._runtime.unregister, address)
            block = Block(address, size, self._runtime.device_pointer(address))
            undo.pop_all()
        self._blocks.append(block)
        return block

    def free(self, block: Block) -> None:
        """Unregister and unmap. The device must be done with it."""
        self._blocks.remove(block)
        try:
            self._runtime.unregister(block.address)
        finally:
            # The kernel keeps pages that a driver still has pinned, whoever unmaps them.
            self._libc.unmap(block.address, block.size)


def touch(address: int, size: int, cpus: frozenset[int] | None) -> None:
    """Write every page of a range, from threads that run on the given CPUs alone."""
    workers = max(1, min(TOUCH_THREADS, size // (64 << 20)))
    part = pages.page_up(-(-size // workers))

    def one(start: int) -> None:
        with on_cpus(cpus):
            ctypes.memset(address + start, 0, min(part, size - start))

    with ThreadPoolExecutor(workers, "expertmaps-touch") as pool:
        list(pool.map(one, range(0, size, part)))


@contextmanager
def on_cpus(cpus: frozenset[int] | None) -> Iterator[None]:
    """Run the calling thread on these CPUs, then on those it had before.

    CPUs the process may not use are left out; with none left, or None, nothing changes.
    """
    before = os.sched_getaffinity(0)
    wanted = before & (cpus or frozenset())
    if wanted:
        os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        if wanted:
            os.sched_setaffinity(0, before)


def cpus_near(bus: str, root: Path = Path("/sys")) -> frozenset[int] | None:
    """CPUs of the NUMA node that a PCI device (`0000:0f:00.0`) is attached to.

    None where the machine does not say: one node, or a virtual machine without the table.
    """
    try:
        text = (root / "bus/pci/devices" / bus.lower() / "numa_node").read_text("ascii")
        node = int(text)
        if node < 0:
            return None
        listed = (root / f"devices/system/node/node{node}/cpulist").read_text("ascii")
        return frozenset(parse_cpus(listed)) or None
    except (OSError, ValueError):
        return None


def parse_cpus(text: str) -> list[int]:
    """CPU numbers of a kernel list such as `0-3,8`. Raises ValueError."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found.extend(range(int(low), int(high or low) + 1))
    return found


def host_free(root: Path = Path("/")) -> int:
    """Bytes of host memory this process may still take: MemAvailable, or less by its cgroup.

    A limit of the pod counts: pinned bytes are charged to it. So do the NUMA nodes that the process
    is bound to: when they are full, the kernel ends it. Raises HookError (HookUnsupported).
    """
    try:
        available = _fields(root / "proc/meminfo", ":")["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError):
        raise HookError("HookUnsupported", "/proc/meminfo: MemAvailable not found") from None
    for files in CGROUP_FILES:
        limit_file, used_file, stat_file = (root / "sys/fs/cgroup" / name for name in files[:3])
        try:
            limit = int(limit_file.read_text("ascii"))
            used = int(used_file.read_text("ascii"))
            # Page cache that the kernel drops before it refuses memory.
            found = _fields(stat_file, None)
            cache = sum(found.get(name, 0) for name in files[3:])
        except (OSError, ValueError):
            continue  # no limit ("max"), or the other version
        available = min(available, limit - used + cache)
    bound = bound_nodes(root)
    if bound is not None:
        available = min(available, sum(_node_free(root, node) for node in bound))
    return max(0, available)


def bound_nodes(root: Path = Path("/")) -> list[int] | None:
    """NUMA nodes this process may take memory from, by its cpuset and its memory policy.

    None where it may take from all of them, or the machine does not say.
    """
    try:
        status = (root / "proc/self/status").read_text("ascii", "replace")
        listed = re.search(r"^Mems_allowed_list:\s*(\S+)", status, re.MULTILINE)
        online = set(parse_cpus((root / "sys/devices/system/node/online").read_text("ascii")))
        allowed = online & set(parse_cpus(listed[1])) if listed else online
        # The program's own text tells the task's policy. No more: for each mapping that is read
        # the kernel looks at all of its pages.
        with (root / "proc/self/numa_maps").open("rb", buffering=0) as maps:
            policy = BIND.search(maps.read(256).partition(b"\n")[0].decode("ascii", "replace"))
        if policy:
            allowed &= set(parse_cpus(policy[1]))
    except (OSError, ValueError):
        return None
    return None if allowed == online else sorted(allowed)


def _node_free(root: Path, node: int) -> int:
    """Bytes of one NUMA node that are free, or page cache. 0 where it does not say."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/meminfo").read_text("ascii", "replace")
    except OSError:
        return 0
    found = dict(re.findall(r"^Node \d+ (\S+):\s+(\d+) kB", text, re.MULTILINE))
    return sum(int(found.get(name, 0)) for name in NODE_FREE) * 1024


def _fields(path: Path, separator: str | None) -> dict[str, int]:
    """`name value` lines as numbers."""
    found = {}
    for line in path.read_text("ascii", "replace").splitlines():
        parts = line.replace(separator, " ").split() if separator else line.split()
        if len(parts) >= 2 and parts[1].isdigit():
            found[parts[0]] = int(parts[1])
    return found
