"""Counts of sequences that come one after the other, in number unknown."""

from __future__ import annotations

import numpy as np

from ..formats.base import FormatError
from ..formats.census import MAX_TRANSCRIPTS, MAX_UNPACKED
from .base import I64, Counts, Layout


class Collector:
    """Tables int64[T,L,E] that grow in place: at no time are there two copies of them.

    `expected` sequences are made room for at once; what is not written to takes no memory.
    """

    def __init__(self, layout: Layout, source: str, prefill: bool, expected: int = 0) -> None:
        self.layout, self._source = layout, source
        each = (len(layout.layer_ids), max(layout.experts))
        most = MAX_UNPACKED // (16 * each[0] * each[1])
        shape = (min(expected, most, MAX_TRANSCRIPTS), *each)
        self._decode = np.zeros(shape, dtype=np.int64)
        self._prefill = np.zeros(shape, dtype=np.int64) if prefill else None
        self.names: list[str] = []
        self._rows: list[tuple[int, int]] = []

    def append(
        self, name: str, prefill: I64 | None, decode: I64 | None, rows: tuple[int, int]
    ) -> None:
        """Add a sequence: int64[L,E] or None for zeros, and its rows (prefill, decode).

        Raises FormatError for more than a census can hold.
        """
        at = len(self.names)
        self._grow(at + 1)
        if decode is not None:
            self._decode[at, :, : decode.shape[1]] = decode
        if prefill is not None and self._prefill is not None:
            self._prefill[at, :, : prefill.shape[1]] = prefill
        self.names.append(name)
        self._rows.append(rows)

    def _grow(self, count: int) -> None:
        tables = [table for table in (self._decode, self._prefill) if table is not None]
        # A census holds both phases, whatever was read.
        size = 2 * count * self._decode.shape[1] * self._decode.shape[2] * 8
        if count > MAX_TRANSCRIPTS or size > MAX_UNPACKED:
            found = f"{count} sequences, {size} bytes of counts"
            expected = f"at most {MAX_TRANSCRIPTS} and {MAX_UNPACKED}"
            raise FormatError(self._source, "sequences", found, expected)
        if count <= len(self._decode):
            return
        wanted = (max(count, len(self._decode) * 5 // 4), *self._decode.shape[1:])
        for table in tables:
            table.resize(wanted, refcheck=False)

    def counts(self, notes: tuple[str, ...] = ()) -> Counts:
        """What there is; the collector is used up."""
        count = len(self.names)
        for table in (self._decode, self._prefill):
            if table is not None:
                table.resize((count, *table.shape[1:]), refcheck=False)
        return Counts(
            layout=self.layout,
            decode=self._decode,
            prefill=self._prefill,
            rows=np.array(self._rows, dtype=np.int64).reshape(count, 2),
            names=tuple(self.names),
            per_sequence=True,
            notes=notes,
        )
