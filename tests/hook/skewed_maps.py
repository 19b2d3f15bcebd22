"""What the tests under a memory limit share: the model of skewed.py, its maps, and its limit."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.status import HookStatus
from tests.hook.serving import MODEL, PYTHON

HOT = 16
COLD_PART = 0.15
"""Share of the cold bytes that the limit leaves room for."""

Order = np.ndarray[Any, Any]
"""Experts of each layer, hottest first: [layers, experts]."""


def write_model(folder: Path) -> None:
    """The checkpoint of skewed.py, 4.5 GiB, in a folder that is made; anybody may read it."""
    script = Path(__file__).parent / "skewed.py"
    subprocess.run([PYTHON, str(script), str(MODEL), str(folder)], check=True)
    for path in folder.iterdir():
        path.chmod(0o644)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """No other test boots an engine meanwhile."""
    lock = subprocess.Popen(["flock", "/tmp/vllm.lock", "cat"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert lock.stdin is not None and lock.stdout is not None
    lock.stdin.write("held\n")
    lock.stdin.flush()
    lock.stdout.readline()
    try:
        yield
    finally:
        lock.stdin.close()
        lock.wait()


def orders(said: HookStatus, counts: Sequence[Order]) -> dict[str, Order]:
    """By position, and by what was counted (one array [layers, experts] for each transcript)."""
    total = np.sum(counts, 0)
    assert said.geometry is not None and isinstance(said.geometry.experts, int)
    positional = np.tile(np.arange(said.geometry.experts), (len(total), 1))
    return {"positional": positional, "measured": np.argsort(-total, kind="stable")}


def counted(path: Any) -> Order:
    """Counts [layers, experts] of a transcript's file, or of its bytes as a file."""
    with np.load(path, allow_pickle=False) as file:
        found: Order = file["counts"].sum(0)
    return found


def made(said: HookStatus, order: Order) -> rowmap.RowMap:
    """The map whose hot rows are the first ones of each layer."""
    assert said.geometry is not None and said.fingerprint is not None
    geometry = rowmap.Geometry(
        experts=said.geometry.experts, top_k=said.geometry.top_k, hot_rows=HOT,
        moe_layers=said.geometry.moe_layers, row_bytes=said.geometry.row_bytes,
    )  # fmt: skip
    rows = order.tolist()
    return rowmap.build(
        said.fingerprint,
        geometry,
        {
            layer: (rows[index][:HOT], rows[index][HOT:])
            for index, layer in enumerate(geometry.moe_layers)
        },
    )
