"""Tables of counts as other systems nest them: checked whole, then made Counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from .base import I64, Counts, Layout

MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_CELLS = 1 << 24
"""Layers x experts (x sequences) of one table: 128 MiB as int64."""
MAX_COUNT = 1 << 40
"""Of one cell; sums over a table stay far inside int64."""


def integers(value: object, source: str, place: str, dims: int) -> I64:
    """Nested lists as int64 with `dims` axes; an integral float is an integer, True is not.

    Raises FormatError for another nesting, unequal lengths, an empty list, too many cells, and
    what is no integer.
    """
    shape: list[int] = []
    probe = value
    for axis in range(dims):
        if not isinstance(probe, list | tuple) or not probe:
            found = "an empty list" if isinstance(probe, list | tuple) else type(probe).__name__
            raise FormatError(source, place, found, f"lists nested {dims} deep (at {axis + 1})")
        shape.append(len(probe))
        probe = probe[0]
    cells = int(np.prod(np.array(shape, dtype=np.float64)))
    if cells > MAX_CELLS:
        raise FormatError(source, place, f"{cells} cells", f"at most {MAX_CELLS}")
    flat: list[object] = [value]
    for axis, length in enumerate(shape):
        below: list[object] = []
        for row in flat:
            if not isinstance(row, list | tuple) or len(row) != length:
                size = f"{len(row)} values" if isinstance(row, list | tuple) else "no list"
                expected = f"{length} values in every list of axis {axis + 1}"
                raise FormatError(source, place, size, expected)
            below.extend(row)
        flat = below
    return np.array([_integer(v, source, place) for v in flat], dtype=np.int64).reshape(shape)


def _integer(value: object, source: str, place: str) -> int:
    if type(value) is float and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    if type(value) is not int:
        found = value if isinstance(value, float) else type(value).__name__
        raise FormatError(source, place, found, "an integer")
    if abs(value) > 1 << 62:
        raise FormatError(source, place, "an integer beyond 62 bits", "a smaller integer")
    return value


def widened(array: npt.NDArray[np.generic], source: str, place: str) -> I64:
    """Integers of any width, or integral floats, as int64. Raises FormatError.

    An unsigned or narrow type is widened before anything is computed with it.
    """
    if array.dtype.kind in "iu":
        if array.dtype == np.uint64 and array.size and int(array.max()) > 1 << 62:
            raise FormatError(source, place, "an integer beyond 62 bits", "a smaller integer")
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        real = array.astype(np.float64)
        if array.size and not (np.isfinite(real).all() and (np.abs(real) < 1 << 53).all()):
            raise FormatError(source, place, "NaN, infinite or huge values", "integers")
        if (real != np.floor(real)).any():
            raise FormatError(source, place, "fractions", "integers")
        return real.astype(np.int64)
    raise FormatError(source, place, str(array.dtype), "integers")


def spans(ids: Iterable[int]) -> str:
    """Layer ids in short: `3-60, 62`."""
    parts: list[str] = []
    run: list[int] = []
    for layer in sorted(set(ids)):
        if run and layer == run[-1] + 1:
            run.append(layer)
            continue
        if run:
            parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
        run = [layer]
    if run:
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ", ".join(parts)


def coverage(layer_ids: Collection[int]) -> str:
    """The note that says which layers a file covers, gaps between them by name."""
    ids = sorted(layer_ids)
    gaps = sorted(set(range(ids[0], ids[-1] + 1)) - set(ids))
    text = f"covers {len(ids)} layers: {spans(ids)}"
    return f"{text}; nothing for {spans(gaps)}" if gaps else text


def require_layers(found: Collection[int], expected: Collection[int], source: str) -> None:
    """Refuse a file that lacks a layer of the model or has one more, each by name.

    A map without a layer (a draft layer behind the last one, say) is a KeyError at start in
    engines that look every layer up. Raises FormatError.
    """
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    if missing or extra:
        parts = [f"no layer {spans(missing)}"] if missing else []
        parts += [f"a layer {spans(extra)} beyond"] if extra else []
        raise FormatError(source, "layers", " and ".join(parts), f"layers {spans(expected)}")


def check_layer_ids(ids: Sequence[int], source: str, place: str) -> None:
    """Distinct ids from 0 to 4095. Raises FormatError."""
    seen: set[int] = set()
    for layer in ids:
        if not 0 <= layer < MAX_LAYERS:
            raise FormatError(source, place, f"layer {layer}", f"0 to {MAX_LAYERS - 1}")
        if layer in seen:
            raise FormatError(source, place, f"layer {layer} twice", "each layer once")
        seen.add(layer)


def make_counts(
    source: str,
    decode: I64,
    layer_ids: Sequence[int],
    *,
    prefill: I64 | None = None,
    rows: I64 | None = None,
    top_k: int | None = None,
    names: Sequence[str] = (),
    per_sequence: bool = False,
    notes: Sequence[str] = (),
) -> Counts:
    """Counts of tables int64[T,L,E] whose layers have `layer_ids`, in ascending order afterwards.

    Layers without any count are left out and named in the notes (dense layers are zero rows in
    several formats). Raises FormatError for a negative or huge count, for no count at all, for
    a placeholder (every layer has all its selections on one expert), and, where top-k is known,
    for a sum that is no multiple of it or an expert chosen more often than there are rows.
    """
    check_layer_ids(layer_ids, source, "layers")
    if not 1 <= decode.shape[2] <= MAX_EXPERTS:
        raise FormatError(source, "experts", decode.shape[2], f"1 to {MAX_EXPERTS}")
    tables = [decode] if prefill is None else [decode, prefill]
    for table in tables:
        _check_values(source, table, layer_ids)
    total = sum(table.sum(axis=(0, 2)) for table in tables)
    used = np.flatnonzero(total)
    if not used.size:
        raise FormatError(source, "counts", "no selection in any layer", "counts of real traffic")
    _check_placeholder(source, tables, used)
    order = sorted(used.tolist(), key=lambda index: layer_ids[index])
    kept = [layer_ids[index] for index in order]
    said = [*notes, coverage(kept)]
    empty = set(layer_ids) - set(kept)
    if empty:
        said.append(f"layers without a count (dense, or not recorded) left out: {spans(empty)}")
    never = [int((sum(t[:, i].sum(axis=0) for t in tables) == 0).sum()) for i in order]
    if any(never):
        where = spans(layer for layer, n in zip(kept, never, strict=True) if n)
        said.append(f"{sum(never)} experts were never selected (layers {where}): they rank last")
    decode = decode[:, order]
    prefill = None if prefill is None else prefill[:, order]
    if top_k is not None:
        _check_top_k(source, [decode] if prefill is None else [decode, prefill], kept, top_k)
    width = decode.shape[2]
    return Counts(
        Layout(tuple(kept), (width,) * len(kept), None if top_k is None else (top_k,) * len(kept)),
        decode,
        prefill,
        rows,
        tuple(names) or tuple(str(t) for t in range(len(decode))),
        per_sequence,
        tuple(said),
    )


def _check_values(source: str, table: I64, layer_ids: Sequence[int]) -> None:
    for bad, found, expected in (
        (table < 0, "a negative count", "counts of 0 or more"),
        (table > MAX_COUNT, "a count beyond 2^40", "at most 2^40"),
    ):
        where = np.argwhere(bad)
        if where.size:
            _, layer, expert = (int(v) for v in where[0])
            place = f"layer {layer_ids[layer]} expert {expert}"
            raise FormatError(source, place, found, expected)


def _check_placeholder(source: str, tables: Sequence[I64], used: npt.NDArray[np.intp]) -> None:
    summed = np.sum([table.sum(axis=0) for table in tables], axis=0)[used]
    alone = summed.max(axis=1) == summed.sum(axis=1)
    if int(summed.sum()) > len(used) and alone.all():
        raise FormatError(
            source,
            "counts",
            f"all selections of every layer on one expert (id {int(summed[0].argmax())} first)",
            "routing of real tokens: this is a placeholder",
        )


def _check_top_k(source: str, tables: Sequence[I64], layers: Sequence[int], top_k: int) -> None:
    for table in tables:
        sums, most = table.sum(axis=2), table.max(axis=2)
        if not 1 <= top_k <= table.shape[2]:
            raise FormatError(source, "top-k", top_k, f"1 to {table.shape[2]}")
        bad = np.argwhere((sums % top_k != 0) | (most > sums // top_k))
        if bad.size:
            t, index = (int(v) for v in bad[0])
            found = f"{int(sums[t, index])} selections, {int(most[t, index])} on one expert"
            expected = f"a multiple of top-k {top_k}, each expert at most once a row"
            raise FormatError(source, f"layer {layers[index]}", found, expected)
