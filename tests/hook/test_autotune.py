"""Evidence of the autotuner: files before and after a boot."""

from __future__ import annotations

from pathlib import Path

import expertmaps_hook_autotune as autotune
import pytest


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"VLLM_CACHE_ROOT": "/cache/vllm"}, "/cache/vllm/flashinfer_autotune_cache"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/vllm/flashinfer_autotune_cache"),
        ({"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/own", "VLLM_CACHE_ROOT": "/cache"}, "/own"),
    ],
)
def test_the_folder_is_where_vllm_has_it(environ: dict[str, str], root: str) -> None:
    assert autotune.root(environ) == Path(root)


def test_without_settings_it_is_below_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/lane")
    assert autotune.root({}) == Path("/home/lane/.cache/vllm/flashinfer_autotune_cache")


def laid_out(root: Path) -> Path:
    """As vLLM writes them on a GPU: release, architecture, hash of the configuration, rank."""
    folder = root / autotune.FOLDER / "0.6.4" / "90a" / ("a" * 64)
    folder.mkdir(parents=True)
    for rank in (0, 1):
        (folder / f"autotune_configs_dp0_rank{rank}.json").write_text('{"tactic": 7}')
    return folder


def test_a_boot_that_found_its_files_wrote_none(tmp_path: Path) -> None:
    laid_out(tmp_path)
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    first = dict(watch.wire())
    watch.look()
    assert watch.wire() == first
    assert (first["autotuneFiles"], first["autotuneWritten"]) == (2, 0)


def test_a_boot_that_tuned_is_seen(tmp_path: Path) -> None:
    folder = laid_out(tmp_path)
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    before = watch.wire()["autotuneDigest"]
    (folder / "autotune_configs_dp0_rank1.json").write_text('{"tactic": 8}')
    (folder / "autotune_configs_dp0_rank2.json").write_text("{}")
    (folder / ".autotune_configs.json.x.tmp").write_text("half")
    watch.look()
    found = watch.wire()
    assert (found["autotuneFiles"], found["autotuneWritten"]) == (3, 2)
    assert found["autotuneDigest"] != before


def test_a_file_that_is_gone_changes_the_digest(tmp_path: Path) -> None:
    folder = laid_out(tmp_path)
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    before = watch.wire()["autotuneDigest"]
    (folder / "autotune_configs_dp0_rank1.json").unlink()
    watch.look()
    assert watch.wire()["autotuneDigest"] != before
    assert watch.wire()["autotuneWritten"] == 0


def test_no_folder_is_no_file(tmp_path: Path) -> None:
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    watch.look()
    assert (watch.wire()["autotuneFiles"], watch.wire()["autotuneWritten"]) == (0, 0)
