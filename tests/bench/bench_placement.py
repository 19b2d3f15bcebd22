"""CPU seconds of placement and in-sample shares: 34.4 million selections, 40 x 384, 100 sessions.

Run with `python tests/bench/bench_placement.py`: the best of five runs, without imports; the naive
script (Counter and sorted) on the same counts in the same run gives the ratio. Exits with 1 when
the whole takes a second or more.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rowmap_jobs.formats.rowmap import Fingerprint, Geometry
from rowmap_jobs.formats.status import ModelGeometry
from rowmap_jobs.placement import hot_mask, map_mask, place, positional_mask
from rowmap_jobs.placement.budget import across, with_rows
from rowmap_jobs.placement.profiles import judge, shrink
from rowmap_jobs.placement.vector import choose_vector

LAYERS, EXPERTS, TOP_K, HOT, SESSIONS = 40, 384, 6, 295, 100
ROWS = 143_243
RUNS, LIMIT = 5, 1.0
SHAPE = ModelGeometry(
    experts=EXPERTS, top_k=TOP_K, moe_layers=tuple(range(LAYERS)), row_bytes=18_800_640
)
DIGEST = "sha256:" + "0" * 64
PRINT = Fingerprint(shape=DIGEST, router=DIGEST, quant="mxfp4", tokenizer=DIGEST)


def counts(seed: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64[T,L,E] of lognormal popularity, the same number of tokens in every layer."""
    rng = np.random.default_rng(seed)
    popularity = np.exp(1.3 * rng.standard_normal((LAYERS, EXPERTS)))
    popularity /= popularity.sum(axis=1, keepdims=True)
    tokens = np.full(SESSIONS, ROWS // SESSIONS)
    tokens[: ROWS % SESSIONS] += 1
    return np.stack([rng.multinomial(n * TOP_K, popularity) for n in tokens])


def best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def whole(data: np.ndarray[Any, np.dtype[np.int64]], shape: Geometry) -> list[float]:
    """Counts of sessions to a map and its shares of each layer."""
    total = data.sum(axis=0)
    built = place(total, PRINT, shape)
    out = []
    for mask in (map_mask(built, EXPERTS), positional_mask(shape, EXPERTS)):
        cold = np.where(mask, 0, total).sum(axis=1)
        out += [*(cold / total.sum(axis=1)).tolist(), float(cold.sum() / total.sum())]
    return out


def naive(cells: list[list[dict[int, int]]]) -> list[float]:
    """The obvious script on the same counts: Counters by layer, sorted, and summed."""
    layers = [Counter[int]() for _ in range(LAYERS)]
    for session in cells:
        for layer, found in zip(layers, session, strict=True):
            layer.update(found)
    out = []
    for layer in layers:
        hot = set(sorted(layer, key=lambda e: (-layer[e], e))[:HOT])
        out.append(sum(n for e, n in layer.items() if e not in hot) / sum(layer.values()))
    return out


def main() -> int:
    data = counts()
    total = data.sum(axis=0)
    shape = with_rows(SHAPE, [HOT] * LAYERS)
    print(f"{int(data.sum()):,} selections, {SESSIONS} sessions, {LAYERS} x {EXPERTS}, CPU seconds")
    seconds = best(lambda: whole(data, shape))
    small = data[:5]
    works: dict[str, Callable[[], object]] = {
        "ranking and mask": lambda: hot_mask(total, shape),
        "all sessions' masks": lambda: hot_mask(total - data, shape),
        "map": lambda: place(total, PRINT, shape),
        "map over all layers, 206.61 GiB": lambda: across(
            total, PRINT, SHAPE, budget=HOT * 752025600
        ),
        "rows by layer, quantum 16": lambda: choose_vector(total, HOT * LAYERS, 16),
        "shrinkage": lambda: shrink(data[0], total, top_k=TOP_K),
        "matrix of 5 classes with blends": lambda: judge(
            {str(i): one for i, one in enumerate(small)}, shape
        ),
    }
    print(f"{'counts to map and in-sample shares':40s}{seconds:8.4f}")
    for name, work in works.items():
        print(f"{name:40s}{best(work):8.4f}")
    cells = [[dict(enumerate(row.tolist())) for row in session] for session in data]
    slow = best(lambda: naive(cells))
    print(f"{'Counter script on the same counts':40s}{slow:8.4f}  x{slow / seconds:.0f}")
    assert whole(data, shape)[:LAYERS] == naive(cells)
    return 0 if seconds < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
