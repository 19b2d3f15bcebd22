"""Numbers as people type them: every spelling that is promised, and no other."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.cli import units


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.size, "180GiB", 180 << 30),
        (units.size, "206.61GiB", 20661 * (1 << 30) // 100),
        (units.size, "1.5TB", 1_500_000_000_000),
        (units.size, "18800640", 18_800_640),
        (units.size, "0", 0),
        (units.size, "3 kB", 3000),
        (units.size, "9007199254740993", 9_007_199_254_740_993),
        (units.rate, "55GB/s", 55e9),
        (units.rate, "3.3TB", 3.3e12),
        (units.duration, "7d", 604800.0),
        (units.duration, "1.5h", 5400.0),
        (units.moment, "@1789632000", 1_789_632_000),
        (units.moment, "2026-09-17", 1_789_603_200),
        (units.moment, "2026-09-17T10:00Z", 1_789_639_200),
        (units.moment, "2026-09-17T12:00+02:00", 1_789_639_200),
        (units.share, "23.2%", 0.232),
        (units.share, "1", 1.0),
        (units.measured, "23.2%:89.3", (0.232, 89.3)),
        (units.span, "0:4096", (0, 4096)),
        (units.span, ":4096", (None, 4096)),
        (units.span, "4096:", (4096, None)),
        (units.integers, "8-11,0,3,3", (0, 3, 8, 9, 10, 11)),
        (units.named, "prose=a=b", ("prose", "a=b")),
        (units.weight, "prose=0.5", ("prose", 0.5)),
        (units.words, "tokens,live", ("tokens", "live")),
    ],
)
def test_numbers_are_read_as_written(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value


def test_a_span_before_now_is_before_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1_000_000.0)
    assert units.moment("7d") == 1_000_000 - 604_800


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (units.size, "180gib"),
        (units.size, "-1"),
        (units.size, "1e9"),
        (units.size, "2000000TiB"),
        (units.size, "٣GiB"),
        (units.size, ""),
        (units.rate, "0GB/s"),
        (units.rate, "55GB/h"),
        (units.duration, "7"),
        (units.duration, "0d"),
        (units.moment, "yesterday"),
        (units.moment, "2026-13-01"),
        (units.share, "101%"),
        (units.share, "nan"),
        (units.measured, "89.3"),
        (units.measured, "23%:inf"),
        (units.span, ":"),
        (units.span, "5:5"),
        (units.span, "5"),
        (units.integers, "0-99999999"),
        (units.integers, "3-1"),
        (units.integers, "a"),
        (units.count, "-1"),
        (units.positive, "0"),
        (units.number, "nan"),
        (units.number, "-1"),
        (units.named, "prose"),
        (units.named, "=x"),
        (units.named, "\udce4=x"),
        (units.label, ""),
        (units.label, " "),
        (units.label, "a\udce4"),
        (units.weight, "a=b"),
    ],
)
def test_others_are_refused_with_what_is_expected(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"^found .*, expected "):
        parse(text)


EVERY = [
    *(units.count, units.positive, units.number, units.size, units.rate, units.duration),
    *(units.moment, units.share, units.measured, units.span, units.integers, units.named),
    *(units.words, units.weight),
]


@given(parse=st.sampled_from(EVERY), text=st.text(max_size=30))
def test_no_text_does_anything_else(parse: Callable[[str], Any], text: str) -> None:
    with suppress(ArgumentTypeError):
        parse(text)


@given(parse=st.sampled_from(EVERY), text=st.from_regex(r"[0-9.:%@=,\-]{1,20}[smhdwGTiB/]{0,4}"))
def test_nor_does_text_that_looks_like_numbers(parse: Callable[[str], Any], text: str) -> None:
    with suppress(ArgumentTypeError):
        parse(text)
