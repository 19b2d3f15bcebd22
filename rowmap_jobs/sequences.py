"""What is fed to the engine: sequences of ids with the segments that count as decode.

A response of n ids fed after a prompt gives n - 1 decode rows, for its last id is never fed in a
real decode: F = P + R[:-1], segment [len(P), len(F)). Turns whose F begins with the F of an
earlier turn of their session are fed once, with one segment a turn.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One exchange as ids. `id` is 32 bytes, `session` an index, `created` Unix seconds."""

    id: bytes
    session: int
    prompt: Ordered[int]
    response: Ordered[int]
    fidelity: int
    created: int


@dataclass(frozen=True)
class Sequence:
    """One request to the engine: `tokens` fed whole, `segments` half-open ranges of them.

    Tokens are an array of C ints: a sample of long conversations has tens of millions of them.
    """

    id: bytes
    session: int
    tokens: array[int]
    segments: tuple[tuple[int, int], ...]
    fidelity: int
    created: int
    turns: int

    @property
    def decode_rows(self) -> int:
        return sum(end - start for start, end in self.segments)

    @property
    def prompt_len(self) -> int:
        """Positions before the last segment."""
        return self.segments[-1][0]

    @property
    def flat_segments(self) -> list[int]:
        return [position for segment in self.segments for position in segment]


def build(
    turns: Iterable[Turn], max_model_len: int, max_response_tokens: int, seed: int
) -> tuple[list[Sequence], Counter[str]]:
    """Sequences of all turns, and how many turns were dropped by reason.

    A response beyond `max_response_tokens` decode rows gives a random window of them, not its
    head; what lies before the window is fed, what lies behind it cannot change it and is not.
    A sequence needs len + 1 <= max_model_len; a longer one is dropped (`TooLong`), never cut.
    """
    dropped: Counter[str] = Counter()
    sessions: defaultdict[int, list[Sequence]] = defaultdict(list)
    for turn in turns:
        sequence = _single(turn, max_response_tokens, seed)
        if len(sequence.tokens) + 1 > max_model_len:
            dropped["TooLong"] += 1
        else:
            sessions[turn.session].append(sequence)
    merged = [s for session in sorted(sessions) for s in _merge(sessions[session])]
    return merged, dropped


def _single(turn: Turn, most: int, seed: int) -> Sequence:
    rows = len(turn.response) - 1
    start, end = len(turn.prompt), len(turn.prompt) + rows
    if rows > most:
        # Drawn by the turn's own id, so that a sample does not depend on what else is counted.
        draw = random.Random(f"{seed}/{turn.id.hex()}")  # noqa: S311
        start += draw.randint(0, rows - most)
        end = start + most
    tokens = array("i", turn.prompt)
    tokens.extend(turn.response[: end - len(tokens)])
    return Sequence(turn.id, turn.session, tokens, ((start, end),), turn.fidelity, turn.created, 1)


def _merge(sequences: list[Sequence]) -> list[Sequence]:
    """Join each sequence to the longest earlier one that it begins with."""
    out: list[Sequence] = []
    for sequence in sorted(sequences, key=lambda s: (len(s.tokens), s.created, s.id)):
        fits = [i for i, earlier in enumerate(out) if _extends(sequence, earlier)]
        if not fits:
            out.append(sequence)
            continue
        best = max(fits, key=lambda i: len(out[i].tokens))
        earlier = out.pop(best)
        out.append(
            Sequence(
                sequence.id,
                sequence.session,
                sequence.tokens,
                earlier.segments + sequence.segments,
                max(earlier.fidelity, sequence.fidelity),
                sequence.created,
                earlier.turns + sequence.turns,
            )
        )
    return out


def _extends(later: Sequence, earlier: Sequence) -> bool:
    """True when `later` feeds all of `earlier` and counts none of its rows again."""
    size = len(earlier.tokens)
    return (
        earlier.segments[-1][1] <= later.segments[0][0]
        and size <= len(later.tokens)
        and later.tokens[:size] == earlier.tokens
    )
