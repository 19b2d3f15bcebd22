"""The committed prompts, greedy, one at a time: token ids of a lane's answers."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.demo.settings import ROOT

PROMPTS = ROOT / "tests/model/prompts.json"
Answers = dict[str, tuple[int, ...]]


def prompts(path: Path = PROMPTS) -> list[dict[str, Any]]:
    """The 20 committed prompts."""
    loaded: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def ask(base_url: str, model: str = "moe") -> Answers:
    """Token ids of every answer by prompt name; temperature 0, one request at a time."""
    answers: Answers = {}
    for prompt in prompts():
        sent = {key: value for key, value in prompt.items() if key != "name"}
        fixed = {"model": model, "temperature": 0, "seed": 0, "return_token_ids": True}
        path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
        reply = post(base_url + path, {**sent, **fixed})
        answers[str(prompt["name"])] = tuple(reply["choices"][0]["token_ids"])
    return answers


def post(url: str, body: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
    """POST JSON, read JSON."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        loaded: dict[str, Any] = json.load(response)
    return loaded


def get_json(url: str, timeout: float = 10) -> dict[str, Any]:
    """GET JSON."""
    with urllib.request.urlopen(url, timeout=timeout) as response:
        loaded: dict[str, Any] = json.load(response)
    return loaded


def differing(one: Answers, two: Answers) -> list[str]:
    """Names of prompts whose token ids differ."""
    return sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
