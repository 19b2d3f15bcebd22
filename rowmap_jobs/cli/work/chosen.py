"""The transcripts of a census that the filter options keep."""

from __future__ import annotations

from dataclasses import dataclass

from ...census import filters
from ...census.filters import Phase
from ...formats.census import Census


@dataclass(frozen=True)
class Choice:
    """What to keep; None keeps all."""

    phase: Phase | None = None
    since: int | None = None
    until: int | None = None
    """Unix seconds; `until` is excluded."""
    sessions: tuple[int, ...] | None = None
    fidelity: tuple[str, ...] | None = None
    prompt_tokens: tuple[int | None, int | None] | None = None

    @property
    def empty(self) -> bool:
        """Nothing is asked for."""
        return self == Choice()


def chosen(census: Census, choice: Choice) -> Census:
    """Whole transcripts that every condition keeps. Raises FormatError when none is left."""
    if choice.sessions is not None:
        census = filters.by_session(census, choice.sessions)
    if choice.since is not None or choice.until is not None:
        census = filters.by_window(census, choice.since, choice.until)
    if choice.fidelity is not None:
        census = filters.by_fidelity(census, choice.fidelity)
    if choice.prompt_tokens is not None:
        census = filters.by_prompt_length(census, *choice.prompt_tokens)
    if choice.phase is not None:
        census = filters.by_phase(census, choice.phase)
    return census
