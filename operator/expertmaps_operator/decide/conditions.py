"""metav1 conditions, built so that deciding twice on the same facts writes the same status."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Literal

from ..api.meta import Condition

Status = Literal["True", "False", "Unknown"]

MAX_MESSAGE = 1024


def condition(
    type: str,
    status: Status,
    reason: str,
    message: str,
    generation: int,
    now: datetime,
    previous: Sequence[Condition],
) -> Condition:
    """One condition; lastTransitionTime is kept while its status is the same as before."""
    before = find(previous, type)
    since = timestamp(now)
    if before is not None and before.status == status:
        since = before.last_transition_time
    return Condition(
        type=str(type),
        status=status,
        reason=str(reason),
        message=one_line(message),
        observed_generation=generation,
        last_transition_time=since,
    )


def merge(previous: Sequence[Condition], changed: Iterable[Condition]) -> list[Condition]:
    """`previous` with `changed` in place of those of the same type; new types go to the end."""
    out = {item.type: item for item in previous}
    out.update({item.type: item for item in changed})
    return list(out.values())


def find(conditions: Sequence[Condition], type: str) -> Condition | None:
    """The condition of a type, or None."""
    return next((item for item in conditions if item.type == type), None)


def is_true(conditions: Sequence[Condition], type: str) -> bool:
    """Whether the condition of a type is there and True."""
    found = find(conditions, type)
    return found is not None and found.status == "True"


def one_line(message: str, limit: int = MAX_MESSAGE) -> str:
    """A message without line breaks, short enough for conditions and events."""
    text = " ".join(message.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as the API server spells it."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_timestamp(text: str) -> datetime:
    """A moment from RFC 3339. Raises ValueError."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"found {text!r}, expected a time with its zone such as ...T12:00:00Z")
    return moment.astimezone(UTC)
