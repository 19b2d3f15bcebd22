"""Evidence of the autotuner: files before and after a boot."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
from pathlib import Path
from typing import Any

import expertmaps_hook_autotune as autotune
import pytest

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"VLLM_CACHE_ROOT": "/cache/vllm"}, "/cache/vllm/flashinfer_autotune_cache"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/vllm/flashinfer_autotune_cache"),
        ({"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/own", "VLLM_CACHE_ROOT": "/cache"}, "/own"),
        ({"XDG_CACHE_HOME": ""}, "vllm/flashinfer_autotune_cache"),
        ({"VLLM_CACHE_ROOT": ""}, "flashinfer_autotune_cache"),
    ],
)
def test_the_folder_is_where_vllm_has_it(environ: dict[str, str], root: str) -> None:
    assert autotune.root(environ) == Path(root)


def test_without_settings_it_is_below_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/lane")
    assert autotune.root({}) == Path("/home/lane/.cache/vllm/flashinfer_autotune_cache")


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "VLLM_CACHE_ROOT", autotune.OWN_ROOT])
def test_a_user_without_a_home_boots(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> Any:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert autotune.root({name: "~/x"}).parts[:2] == ("~", "x")
    assert autotune.root({}) == Path("~/.cache/vllm/flashinfer_autotune_cache")


def laid_out(root: Path, launch: str = "a") -> Path:
    """As vLLM writes them on a GPU: release, architecture, hash of the configuration, rank."""
    folder = root / autotune.FOLDER / "0.6.4" / "90a" / (launch * 64)
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


def own(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    monkeypatch.setattr(autotune, "launch_folder", lambda *_: folder)


def test_a_launch_that_tunes_beside_this_one_is_not_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = laid_out(tmp_path), laid_out(tmp_path, "b")
    own(monkeypatch, folder)
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    watch.look("runner")
    before = dict(watch.wire())
    (other / "autotune_configs_dp0_rank0.json").write_text('{"tactic": 8}')
    laid_out(tmp_path, "c")
    watch.look("runner")
    assert watch.wire() == before
    assert (before["autotuneFiles"], before["autotuneWritten"]) == (2, 0)
    (folder / "autotune_configs_dp0_rank0.json").write_text('{"tactic": 8}')
    watch.look("runner")
    assert (watch.wire()["autotuneFiles"], watch.wire()["autotuneWritten"]) == (2, 1)
    assert watch.wire()["autotuneDigest"] != before["autotuneDigest"]


def test_a_launch_without_a_folder_has_tuned_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(monkeypatch, None)
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    laid_out(tmp_path)
    watch.look("runner")
    assert (watch.wire()["autotuneFiles"], watch.wire()["autotuneWritten"]) == (0, 0)


def test_a_folder_that_cannot_be_told_is_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Path:
        raise AttributeError("vllm_config")

    monkeypatch.setattr(autotune, "launch_folder", broken)
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    laid_out(tmp_path)
    watch.look("runner")
    assert (watch.wire()["autotuneFiles"], watch.wire()["autotuneWritten"]) == (2, 2)


def test_among_many_launches_one_that_found_its_files_wrote_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = laid_out(tmp_path, "f")
    crowd = folder.with_name("a" * 64)
    crowd.mkdir()
    for number in range(5000):
        (crowd / f"autotune_configs_dp{number}_rank0.json").touch()
    own(monkeypatch, folder)
    watch = autotune.Watch({"VLLM_CACHE_ROOT": str(tmp_path)})
    watch.look("runner")
    assert (watch.wire()["autotuneFiles"], watch.wire()["autotuneWritten"]) == (2, 0)


SHARED = """
import json, os, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
hook, model, work, root = sys.argv[1:]
sys.path.insert(0, hook)
import expertmaps_hook_autotune as autotune
import expertmaps_hook_preflight as preflight
from vllm.model_executor.warmup import flashinfer_autotune_cache as engine

os.environ["VLLM_CACHE_ROOT"] = work
if root == "own":
    os.environ[autotune.OWN_ROOT] = work + "/tuned"

def runner(dtype):
    arguments = [model, "--max-model-len", "1024", "--dtype", dtype]
    return SimpleNamespace(vllm_config=preflight.engine_config(arguments))

ours, other = runner("bfloat16"), runner("float32")
watch = autotune.Watch(os.environ)
folder = autotune.launch_folder(autotune.root(os.environ), os.environ, ours)
assert (folder is None) == (root != "own"), folder
# FlashInfer's module of paths, which installs on a machine with a GPU only.
jit = ModuleType("flashinfer.jit")
jit.env = ModuleType("flashinfer.jit.env")
jit.env.FLASHINFER_WORKSPACE_DIR = Path(work, "flashinfer", "0.6.4", "90a")
sys.modules["flashinfer"] = ModuleType("flashinfer")
sys.modules.update({"flashinfer.jit": jit, "flashinfer.jit.env": jit.env})
seen = []
for written in (other, ours):
    path = engine.resolve_flashinfer_autotune_file(written)
    engine.write_flashinfer_autotune_cache(path, b"{}")
    watch.look(ours)
    seen.append(watch.wire())
assert path.parent == autotune.launch_folder(autotune.root(os.environ), os.environ, ours)
print(json.dumps(seen))
"""


@pytest.mark.hook
@pytest.mark.parametrize("root", ["own", "default"])
def test_vllm_itself_names_the_launchs_folder(tmp_path: Path, root: str) -> None:
    hook, model = HERE.parents[1] / "rowmap_jobs" / "hook", HERE.parent / "model" / "moe"
    done = subprocess.run(
        [PYTHON, "-c", SHARED, str(hook), str(model), str(tmp_path), root],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [(one["autotuneFiles"], one["autotuneWritten"]) for one in seen] == [(0, 0), (1, 1)]
