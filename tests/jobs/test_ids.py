"""Where ids come from: recorded, rendered by the server, generated; never guessed."""

from __future__ import annotations

from typing import Any

import pytest

from rowmap_jobs.engine import Engine
from rowmap_jobs.formats.transcript import TranscriptRecord
from rowmap_jobs.ids import (
    GENERATED,
    GENERATED_TOKENS,
    RENDERED,
    TOKENS,
    DroppedError,
    Ids,
    Limits,
    Reader,
    chat_body,
    lost,
    unusable,
    wanted_tokens,
)
from tests.jobs.fake_engine import END, SYSTEM, TOKENIZER, FakeEngine, encode
from tests.jobs.world import QUICK, chat, with_ids


def record(wire: dict[str, Any]) -> TranscriptRecord:
    return TranscriptRecord.from_wire(wire, "x")


def reader(engine: FakeEngine, most: int = 100) -> Reader:
    client = Engine(engine.url, engine.url + "/status", None, QUICK)
    out = Reader(client, "fake", TOKENIZER, Limits(engine.max_model_len, most, 0))
    out.prepare()
    return out


def ids(engine: FakeEngine, wire: dict[str, Any]) -> Ids:
    return reader(engine).read(record(wire), "salt")


def answered(message: dict[str, Any], finish: str = "stop", **choice: Any) -> dict[str, Any]:
    out = chat(1)
    out["response"]["choices"] = [
        {"message": {"role": "assistant", **message}, "finish_reason": finish, **choice}
    ]
    return out


def test_recorded_ids_of_the_lanes_tokenizer_come_first(engine: FakeEngine) -> None:
    wire = with_ids(chat(1), engine)
    found = ids(engine, wire)
    assert (found.fidelity, found.prompt, found.response) == (
        TOKENS,
        wire["prompt_token_ids"],
        wire["token_ids"],
    )
    assert engine.posts("/v1/completions") == []


def test_rendering_gives_what_was_recorded(engine: FakeEngine) -> None:
    for finish in ("stop", "length"):
        wire = with_ids(chat(1, finish=finish), engine)
        found = ids(engine, {k: v for k, v in wire.items() if not k.endswith("token_ids")})
        assert (found.fidelity, found.refused) == (RENDERED, None)
        assert found.prompt == wire["prompt_token_ids"]
        end = [END] if finish == "stop" else []
        assert found.response == [*wire["token_ids"][:-1], *end]


def test_a_stop_string_is_no_end_of_turn(engine: FakeEngine) -> None:
    wire = answered({"content": "some text"}, stop_reason="###")
    assert ids(engine, wire).response == encode("some text")


def test_ids_of_another_tokenizer_are_not_used(engine: FakeEngine) -> None:
    wire = {**with_ids(chat(1), engine), "tokenizer": "sha256:" + "0" * 64}
    assert ids(engine, wire).fidelity == RENDERED


CALL = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}


@pytest.mark.parametrize(
    ("message", "faults", "refused"),
    [
        ({"content": "text"}, {}, None),
        ({"content": "text", "reasoning": "thought"}, {}, None),
        ({"content": "text", "reasoning_content": "thought"}, {}, None),
        ({"content": None, "tool_calls": [CALL]}, {}, None),
        ({"content": "text", "reasoning": "thought", "tool_calls": [CALL]}, {}, None),
        (
            {"content": "text", "reasoning": "thought"},
            {"drop_reasoning": True},
            "ReasoningDropped",
        ),
        ({"content": None, "tool_calls": [CALL]}, {"rewrite_tools": True}, "ToolCallsRewritten"),
        # A template that puts an empty thought before every last answer.
        ({"content": "text"}, {"empty_think": True}, "TextChanged"),
        # A template that adds a system line once there is an answer.
        ({"content": "text"}, {"unprefixed": True}, "NotAPrefix"),
        # A tokenizer that loses a leading space when it decodes a part by itself.
        ({"content": " text"}, {"join_space": True}, None),
    ],
)
def test_templates(
    engine: FakeEngine, message: dict[str, Any], faults: dict[str, bool], refused: str | None
) -> None:
    for name, value in faults.items():
        setattr(engine.faults, name, value)
    wire = answered(message)
    wire["request"]["messages"] = [
        {"role": "system", "content": "s"},
        *wire["request"]["messages"],
    ]
    found = ids(engine, wire)
    assert found.refused == refused
    assert found.fidelity == (RENDERED if refused is None else GENERATED)


def test_more_completion_tokens_than_text_means_hidden_reasoning(engine: FakeEngine) -> None:
    wire = answered({"content": "four"})
    wire["response"]["usage"] = {"completion_tokens": 400}
    found = ids(engine, wire)
    assert (found.fidelity, found.refused) == (GENERATED, "ResponseIncomplete")


def test_without_an_end_of_turn_nothing_is_rendered(engine: FakeEngine) -> None:
    original = engine.tokenize
    engine.tokenize = lambda body: (  # type: ignore[method-assign]
        {"tokens": "no"} if body.get("continue_final_message") else original(body)
    )
    assert ids(engine, chat(1)).refused == "NoEndOfTurn"


def completion(text: str | None, finish: str = "stop", **request: Any) -> dict[str, Any]:
    response = {"choices": [{"text": text, "finish_reason": finish}]} if text else None
    return {
        **chat(1),
        "endpoint": "/v1/completions",
        "request": {"prompt": "once upon", **request},
        "response": response,
    }


def test_plain_completions_are_rendered(engine: FakeEngine) -> None:
    found = ids(engine, completion(" a time", "length"))
    assert (found.prompt, found.response) == ([SYSTEM, *encode("once upon")], encode(" a time"))
    assert len(ids(engine, completion(" a time")).response) == len(encode(" a time")) + 1
    bare = ids(engine, completion(" a time", add_special_tokens=False))
    assert bare.prompt == encode("once upon")


def test_a_completion_of_ids_is_generated_afresh(engine: FakeEngine) -> None:
    found = ids(engine, completion(" a", prompt=[20, 21]))
    assert (found.prompt, found.fidelity, found.refused) == ([20, 21], GENERATED, "NoText")


def test_generation_keeps_the_requests_sampling_and_length(engine: FakeEngine) -> None:
    wire = chat(1, response=None)
    wire["request"] |= {"temperature": 0.7, "top_p": 0.9, "max_tokens": 40, "stop": ["x"]}
    found = ids(engine, wire)
    [body] = engine.posts("/v1/completions")
    assert (body["temperature"], body["top_p"], body["seed"], body["max_tokens"]) == (
        0.7,
        0.9,
        0,
        40,
    )
    assert body["return_token_ids"] and "stop" not in body and body["cache_salt"] == "salt"
    assert found.refused is None and 2 <= len(found.response) <= 40


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"token_ids": [1] * 70}, 70),
        ({"response": {"usage": {"completion_tokens": 33}}}, 33),
        ({"request": {"messages": [], "max_tokens": 9}, "response": None}, 9),
        ({"request": {"messages": [], "max_completion_tokens": 10**6}}, GENERATED_TOKENS),
        ({}, GENERATED_TOKENS),
    ],
)
def test_length_of_a_fresh_decode(over: dict[str, Any], expected: int) -> None:
    assert wanted_tokens(record(chat(1, **over))) == expected


def test_a_prompt_without_room_is_too_long(engine: FakeEngine) -> None:
    engine.max_model_len = 30
    with pytest.raises(DroppedError, match="TooLong"):
        ids(engine, chat(1, response=None))


def test_a_prompt_that_the_server_refuses_is_dropped(engine: FakeEngine) -> None:
    engine.tokenize = lambda body: {"tokens": None}  # type: ignore[method-assign]
    with pytest.raises(DroppedError, match="PromptRefused"):
        ids(engine, chat(1))


MEDIA = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}]}


@pytest.mark.parametrize(
    ("request_", "endpoint", "expected"),
    [
        ({"messages": [PARTS]}, "/v1/chat/completions", None),
        ({"messages": [MEDIA]}, "/v1/chat/completions", "Multimodal"),
        ({"messages": [PARTS], "n": 2}, "/v1/chat/completions", "SeveralChoices"),
        ({"messages": [PARTS], "use_beam_search": True}, "/v1/chat/completions", "BeamSearch"),
        ({"messages": "x"}, "/v1/chat/completions", "NoMessages"),
        ({"messages": ["x"]}, "/v1/chat/completions", "NoMessages"),
        ({"prompt": "x"}, "/v1/completions", None),
        ({"prompt": [1, 2]}, "/v1/completions", None),
        ({"prompt": ["x", "y"]}, "/v1/completions", "SeveralPrompts"),
        ({"prompt": []}, "/v1/completions", "SeveralPrompts"),
        ({"prompt": "x", "best_of": 3}, "/v1/completions", "SeveralChoices"),
        ({"prompt": "x", "echo": True}, "/v1/completions", "Echo"),
        ({"prompt": None, "prompt_embeds": "b"}, "/v1/completions", "PromptEmbeds"),
    ],
)
def test_requests_that_ids_cannot_stand_for(
    request_: dict[str, Any], endpoint: str, expected: str | None
) -> None:
    assert unusable(record(chat(1, request=request_, endpoint=endpoint))) == expected


def test_the_rendering_is_asked_for_as_the_chat_was() -> None:
    body = chat_body(
        record(
            chat(
                1,
                request={
                    "messages": [PARTS],
                    "tools": [{"type": "function"}],
                    "tool_choice": "auto",
                    "chat_template_kwargs": {"enable_thinking": False},
                    "reasoning_effort": "low",
                    "temperature": 1,
                },
            )
        ),
        "fake",
    )
    assert body == {
        "model": "fake",
        "messages": [PARTS],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"},
    }


@pytest.mark.parametrize(
    ("text", "message", "expected"),
    [
        ("abc", {"content": "abc"}, None),
        ("abc ", {"content": "abc"}, "TextChanged"),
        ("", {"content": None}, None),
        ("<think>\nt\n</think>\n\nabc", {"content": "abc", "reasoning": "t"}, None),
        ("abc", {"content": "abc", "reasoning": "t"}, "ReasoningDropped"),
        ("<t>t</t>" + "x" * 200 + "abc", {"content": "abc", "reasoning": "t"}, "TextChanged"),
        ("call", {"tool_calls": ["odd"]}, "ToolCallsRewritten"),
    ],
)
def test_what_a_rendering_must_hold(
    text: str, message: dict[str, Any], expected: str | None
) -> None:
    assert lost(text, message) == expected
