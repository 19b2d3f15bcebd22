"""Window and sampling, from an in-memory bucket."""

from __future__ import annotations

import gzip
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rowmap_jobs import selection
from rowmap_jobs.reasons import RunError
from rowmap_jobs.selection import Picked, Tally, check_enough, pick, read, window_start
from tests.jobs.world import NOW, chat, lines

SINCE = NOW - timedelta(days=7)


@dataclass(frozen=True)
class Item:
    key: str
    modified: datetime = NOW


@dataclass
class Memory:
    objects: dict[str, bytes]
    modified: dict[str, datetime] = field(default_factory=dict)

    def list(self) -> Iterator[Item]:
        for key in self.objects:
            yield Item(key, self.modified.get(key, NOW))

    def stream(self, key: str) -> Iterator[bytes]:
        yield self.objects[key]

    def url(self, key: str) -> str:
        return f"s3://b/{key}"


def collect(memory: Memory, since: datetime = SINCE) -> tuple[list[str], Tally]:
    tally = Tally()
    return [record.id for record in read(memory, since, tally)], tally


def test_the_window_goes_by_created_and_else_by_the_object() -> None:
    old = chat(1, created=(SINCE - timedelta(minutes=1)).isoformat())
    undated = {k: v for k, v in chat(2).items() if k != "created"}
    memory = Memory({"a.jsonl": lines([old, undated, chat(3)])})
    ids, tally = collect(memory)
    assert ids == ["r2", "r3"] and tally.outside == 1
    assert tally.skipped == {"OutsideWindow": 1}
    memory.modified["a.jsonl"] = SINCE - timedelta(minutes=1)
    assert collect(memory)[0] == ["r3"]


def test_objects_older_than_the_window_are_not_read() -> None:
    memory = Memory({"a.jsonl": b"not read"}, {"a.jsonl": SINCE - timedelta(days=1)})
    ids, tally = collect(memory)
    assert (ids, tally.old_objects, tally.broken) == ([], 1, 0)


def test_broken_lines_are_counted_and_the_first_is_kept() -> None:
    body = lines([chat(1), b"{", b'{"v":1}', chat(2)])
    ids, tally = collect(Memory({"a.jsonl": body, "notes.txt": b"?"}))
    assert ids == ["r1", "r2"]
    assert (tally.broken, tally.readable, tally.other_objects) == (2, 2, 1)
    assert tally.first_break.startswith("s3://b/a.jsonl line 2: line 1 column 2: found ")


def test_an_object_of_something_else_is_left_after_many_broken_lines() -> None:
    bomb = gzip.compress(b"{}\n" * 200_000)
    ids, tally = collect(Memory({"a.jsonl.gz": bomb, "b.jsonl": lines([chat(1)])}))
    assert ids == ["r1"] and tally.broken == selection.MOST_BROKEN_LINES


def test_a_cut_gzip_object_gives_what_it_has() -> None:
    data = gzip.compress(lines([chat(i) for i in range(50)]))
    ids, tally = collect(Memory({"a.jsonl.gz": data[:-400]}))
    assert 0 < len(ids) < 50 and tally.broken >= 1
    assert "expected whole gzip data" in tally.first_break or "line" in tally.first_break


def test_a_record_that_lies_in_two_objects_counts_once() -> None:
    body = lines([chat(1)])
    ids, tally = collect(Memory({"a.jsonl": body, "b.jsonl.gz": gzip.compress(body)}))
    assert ids == ["r1"] and tally.skipped == {"Duplicate": 1}


def tally_of(objects: dict[str, bytes], since: datetime = SINCE) -> Tally:
    return collect(Memory(objects), since)[1]


ALL = datetime.fromtimestamp(0, UTC)


@pytest.mark.parametrize(
    ("objects", "since", "reason", "part"),
    [
        ({}, ALL, "NoTranscripts", "found none, expected objects named *.jsonl or *.jsonl.gz"),
        ({"a.txt": b""}, ALL, "NoTranscripts", "found 1 objects of other names, expected"),
        (
            {"a.jsonl": b""},
            ALL,
            "NoTranscripts",
            "found 1 objects with no transcript created since",
        ),
        (
            {"a.jsonl": lines([chat(1)])},
            NOW,
            "NoTranscripts",
            "the newest of 2026-11-20T10:59Z, expected at least 3 sessions",
        ),
        (
            {"a.jsonl": b"x\ny\n"},
            ALL,
            "OnlyBrokenTranscripts",
            "found 2 lines that cannot be read and no other, expected transcript lines; the first: "
            "s3://b/a.jsonl line 1: line 1 column 1: found Expecting value, expected valid JSON",
        ),
        (
            {"a.jsonl": lines([chat(1, session="s"), chat(2, session="s"), chat(3), b"?"])},
            SINCE,
            "TooFewTranscripts",
            "found 2 sessions created since 2026-11-13T12:00Z (3 transcripts, 1 broken lines), "
            "expected at least 3 (minTranscripts): record more, widen `window` or lower",
        ),
    ],
)
def test_too_little_is_refused(
    objects: dict[str, bytes], since: datetime, reason: str, part: str
) -> None:
    with pytest.raises(RunError) as refused:
        check_enough(tally_of(objects, since), "s3://b/", since, 3)
    assert refused.value.reason == reason and refused.value.final
    assert part in refused.value.message and "\n" not in refused.value.message


def test_enough_is_enough() -> None:
    check_enough(tally_of({"a.jsonl": lines([chat(i) for i in range(3)])}), "s3://b/", SINCE, 3)


def drawn(records: list[Any], seed: int, most: int) -> tuple[Picked, Tally]:
    tally = Tally()
    memory = Memory({"a.jsonl": lines(records)})
    return pick(read(memory, SINCE, tally), seed, most, tally), tally


def many(sessions: int = 20, turns: int = 3) -> list[dict[str, Any]]:
    return [
        chat(turns * s + t, session=f"s{s}", size=10) for s in range(sessions) for t in range(turns)
    ]


def test_the_sample_does_not_depend_on_the_order() -> None:
    records = many()
    first, tally = drawn(records, 1, 10)
    random.Random(3).shuffle(records)
    assert drawn(records, 1, 10)[0].sessions == first.sessions
    assert first.records == 10 and len(first.sessions) == 4
    assert tally.skipped == {"NotSampled": 50}
    assert [len(turns) for turns in first.sessions] == [3, 3, 3, 1]


def test_turns_are_in_order_and_a_cut_session_keeps_its_first() -> None:
    for turns in drawn(many(), 1, 10)[0].sessions:
        whole = sorted(
            (r for r in many() if r["session"] == turns[0].session), key=lambda r: r["created"]
        )
        assert [t.id for t in turns] == [r["id"] for r in whole[: len(turns)]]


def test_every_session_is_as_likely() -> None:
    records = list(read(Memory({"a.jsonl": lines(many(sessions=8, turns=1))}), SINCE, Tally()))
    hits = Counter(
        turns[0].session
        for seed in range(400)
        for turns in pick(records, seed, 2, Tally()).sessions
    )
    assert sum(hits.values()) == 800
    assert all(60 <= hits[f"s{i}"] <= 140 for i in range(8))


def test_all_are_taken_when_there_is_room() -> None:
    picked, tally = drawn(many(), 0, 1000)
    assert picked.records == 60 and not tally.skipped


def test_window_start() -> None:
    assert window_start(NOW, 60) == NOW - timedelta(minutes=1)
    assert window_start(NOW, None) == ALL
    assert window_start(NOW, 10**15) == ALL
