"""Lines of objects: plain, gzip, damaged, overlong."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs import lines
from rowmap_jobs.lines import DamagedError, is_transcript, split


def chunks(data: bytes, size: int) -> Iterator[bytes]:
    yield from (data[i : i + size] for i in range(0, len(data), size))


LINES = st.lists(st.binary(min_size=1, max_size=30).map(lambda b: b.replace(b"\n", b".")))


@given(LINES, st.integers(1, 40), st.booleans(), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_any_cutting_gives_the_same_lines(
    texts: list[bytes], size: int, packed: bool, members: int
) -> None:
    wanted = [text.strip() for text in texts if text.strip()]
    body = b"".join(text + b"\n" for text in texts)
    if packed:
        # Several gzip members, as `cat a.gz b.gz` gives them.
        body = b"".join(gzip.compress(body) for _ in range(members))
        wanted = wanted * members
    elif body.startswith(lines.GZIP_MAGIC):
        return
    assert list(split(chunks(body, size))) == wanted


@given(st.binary(max_size=200), st.integers(1, 40))
@settings(deadline=None, max_examples=60)
def test_damaged_gzip_is_said_to_be_damaged(noise: bytes, size: int) -> None:
    try:
        list(split(chunks(lines.GZIP_MAGIC + noise, size)))
    except DamagedError as error:
        assert "gzip" in str(error)


def test_lines_before_the_damage_are_given() -> None:
    rng = random.Random(1)
    body = b"".join(b"%d\n" % rng.getrandbits(64) for _ in range(2000))
    got = []
    with pytest.raises(DamagedError, match="ends too early"):
        for line in split(chunks(gzip.compress(body)[:-200], 100)):
            got.append(line)
    assert len(got) > 1000 and body.startswith(b"\n".join(got))


def test_an_overlong_line_stays_bounded_and_the_next_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    assert list(split(chunks(b"x" * 100 + b"\nnext\n", 7))) == [b"x" * 11, b"next"]


def test_an_overlong_line_is_given_before_its_end_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    endless = iter(lambda: bytes(4), b"")
    assert next(split(endless)) == bytes(11)


@pytest.mark.parametrize("end", [b"", b"\n", b"\nnext\n"])
@pytest.mark.parametrize("size", [1, 3, 7, 200])
@pytest.mark.parametrize("text", [b" " * 8 + b"x" * 8, b"x" * 8 + b" " * 8, b" " * 30])
def test_spaces_make_no_overlong_line_short(
    text: bytes, size: int, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    wanted = [text[:11], *([b"next"] if end.endswith(b"next\n") else [])]
    assert list(split(chunks(text + end, size))) == wanted


def test_a_bomb_is_unpacked_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_STEP", 1000)
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 5000)
    bomb = zlib.compressobj(wbits=31)
    data = bomb.compress(b"a" * 1_000_000) + bomb.flush()
    assert list(split(iter([data]))) == [b"a" * 5001]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("a.jsonl", True),
        ("a.jsonl.gz", True),
        ("a.ndjson", True),
        ("a.json", False),
        ("a.jsonl.tmp", False),
        ("_SUCCESS", False),
    ],
)
def test_names(key: str, expected: bool) -> None:
    assert is_transcript(key) is expected
