"""The keyed queue, by a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from expertmaps_operator.observe.kube import ApiError
from expertmaps_operator.queue import BASE_DELAY, MAX_DELAY, Key, KeyedQueue, WorkQueue, told

A = Key("ExpertLane", "lanes", "a")
B = Key("ExpertLane", "lanes", "b")


@pytest.fixture
def queue() -> KeyedQueue:
    return KeyedQueue(jitter=lambda: 1.0)


def test_a_key_added_twice_is_worked_on_once(queue: KeyedQueue) -> None:
    queue.add(A, 0.0)
    queue.add(A, 0.0)
    assert queue.take(0.0) == A
    queue.done(A, 0.0, None)
    assert queue.take(100.0) is None
    assert queue.depth(100.0) == 0


def test_a_key_is_worked_on_by_one_at_a_time_and_not_lost(queue: KeyedQueue) -> None:
    queue.add(A, 0.0)
    assert queue.take(0.0) == A
    queue.add(A, 1.0)
    queue.add(B, 1.0)
    assert queue.take(1.0) == B
    assert queue.take(1.0) is None
    queue.done(A, 2.0, None)
    assert queue.take(2.0) == A


def test_a_wish_while_it_is_worked_on_is_kept_even_when_polled_meanwhile(
    queue: KeyedQueue,
) -> None:
    queue.add(A, 0.0)
    queue.take(0.0)
    queue.add(A, 1.0, delay=5.0)
    assert queue.take(7.0) is None
    queue.done(A, 8.0, 60.0)
    assert queue.take(8.0) == A


def test_the_earlier_of_two_wishes_holds(queue: KeyedQueue) -> None:
    queue.add(A, 0.0, delay=60.0)
    queue.add(A, 0.0, delay=5.0)
    queue.add(A, 0.0, delay=30.0)
    assert queue.take(4.9) is None
    assert queue.take(5.0) == A
    queue.done(A, 5.0, None)
    assert queue.take(100.0) is None


def test_requeue_after_comes_back_then_and_an_event_comes_sooner(queue: KeyedQueue) -> None:
    queue.add(A, 0.0)
    queue.take(0.0)
    queue.done(A, 0.0, 30.0)
    assert queue.next_due() == 30.0
    assert queue.take(29.0) is None
    queue.add(A, 29.0)
    assert queue.take(29.0) == A


def test_errors_come_back_with_a_growing_bounded_delay(queue: KeyedQueue) -> None:
    now, delays = 0.0, []
    queue.add(A, now)
    for _ in range(12):
        assert queue.take(now) == A
        delay = queue.failed(A, now)
        assert queue.take(now + delay - 0.001) is None
        delays.append(delay)
        now += delay
    assert delays[:4] == [1.0, 2.0, 4.0, 8.0]
    assert delays[-1] == MAX_DELAY


def test_jitter_takes_up_to_half() -> None:
    queue = KeyedQueue(jitter=lambda: 0.0)
    queue.add(A, 0.0)
    queue.take(0.0)
    assert queue.failed(A, 0.0) == BASE_DELAY / 2


def test_success_forgets_the_errors(queue: KeyedQueue) -> None:
    queue.add(A, 0.0)
    queue.take(0.0)
    queue.failed(A, 0.0)
    queue.take(1.0)
    queue.done(A, 1.0, None)
    queue.add(A, 2.0)
    queue.take(2.0)
    assert queue.failed(A, 2.0) == BASE_DELAY


def test_events_bring_a_failing_key_back_but_not_in_a_hot_loop(queue: KeyedQueue) -> None:
    queue.add(A, 0.0)
    now = 0.0
    for _ in range(6):
        queue.take(now)
        now += queue.failed(A, now)
    queue.take(now)
    queue.add(A, now)
    queue.failed(A, now)
    queue.add(A, now)
    assert queue.take(now + BASE_DELAY - 0.01) is None
    assert queue.take(now + BASE_DELAY) == A


def test_depth_counts_what_is_due_or_worked_on(queue: KeyedQueue) -> None:
    queue.add(A, 0.0)
    queue.add(B, 0.0, delay=10.0)
    assert queue.depth(0.0) == 1
    queue.take(0.0)
    assert queue.depth(0.0) == 1
    assert queue.depth(10.0) == 2


def test_threads_serialise_a_key_and_survive_errors() -> None:
    inside, overlaps, seen = set[Key](), [], []
    first, done = threading.Event(), threading.Event()
    lock = threading.Lock()

    def work(key: Key) -> float | None:
        with lock:
            if key in inside:
                overlaps.append(key)
            inside.add(key)
            seen.append(key)
        if seen.count(A) == 1 and key == A:
            first.set()
            with lock:
                inside.discard(key)
            raise RuntimeError("broken")
        with lock:
            inside.discard(key)
        if key == A and seen.count(A) == 2:
            done.set()
        return None

    queue = WorkQueue(work, threads=3, queue=KeyedQueue(jitter=lambda: 0.0))
    queue.start()
    queue.add(A)
    assert first.wait(60)
    queue.add(B)
    assert done.wait(60)
    assert queue.alive()
    assert queue.stop(60)
    assert overlaps == []
    assert B in seen


def test_stop_finishes_the_turn_under_way_and_takes_no_other() -> None:
    began, may_end, seen = threading.Event(), threading.Event(), []

    def work(key: Key) -> float | None:
        seen.append(key)
        began.set()
        may_end.wait(60)
        return None

    queue = WorkQueue(work, threads=1)
    queue.start()
    queue.add(A)
    queue.add(B)
    assert began.wait(60)
    assert not queue.stop(0.01)
    assert queue.longest_turn() > 0
    may_end.set()
    assert queue.stop(60)
    assert seen == [A]


def test_an_error_of_the_api_is_quoted_and_any_other_is_not() -> None:
    refused = ApiError("GET /x", 403, "Forbidden", "no")
    assert told(refused) == "ApiError: GET /x: HTTP 403 Forbidden: no"
    try:
        raise ValueError("password=hunter2")
    except ValueError as error:
        line = told(error)
    assert "hunter2" not in line
    assert line.startswith("InternalError: ValueError at test_queue.py:")
