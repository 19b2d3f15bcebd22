"""Token ids of a recorded exchange: prompt P and response R, and how they were come by.

In this order (design, section 4): `tokens`, recorded ids of the lane's own tokenizer; `rendered`,
the server's own rendering, accepted only when P is a token prefix of the whole and the text of the
record is all there; `generated`, the prompt decoded afresh. Never a client-side tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .engine import Engine, RefusedError, plain
from .formats.census import FIDELITY
from .formats.transcript import TranscriptRecord
from .reasons import Reason, RunError

TOKENS, RENDERED, GENERATED = (FIDELITY.index(n) for n in ("tokens", "rendered", "generated"))
GENERATED_TOKENS = 512
"""Bound of a fresh decode where neither record nor request says how long it is."""
MARKER_CHARS = 64
"""Characters that a template may put around each of reasoning, content and tool calls."""
CONTEXT = 8
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class DroppedError(Exception):
    """The record cannot be counted: one word that says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class NotRenderedError(Exception):
    """The server's rendering is not the recorded exchange: one word that says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True)
class Ids:
    """P and R. R ends in the end-of-turn id when the model stopped by itself."""

    prompt: list[int]
    response: list[int]
    fidelity: int
    refused: str | None = None
    """Why the server's rendering was not accepted, where it was tried."""


@dataclass(frozen=True)
class Limits:
    """What bounds a fresh decode."""

    max_model_len: int
    max_response_tokens: int
    seed: int


def unusable(record: TranscriptRecord) -> str | None:
    """Why a record's request cannot be counted by ids alone; None when it can."""
    request = record.request
    if request.get("n") not in (None, 1) or request.get("best_of") not in (None, 1):
        return "SeveralChoices"
    if request.get("use_beam_search"):
        return "BeamSearch"
    if request.get("prompt_embeds") is not None:
        return "PromptEmbeds"
    if request.get("echo"):
        return "Echo"
    if record.endpoint == "/v1/completions":
        prompt = request.get("prompt")
        fits = isinstance(prompt, str) or (
            isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
        )
        return None if fits else "SeveralPrompts"
    messages = request.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return "NoMessages"
    if any(_is_media(part) for message in messages for part in _parts(message)):
        return "Multimodal"
    return None


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_media(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") not in ("text", "refusal", "thinking")


class Reader:
    """Finds the ids of records, with one engine. Thread-safe once `prepare` was called."""

    def __init__(self, engine: Engine, model: str, tokenizer: str, limits: Limits) -> None:
        self._engine = engine
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._end: int | None = None

    def prepare(self) -> None:
        """Learn the id that ends an assistant's turn: the first that a closed rendering of a
        short exchange has beyond the open one. Without it no chat is `rendered`.
        """
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        body = {"model": self._model, "messages": messages, "add_generation_prompt": False}
        try:
            opened = self._engine.tokenize({**body, "continue_final_message": True})
            closed = self._engine.tokenize(body)
        except RefusedError:
            return
        if len(closed) > len(opened) and closed[: len(opened)] == opened:
            self._end = closed[len(opened)]

    def read(self, record: TranscriptRecord, salt: str) -> Ids:
        """P and R of a record. Raises DroppedError, or RunError when the engine is gone."""
        reason = unusable(record)
        if reason is not None:
            raise DroppedError(reason)
        ids = self._recorded(record) or self._rendered_or_generated(record, salt)
        if len(ids.response) < 2:
            # The last generated id is never fed, so one id leaves no decode row.
            raise DroppedError("EmptyResponse")
        return ids

    def _recorded(self, record: TranscriptRecord) -> Ids | None:
        prompt, response = record.prompt_token_ids, record.token_ids
        if record.tokenizer != self._tokenizer or not prompt or not response:
            return None
        return Ids(prompt, response, TOKENS)

    def _rendered_or_generated(self, record: TranscriptRecord, salt: str) -> Ids:
        try:
            prompt = self._prompt(record)
        except RefusedError:
            raise DroppedError("PromptRefused") from None
        refused = None
        if first_choice(record) is not None:
            try:
                return Ids(prompt, self._render(record, prompt), RENDERED)
            except NotRenderedError as error:
                refused = error.reason
            except RefusedError:
                refused = "RenderingRefused"
        return Ids(prompt, self._generate(record, prompt, salt), GENERATED, refused)

    def _prompt(self, record: TranscriptRecord) -> list[int]:
        if record.prompt_token_ids and record.tokenizer == self._tokenizer:
            return record.prompt_token_ids
        if record.endpoint == "/v1/completions":
            prompt = record.request["prompt"]
            return prompt if isinstance(prompt, list) else self._text(record, prompt)
        return self._engine.tokenize({**chat_body(record, self._model), **_OPEN})

    def _text(self, record: TranscriptRecord, text: str) -> list[int]:
        special = record.request.get("add_special_tokens") is not False
        return self._engine.tokenize(
            {"model": self._model, "prompt": text, "add_special_tokens": special}
        )

    def _render(self, record: TranscriptRecord, prompt: list[int]) -> list[int]:
        choice = first_choice(record) or {}
        if record.endpoint == "/v1/completions":
            rest = self._render_text(record, prompt, choice)
        else:
            rest = self._render_chat(record, prompt, choice)
        used = usage_tokens(record)
        if used is not None and used > 2 * len(rest) + 16:
            # The model wrote more than the record shows: reasoning that was not recorded.
            raise NotRenderedError("ResponseIncomplete")
        return rest

    def _render_text(
        self, record: TranscriptRecord, prompt: list[int], choice: dict[str, Any]
    ) -> list[int]:
        text = choice.get("text")
        if not isinstance(text, str) or not isinstance(record.request["prompt"], str):
            raise NotRenderedError("NoText")
        whole = self._text(record, record.request["prompt"] + text)
        if whole[: len(prompt)] != prompt:
            raise NotRenderedError("NotAPrefix")
        # The id that ended it is not known here and never fed: any id in its place will do.
        return whole[len(prompt) :] + ([0] if stopped(record, choice) else [])

    def _render_chat(
        self, record: TranscriptRecord, prompt: list[int], choice: dict[str, Any]
    ) -> list[int]:
        message = choice.get("message")
        if not isinstance(message, dict):
            raise NotRenderedError("NoMessage")
        if self._end is None:
            raise NotRenderedError("NoEndOfTurn")
        body = chat_body(record, self._model)
        body["messages"] = [*body["messages"], assistant_message(message)]
        whole = self._engine.tokenize({**body, **_CLOSED})
        if whole[: len(prompt)] != prompt:
            raise NotRenderedError("NotAPrefix")
        rest = whole[len(prompt) :]
        if self._end not in rest:
            raise NotRenderedError("NoEndOfTurn")
        rest = rest[: rest.index(self._end)]
        changed = lost(self._decode(rest), message)
        if changed is not None:
            # Tokenizers that join a leading space to a word need some context before the text.
            context = prompt[-CONTEXT:]
            before = self._decode(context)
            text = self._decode(context + rest)
            if not text.startswith(before) or lost(text[len(before) :], message) is not None:
                raise NotRenderedError(changed)
        return [*rest, self._end] if stopped(record, choice) else rest

    def _decode(self, ids: list[int]) -> str:
        return self._engine.detokenize(self._model, ids) if ids else ""

    def _generate(self, record: TranscriptRecord, prompt: list[int], salt: str) -> list[int]:
        room = self._limits.max_model_len - len(prompt)
        if room < 2:
            raise DroppedError("TooLong")
        want = min(wanted_tokens(record), self._limits.max_response_tokens + 1, room)
        sampling = {
            name: record.request[name]
            for name in SAMPLING_FIELDS
            if isinstance(record.request.get(name), int | float)
        }
        try:
            choice = self._engine.complete(
                {
                    **plain(self._model, prompt, salt),
                    **sampling,
                    "max_tokens": max(want, 2),
                    "seed": self._limits.seed,
                    "return_token_ids": True,
                }
            )
        except RefusedError:
            raise DroppedError("PromptRefused") from None
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise RunError(
                Reason.COUNTING_FAILED,
                "/v1/completions: token_ids: found none, expected them for return_token_ids",
            )
        return ids


_OPEN = {"add_generation_prompt": True}
_CLOSED = {"add_generation_prompt": False}


def chat_body(record: TranscriptRecord, model: str) -> dict[str, Any]:
    """The /tokenize body that renders a chat request as the server renders it for a chat."""
    request = record.request
    body: dict[str, Any] = {"model": model, "messages": request["messages"]}
    if isinstance(request.get("tools"), list) and request["tools"]:
        body["tools"] = request["tools"]
    for name in ("chat_template", "add_special_tokens", "media_io_kwargs", "mm_processor_kwargs"):
        if request.get(name) is not None:
            body[name] = request[name]
    given = request.get("chat_template_kwargs")
    extra: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
    if request.get("documents") is not None:
        extra.setdefault("documents", request["documents"])
    effort = request.get("reasoning_effort")
    if effort is not None:
        extra.setdefault("reasoning_effort", effort)
        extra.setdefault("enable_thinking", effort != "none")
    if extra:
        body["chat_template_kwargs"] = extra
    return body


def assistant_message(message: dict[str, Any]) -> dict[str, Any]:
    """A response's message as the next request would carry it."""
    out: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    thought = reasoning_of(message)
    if thought:
        out["reasoning"] = thought
    if message.get("tool_calls"):
        out["tool_calls"] = message["tool_calls"]
    return out


def reasoning_of(message: dict[str, Any]) -> str:
    """The recorded reasoning, by either of its names."""
    for name in ("reasoning", "reasoning_content"):
        if isinstance(message.get(name), str):
            return str(message[name])
    return ""


def first_choice(record: TranscriptRecord) -> dict[str, Any] | None:
    """The response's only choice, if there is a response."""
    choices = (record.response or {}).get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0]
    return None


def stopped(record: TranscriptRecord, choice: dict[str, Any]) -> bool:
    """True when the model ended its turn: the end-of-turn id was generated."""
    finish = record.finish_reason or choice.get("finish_reason")
    return finish in ("stop", "tool_calls", "function_call") and choice.get("stop_reason") is None


def usage_tokens(record: TranscriptRecord) -> int | None:
    """Completion tokens that the recorded server counted."""
    usage = (record.response or {}).get("usage")
    value = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return value if type(value) is int and value > 0 else None


def wanted_tokens(record: TranscriptRecord) -> int:
    """How long a fresh decode should be: as recorded, else as asked for, else a bound."""
    if record.token_ids:
        return len(record.token_ids)
    recorded = usage_tokens(record)
    if recorded is not None:
        return recorded
    for name in ("max_completion_tokens", "max_tokens"):
        value = record.request.get(name)
        if type(value) is int and value > 0:
            return min(value, GENERATED_TOKENS)
    return GENERATED_TOKENS


def lost(text: str, message: dict[str, Any]) -> str | None:
    """What of a recorded message the decoded rendering does not hold word for word; None: nothing.

    A plain message must be the text exactly; reasoning and tool calls may stand in markers.
    """
    content = message.get("content")
    content = content if isinstance(content, str) else ""
    thought = reasoning_of(message)
    calls = message.get("tool_calls") or []
    if not thought and not calls:
        return None if text == content else "TextChanged"
    pieces = [("ReasoningDropped", thought), ("TextChanged", content)]
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return "ToolCallsRewritten"
        pieces.append(("ToolCallsRewritten", str(function.get("name") or "")))
        pieces.append(("ToolCallsRewritten", str(function.get("arguments") or "")))
    rest = text
    for reason, piece in pieces:
        at = rest.find(piece)
        if at < 0:
            return reason
        rest = rest[:at] + rest[at + len(piece) :]
    present = sum(1 for _, piece in pieces if piece)
    return "TextChanged" if len(rest) > MARKER_CHARS * present else None
