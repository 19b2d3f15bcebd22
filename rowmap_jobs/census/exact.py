"""Totals of other systems as int64, or a refusal: nothing may wrap or have been rounded before.

Engines keep totals in what is at hand. An int32 total wraps at 2,147,483,647 (62 profiles of 34.4
million selections); imatrix files hold float32 counts, exact only to 16,777,216: from there on
adding one changes nothing, so a larger total may be short by any number of selections.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from ..formats.census import MAX_ROWS

I64 = npt.NDArray[np.int64]

_MOST_BITS = 62


def exact_int64(array: npt.NDArray[Any], source: str, place: str) -> I64:
    """The same numbers as int64, in the same shape; negative ones are let through.

    Integers of any width pass if int64 holds them. Floats pass only when each is a whole number
    below the first that its type cannot tell from its neighbour: 2**11 for float16, 2**24 for
    float32, 2**53 for float64. Raises FormatError naming the first that does not fit.
    """
    kind = array.dtype.kind
    if kind in "iu":
        if array.dtype.itemsize == 8 and kind == "u" and array.size:
            most = int(array.max())
            if most > np.iinfo(np.int64).max:
                raise FormatError(source, place, most, "numbers that 64 signed bits hold")
        return array.astype(np.int64)
    if kind != "f":
        raise FormatError(source, place, str(array.dtype), "integers, or floats that are whole")
    limit = 2 ** min(np.finfo(array.dtype).nmant + 1, _MOST_BITS)
    # NaN fails every comparison, so it is caught by the negation.
    bad = ~(np.abs(array) < limit) | (array != np.trunc(array))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        value = float(array[at])
        where = f"{place}[{','.join(map(str, at))}]" if at else place
        expected = f"a whole number below {limit} (as far as {array.dtype} is exact)"
        raise FormatError(source, where, value, expected)
    return array.astype(np.int64)


def exact_counts(array: npt.NDArray[Any], source: str, place: str) -> I64:
    """`exact_int64` for counts: none negative (a wrapped total is), none above 2**40.

    Sums of counts and products with top-k then stay inside int64. Raises FormatError.
    """
    counts = exact_int64(array, source, place)
    if counts.size:
        at = np.unravel_index(int(counts.argmin()), counts.shape)
        if counts[at] < 0:
            where = f"{place}[{','.join(str(int(i)) for i in at)}]" if at else place
            expected = "counts of 0 or more (a total that wrapped is negative)"
            raise FormatError(source, where, int(counts[at]), expected)
        if int(counts.max()) > MAX_ROWS:
            raise FormatError(source, place, int(counts.max()), f"counts of at most {MAX_ROWS}")
    return counts
