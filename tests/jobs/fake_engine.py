"""A stand-in for an engine's boot: speaks vLLM's endpoints and writes the hook's count files.

There is no model in it. Token ids are bytes; the experts of a token are a fixed function of it and
the two ids before it, so that a count can be computed twice and compared exactly. It does have a
prefix cache: a request without a fresh `cache_salt` loses the rows it has seen, as in vLLM.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, EXPERTS, TOP_K = (1, 2, 4), 16, 2
END, USER, ASSISTANT, SYSTEM, TOOL = 1, 2, 3, 4, 5
OFFSET = 16
ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "tool": TOOL}


def digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


TOKENIZER = digest("tokenizer")
FINGERPRINT = {
    "shape": digest("shape"),
    "router": digest("router"),
    "quant": "bf16",
    "tokenizer": TOKENIZER,
}


def encode(text: str) -> list[int]:
    return [byte + OFFSET for byte in text.encode("utf-8")]


def decode(ids: list[int]) -> str:
    out = bytearray()
    for i in ids:
        out += bytes([i - OFFSET]) if i >= OFFSET else f"<{i}>".encode()
    return out.decode("utf-8", "replace")


def experts_of(tokens: list[int]) -> np.ndarray:
    """int64[n,L,k]: experts of each token; frequent letters choose few experts."""
    ids = np.asarray(tokens, dtype=np.int64)
    before = np.concatenate([[0, 0], ids])[:-2] + 3 * np.concatenate([[0], ids])[:-1]
    layers = np.asarray(LAYERS)
    first = (ids[:, None] * 5 + layers[None, :]) % 11 % 7 + (before[:, None] % 17 == 0) * 8
    second = (first + 1 + (ids[:, None] + layers[None, :]) % 3) % EXPERTS
    return np.stack([first, second], axis=2)


def count(tokens: list[int], decode_mask: np.ndarray, keep: np.ndarray) -> tuple[Any, Any]:
    """Counts int64[2,L,E] and rows int64[2] of the kept rows."""
    counts = np.zeros((2, len(LAYERS), EXPERTS), dtype=np.int64)
    chosen = experts_of(tokens)
    for phase in (0, 1):
        rows = chosen[keep & (decode_mask == bool(phase))]
        for layer in range(len(LAYERS)):
            counts[phase, layer] = np.bincount(rows[:, layer].ravel(), minlength=EXPERTS)
    rows = np.array([(keep & ~decode_mask).sum(), (keep & decode_mask).sum()], dtype=np.int64)
    return counts, rows


def next_token(tokens: list[int]) -> int:
    """Greedy decoding: letters, ended now and then."""
    value = int(hashlib.sha256(str(tokens[-3:]).encode()).hexdigest()[:4], 16)
    return END if value % 41 == 0 else OFFSET + 97 + value % 26


@dataclass
class Faults:
    """What goes wrong; numbers count down."""

    lose_rows: int = 0
    bad_rows: int = 0
    silent: int = 0
    damaged: int = 0
    placeholder: int = 0
    skip: list[str] = field(default_factory=list)
    refuse_over: int = 1 << 30
    failing_posts: int = 0
    drop_reasoning: bool = False
    rewrite_tools: bool = False
    empty_think: bool = False
    unprefixed: bool = False
    join_space: bool = False
    no_live: bool = False
    no_logprobs: bool = False
    key: str | None = None


class FakeEngine:
    """Serves on a free loopback port (or the given address) until closed."""

    def __init__(self, folder: Path, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.faults = Faults()
        self.max_model_len = 4096
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.salts: Counter[str | None] = Counter()
        self.seen: dict[str | None, list[list[int]]] = {}
        self.status: dict[str, Any] = {
            "version": 1,
            "hookVersion": "0",
            "hookDigest": digest("hook"),
            "engine": "vLLM",
            "engineVersion": "0.32.0",
            "runner": "v1",
            "mode": "count",
            "phase": "Ready",
            "generation": 0,
            "rank": 0,
            "pid": 7,
            "startedAt": 1,
            "updatedAt": 2,
            "fingerprint": FINGERPRINT,
            "geometry": {
                "experts": EXPERTS,
                "topK": TOP_K,
                "moeLayers": list(LAYERS),
                "rowBytes": 1000,
            },
        }
        self.status_code = 200
        self.health_code = 200
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"engine": self})
        self.server = ThreadingHTTPServer(address, handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(5)

    def posts(self, path: str) -> list[dict[str, Any]]:
        return [body for p, body in self.requests if p == path]

    def forced(self) -> list[dict[str, Any]]:
        """Counting requests with segments."""
        return [
            b for b in self.posts("/v1/completions") if "expertmaps_seg" in b.get("vllm_xargs", {})
        ]

    # Endpoints.

    def render(self, body: dict[str, Any]) -> list[int]:
        faults, out = self.faults, []
        for index, message in enumerate(body["messages"]):
            last = index == len(body["messages"]) - 1
            out.append(ROLES[message["role"]])
            text = ""
            if message.get("reasoning") and not faults.drop_reasoning:
                text += f"[{message['reasoning']}]"
            if faults.empty_think and message["role"] == "assistant" and last:
                text += "[]"
            content = message.get("content") or ""
            if isinstance(content, list):
                content = "".join(part["text"] for part in content)
            text += content
            for call in message.get("tool_calls") or []:
                arguments = call["function"]["arguments"]
                if faults.rewrite_tools:
                    arguments = json.dumps(json.loads(arguments), separators=(",", ":"))
                text += f"({call['function']['name']}|{arguments})"
            out += encode(text)
            if not (last and body.get("continue_final_message")):
                out += [END, *encode("\n")]
        if body.get("add_generation_prompt", True):
            out.append(ASSISTANT)
        elif faults.unprefixed and len(body["messages"]) > 2:
            out = [SYSTEM, *out]
        return out

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            return {"tokens": self.render(body), "max_model_len": self.max_model_len}
        special = [SYSTEM] if body.get("add_special_tokens", True) else []
        return {"tokens": special + encode(body["prompt"]), "max_model_len": self.max_model_len}

    def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        text = decode(body["tokens"])
        # SentencePiece style: a text that begins with a space loses it when decoded alone.
        return {"prompt": text.removeprefix(" ") if self.faults.join_space else text}

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = body["prompt"]
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": "too long"}}
        if len(prompt) > self.faults.refuse_over:
            return 400, {"error": {"message": "refused"}}
        tokens = list(prompt)
        while len(tokens) - len(prompt) < body["max_tokens"]:
            tokens.append(next_token(tokens))
            if tokens[-1] == END and not body.get("ignore_eos"):
                break
        new = tokens[len(prompt) :]
        ended = new[-1] == END and not body.get("ignore_eos")
        self._count(body, tokens, len(new))
        choice = {"text": decode(new), "finish_reason": "stop" if ended else "length"}
        if body.get("return_token_ids"):
            choice["token_ids"] = new
        if body.get("prompt_logprobs") and not self.faults.no_logprobs:
            choice["prompt_logprobs"] = [
                None if i == 0 else {str(t): {"logprob": -0.5, "rank": 1 + t % 2}, "9": {}}
                for i, t in enumerate(prompt)
            ]
        return 200, {"choices": [choice], "model": "fake"}

    def _count(self, body: dict[str, Any], tokens: list[int], new: int) -> None:
        salt = body.get("cache_salt")
        fed = tokens[:-1]
        with self.lock:
            self.salts[salt] += 1
            cached = max((_common(fed, old) for old in self.seen.get(salt, [])), default=0)
            self.seen.setdefault(salt, []).append(fed)
        extra = body.get("vllm_xargs") or {}
        name = extra.get("expertmaps_t")
        if name is None:
            return
        segments = extra.get("expertmaps_seg")
        if segments is None and self.faults.no_live:
            return
        flat = segments if segments is not None else [len(tokens) - new, len(fed)]
        mask = np.zeros(len(fed), dtype=bool)
        for start, end in zip(flat[::2], flat[1::2], strict=True):
            mask[start:end] = True
        keep = np.arange(len(fed)) >= cached
        self._write(name, fed, mask, keep)

    def _write(self, name: str, fed: list[int], mask: np.ndarray, keep: np.ndarray) -> None:
        faults = self.faults
        bad = 0
        with self.lock:
            if faults.silent:
                faults.silent -= 1
                return
            if faults.skip:
                (self.folder / f"{name}.skip").write_text(faults.skip.pop(0) + "\n")
                return
            if faults.lose_rows:
                faults.lose_rows -= 1
                keep = keep & (np.arange(len(fed)) >= len(fed) // 2)
            if faults.bad_rows:
                faults.bad_rows -= 1
                bad = 1
            placeholder = faults.placeholder > 0
            faults.placeholder -= placeholder
            damaged = faults.damaged > 0
            faults.damaged -= damaged
        counts, rows = count(fed, mask, keep)
        if placeholder:
            counts = np.zeros_like(counts)
            counts[:, :, 0] = rows[:, None] * TOP_K
        out = io.BytesIO()
        np.savez(
            out,
            counts=counts,
            rows=rows,
            bad=np.array(bad, dtype=np.int64),
            recomputed=np.array(0, dtype=np.int64),
        )
        data = b"PK\x03\x04 not an archive" if damaged else out.getvalue()
        hidden = self.folder / f".{name}.tmp"
        hidden.write_bytes(data)
        hidden.replace(self.folder / f"{name}.npz")


def _common(a: list[int], b: list[int]) -> int:
    size = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        size += 1
    return size


class _Handler(BaseHTTPRequestHandler):
    engine: FakeEngine
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        engine = self.engine
        if self.path == "/health":
            self._send(engine.health_code, {})
        elif self.path == "/status":
            self._send(engine.status_code, engine.status)
        elif self.path == "/v1/models" and self._allowed():
            model = {"id": "fake", "max_model_len": engine.max_model_len}
            self._send(200, {"object": "list", "data": [model]})
        else:
            self._send(401 if self.path == "/v1/models" else 404, {})

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with engine.lock:
            engine.requests.append((self.path, body))
            failing = engine.faults.failing_posts > 0
            engine.faults.failing_posts -= failing
        if failing:
            self._send(500, {"error": {"message": "engine dead"}})
        elif not self._allowed():
            self._send(401, {})
        elif self.path == "/tokenize":
            self._send(200, engine.tokenize(body))
        elif self.path == "/detokenize":
            self._send(200, engine.detokenize(body))
        elif self.path == "/v1/completions":
            self._send(*engine.complete(body))
        else:
            self._send(404, {})

    def _allowed(self) -> bool:
        key = self.engine.faults.key
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
