"""What is fed: the last id is not, windows, length limits, merged turns."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs.sequences import Turn, build


def turn(
    prompt: list[int], response: list[int], number: int = 1, session: int = 0, fidelity: int = 0
) -> Turn:
    return Turn(bytes([number]) * 32, session, prompt, response, fidelity, number)


def test_the_last_generated_id_is_never_fed() -> None:
    [sequence], dropped = build([turn([1, 2, 3], [4, 5, 6])], 100, 100, 0)
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5] and sequence.segments == ((3, 5),)
    assert (sequence.decode_rows, sequence.prompt_len) == (2, 3)
    assert sequence.flat_segments == [3, 5] and not dropped


def test_too_long_is_dropped_and_never_cut() -> None:
    turns = [turn([1] * 5, [2] * 6, 1), turn([1] * 5, [2] * 7, 2, session=1)]
    sequences, dropped = build(turns, 11, 100, 0)
    assert [s.id[0] for s in sequences] == [1] and dropped == {"TooLong": 1}


def test_a_cap_takes_a_window_of_the_response_and_feeds_what_is_before() -> None:
    starts = set()
    for number in range(1, 60):
        one = turn([1] * 10, list(range(100, 151)), number)
        [sequence], _ = build([one], 1000, 20, 7)
        [(start, end)] = sequence.segments
        assert end - start == 20 and 10 <= start <= 40 and len(sequence.tokens) == end
        assert sequence.tokens.tolist() == ([1] * 10 + list(range(100, 150)))[:end]
        starts.add(start)
        assert build([one], 1000, 20, 7)[0] == [sequence]
    assert len(starts) > 15


def test_turns_that_extend_each_other_are_one_sequence() -> None:
    first = turn([1, 2], [3, 4, 9], 1)
    second = turn([1, 2, 3, 4, 9, 5], [6, 7, 9], 2)
    third = turn([1, 2, 3, 4, 9, 5, 6, 7, 9, 8], [6, 9], 3, fidelity=1)
    [sequence], _ = build([third, first, second], 100, 100, 0)
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 9, 5, 6, 7, 9, 8, 6]
    assert sequence.segments == ((2, 4), (6, 8), (10, 11))
    assert (sequence.turns, sequence.id[0], sequence.fidelity) == (3, 3, 1)
    assert sequence.prompt_len == 10


def test_a_turn_that_changes_the_past_is_sent_by_itself() -> None:
    first = turn([1, 2], [3, 4, 9], 1)
    stripped = turn([1, 2, 4, 9, 5], [6, 9], 2)
    other_session = turn([1, 2, 3, 4, 9, 5], [6, 7, 9], 3, session=1)
    sequences, _ = build([first, stripped, other_session], 100, 100, 0)
    assert sorted(s.turns for s in sequences) == [1, 1, 1]


def test_the_same_answer_twice_is_counted_twice() -> None:
    sequences, _ = build([turn([1], [2, 3, 9], 1), turn([1], [2, 3, 9], 2)], 100, 100, 0)
    assert [s.segments for s in sequences] == [((1, 3),), ((1, 3),)]


def test_a_fork_joins_the_longest_start_only_once() -> None:
    first = turn([1], [2, 9], 1)
    left, right = turn([1, 2, 9, 3], [4, 9], 2), turn([1, 2, 9, 5, 6], [7, 9], 3)
    sequences, _ = build([first, left, right], 100, 100, 0)
    assert sum(s.decode_rows for s in sequences) == 3
    assert sorted(s.turns for s in sequences) == [1, 2]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=6),
            st.lists(st.integers(0, 2), min_size=2, max_size=6),
            st.integers(0, 2),
        ),
        max_size=8,
    ),
    st.integers(1, 6),
)
@settings(deadline=None, max_examples=40)
def test_no_decode_row_is_lost_or_counted_twice(
    turns: list[tuple[list[int], list[int], int]], most: int
) -> None:
    given_turns = [turn(p, r, i + 1, session=s) for i, (p, r, s) in enumerate(turns)]
    sequences, dropped = build(given_turns, 1000, most, 0)
    assert not dropped
    assert sum(s.turns for s in sequences) == len(turns)
    assert sum(s.decode_rows for s in sequences) == sum(min(len(r) - 1, most) for _, r, _ in turns)
    for sequence in sequences:
        flat = sequence.flat_segments
        assert flat == sorted(flat) and flat[-1] <= len(sequence.tokens)
