"""The model server and its hook as a run sees them: readiness, tokenization, forced counting."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from .edges import http
from .formats import status as status_format
from .formats.base import FormatError
from .formats.names import XARG_SEGMENTS, XARG_TRANSCRIPT
from .formats.status import HookStatus
from .log import say
from .reasons import Reason, RunError, one_line

NO_EXPERTS_REASON = "NotMoE"
"""The hook's word for a dense model."""


class Send(Protocol):
    """The HTTP edge."""

    def __call__(
        self, url: str, body: dict[str, Any] | None, key: str | None, timeout: float
    ) -> http.Answer:
        """One request. Raises http.UnreachableError."""


class RefusedError(Exception):
    """The server refused one request (HTTP 4xx); the run goes on without it."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"HTTP {status}")


@dataclass(frozen=True)
class Deadlines:
    """Bounds in seconds."""

    poll: float = 1.0
    hook_grace: float = 60.0
    """A healthy server without a hook's status for so long has no hook."""
    request: float = 1800.0
    recover: float = 30.0
    counts: float = 60.0
    """From the engine's answer to the hook's file."""
    counts_poll: float = 0.05


@dataclass(frozen=True)
class Model:
    """What /v1/models says of the first model."""

    name: str
    max_model_len: int


@dataclass(frozen=True)
class Ready:
    """An engine that can count."""

    status: HookStatus
    model: Model
    seconds: float


class Engine:
    """Requests to one engine. Raises RunError when the engine is gone, RefusedError for one 4xx."""

    def __init__(
        self,
        server_url: str,
        status_url: str,
        key: str | None = None,
        deadlines: Deadlines | None = None,
        send: Send | None = None,
    ) -> None:
        self.server_url = server_url.rstrip("/")
        self.status_url = status_url
        self.deadlines = deadlines or Deadlines()
        self._key = key
        self._send: Send = send or http.request

    def status(self) -> HookStatus | None:
        """The hook's status; None when nothing answers yet. Raises FormatError."""
        try:
            answer = self._send(self.status_url, None, None, 10.0)
        except http.UnreachableError:
            return None
        if answer.status != 200:
            return None
        return status_format.parse(answer.body, self.status_url)

    def healthy(self) -> bool:
        """True when /health answers 200."""
        try:
            return self._send(f"{self.server_url}/health", None, self._key, 10.0).status == 200
        except http.UnreachableError:
            return False

    def model(self) -> Model:
        """Name and length limit of the served model. Raises RunError."""
        url = f"{self.server_url}/v1/models"
        try:
            answer = self._send(url, None, self._key, 30.0)
        except http.UnreachableError as error:
            raise RunError(
                Reason.ENGINE_FAILED, f"{url}: found {error}, expected an answer"
            ) from None
        self._check_key(url, answer)
        data = answer.json()
        try:
            first = data["data"][0]
            return Model(str(first["id"]), int(first["max_model_len"]))
        except (TypeError, KeyError, IndexError, ValueError):
            raise RunError(
                Reason.ENGINE_FAILED,
                f"{url}: found HTTP {answer.status} without a model, expected `data[0].id` and "
                "`data[0].max_model_len`",
            ) from None

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """Token ids of the server's own rendering (POST /tokenize)."""
        return self._ids(self._post("/tokenize", body), "tokens")

    def detokenize(self, model: str, tokens: list[int]) -> str:
        """Text of token ids (POST /detokenize)."""
        data = self._post("/detokenize", {"model": model, "tokens": tokens})
        text = data.get("prompt") if isinstance(data, dict) else None
        if not isinstance(text, str):
            raise RefusedError(200)
        return text

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of POST /v1/completions."""
        data = self._post("/v1/completions", body)
        try:
            choice = data["choices"][0]
        except (TypeError, KeyError, IndexError):
            raise RefusedError(200) from None
        if not isinstance(choice, dict):
            raise RefusedError(200)
        return choice

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """One POST, and one more when the engine is healthy after a broken answer."""
        url = self.server_url + path
        found = ""
        for attempt in range(2):
            try:
                answer = self._send(url, body, self._key, self.deadlines.request)
            except http.UnreachableError as error:
                found = str(error)
            else:
                self._check_key(url, answer)
                if answer.status == 200:
                    return answer.json()
                if answer.status < 500 and answer.status != 429:
                    raise RefusedError(answer.status)
                found = f"HTTP {answer.status}"
            if attempt == 0 and not self._recovers():
                break
        raise RunError(
            Reason.ENGINE_FAILED,
            f"{url}: found {found}, expected an answer: read the engine's log in this pod",
        )

    def _recovers(self) -> bool:
        end = time.monotonic() + self.deadlines.recover
        while not self.healthy():
            if time.monotonic() >= end:
                return False
            time.sleep(min(self.deadlines.poll, 1.0))
        return True

    def _check_key(self, url: str, answer: http.Answer) -> None:
        if answer.status in (401, 403):
            raise RunError(
                Reason.ENGINE_UNAUTHORIZED,
                f"{url}: found HTTP {answer.status}, expected a server without an API key of its "
                "own: a run has none to give",
            )

    @staticmethod
    def _ids(data: Any, name: str) -> list[int]:
        ids = data.get(name) if isinstance(data, dict) else None
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise RefusedError(200)
        return ids


def forced(
    model: str, tokens: list[int], count_id: str, salt: str, segments: list[int]
) -> dict[str, Any]:
    """Body of /v1/completions that feeds `tokens` once, with no cached row, to be counted.

    `segments` is the flat list of names.XARG_SEGMENTS. One token is generated and never fed.
    """
    return {
        **plain(model, tokens, salt),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "vllm_xargs": {XARG_TRANSCRIPT: count_id, XARG_SEGMENTS: segments},
    }


def plain(model: str, tokens: list[int], salt: str) -> dict[str, Any]:
    """The common part of requests with ids: nothing added to them, nothing read from a cache."""
    return {
        "model": model,
        "prompt": tokens,
        "add_special_tokens": False,
        "cache_salt": salt,
        "n": 1,
        "stream": False,
    }


def check_status(status: HookStatus) -> bool:
    """True when the hook can count, False while it loads. Raises RunError when it never will."""
    if status.phase == "Failed":
        reason = status.error.reason if status.error else "Failed"
        message = status.error.message if status.error else "no message"
        kind = Reason.NO_EXPERTS if reason == NO_EXPERTS_REASON else Reason.HOOK_FAILED
        raise RunError(kind, f"hook: found {reason}: {one_line(message, 600)}")
    if status.mode != "count":
        raise RunError(
            Reason.HOOK_NOT_LOADED,
            f"hook: mode: found {status.mode}, expected count: EXPERTMAPS_MODE of the engine's "
            "container is not what the operator writes",
        )
    if status.phase not in ("Ready", "Serving"):
        return False
    if status.fingerprint is None or status.geometry is None or not status.geometry.moe_layers:
        raise RunError(
            Reason.NO_EXPERTS,
            "hook: geometry: found no MoE layer, expected a mixture-of-experts model",
        )
    return True


def wait_ready(
    engine: Engine,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Ready:
    """Wait until server and hook can count.

    Raises RunError: EngineNotReady after `seconds`; HookNotLoaded when the server is healthy and
    no hook answers; HookFailed or NoExperts when the hook says so.
    """
    start = clock()
    healthy_since: float | None = None
    while True:
        try:
            status = engine.status()
        except FormatError as error:
            raise RunError(Reason.HOOK_NOT_LOADED, str(error)) from None
        counting = status is not None and check_status(status)
        healthy = engine.healthy()
        now = clock()
        if counting and healthy and status is not None:
            model = engine.model()
            say(f"engine ready after {now - start:.0f} s: {status.engine} {status.engine_version}")
            return Ready(status, model, now - start)
        healthy_since = (healthy_since or now) if healthy else None
        if status is None and healthy_since is not None:
            _check_hook_grace(engine, now - healthy_since)
        if now - start >= seconds:
            raise RunError(
                Reason.ENGINE_NOT_READY,
                f"{engine.server_url}: found no ready engine after {seconds:.0f} s (server "
                f"{'healthy' if healthy else 'not healthy'}, hook "
                f"{status.phase if status else 'silent'}), expected one within "
                "pendingDeadlineSeconds: read the engine's log in this pod",
            )
        sleep(engine.deadlines.poll)


def _check_hook_grace(engine: Engine, seconds: float) -> None:
    if seconds >= engine.deadlines.hook_grace:
        raise RunError(
            Reason.HOOK_NOT_LOADED,
            f"{engine.status_url}: found no answer while the server is healthy, expected the "
            "hook's status: PYTHONPATH or VLLM_PLUGINS of the container keeps the hook out",
        )
