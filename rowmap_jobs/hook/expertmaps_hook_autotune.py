"""Evidence of the kernel autotuner: its files before and after this boot. Standard library only.

FlashInfer's tuning takes minutes to hours and is kept in files below vLLM's cache root, by a hash
of vLLM's configuration (warmup/flashinfer_autotune_cache.py). A boot that had to tune writes them
anew; one that found them leaves them as they were. The folder may be shared: other launches, of
other lanes, write below it at the same time, and are told apart by that hash.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_env import logger
    from .expertmaps_hook_files import open_regular
else:
    from expertmaps_hook_env import logger
    from expertmaps_hook_files import open_regular

OWN_ROOT = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"
FOLDER = "flashinfer_autotune_cache"


def root(environ: Mapping[str, str]) -> Path:
    """Where vLLM keeps the files: its own rules (envs.py), read from an environment."""
    own = environ.get(OWN_ROOT)
    if own:
        return _expanded(own)
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    vllm = environ.get("VLLM_CACHE_ROOT", os.path.join(cache, "vllm"))  # noqa: PTH118
    return _expanded(vllm) / FOLDER


def _expanded(path: str) -> Path:
    # A user without a home has `~` left as it is, where Path.expanduser raises.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def device_folder(folder: Path, environ: Mapping[str, str], workspace: Path) -> Path:
    """Below the root, of FlashInfer's release and the device, as its own workspace's path ends."""
    return folder if environ.get(OWN_ROOT) else folder / workspace.parent.name / workspace.name


def launch_folder(folder: Path, environ: Mapping[str, str], runner: Any) -> Path | None:
    """Where this process keeps its files below the root; None: it had no reason to name a folder.

    The hash is that of the configuration at the end of warm-up: loading a model changes it, sizing
    its cache may, nothing between tuning and then does. vLLM names the folder by FlashInfer's
    module, unless the root is set; a process that has not loaded it has not tuned.
    """
    from vllm.model_executor.warmup.flashinfer_autotune_cache import flashinfer_autotune_cache_hash

    name = str(flashinfer_autotune_cache_hash(runner))
    if environ.get(OWN_ROOT):
        return folder / name
    flashinfer = sys.modules.get("flashinfer.jit.env")
    if flashinfer is None:
        return None
    return device_folder(folder, environ, Path(flashinfer.FLASHINFER_WORKSPACE_DIR)) / name


def snapshot(folder: Path, part: Path | None = None) -> dict[str, str]:
    """sha256 of each file by its path below a folder, or of those in one part of it.

    What cannot be read is left out. Nothing is for its number: it would look new in its part.
    """
    found: dict[str, str] = {}
    try:
        paths = sorted((part or folder).rglob("*.json"))
    except OSError:
        return found
    for path in paths:
        try:
            with open_regular(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            continue
        found[path.relative_to(folder).as_posix()] = digest
    return found


def evidence(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, Any]:
    """Wire fields: files there now, how many this boot wrote, and one digest over all.

    The digest is `sha256:<hex>` over sorted lines `<path>NUL<sha256>`: equal between two boots
    when no file is new, gone or different.
    """
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(after.items()))
    return {
        "autotuneFiles": len(after),
        "autotuneWritten": sum(before.get(name) != digest for name, digest in after.items()),
        "autotuneDigest": "sha256:" + hashlib.sha256(lines.encode()).hexdigest(),
    }


class Watch:
    """What the autotuner left behind, from the load of the model to the end of warm-up."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._root = root(environ)
        self._before = snapshot(self._root)
        self._found = evidence(self._before, self._before)

    def look(self, runner: Any = None) -> None:
        """Read the files again: the engine has warmed up.

        With its model runner, only those of its own launch. Without, or where vLLM cannot say which
        these are, all: a launch that tuned beside this one is then taken for this one.
        """
        part: Path | None = self._root
        if runner is not None:
            try:
                part = launch_folder(self._root, self._environ, runner)
            except Exception:
                logger.warning("expertmaps: the autotuner's folder is unknown", exc_info=True)
        self._found = evidence(self._before, snapshot(self._root, part) if part else {})

    def wire(self) -> dict[str, Any]:
        """Fields of the status's compile evidence."""
        return self._found
