"""One recorded exchange with a model server, a line of JSONL."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import AwareDatetime, ConfigDict, Field

from .base import Digest, FormatError, Strict, canonical_json, load_json

MAX_LINE_BYTES = 64 << 20
ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


class TranscriptRecord(Strict):
    """A transcript line in its own format (snake_case on the wire, as OpenAI's API)."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=None)

    v: Literal[1]
    id: str = Field(min_length=1, max_length=256)
    session: str = Field(min_length=1, max_length=256)
    created: AwareDatetime | None = None
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    request: dict[str, Any]
    response: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    tokenizer: Digest | None = None
    model: str | None = None
    finish_reason: str | None = None


def parse_line(line: bytes, source: str, number: int, modified: datetime) -> TranscriptRecord:
    """Read one line: the format above, or a bare `{"request", "response"}` pair of OpenAI's API.

    `source` names the object, `number` the line (from 1), `modified` stands in for a missing
    `created`. A bare pair without a session is a session of its own.
    Raises FormatError naming object and line, never content of the conversation.
    """
    place = f"{source} line {number}"
    if len(line) > MAX_LINE_BYTES:
        raise FormatError(place, "size", f"{len(line)} bytes", f"at most {MAX_LINE_BYTES}")
    try:
        data = load_json(line, place)
    except FormatError as error:
        # A key that stands twice is somebody's text: name what is wrong, not the key.
        if error.found == "the key twice":
            raise FormatError(place, "a key", error.found, error.expected) from None
        raise
    if not isinstance(data, dict):
        raise FormatError(place, "top level", type(data).__name__, "a JSON object")
    if "v" not in data:
        data = _from_bare_pair(data, place)
    record = _validate(data, place)
    if record.created is None:
        record = record.model_copy(update={"created": modified.astimezone(UTC)})
    return record


def _validate(data: dict[str, Any], place: str) -> TranscriptRecord:
    try:
        record = TranscriptRecord.from_wire(data, place)
    except FormatError as error:
        # The input may be somebody's conversation: name fields of the format, and no value.
        field = error.place.split(".")[0]
        if field not in TranscriptRecord.model_fields:
            raise FormatError(
                place, "top level", "a field that is not known", "fields of the format"
            ) from None
        raise FormatError(place, field, "a value that does not fit", error.expected) from None
    for name in ("prompt_token_ids", "token_ids"):
        ids = getattr(record, name)
        if ids is not None and any(i < 0 or i >= 1 << 31 for i in ids):
            raise FormatError(place, name, "an id out of range", "ids from 0 to 2**31-1")
    return record


def _from_bare_pair(data: dict[str, Any], place: str) -> dict[str, Any]:
    request, response = data.get("request"), data.get("response")
    if not isinstance(request, dict):
        raise FormatError(
            place,
            "top level",
            f"an object of {len(data)} keys without a request",
            'a "v":1 record or {"request","response"}',
        )
    digest = hashlib.sha256(canonical_json(data)).hexdigest()
    chat = "messages" in request
    created = response.get("created") if isinstance(response, dict) else None
    return {
        "v": 1,
        "id": digest[:32],
        "session": str(data.get("session") or digest[:32]),
        "created": created if isinstance(created, int) and not isinstance(created, bool) else None,
        "endpoint": ENDPOINTS[0] if chat else ENDPOINTS[1],
        "request": request,
        "response": response if isinstance(response, dict) else None,
        "model": request.get("model") if isinstance(request.get("model"), str) else None,
    }
