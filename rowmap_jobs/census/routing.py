"""From routed expert ids to counts, and the checks that tell routing from a placeholder.

Ids come as integers [N,L,k]: N rows (tokens), L layers by absolute index, k experts of the row.
A real row has k distinct ids in every MoE layer, so a repeated id shows an array that was never
written, a narrowed -1 and most other accidents. What other engines write, and what is done with it:

- all zeros in one layer, in all rows: a dense layer; it keeps its index and counts nothing
- all zeros in every layer: a placeholder, refused (it would say that expert 0 is hot)
- whole rows of -1: padding, skipped and numbered; -1 beside real ids: refused
- ids beyond the experts (physical ids of replicas, -1 as 255 or 65535): refused
- more than half of the rows equal to the row before, in every layer: one row repeated, refused
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..exchange.base import Layout
from ..formats.base import FormatError
from ..formats.census import MAX_EXPERTS

I64 = npt.NDArray[np.int64]
Ids = npt.NDArray[Any]

MAX_LAYERS = 1 << 12
MAX_WINDOW = 64
"""Rows of the greatest window that `touched` looks at."""
REPEAT_LAYERS = 4
"""Fewer layers may agree by chance, above all those that route by token id."""
REPEAT_ROWS = 8
FEW_ROWS = 8
"""With top-1 a column of zeros may be a choice; over this many rows it is none."""

_CHUNK_BYTES = 1 << 18
"""A chunk is compared column by column as it lies in the processor's cache."""


@dataclass(frozen=True)
class Tally:
    """Counts int64[L,E] of `rows` rows; `padding` rows of -1 were skipped."""

    counts: I64
    rows: int
    padding: int


def count(
    ids: Ids,
    experts: int | Sequence[int],
    source: str,
    place: str,
    dense: Collection[int] | None = None,
) -> I64:
    """Selections int64[L,E] of routed ids [N,L,k]; see `tally`."""
    return tally(ids, experts, source, place, dense).counts


def tally(
    ids: Ids,
    experts: int | Sequence[int],
    source: str,
    place: str,
    dense: Collection[int] | None = None,
    rows: int | None = None,
) -> Tally:
    """Count routed ids [N,L,k] of any integer type; `experts` is one number or one a layer.

    E is the greatest number of experts; counts of a dense layer are zero. `dense` says which layers
    have no experts; without it they are found (`dense_layers`), and the caller compares them with
    the model's geometry. `rows` is how many rows must be there without padding. Give the rows of
    one sequence and phase at a time: the check for repeated rows is by half of what it is given.
    Memory beyond the result is some 20 MB, whatever N. Raises FormatError.
    """
    limits = _limits(ids, experts, source, place)
    without = dense_layers(ids, source, place) if dense is None else tuple(sorted(set(dense)))
    moe = _moe(ids, without)
    _check_layers(ids, limits, moe, without, source, place)
    counter = _Counter(limits[moe], ids.shape[2], len(ids))
    for piece in _pieces(ids, moe, counter.chunk):
        if not counter.add(piece):
            raise _explain(ids, limits, moe, source, place)
    if not counter.within():
        raise _explain(ids, limits, moe, source, place)
    if rows is not None and counter.rows != rows:
        raise FormatError(source, place, f"{counter.rows} rows", f"{rows} rows")
    if ids.shape[2] == 1 and counter.rows >= FEW_ROWS and not counter.counts[:, 1:].any():
        # With more choices a row of zeros repeats an id.
        raise _placeholder(len(ids), 1, source, place)
    _check_repeats(counter, limits[moe], source, place)
    counts = np.zeros((ids.shape[1], int(limits.max())), dtype=np.int64)
    counts[moe, : counter.counts.shape[1]] = counter.counts
    return Tally(counts, counter.rows, counter.padding)


def dense_layers(ids: Ids, source: str, place: str) -> tuple[int, ...]:
    """Layers whose ids are 0 in all rows (but padding): they have no experts to choose.

    Engines that record into one array for all layers leave dense layers as they allocated them.
    Raises FormatError for an array that is all zero: then nothing was recorded.
    """
    _check_array(ids, source, place)
    layers, k = ids.shape[1:]
    left = np.arange(layers)
    zeros = np.zeros(layers, dtype=np.int64)
    step = 4
    start = 0
    while start < len(ids) and left.size:
        piece = ids[start : start + step][:, left]
        zero = piece == 0
        zeros[left] += zero.sum(axis=(0, 2))
        if ids.dtype.kind == "i":
            left = left[(zero | (piece == -1)).all(axis=(0, 2))]
        else:
            left = left[zero.all(axis=(0, 2))]
        start, step = start + step, max(4, _CHUNK_BYTES // (layers * k))
    # With k > 1 a row of zeros is no choice; with top-1 expert 0 may be chosen a few times.
    enough = FEW_ROWS if k == 1 else 1
    if left.size == layers and zeros.min() > 0 and zeros.sum() >= enough:
        raise _placeholder(len(ids), k, source, place)
    return tuple(int(layer) for layer in left if zeros[layer] >= enough)


def _placeholder(rows: int, k: int, source: str, place: str) -> FormatError:
    expected = f"{k} distinct ids a row (zeros everywhere: routing was not recorded)"
    return FormatError(source, place, f"id 0 in all {rows} rows and layers", expected)


def layout(ids: Ids, experts: int | Sequence[int], dense: Collection[int]) -> Layout:
    """The layers of ids [N,L,k] that have counts: absolute indices, without the dense ones."""
    layers, k = ids.shape[1:]
    each = [experts] * layers if isinstance(experts, int) else list(experts)
    kept = tuple(layer for layer in range(layers) if layer not in dense)
    return Layout(kept, tuple(each[layer] for layer in kept), (k,) * len(kept))


def _moe(ids: Ids, dense: Collection[int]) -> I64:
    return np.array([i for i in range(ids.shape[1]) if i not in dense], dtype=np.int64)


def _check_array(ids: Ids, source: str, place: str) -> None:
    if ids.dtype.kind not in "iu":
        raise FormatError(source, place, str(ids.dtype), "integer expert ids")
    if ids.ndim != 3 or not 1 <= ids.shape[1] <= MAX_LAYERS or ids.shape[2] < 1:
        expected = f"[rows, 1 to {MAX_LAYERS} layers, top-k]"
        raise FormatError(source, place, list(ids.shape), expected)


def _limits(ids: Ids, experts: int | Sequence[int], source: str, place: str) -> I64:
    """Experts of each layer, int64[L]."""
    _check_array(ids, source, place)
    layers = ids.shape[1]
    each = [experts] * layers if isinstance(experts, int) else list(experts)
    if len(each) != layers:
        raise FormatError(source, place, f"{layers} layers", f"{len(each)} layers")
    if min(each) < 1 or max(each) > MAX_EXPERTS:
        raise FormatError(
            source, place, f"{min(each)} to {max(each)} experts", f"1 to {MAX_EXPERTS}"
        )
    return np.array(each, dtype=np.int64)


def _check_layers(
    ids: Ids, limits: I64, moe: I64, without: tuple[int, ...], source: str, place: str
) -> None:
    layers, k = ids.shape[1:]
    if not moe.size or len(moe) + len(without) != layers:
        found = f"dense layers {list(without)}"
        raise FormatError(source, place, found, f"fewer than all of the layers 0..{layers - 1}")
    if k > int(limits[moe].min()):
        expected = f"at most {int(limits[moe].min())} ids, the layer's experts"
        raise FormatError(source, place, f"{k} ids a row", expected)
    for layer in without:
        column = ids[:, layer]
        if column.size and (int(column.max()) > 0 or int(column.min()) < -1):
            found = f"id {int(column.max())}"
            expected = "zeros (a layer without experts)"
            raise FormatError(source, f"{place}[layer {layer}]", found, expected)


def _pieces(ids: Ids, moe: I64, chunk: int) -> Iterator[Ids]:
    """Chunks of rows, MoE layers only (most often they are one run: then nothing is copied)."""
    first, last = int(moe[0]), int(moe[-1])
    together = last - first + 1 == len(moe)
    for start in range(0, len(ids), chunk):
        piece = ids[start : start + chunk, first : last + 1]
        yield piece if together else piece[:, moe - first]


class _Counter:
    """Counts pieces [n,M,k]. `add` and `within` are False when something does not fit.

    Ids are narrowed only after their range is known. Columns of one choice lie in one run, so a
    comparison of two choices is one pass over contiguous bytes. Each layer has bins of its own in
    one histogram, as a histogram of few ids costs its call.
    """

    def __init__(self, limits: I64, k: int, rows: int) -> None:
        layers, self._width = len(limits), int(limits.max())
        self._limits = limits
        self._type = np.dtype(np.uint8 if self._width <= 256 else np.uint16)
        self.k = k
        self.chunk = max(1, _CHUNK_BYTES // (layers * k * self._type.itemsize))
        most = min(rows, self.chunk)
        self._columns = np.empty(k * layers * most, dtype=self._type)
        self._equal = np.empty((k - 1) * layers * most, dtype=np.bool_)
        self._bins = np.empty((most, layers * k), dtype=np.intp)
        self._first = np.repeat(np.arange(layers, dtype=np.intp) * self._width, k)
        self._previous: Ids | None = None
        self._counts = np.zeros(layers * self._width, dtype=np.int64)
        self.rows = self.padding = self.repeats = 0

    @property
    def counts(self) -> I64:
        """int64[M,E] so far."""
        return self._counts.reshape(-1, self._width)

    def add(self, piece: Ids) -> bool:
        if piece.dtype.kind == "i" and int(piece.min()) < 0:
            padding = (piece == -1).all(axis=(1, 2))
            piece = piece[~padding]
            self.padding += int(padding.sum())
            if not len(piece):
                return True
            if int(piece.min()) < 0:
                return False
        if int(piece.max()) >= self._width:
            return False  # it would be counted in the next layer
        rows, layers = piece.shape[:2]
        columns = self._columns[: self.k * layers * rows].reshape(self.k, layers, rows)
        np.copyto(columns, piece.transpose(2, 1, 0), casting="unsafe")
        if not self._distinct(columns.reshape(self.k, -1)):
            return False
        self._count_repeats(piece)
        bins = self._bins[:rows]
        np.add(piece.reshape(rows, -1), self._first, out=bins, casting="unsafe")
        self._counts += np.bincount(bins.reshape(-1), minlength=len(self._counts))
        self.rows += rows
        return True

    def _distinct(self, columns: Ids) -> bool:
        length = columns.shape[1]
        for choice in range(self.k - 1):
            others = self.k - 1 - choice
            equal = self._equal[: others * length].reshape(others, length)
            np.equal(columns[choice + 1 :], columns[choice], out=equal)
            if equal.any():
                return False
        return True

    def _count_repeats(self, piece: Ids) -> None:
        if self._previous is not None:
            self.repeats += int((piece[0] == self._previous).all())
        self._previous = piece[-1].copy()
        # One layer that differs settles most rows.
        (same,) = np.nonzero((piece[1:, 0] == piece[:-1, 0]).all(axis=1))
        if same.size:
            self.repeats += int((piece[same + 1] == piece[same]).all(axis=(1, 2)).sum())

    def within(self) -> bool:
        """Whether every layer's ids are below its own number of experts."""
        beyond = np.arange(self._width) >= self._limits[:, None]
        return not self.counts[beyond].any()


def _check_repeats(counter: _Counter, limits: I64, source: str, place: str) -> None:
    layers, k = len(limits), counter.k
    if layers < REPEAT_LAYERS or counter.rows < REPEAT_ROWS or int(limits.max()) <= k:
        return
    if 2 * counter.repeats > counter.rows - 1:
        found = f"{counter.repeats} of {counter.rows} rows equal to the row before in every layer"
        expected = "at most half (one row's experts were written for the next ones too)"
        raise FormatError(source, place, found, expected)


def _explain(ids: Ids, limits: I64, moe: I64, source: str, place: str) -> FormatError:
    """The refusal for ids that did not fit: range first, as a wrapped -1 also repeats."""
    greatest = [int(ids[:, layer].max()) for layer in moe]
    beyond = [top - int(limits[layer]) for top, layer in zip(greatest, moe, strict=True)]
    if max(beyond) >= 0:
        at = max(range(len(moe)), key=lambda i: (beyond[i] >= 0, greatest[i], -i))
        layer, top = int(moe[at]), greatest[at]
        hint = "physical ids of replicated experts?"
        if ids.dtype.kind == "u" and top == np.iinfo(ids.dtype).max:
            hint = f"-1 as {ids.dtype}?"
        expected = f"ids 0 to {int(limits[layer]) - 1} ({hint})"
        return FormatError(source, f"{place}[layer {layer}]", f"id {top}", expected)
    start = 0
    for piece in _pieces(ids, moe, max(1, _CHUNK_BYTES // (len(moe) * ids.shape[2]))):
        wide = piece.astype(np.int64)
        padding = (wide == -1).all(axis=(1, 2))
        ordered = np.sort(wide, axis=2)
        bad = ((ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2) | (wide < 0).any(axis=2)) & (
            ~padding[:, None]
        )
        if bad.any():
            row, index = (int(i) for i in np.argwhere(bad)[0])
            where = f"{place}[row {start + row},layer {int(moe[index])}]"
            return FormatError(source, where, *_misfit(wide[row], index))
        start += len(piece)
    return FormatError(source, place, "ids that changed while they were read", "a quiet array")


def _misfit(row: I64, index: int) -> tuple[str, str]:
    """Found and expected for the ids [M,k] of one row that fail in layer `index`."""
    found = f"ids {row[index].tolist()}"
    k = row.shape[1]
    if (row[index] < 0).any():
        return found, "no negative id, or -1 in the whole row (padding)"
    if not row.any():
        return f"{found} in every layer", f"{k} distinct ids (the row was never written)"
    return found, f"{k} distinct ids (a duplicate is a placeholder)"


def touched(ids: Ids, sizes: Collection[int], dense: Collection[int] = ()) -> tuple[I64, I64]:
    """Distinct experts of n rows one after the other, for each n in `sizes` (1 to 64).

    Returns steps int64[N] and touched int64[N,L], N the greatest size: steps[n-1] windows of n rows
    (they do not overlap, and rows that fill no window are left out), and the distinct experts of
    each layer summed over them; zero for sizes that were not asked for and for dense layers. This
    is what a step that verifies n rows of one sequence reads. `ids` [N,L,k] are such as `tally`
    accepts; padding is skipped. Raises ValueError for sizes out of range.
    """
    most = max(sizes, default=0)
    if not sizes or min(sizes) < 1 or most > MAX_WINDOW:
        raise ValueError(f"sizes: found {sorted(sizes)}, expected numbers from 1 to {MAX_WINDOW}")
    layers, k = ids.shape[1:]
    moe = _moe(ids, dense)
    steps = np.zeros(most, dtype=np.int64)
    sums = np.zeros((most, layers), dtype=np.int64)
    if not moe.size:
        return steps, sums
    kept = _real_rows(ids, moe)
    rows = len(ids) if kept is None else len(kept)
    chunk = max(2 * most, _CHUNK_BYTES // max(1, len(moe) * k))
    for start in range(0, rows, chunk):
        back = min(start, most - 1)
        at = slice(start - back, start + chunk)
        piece = _narrow((ids[at] if kept is None else ids[kept[at]])[:, moe])
        age = _ages(piece, most)[:, back * len(moe) :]
        row = np.arange(start, start + age.shape[1] // len(moe))
        for size in set(sizes):
            # An id is new to its window when it was last chosen before the window began. Rows that
            # fill no window have a place that no age exceeds.
            place = np.where(row < rows // size * size, row % size, 255).astype(np.uint8)
            new = age > np.repeat(place, len(moe))
            per_row = np.add.reduce(new.view(np.uint8), axis=0, dtype=np.uint16)
            sums[size - 1, moe] += per_row.reshape(-1, len(moe)).sum(axis=0, dtype=np.int64)
    for size in set(sizes):
        steps[size - 1] = rows // size
    return steps, sums


def _real_rows(ids: Ids, moe: I64) -> I64 | None:
    """Indices of the rows that are no padding; None for all."""
    if ids.dtype.kind != "i" or not len(ids) or int(ids[:, moe[0]].min()) >= 0:
        return None
    return np.nonzero(~(ids[:, moe[0]] == -1).all(axis=1))[0]


def _narrow(piece: Ids) -> Ids:
    """Bytes are compared fastest."""
    fits = piece.dtype.itemsize > 1 and piece.size and int(piece.min()) >= 0
    return piece.astype(np.uint8) if fits and int(piece.max()) < 256 else piece


def _ages(piece: Ids, most: int) -> npt.NDArray[np.uint8]:
    """For ids [n,M,k]: how many rows ago the id was chosen last, at most `most`; uint8[k,n*M]."""
    rows, layers, k = piece.shape
    flat = np.ascontiguousarray(piece.transpose(2, 0, 1)).reshape(k, -1)
    age = np.full(flat.shape, most, dtype=np.uint8)
    for lag in range(min(most, rows) - 1, 0, -1):
        now, then = flat[:, lag * layers :], flat[:, : -lag * layers]
        equal = now == then[0]
        for choice in range(1, k):
            equal |= now == then[choice]
        np.copyto(age[:, lag * layers :], np.uint8(lag), where=equal)
    return age
