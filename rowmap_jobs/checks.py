"""Two checks on a sample: did this model write the text, and is forced counting the real thing?"""

from __future__ import annotations

import math
import random
from typing import Any

from .counts import Counts
from .engine import Engine, RefusedError, plain
from .formats.census import DECODE, OffPolicy
from .formats.names import XARG_TRANSCRIPT
from .ids import GENERATED
from .log import say
from .reasons import RunError
from .replay import ForcedCounter, fresh_id
from .sequences import Sequence

LOGPROB_SAMPLE = 20
LOGPROB_MAX_TOKENS = 8192
"""Longer sequences would bring an answer of many megabytes."""
TRICK_SAMPLE = 4
TRICK_TOKENS = 32
TRICK_SECONDS = 15.0


def sample(sequences: list[Sequence], size: int, seed: int) -> list[Sequence]:
    """At most `size` of the sequences, drawn with `seed`."""
    return random.Random(seed).sample(sequences, min(size, len(sequences)))  # noqa: S311


def off_policy(
    engine: Engine, model: str, sequences: list[Sequence], seed: int
) -> OffPolicy | None:
    """Mean log-probability (nats) and top-1 share of recorded response ids under this model.

    Text that was generated afresh is this model's own and left out. None without a sample.
    """
    recorded = [
        s for s in sequences if s.fidelity != GENERATED and len(s.tokens) <= LOGPROB_MAX_TOKENS
    ]
    values: list[tuple[float, bool]] = []
    for sequence in sample(recorded, LOGPROB_SAMPLE, seed):
        body = {
            **plain(model, sequence.tokens.tolist(), fresh_id()),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 1,
        }
        try:
            values += logprobs(engine.complete(body).get("prompt_logprobs"), sequence)
        except RefusedError as error:
            say(f"prompt_logprobs refused: {error}")
            return None
    if not values:
        return None
    mean = sum(value for value, _ in values) / len(values)
    top1 = sum(1 for _, first in values if first) / len(values)
    return OffPolicy(top1=top1, mean_logprob=mean, n=len(values))


def logprobs(answer: Any, sequence: Sequence) -> list[tuple[float, bool]]:
    """(log-probability, was it the likeliest) of each id in the sequence's segments.

    `answer[i]` maps ids to the entries for position i, as vLLM returns them: the fed id is always
    among them. Positions that are not well-formed are left out.
    """
    out = []
    if not isinstance(answer, list) or len(answer) != len(sequence.tokens):
        return []
    for start, end in sequence.segments:
        for position in range(start, end):
            entries = answer[position]
            entry = None
            if isinstance(entries, dict):
                entry = entries.get(str(sequence.tokens[position]))
            value = entry.get("logprob") if isinstance(entry, dict) else None
            if isinstance(value, int | float) and math.isfinite(value):
                out.append((float(value), entry is not None and entry.get("rank") == 1))
    return out


def trick_check(
    counter: ForcedCounter, sequences: list[Sequence], seed: int
) -> dict[str, int] | None:
    """Selections of a real decode that forced counting of the same ids puts elsewhere.

    A few prompts are decoded greedily while the hook counts them, then prompt and answer are fed
    as one and counted by force. None when the hook does not count a live decode.
    """
    fitting = [s for s in sequences if len(s.tokens) <= LOGPROB_MAX_TOKENS]
    selections = moved = 0
    for sequence in sample(fitting, TRICK_SAMPLE, seed):
        prompt = sequence.tokens[: sequence.segments[0][0]].tolist()
        try:
            pair = _both(counter, prompt)
        except (RefusedError, RunError) as error:
            say(f"trick check left out: {error}")
            return None
        if pair is None:
            return None
        live, forced = (one.counts[DECODE] for one in pair)
        selections += int(live.sum())
        moved += int(abs(live - forced).sum()) // 2
    return {"selections": selections, "moved": moved} if selections else None


def _both(counter: ForcedCounter, prompt: list[int]) -> tuple[Counts, Counts] | None:
    """Counts of a real decode of TRICK_TOKENS ids and of the forced one."""
    live_id = fresh_id()
    choice = counter.engine.complete(
        {
            **plain(counter.model, prompt, fresh_id()),
            "max_tokens": TRICK_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {XARG_TRANSCRIPT: live_id},
        }
    )
    ids = choice.get("token_ids")
    live = counter.wait(live_id, TRICK_SECONDS)
    if isinstance(live, str) or not isinstance(ids, list) or len(ids) < 2:
        return None
    fed = [*prompt, *ids[:-1]]
    if int(live.rows.sum()) != len(fed) or int(live.rows[DECODE]) != len(ids) - 1:
        return None
    forced = counter.once(fed, [len(prompt), len(fed)], len(ids) - 1)
    return None if isinstance(forced, str) else (live, forced)
