"""Routing as a model makes it, and small censuses with ids, times and sessions of their own."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rowmap_jobs.census.routing import tally
from rowmap_jobs.exchange.base import Counts, Layout
from rowmap_jobs.formats.census import Census
from tests.formats.samples import census as plain

MANY = 500
"""More rows than this are drawn from as many, each layer by itself."""


def routed(
    rows: int, layers: int = 4, experts: int = 8, k: int = 2, dtype: Any = np.uint8, seed: int = 0
) -> npt.NDArray[Any]:
    """[rows, layers, k]: k distinct ids in each row, some experts hotter than others."""
    rng = np.random.default_rng(seed)
    if rows > MANY:
        few = routed(MANY, layers, experts, k, dtype, seed)
        return few[rng.integers(0, MANY, (rows, layers)), np.arange(layers)]
    heat = rng.gumbel(size=(rows, layers, experts)) + 2.0 * rng.normal(size=(layers, experts))
    return np.argsort(-heat, axis=2)[:, :, :k].astype(dtype)


def transcript(name: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype=np.uint8)


_plain = cache(plain)


def census(*names: str, seed: int = 0, **over: Any) -> Census:
    """A census of 2 layers x 5 experts; transcript i is called names[i] and created at i."""
    data = _plain(len(names), seed)
    ids = [transcript(name) for name in names]
    values: dict[str, Any] = {
        "transcript_id": np.array(ids, dtype=np.uint8).reshape(-1, 32),
        "created": np.arange(len(names), dtype=np.int64),
    }
    for name, value in over.items():
        values[name] = np.array(value, dtype=getattr(data, name).dtype)
    return replace(data, **values)


def header(data: Census, **over: Any) -> Census:
    return replace(data, header=data.header.model_copy(update=over))


def sums(layers: int = 3, experts: int = 8, k: int = 2, rows: int = 40, seed: int = 0) -> Counts:
    """Counts of one sequence as engines dump them: layers 0 and up, decode only."""
    counts = tally(routed(rows, layers, experts, k, seed=seed), experts, "sample", "ids").counts
    each = Layout(tuple(range(layers)), (experts,) * layers, (k,) * layers)
    return Counts(each, counts[None], None, np.array([[0, rows]]), ("dump",), False)
