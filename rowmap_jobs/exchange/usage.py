"""How many tokens of a sequence are prompt, as responses of OpenAI's API and sidecars say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..census import routing
from ..formats.base import FormatError
from .npz import Header

MAX_TOP_K = 256


@dataclass(frozen=True)
class Usage:
    """Tokens of a sequence; the array begins at token `start`."""

    prompt: int
    completion: int | None = None
    start: int = 0


def usage_of(data: object, source: str) -> Usage:
    """Tokens in a sidecar or a response. Raises FormatError."""
    if not isinstance(data, dict):
        raise FormatError(source, "top level", type(data).__name__, "an object with prompt_tokens")
    usage = data.get("usage", data)
    if not isinstance(usage, dict):
        raise FormatError(source, "usage", type(usage).__name__, "an object with prompt_tokens")
    prompt = _number(usage.get("prompt_tokens"), source, "prompt_tokens")
    completion = usage.get("completion_tokens")
    start = data.get("routed_experts_prompt_start")
    return Usage(
        prompt,
        None if completion is None else _number(completion, source, "completion_tokens"),
        0 if start is None else _number(start, source, "routed_experts_prompt_start"),
    )


def _number(value: object, source: str, place: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise FormatError(source, place, value, "a number of tokens")
    return value


def response_of(data: object, source: str, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What of the request matters here, and the response."""
    if not isinstance(data, dict):
        raise FormatError(source, place, type(data).__name__, "a JSON object")
    request, response = data.get("request"), data.get("response", data)
    if not isinstance(response, dict):
        raise FormatError(source, place, "no response", "a response with choices")
    start = request.get("routed_experts_prompt_start") if isinstance(request, dict) else None
    return {"routed_experts_prompt_start": start}, response


def split(header: Header, usage: Usage, source: str, place: str) -> tuple[int, int]:
    """Rows of prompt and decode in an array. Raises FormatError where they do not fit."""
    if header.dtype.kind not in "iu" or len(header.shape) != 3:
        found = f"{header.dtype} with {len(header.shape)} dimensions"
        raise FormatError(source, place, found, "integers [tokens - 1, layers, top-k]")
    tokens, layers, k = header.shape
    if (
        not 1 <= tokens < 1 << 31
        or not 1 <= layers <= routing.MAX_LAYERS
        or not 1 <= k <= MAX_TOP_K
    ):
        expected = f"[tokens - 1, 1 to {routing.MAX_LAYERS} layers, 1 to {MAX_TOP_K} ids]"
        raise FormatError(source, place, list(header.shape), expected)
    prompt = usage.prompt - usage.start
    if usage.completion is not None and tokens != prompt + usage.completion - 1:
        expected = f"{prompt + usage.completion - 1} (prompt + completion - 1"
        expected += f" from token {usage.start})" if usage.start else ")"
        raise FormatError(source, place, f"{tokens} rows", expected)
    if not 0 <= prompt <= tokens:
        found = f"a prompt of {usage.prompt} tokens from token {usage.start}"
        raise FormatError(source, place, found, f"0 to {tokens}, the rows of the array")
    return prompt, tokens - prompt
