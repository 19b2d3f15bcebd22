"""The hook as data of a ConfigMap: its files, their digest, and where each is mounted.

A ConfigMap is flat, so the modules are flat too. The two files that make the hook a Python
distribution are generated here; `items()` mounts them into a `.dist-info` folder, where Python
finds the entry point once the mount is on PYTHONPATH.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from .expertmaps_hook_version import VERSION

__all__ = ["VERSION", "digest", "files", "items"]

DIST_INFO = f"expertmaps_hook-{VERSION}.dist-info"
ENTRY_POINTS = "entry_points.txt"
METADATA = "METADATA"
MODULE_PATTERN = "expertmaps_hook*.py"

_GENERATED = {
    ENTRY_POINTS: "[vllm.general_plugins]\nexpertmaps = expertmaps_hook:register\n",
    METADATA: f"Metadata-Version: 2.1\nName: expertmaps-hook\nVersion: {VERSION}\n",
}


def files() -> dict[str, str]:
    """ConfigMap data: file name to text."""
    folder = Path(__file__).parent
    modules = {path.name: path.read_text("utf-8") for path in folder.glob(MODULE_PATTERN)}
    return dict(sorted({**modules, **_GENERATED}.items()))


def digest() -> str:
    """`sha256:<hex>` over the sorted lines `<name>NUL<sha256 of the file>`.

    The hook computes the same over its mounted files and reports it as hookDigest.
    """
    lines = "".join(
        f"{name}\0{hashlib.sha256(text.encode()).hexdigest()}\n" for name, text in files().items()
    )
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def items() -> list[dict[str, str]]:
    """`items` of the ConfigMap volume: key to path below the mount."""
    return [
        {"key": name, "path": f"{DIST_INFO}/{name}" if name in _GENERATED else name}
        for name in files()
    ]
