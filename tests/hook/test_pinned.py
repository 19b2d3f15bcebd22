"""Pinned host memory against a recorded libcudart: order, balance, and every call failing."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import expertmaps_hook_env as env
import expertmaps_hook_pages as pages
import expertmaps_hook_pinned as pinned
import pytest
from fake_cuda import FakeCudart, FakeLibc
from hypothesis import given
from hypothesis import strategies as st

PAGE = pages.PAGE


class Machine:
    """Pinned memory on the fakes, and what is left of it."""

    def __init__(self, fail_at: int = -1, code: int = 2) -> None:
        self.calls: list[str] = []
        self.cuda = FakeCudart(self.calls, fail_at, code)
        self.libc = FakeLibc(pages.Libc(), self.calls, fail_at)
        self.pinned = pinned.Pinned(pinned.CudaRuntime(self.cuda), None, self.libc)

    def clean(self) -> bool:
        return not self.cuda.registered and not self.libc.mapped and self.pinned.size == 0


def test_a_block_is_mapped_touched_registered_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    original = pinned.touch

    def touch(address: int, size: int, cpus: frozenset[int] | None) -> None:
        machine.calls.append("touch")
        original(address, size, cpus)

    monkeypatch.setattr(pinned, "touch", touch)
    block = machine.pinned.allocate(3 * PAGE + 1)
    assert machine.calls == ["map", "touch", "register", "pointer"]
    assert block.size == machine.pinned.size == 4 * PAGE
    assert machine.cuda.registered == {block.address: 4 * PAGE}
    ctypes.memset(block.device_address, 7, block.size)
    assert ctypes.string_at(block.address, block.size) == b"\7" * block.size
    machine.pinned.free(block)
    assert machine.calls[4:] == ["unregister", "unmap"]
    assert machine.clean()


@pytest.mark.parametrize(
    ("fail_at", "words"),
    [
        (0, "Cannot allocate memory"),
        (1, "cudaHostRegister of 4096 bytes: error 2, cudaErrorMemoryAllocation"),
        (2, "cudaHostGetDevicePointer: error 2, cudaErrorMemoryAllocation"),
    ],
)
def test_each_call_that_fails_leaves_nothing(fail_at: int, words: str) -> None:
    machine = Machine(fail_at)
    with pytest.raises(env.HookError) as caught:
        machine.pinned.allocate(PAGE)
    assert caught.value.reason == "PinFailed" and words in caught.value.message
    assert machine.clean()
    assert machine.cuda.last_error == 0  # not left for torch to find
    assert machine.calls.count("unregister") == (1 if fail_at == 2 else 0)


def test_memory_that_cannot_be_touched_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", no)
    machine = Machine()
    machine.pinned = pinned.Pinned(
        pinned.CudaRuntime(machine.cuda), frozenset(os.sched_getaffinity(0)), machine.libc
    )
    with pytest.raises(env.HookError, match="PinFailed"):
        machine.pinned.allocate(PAGE)
    assert machine.calls == ["map", "unmap"] and machine.clean()


def test_an_unknown_code_is_named_by_its_number() -> None:
    machine = Machine(1, code=4242)
    with pytest.raises(env.HookError, match="error 4242, unknown"):
        machine.pinned.allocate(PAGE)


def test_every_page_is_written_on_the_wanted_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    near = frozenset([min(allowed), 4096])
    seen: list[tuple[int, set[int]]] = []
    original, memset = os.sched_setaffinity, ctypes.memset

    def noted(address: int, value: int, size: int) -> None:
        seen.append((threading.get_ident(), os.sched_getaffinity(0)))
        memset(address, value, size)

    monkeypatch.setattr(ctypes, "memset", noted)
    restored: list[set[int]] = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda who, cpus: (restored.append(set(cpus)), original(who, cpus))
    )
    libc = pages.Libc()
    size = 130 << 20  # two threads, uneven parts
    address = libc.map_anonymous(size)
    memset(address, 1, PAGE)
    memset(address + size - PAGE, 1, PAGE)
    pinned.touch(address, size, near)
    assert ctypes.string_at(address, PAGE) == ctypes.string_at(address + size - PAGE, PAGE)
    assert not any(ctypes.string_at(address + size - PAGE, PAGE))
    libc.unmap(address, size)
    assert len(seen) == 2 and all(cpus == {min(allowed)} for _, cpus in seen)
    assert restored.count({min(allowed)}) >= 2 and restored[-1] == allowed
    assert all(ident != threading.get_ident() for ident, _ in seen)
    assert os.sched_getaffinity(0) == allowed


def test_affinity_comes_back_after_a_failure_and_foreign_cpus_change_nothing() -> None:
    allowed = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), pinned.on_cpus(frozenset([min(allowed)])):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == allowed
    for cpus in (None, frozenset([4096])):
        with pinned.on_cpus(cpus):
            assert os.sched_getaffinity(0) == allowed


def sysfs(root: Path, node: str, cpus: str = "0-1,8") -> Path:
    device = root / "bus/pci/devices/0000:0f:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(node)
    folder = root / "devices/system/node/node1"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(cpus + "\n")
    return root


def test_cpus_of_the_devices_node(tmp_path: Path) -> None:
    root = sysfs(tmp_path / "two", "1\n")
    assert pinned.cpus_near("0000:0F:00.0", root) == {0, 1, 8}
    assert pinned.cpus_near("0000:10:00.0", root) is None
    assert pinned.cpus_near("0000:0f:00.0", sysfs(tmp_path / "one", "-1\n")) is None
    assert pinned.cpus_near("0000:0f:00.0", sysfs(tmp_path / "odd", "1\n", "x-y")) is None
    assert pinned.cpus_near("0000:0f:00.0", sysfs(tmp_path / "none", "1\n", "")) is None


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_read_back(cpus: set[int]) -> None:
    assert set(pinned.parse_cpus(",".join(str(cpu) for cpu in sorted(cpus)))) == cpus


def test_free_host_memory_is_the_least_of_machine_and_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    assert pinned.host_free(tmp_path) == 1000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("600000\n")
    (group / "memory.stat").write_text("anon 500000\ninactive_file 400\nactive_file 600\n")
    assert pinned.host_free(tmp_path) == 1000 * 1024
    (group / "memory.max").write_text("900000\n")
    assert pinned.host_free(tmp_path) == 900000 - 600000 + 1000
    (group / "memory.max").write_text("1000\n")
    assert pinned.host_free(tmp_path) == 0
    (group / "memory.max").unlink()
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")  # none
    (group / "memory/memory.usage_in_bytes").write_text("600000\n")
    own, whole = "inactive_file 7\nactive_file 5\n", "total_inactive_file 1200\n"
    (group / "memory/memory.stat").write_text(own + whole + "total_active_file 800\n")
    assert pinned.host_free(tmp_path) == 1000 * 1024
    (group / "memory/memory.limit_in_bytes").write_text("900000\n")
    assert pinned.host_free(tmp_path) == 900000 - 600000 + 2000
    assert pinned.host_free() > 0
    (tmp_path / "proc/meminfo").write_text("")
    with pytest.raises(env.HookError, match="MemAvailable"):
        pinned.host_free(tmp_path)


def nodes(root: Path, online: str, allowed: str, policy: str) -> None:
    """A machine's nodes, 1000 kB free in each but number 0, which has 100 and page cache."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemAvailable: 9999 kB\n")
    (root / "proc/self/status").write_text(f"Name:\tvllm\nMems_allowed_list:\t{allowed}\n")
    (root / "proc/self/numa_maps").write_text(f"7f00 {policy} file=/bin/x\n7f01 bind:7\n")
    folder = root / "sys/devices/system/node"
    for node in pinned.parse_cpus(online):
        (folder / f"node{node}").mkdir(parents=True)
        free = 1000 if node else 100
        text = f"Node {node} MemTotal: 4000 kB\nNode {node} MemFree:  {free} kB\n"
        text += "" if node else "Node 0 Active(file): 20 kB\nNode 0 Inactive(file): 3 kB\n"
        (folder / f"node{node}/meminfo").write_text(text)
    (folder / "online").write_text(f"{online}\n")


@pytest.mark.parametrize(
    ("online", "allowed", "policy", "free"),
    [
        ("0-1", "0-1", "default", 9999),
        ("0-1", "0-63", "interleave:0", 9999),  # possible nodes are listed, too
        ("0-1", "0-1", "bind:0", 123),
        ("0-1", "0-1", "bind=static:0", 123),
        ("0-2", "1-2", "default", 2000),
        ("0-2", "0-1", "bind:1-2", 1000),
        ("0", "0", "bind:0", 9999),
    ],
)
def test_a_process_bound_to_some_nodes_has_their_memory_alone(
    tmp_path: Path, online: str, allowed: str, policy: str, free: int
) -> None:
    """What a bound process takes beyond them ends it: no other node stands in."""
    nodes(tmp_path, online, allowed, policy)
    assert pinned.host_free(tmp_path) == free * 1024


def test_a_machine_that_does_not_list_its_nodes_binds_nobody(tmp_path: Path) -> None:
    assert pinned.bound_nodes(tmp_path) is None
    nodes(tmp_path, "0-1", "0-1", "bind:1")
    (tmp_path / "sys/devices/system/node/node1/meminfo").unlink()
    assert pinned.host_free(tmp_path) == 0


def test_the_runtime_of_this_process_is_used_or_none(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 0:0 0 \n7f02-7f03 r-xp 0 0:0 1  /lib/libc.so.6\n")
    with pytest.raises(env.HookError) as caught:
        pinned.load_cudart("13.0", maps)
    assert caught.value.reason == "HookUnsupported"
    line = "7f02-7f03 r-xp 0 0:0 1  /no such folder/libcudart.so.13\n"
    maps.write_text(line)
    with pytest.raises(OSError, match=r"/no such folder/libcudart\.so\.13"):
        pinned.load_cudart("13.0", maps)
    other = line.replace("no such folder", "other")
    maps.write_text(line + other.replace(".13", ".12") + line)
    with pytest.raises(OSError, match=r"/no such folder/libcudart\.so\.13"):
        pinned.load_cudart("13.0", maps)
    maps.write_text(line + other)
    with pytest.raises(env.HookError, match=r"found libcudart\.so\.13, libcudart\.so\.13 in"):
        pinned.load_cudart("13.0", maps)
