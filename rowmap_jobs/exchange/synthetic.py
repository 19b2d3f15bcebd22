"""Routing that has given counts: for formats that hold rows of ids and no counts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from .base import Counts

I64 = npt.NDArray[np.int64]


def deal(counts: I64, rows: int, k: int, layer: int = 0) -> I64:
    """`rows` rows of k distinct ids, int64[rows,k], whose counts are `counts` int64[E].

    The ids are written out in order, each as often as it was chosen, and dealt to the rows like
    cards: an id lies in at most `rows` places in a row, so no row gets it twice. The sum must be
    rows x k and no count above `rows`, as `Counts` of real routing are. The rows are then put in
    an order that `layer` gives: as dealt, equal ones lie side by side in all layers at once, which
    readers take for one row written again and again.
    """
    ids = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return np.asarray(ids.reshape(k, rows).T[_shuffled(rows, layer)])


def _shuffled(rows: int, layer: int) -> I64:
    """The numbers below `rows` in an order of the layer's own, the same on every machine.

    By the finalizer of splitmix64 (Steele, Lea and Flood 2014): a bijection, so no keys are equal.
    """
    key = np.arange(rows, dtype=np.uint64) + np.uint64((layer + 1) << 40)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(key)


def rows_and_top_k(counts: Counts, source: str) -> tuple[I64, tuple[int, ...]]:
    """Rows int64[T,2] and top-k of each layer, as dealing needs them.

    Raises FormatError where the counts have none, or are not those of so many rows.
    """
    if counts.rows is None or counts.layout.top_k is None:
        missing = "rows" if counts.rows is None else "top-k"
        raise FormatError(source, missing, "none", "counts of known rows and top-k")
    for phase, table in enumerate((counts.prefill, counts.decode)):
        wanted = counts.rows[:, phase : phase + 1] * np.array(counts.layout.top_k, dtype=np.int64)
        table = np.zeros_like(counts.decode) if table is None else table
        sums, most = table.sum(axis=2), table.max(axis=2, initial=0)
        bad = np.argwhere((sums != wanted) | (most > counts.rows[:, phase : phase + 1]))
        if bad.size:
            t, layer = (int(i) for i in bad[0])
            place = f"{('prefill', 'decode')[phase]}[{t},layer {counts.layout.layer_ids[layer]}]"
            found = f"{int(sums[t, layer])} selections, an expert {int(most[t, layer])} times"
            expected = f"{int(wanted[t, layer])} = rows x top-k, each at most once a row"
            raise FormatError(source, place, found, expected)
    return counts.rows, counts.layout.top_k
