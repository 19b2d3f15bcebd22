"""Evidence of the kernel autotuner: its files before and after this boot. Standard library only.

FlashInfer's tuning takes minutes to hours and is kept in files below vLLM's cache root, by a hash
of vLLM's configuration (warmup/flashinfer_autotune_cache.py). A boot that had to tune writes them
anew; one that found them leaves them as they were.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "flashinfer_autotune_cache"
MAX_FILES = 4096


def root(environ: Mapping[str, str]) -> Path:
    """Where vLLM keeps the files: its own rules (envs.py), read from an environment."""
    own = environ.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    vllm = environ.get("VLLM_CACHE_ROOT") or os.path.join(cache, "vllm")  # noqa: PTH118
    return Path(vllm).expanduser() / FOLDER


def snapshot(folder: Path) -> dict[str, str]:
    """sha256 of each file by its path below a folder; what cannot be read is left out."""
    found: dict[str, str] = {}
    try:
        paths = sorted(folder.rglob("*.json"))[:MAX_FILES]
    except OSError:
        return found
    for path in paths:
        try:
            with path.open("rb") as file:
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
        self._root = root(environ)
        self._before = snapshot(self._root)
        self._found = evidence(self._before, self._before)

    def look(self) -> None:
        """Read the files again: the engine has warmed up."""
        self._found = evidence(self._before, snapshot(self._root))

    def wire(self) -> dict[str, Any]:
        """Fields of the status's compile evidence."""
        return self._found
