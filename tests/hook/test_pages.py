"""Page arithmetic, and the calls on real memory."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace

import expertmaps_hook_env as env
import expertmaps_hook_pages as pages
import pytest
from hypothesis import given
from hypothesis import strategies as st

PAGE = pages.PAGE


def test_lay_out_is_page_aligned() -> None:
    segments, total = pages.lay_out([(0, "a", PAGE + 1, 1), (1, "b", 3 * PAGE, PAGE)])
    assert [segment.offset for segment in segments] == [0, 2 * PAGE]
    assert total == 5 * PAGE


@given(st.integers(1, 40), st.integers(1, 3 * PAGE), st.integers(0, 5), st.sets(st.integers(0, 39)))
def test_hot_and_cold_cover_every_page_once(
    rows: int, row_bytes: int, before: int, chosen: set[int]
) -> None:
    hot = {row for row in chosen if row < rows}
    segment = pages.Segment(0, "w", before * PAGE, rows * row_bytes, row_bytes)
    warm = pages.hot_ranges(segment, hot)
    cold = pages.cold_ranges(segment, warm)
    pieces = sorted([*warm, *cold])
    assert all(low % PAGE == 0 and high % PAGE == 0 and low < high for low, high in pieces)
    position = segment.offset
    for low, high in pieces:
        assert low == position
        position = high
    assert position == pages.page_up(segment.end)
    for row in hot:
        start = segment.offset + row * row_bytes
        assert any(low <= start and start + row_bytes <= high for low, high in warm)
    for low, high in cold:
        first, last = low - segment.offset, min(high, segment.end) - 1 - segment.offset
        assert not hot & set(range(first // row_bytes, last // row_bytes + 1))


def test_overlay_protect_and_evict_keep_every_byte(tmp_path: Path) -> None:
    libc = pages.Libc()
    size = 8 * PAGE
    data = os.urandom(size)
    descriptor = pages.create_cold_file(tmp_path, size)
    assert list(tmp_path.iterdir()) == []
    base = libc.map_file(descriptor, size)
    ctypes.memmove(base, data, size)
    os.fdatasync(descriptor)
    libc.overlay(base + 2 * PAGE, PAGE)
    ctypes.memmove(base + 2 * PAGE, data[2 * PAGE : 3 * PAGE], PAGE)
    libc.protect(base, size)
    libc.forget(base, 2 * PAGE)
    libc.forget(base + 3 * PAGE, 5 * PAGE)
    os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
    assert ctypes.string_at(base, size) == data
    libc.unmap(base, size)
    os.close(descriptor)


def test_calls_that_fail_raise(tmp_path: Path) -> None:
    libc = pages.Libc()
    with pytest.raises(OSError, match="mmap"):
        libc.map_file(-1, PAGE)
    with pytest.raises(OSError, match="mlock"):
        libc.lock(0, PAGE)


def test_a_small_disk_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SimpleNamespace(f_bavail=3, f_frsize=PAGE)
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(env.HookError) as caught:
        pages.create_cold_file(tmp_path, 4 * PAGE)
    assert caught.value.reason == "ColdDirFull"


def test_a_disk_that_fills_up_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(env.HookError) as caught:
        pages.create_cold_file(tmp_path, PAGE)
    assert caught.value.reason == "ColdDirFull"
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_nameless_files_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # opening a folder for writing fails
    descriptor = pages.create_cold_file(tmp_path, PAGE)
    assert os.fstat(descriptor).st_size == PAGE
    assert list(tmp_path.iterdir()) == []
    os.close(descriptor)


def test_memory_filesystems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "filesystem_of", lambda *_: "tmpfs")
    with pytest.raises(env.HookError) as caught:
        pages.create_cold_file(tmp_path, PAGE)
    assert caught.value.reason == "ColdDirInMemory"


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(env.HookError) as caught:
        pages.create_cold_file(tmp_path / "file" / "below", PAGE)
    assert caught.value.reason == "ColdDirUnusable"


def test_filesystem_of_takes_the_deepest_mount(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    spelled = str(tmp_path / "a b").replace(" ", "\\040")
    mounts = f"none / overlay rw 0 0\ndev {tmp_path} ext4 rw 0 0\nmem {spelled} tmpfs rw 0 0\nbad\n"
    assert pages.filesystem_of(tmp_path / "a b", mounts) == "tmpfs"
    assert pages.filesystem_of(tmp_path, mounts) == "ext4"
    assert pages.filesystem_of(Path("/"), mounts) == "overlay"
    (tmp_path / "Zwischenablage für ä").mkdir()
    spelled = str(tmp_path / "Zwischenablage für ä").replace(" ", "\\040")
    mounts += f"mem {spelled} ramfs rw 0 0\n"
    assert pages.filesystem_of(tmp_path / "Zwischenablage für ä", mounts) == "ramfs"


def test_too_many_ranges_are_refused() -> None:
    pages.check_map_count(10)
    with pytest.raises(env.HookError) as caught:
        pages.check_map_count(1 << 40)
    assert caught.value.reason == "MapCountExceeded"
