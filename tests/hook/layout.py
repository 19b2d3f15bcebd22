"""The hook's ConfigMap as the kubelet lays it out: a hidden folder behind `..data` symlinks."""

from __future__ import annotations

from pathlib import Path

from rowmap_jobs.hook import manifest


def mount(folder: Path) -> Path:
    """Write the files as a ConfigMap volume with `items`; returns the mount."""
    hidden = folder / "..2025_01_02_03_04_05.678"
    data = manifest.files()
    for item in manifest.items():
        path = hidden / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data[item["key"]], "utf-8")
    (folder / "..data").symlink_to(hidden.name)
    for path in hidden.iterdir():
        (folder / path.name).symlink_to(f"..data/{path.name}")
    for path in sorted(hidden.rglob("*"), reverse=True):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return folder
