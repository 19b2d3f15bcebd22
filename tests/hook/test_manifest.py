"""The ConfigMap's files, their digest, and what Python finds in the mounted layout."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import layout
import pytest

from rowmap_jobs.hook import manifest
from tests.ports import free_ports

MODULES = sorted(name for name in manifest.files() if name.endswith(".py"))
ALLOWED = set(sys.stdlib_module_names) | {"torch", "triton", "numpy", "vllm"}


def in_mount(mount: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(mount), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**base, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_files_and_items_agree() -> None:
    files, items = manifest.files(), manifest.items()
    assert [item["key"] for item in items] == sorted(files)
    assert all("/" not in name for name in files)
    paths = {item["path"] for item in items}
    assert f"expertmaps_hook-{manifest.VERSION}.dist-info/entry_points.txt" in paths
    assert "expertmaps_hook.py" in paths
    assert sum(len(text.encode()) for text in files.values()) < 500_000


@pytest.mark.parametrize("name", MODULES)
def test_module_is_short_and_imports_only_what_an_image_has(name: str) -> None:
    text = manifest.files()[name]
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for found in names:
            top = found.split(".")[0]
            assert top in ALLOWED or top.startswith("expertmaps_hook"), found
            assert top != "rowmap_jobs"


def test_hook_computes_the_digest_of_its_mounted_files(tmp_path: Path) -> None:
    mount = layout.mount(tmp_path)
    done = in_mount(mount, "import expertmaps_hook_env as e; print(e.hook_digest())")
    assert done.stdout.strip() == manifest.digest(), done.stderr


def test_digest_changes_with_any_file(tmp_path: Path) -> None:
    import expertmaps_hook_env as env

    files = {name: text.encode() for name, text in manifest.files().items()}
    assert env.digest_of(files) == manifest.digest()
    for name in files:
        assert env.digest_of({**files, name: files[name] + b"#"}) != manifest.digest()


def test_entry_point_loads_light_from_the_mount(tmp_path: Path) -> None:
    mount = layout.mount(tmp_path)
    code = (
        "import sys, json\n"
        "from importlib.metadata import entry_points\n"
        "found = [e for e in entry_points(group='vllm.general_plugins') if e.name=='expertmaps']\n"
        "assert len(found) == 1 and found[0].dist.name == 'expertmaps-hook', found\n"
        "register = found[0].load()\n"
        "register()\n"
        "print(json.dumps([m for m in ('torch', 'triton', 'numpy', 'vllm') if m in sys.modules]))\n"
    )
    done = in_mount(mount, code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("mode", ["off", "serve", "count"])
def test_arming_the_plugin_is_light_and_cheap(tmp_path: Path, mode: str) -> None:
    """What every process of the engine pays: no torch, no numpy, no worker, no server, few ms.

    The CPU time of the process is measured, which a busy machine does not change much.
    """
    (tmp_path / "mount").mkdir()
    mount = layout.mount(tmp_path / "mount")
    code = (
        "import sys, types, time, json\n"
        "from importlib.metadata import entry_points\n"
        "vllm = types.ModuleType('vllm'); vllm.__version__ = '0.32.0'; vllm.__path__ = []\n"
        "sys.modules['vllm'] = vllm\n"
        "entry, = entry_points(group='vllm.general_plugins', name='expertmaps')\n"
        "import logging, importlib.abc, importlib.machinery, hashlib, pathlib, threading\n"
        "start = time.process_time()\n"
        "entry.load()()\n"
        "spent = time.process_time() - start\n"
        "armed = [type(f).__name__ for f in sys.meta_path].count('_PostImport')\n"
        "heavy = [m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'triton')\n"
        "         or m.startswith(('vllm.', 'http.server', 'expertmaps_hook_worker'))]\n"
        "print(json.dumps([spent, armed, heavy]))\n"
    )
    env = {"EXPERTMAPS_MODE": mode, "EXPERTMAPS_DIR": str(tmp_path / "run")}
    done = in_mount(mount, code, **env)
    assert done.returncode == 0, done.stderr
    spent, armed, heavy = json.loads(done.stdout)
    assert (armed, heavy) == (1, [])
    assert spent < 0.5, f"{spent * 1000:.1f} ms of CPU"
    assert not (tmp_path / "run").exists()


FAKE = """
import sys, types
vllm = types.ModuleType("vllm"); vllm.__version__ = {version!r}; vllm.__path__ = [{fake!r}]
sys.modules["vllm"] = vllm
import expertmaps_hook
expertmaps_hook.register()
expertmaps_hook.register()
import vllm.v1.worker.gpu_worker as module
worker = module.Worker()
print(module.Worker.load_model.__name__, worker.load_model())
import json, urllib.request, os
url = "http://127.0.0.1:" + os.environ["EXPERTMAPS_STATUS_PORT"] + "/status"
with urllib.request.urlopen(url) as answer:
    print(json.dumps(json.load(answer)))
"""


def fake_engine(folder: Path, body: str) -> Path:
    module = folder / "v1" / "worker" / "gpu_worker.py"
    module.parent.mkdir(parents=True)
    for package in (folder / "v1", module.parent):
        (package / "__init__.py").write_text("")
    module.write_text(body)
    return folder


@pytest.mark.parametrize(
    ("version", "body", "reason"),
    [
        ("0.31.0", "class Worker:\n    rank = 0\n    def load_model(self): return 'own'\n    def shutdown(self): pass\n", "HookUnsupported"),  # noqa: E501
        ("0.32.0", "class Worker:\n    rank = 0\n    def load_model(self): return 'own'\n", "HookUnsupported"),  # noqa: E501
        ("0.32.0+cpu", "class Worker:\n    rank = 0\n    def load_model(self): return 'own'\n    def shutdown(self): pass\n", "HookFailed"),  # noqa: E501
    ],
)  # fmt: skip
def test_failure_is_served_and_the_engine_loads_by_itself(
    tmp_path: Path, version: str, body: str, reason: str
) -> None:
    from rowmap_jobs.formats import status

    mount = tmp_path / "mount"
    mount.mkdir()
    layout.mount(mount)
    fake = fake_engine(tmp_path / "vllm", body)
    done = in_mount(
        mount,
        FAKE.format(version=version, fake=str(fake)),
        EXPERTMAPS_MODE="serve",
        EXPERTMAPS_DIR=str(tmp_path / "run"),
        EXPERTMAPS_STATUS_PORT=str(free_ports(1)[0]),
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert first == "load_model own"
    served = status.parse(second.encode(), "GET /status")
    written = status.parse((tmp_path / "run" / "status.json").read_bytes(), "status.json")
    assert served.phase == written.phase == "Failed"
    assert served.error is not None and served.error.reason == reason
    assert served.engine_version == version and served.hook_digest == manifest.digest()


def test_without_settings_nothing_happens(tmp_path: Path) -> None:
    mount = layout.mount(tmp_path)
    done = in_mount(
        mount,
        "import sys, expertmaps_hook as h; n = len(sys.meta_path); h.register();"
        "assert len(sys.meta_path) == n and 'expertmaps_hook_env' not in sys.modules",
    )
    assert done.returncode == 0, done.stderr
