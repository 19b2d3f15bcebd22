"""Make the recorded traffic: prompts from unseen documents, answers by the model itself."""

from __future__ import annotations

import argparse
import hashlib
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from tests.model.corpus import load, turns
from tests.model.fixture import CLASSES, HERE, MODEL, encode

SOURCES = {"code": "code", "prose": "german"}
FIRST = datetime(2026, 1, 5, 8, tzinfo=UTC)
TEMPERATURE = 0.8
EXTRA = 16
TURN_TOKENS = (384, 256, 256)
LEAST_EXTENDED = 24
IDS = {"prompt_token_ids", "token_ids", "tokenizer"}

Message = dict[str, str]
Record = dict[str, Any]


@dataclass
class Answer:
    """One sampled completion of one prompt."""

    prompt_ids: list[int]
    ids: list[int]
    finish: str
    max_tokens: int


@dataclass
class Session:
    """One user: the turns still to be sent and what was said so far."""

    name: str
    start: datetime
    users: list[str]
    kind: str = "chat"  # chat, extends, edits, completion
    history: list[Message] = field(default_factory=list)
    answers: list[tuple[dict[str, Any], Answer]] = field(default_factory=list)


class Server:
    """The model behind an OpenAI-shaped interface."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.engine = LLM(str(model), enforce_eager=True, max_model_len=4096, max_num_seqs=32)
        digest = hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()
        self.tokenizer_hash = f"sha256:{digest}"

    def ids(self, prompt: str | list[Message]) -> list[int]:
        if not isinstance(prompt, str):
            prompt = self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=False
            )
        return list(self.tokenizer(prompt)["input_ids"])

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def answer(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """Sample one answer for each prompt; a finished one ends in the end-of-turn id."""
        end = self.tokenizer.eos_token_id
        sampling = SamplingParams(
            temperature=TEMPERATURE,
            max_tokens=max_tokens,
            logit_bias={self.tokenizer.pad_token_id: -100.0},
        )
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = []
        for prompt, output in zip(prompts, self.engine.generate(tokens, sampling), strict=True):
            generated = list(output.outputs[0].token_ids)
            finish = "stop" if generated[-1] == end else "length"
            answers.append(Answer(prompt, generated, finish, max_tokens))
        return answers

    def cut_to_exact(self, answer: Answer) -> Answer:
        """The longest start of the answer whose text has the same tokens, as if cut there."""
        end = self.tokenizer.eos_token_id
        body = answer.ids[:-1] if answer.finish == "stop" else answer.ids
        if self.ids(self.text(body)) == body:
            return answer
        for size in range(len(body) - 1, LEAST_EXTENDED, -1):
            if end not in body[:size] and self.ids(self.text(body[:size])) == body[:size]:
                return Answer(answer.prompt_ids, body[:size], "length", size)
        return answer


def new_sessions(cls: str, part: str, count: int, seed: int) -> list[Session]:
    """Sessions from documents of one part of the corpus, of every kind."""
    documents = load(SOURCES[cls], 0).part(part)
    out: list[Session] = []
    kinds = ["chat", "chat", "extends", "chat", "edits", "chat", "chat", "completion"]
    rng = random.Random(f"{seed}/{cls}/{part}")
    while len(out) < count:
        number = len(out)
        kind = kinds[number % len(kinds)]
        several = kind in {"extends", "edits"}
        conversation = turns(rng.choice(documents), rng, most=3 if several else 1)
        if several and len(conversation) < 2:
            continue
        if not conversation:
            continue
        start = FIRST + timedelta(minutes=9 * number, seconds=rng.randrange(60))
        name = f"{cls}-{part}-{number:03d}"
        out.append(Session(name, start, [t.user for t in conversation], kind))
    return out


def next_request(session: Session) -> dict[str, Any] | None:
    turn = len(session.answers)
    if turn >= len(session.users):
        return None
    if session.kind == "completion":
        return {"prompt": session.users[turn] + "\n"}
    session.history.append({"role": "user", "content": session.users[turn]})
    return {"messages": list(session.history)}


def remember(session: Session, server: Server, answer: Answer) -> None:
    """Put the answer into the history, as it was or as a client edits it."""
    text = server.text(answer.ids)
    if session.kind == "edits":
        kept = text.split("\n")
        text = "\n".join(kept[: max(1, len(kept) // 2)]).strip() + " [...]"
    session.history.append({"role": "assistant", "content": text})


def run(server: Server, sessions: list[Session]) -> None:
    """Serve every turn of the sessions, a batch of requests at a time."""
    rounds = max(len(s.users) for s in sessions)
    for number in range(rounds):
        asked = [(s, r) for s in sessions if (r := next_request(s)) is not None]
        if not asked:
            continue
        max_tokens = TURN_TOKENS[number]
        prompts = [server.ids(r.get("messages") or r["prompt"]) for _, r in asked]
        found = server.answer(prompts, max_tokens)
        for (session, request), answer in zip(asked, found, strict=True):
            if session.kind == "extends":
                answer = server.cut_to_exact(answer)
            session.answers.append((request, answer))
            remember(session, server, answer)


def record(server: Server, session: Session, turn: int) -> Record:
    request, answer = session.answers[turn]
    created = session.start + timedelta(minutes=2 * turn)
    chat = "messages" in request
    key = hashlib.sha256(f"{session.name}/{turn}".encode()).hexdigest()[:24]
    text = server.text(answer.ids)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": answer.finish}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    usage = {"prompt_tokens": len(answer.prompt_ids), "completion_tokens": len(answer.ids)}
    return {
        "v": 1,
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{key}",
        "session": session.name,
        "created": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "endpoint": "/v1/chat/completions" if chat else "/v1/completions",
        "request": {
            "model": "moe",
            **request,
            "max_tokens": answer.max_tokens,
            "temperature": TEMPERATURE,
        },
        "response": {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{key}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(created.timestamp()),
            "model": "moe",
            "choices": [choice],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        },
        "prompt_token_ids": answer.prompt_ids,
        "token_ids": answer.ids,
        "tokenizer": server.tokenizer_hash,
        "model": "moe",
        "finish_reason": answer.finish,
    }


def without_ids(full: Record) -> Record:
    return {k: v for k, v in full.items() if k not in IDS}


def unanswered(full: Record, with_prompt_ids: bool) -> Record:
    out = without_ids(full) | {"response": None, "finish_reason": None}
    if with_prompt_ids:
        out |= {"prompt_token_ids": full["prompt_token_ids"], "tokenizer": full["tokenizer"]}
    return out


def write(folder: Path, found: list[Record], parts: int) -> None:
    """Records in the order of time over `parts` files, every second one compressed."""
    found.sort(key=lambda r: (r["created"], r["id"]))
    size = -(-len(found) // parts)
    for number in range(parts):
        compress = number % 2 == 1
        name = f"part-{number:02d}.jsonl" + (".gz" if compress else "")
        (folder / name).write_bytes(encode(found[number * size : (number + 1) * size], compress))


def incomplete(server: Server, sessions: list[Session]) -> tuple[list[Record], list[Record]]:
    """Records that lack something, and bare pairs of request and response."""
    chats = [record(server, s, 0) for s in sessions if s.kind == "chat"]
    plain = [record(server, s, 0) for s in sessions if s.kind == "completion"]
    found = [without_ids(r) for r in (*chats[:4], *plain[:1])]
    found += [unanswered(r, number == 0) for number, r in enumerate(chats[4:7])]
    return found, [{k: r[k] for k in ("request", "response")} for r in chats[7:9]]


def make(server: Server, cls: str, part: str, count: int, seed: int, out: Path) -> None:
    """Serve `count` sessions, and for the transcripts a few whose records are incomplete."""
    extra = EXTRA if part == "transcripts" else 0
    sessions = new_sessions(cls, part, count + extra, seed)
    run(server, sessions)
    found = [record(server, s, t) for s in sessions[:count] for t in range(len(s.answers))]
    tokens = sum(len(r["token_ids"]) for r in found)
    print(f"{part} {cls}: {count} sessions, {tokens} generated tokens", flush=True)
    folder = out / part / cls
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    if extra:
        lacking, bare = incomplete(server, sessions[count:])
        found += lacking
        (folder / "bare.jsonl").write_bytes(encode(bare, False))
    write(folder, found, 4 if extra else 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--sessions", type=int, default=64, help="transcripts of a class")
    parser.add_argument("--heldout", type=int, default=16, help="held-out sessions of a class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--class", dest="classes", choices=CLASSES, action="append")
    args = parser.parse_args()
    server = Server(args.model)
    for cls in args.classes or CLASSES:
        make(server, cls, "transcripts", args.sessions, args.seed, args.out)
        make(server, cls, "heldout", args.heldout, args.seed + 10_000, args.out)


if __name__ == "__main__":
    main()
