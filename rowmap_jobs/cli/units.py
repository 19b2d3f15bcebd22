"""Numbers as people type them. Each function raises ArgumentTypeError: found and expected."""

from __future__ import annotations

import math
import re
import time
from argparse import ArgumentTypeError
from datetime import UTC, datetime

_SIZES = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NUMBER = r"(\d{1,18}(?:\.\d{1,18})?)"
_MOST_BYTES = 1 << 60
_MOST_IDS = 1 << 20
_MOST_INT = (1 << 63) - 1


def _refuse(text: str, expected: str) -> ArgumentTypeError:
    shown = text if len(text) <= 40 else text[:37] + "..."
    return ArgumentTypeError(f"found {shown!r}, expected {expected}")


def count(text: str) -> int:
    """A whole number of 0 or more."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise _refuse(text, "a whole number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise _refuse(text, "a whole number of 1 or more")
    return int(text)


def number(text: str) -> float:
    """A finite number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise _refuse(text, "a number of 0 or more")
    return value


def size(text: str) -> int:
    """Bytes: `180GiB`, `1.5TB` or a plain number; a fraction of a byte is dropped."""
    match = re.fullmatch(_NUMBER + r" ?([a-zA-Z]*)", text, re.ASCII)
    if match is None or match[2] not in _SIZES:
        raise _refuse(text, "bytes, as 180GiB, 200GB or a plain number")
    whole, _, rest = match[1].partition(".")
    unit = _SIZES[match[2]]
    # In integers: 2**53 bytes are less than some memories have.
    value = int(whole) * unit + int(rest or 0) * unit // int(f"1{'0' * len(rest)}")
    if value > _MOST_BYTES:
        raise _refuse(text, "at most 1 EiB")
    return value


def rate(text: str) -> float:
    """Bytes a second: `55GB/s`, `3.3TB/s`; the `/s` may be left out."""
    try:
        value = size(text.removesuffix("/s"))
    except ArgumentTypeError:
        value = 0
    if value < 1:
        raise _refuse(text, "bytes a second, as 55GB/s or 3.3TB/s")
    return float(value)


def duration(text: str) -> float:
    """Seconds above 0: `90s`, `30m`, `168h`, `7d`, `2w`."""
    match = re.fullmatch(_NUMBER + r"([smhdw])", text, re.ASCII)
    if match is None or float(match[1]) <= 0:
        raise _refuse(text, "a time span, as 90s, 30m, 168h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def moment(text: str) -> int:
    """Unix seconds: RFC 3339 (`2026-09-17`, `2026-09-17T10:00Z`), `@1789632000`, or a span before
    now (`7d`). A time without a zone is UTC.
    """
    if re.fullmatch(r"@\d{1,15}", text, re.ASCII):
        return int(text[1:])
    if re.fullmatch(_NUMBER + r"[smhdw]", text, re.ASCII):
        return int(time.time() - min(duration(text), 1e15))
    try:
        when = datetime.fromisoformat(text)
        return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        expected = "a date, as 2026-09-17 or 2026-09-17T10:00Z, @seconds, or 7d (before now)"
        raise _refuse(text, expected) from None


def share(text: str) -> float:
    """A share of 0 to 1: `23.2%` or `0.232`."""
    try:
        # As a decimal exponent: 23.2 / 100 is not the number that 0.232 is.
        value = float(f"{text[:-1]}e-2" if text.endswith("%") else text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise _refuse(text, "a share, as 23.2% or 0.232")
    return value


def measured(text: str) -> tuple[float, float]:
    """`SHARE:TOKENS_PER_SECOND`, as `23.2%:89.3`."""
    left, _, right = text.partition(":")
    try:
        return share(left), number(right)
    except ArgumentTypeError:
        expected = "SHARE:TOKENS_PER_SECOND, as 23.2%:89.3"
        raise _refuse(text, expected) from None


def span(text: str) -> tuple[int | None, int | None]:
    """`LOW:HIGH`, HIGH excluded; an empty side is open: `:4096`, `4096:`."""
    match = re.fullmatch(r"(\d{0,18}):(\d{0,18})", text, re.ASCII)
    if match is None or text == ":":
        raise _refuse(text, "LOW:HIGH, as 0:4096, :4096 or 4096:")
    low, high = (int(part) if part else None for part in match.groups())
    if low is not None and high is not None and low >= high:
        raise _refuse(text, "LOW below HIGH")
    return low, high


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers and ranges, ends included: `0,3,8-11`."""
    out: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", part, re.ASCII)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if low > high or high - low >= _MOST_IDS or len(out) > _MOST_IDS:
            raise _refuse(text, "numbers and ranges, as 0,3,8-11")
        out.update(range(low, high + 1))
    return tuple(sorted(out))


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(word for word in text.split(",") if word)


def label(value: str) -> str:
    """Text that a file can hold: some character, and none that is half of one.

    Bytes of a command line that are no UTF-8 come as lone surrogates.
    """
    if not value.strip() or any("\ud800" <= character <= "\udfff" for character in value):
        raise _refuse(value, "some text in UTF-8")
    return value


def named(text: str) -> tuple[str, str]:
    """`NAME=VALUE`, neither empty; the name is a `label`, the value may be any file's name."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise _refuse(text, "NAME=VALUE")
    return label(name), value


def weight(text: str) -> tuple[str, float]:
    """`NAME=NUMBER`."""
    name, value = named(text)
    return name, number(value)
