"""Transcript lines: two spellings, and refusals that keep people's words to themselves."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats import transcript
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.transcript import parse_line

MODIFIED = datetime(2026, 11, 1, tzinfo=UTC)
SECRET = "kept-to-myself"


def record(**over: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "id": "r1",
        "session": "s1",
        "created": "2026-11-02T10:00:00Z",
        "endpoint": "/v1/chat/completions",
        "request": {"messages": [{"role": "user", "content": SECRET}]},
        "response": {"choices": []},
        **over,
    }


def parse(value: object) -> transcript.TranscriptRecord:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(raw, "s3://b/a.jsonl", 7, MODIFIED)


def test_a_line_in_the_own_format() -> None:
    read = parse(record(prompt_token_ids=[1, 2], token_ids=[3], tokenizer="sha256:" + "0" * 64))
    assert (read.id, read.session, read.token_ids) == ("r1", "s1", [3])
    assert read.created == datetime(2026, 11, 2, 10, tzinfo=UTC)


def test_without_created_the_object_is_asked() -> None:
    wire = record()
    del wire["created"]
    assert parse(wire).created == MODIFIED


@pytest.mark.parametrize(
    ("request_", "endpoint"),
    [
        ({"messages": []}, "/v1/chat/completions"),
        ({"prompt": "x", "model": "m"}, "/v1/completions"),
    ],
)
def test_a_bare_pair(request_: dict[str, Any], endpoint: str) -> None:
    read = parse({"request": request_, "response": {"created": 1767348000}})
    assert read.endpoint == endpoint and read.session == read.id
    assert read.created == datetime.fromtimestamp(1767348000, UTC)
    assert parse({"request": request_}).created == MODIFIED
    assert parse({"request": request_, "session": "mine"}).session == "mine"


def test_equal_pairs_have_equal_ids() -> None:
    pair = {"request": {"messages": [SECRET]}}
    assert parse(pair).id == parse(dict(reversed(pair.items()))).id


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"[1]", "top level: found list, expected a JSON object"),
        (b'{"a', "line 1 column 2: found Unterminated string starting at, expected valid JSON"),
        (
            {SECRET: 1, "b": 2},
            "top level: found an object of 2 keys without a request, expected "
            'a "v":1 record or {"request","response"}',
        ),
        (record(v=2), "v: found a value that does not fit, expected Input should be 1"),
        (
            record(endpoint=SECRET),
            "endpoint: found a value that does not fit, expected Input should be "
            "'/v1/chat/completions' or '/v1/completions'",
        ),
        (
            record(**{SECRET: SECRET}),
            "top level: found a field that is not known, expected fields of the format",
        ),
        (record(token_ids=[SECRET]), "token_ids: found a value that does not fit, expected "),
        (record(token_ids=[-1]), "token_ids: found an id out of range, expected ids from 0 to"),
        (record(created="2026-11-02T10:00:00"), "created: found a value that does not fit, "),
        (record(request=SECRET), "request: found a value that does not fit, expected "),
        (
            b'{"v":1,"' + SECRET.encode() + b'":1,"' + SECRET.encode() + b'":2}',
            "a key: found the key twice, expected each key once",
        ),
        (b'{"v":"\\ud800"}', "a string: found a lone surrogate, expected whole characters"),
    ],
)
def test_refusals_name_object_and_line_and_no_content(value: object, message: str) -> None:
    with pytest.raises(FormatError) as refused:
        parse(value)
    assert str(refused.value).startswith(f"s3://b/a.jsonl line 7: {message}")
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)


def test_an_overlong_line_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcript, "MAX_LINE_BYTES", 10)
    with pytest.raises(FormatError, match="size: found 11 bytes, expected at most 10"):
        parse(b"x" * 11)


@given(st.binary(max_size=200))
def test_random_bytes_never_pass(raw: bytes) -> None:
    with pytest.raises(FormatError):
        parse(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted([*record(), "token_ids", SECRET])), JSON))
def test_any_object_is_read_or_refused_in_a_line(value: dict[str, Any]) -> None:
    try:
        parse(record(**value))
    except FormatError as error:
        assert "\n" not in str(error) and SECRET not in str(error)
