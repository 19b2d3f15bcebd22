"""What the tests of whole runs share: records, a RunSpec, credentials on disk, services."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rowmap_jobs.engine import Deadlines
from rowmap_jobs.formats.run import RunSpec
from rowmap_jobs.services import Services
from tests.jobs.fake_engine import END, TOKENIZER, FakeEngine, encode
from tests.jobs.s3_server import KEYS, S3Server

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
QUICK = Deadlines(
    poll=0.01, hook_grace=0.1, request=20.0, recover=0.2, counts=0.5, counts_poll=0.002
)
WORDS = "the quick brown fox jumps over a lazy dog while many small birds sing in tall trees"


def words(rng: random.Random, size: int) -> str:
    """About `size` characters of English-looking text."""
    pool = WORDS.split()
    out = ""
    while len(out) < size:
        out += rng.choice(pool) + " "
    return out.strip()


def chat(
    number: int,
    session: str | None = None,
    size: int = 120,
    history: list[dict[str, Any]] | None = None,
    finish: str = "stop",
    **over: Any,
) -> dict[str, Any]:
    """A chat record whose text the stand-in's template renders exactly."""
    rng = random.Random(number)
    messages = [*(history or []), {"role": "user", "content": words(rng, 40)}]
    answer = {"role": "assistant", "content": words(rng, size)}
    return {
        "v": 1,
        "id": f"r{number}",
        "session": session or f"s{number}",
        "created": (NOW - timedelta(hours=1, minutes=number)).isoformat(),
        "endpoint": "/v1/chat/completions",
        "request": {"model": "fake", "messages": messages},
        "response": {"choices": [{"message": answer, "finish_reason": finish}]},
        **over,
    }


def with_ids(record: dict[str, Any], engine: FakeEngine) -> dict[str, Any]:
    """The record with the ids that the stand-in's tokenizer gives, as a recorder stores them."""
    prompt = engine.render({"messages": record["request"]["messages"]})
    text = record["response"]["choices"][0]["message"]["content"]
    return {
        **record,
        "prompt_token_ids": prompt,
        "token_ids": [*encode(text), END],
        "tokenizer": TOKENIZER,
    }


def lines(records: list[Any]) -> bytes:
    return b"".join(
        (r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records
    )


@dataclass
class World:
    """A bucket with transcripts below `<root>t/` and the store below `<root>store/`."""

    s3: S3Server
    engine: FakeEngine
    folder: Path
    bucket: str
    root: str
    created: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("store", "transcripts"):
            self.credentials(name, "rw")

    def credentials(self, name: str, who: str) -> None:
        """Mount an identity's Secret."""
        folder = self.folder / "creds" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "AWS_ACCESS_KEY_ID").write_text(KEYS[who][0] + "\n")
        (folder / "AWS_SECRET_ACCESS_KEY").write_text(KEYS[who][1])

    def record(self, records: list[Any], name: str = "a.jsonl") -> None:
        """Upload transcripts, compressed when the name says so."""
        body = lines(records)
        self.put(f"t/{name}", gzip.compress(body) if name.endswith(".gz") else body)

    @property
    def store(self) -> str:
        """The store's prefix."""
        return f"{self.root}store/"

    def put(self, key: str, body: bytes) -> None:
        self.s3.put(self.bucket, self.root + key.removeprefix(self.root), body)

    def get(self, key: str) -> bytes:
        return self.s3.get(self.bucket, self.root + key.removeprefix(self.root))

    def keys(self, prefix: str) -> list[str]:
        return self.s3.keys(self.bucket, self.root + prefix)

    def location(self, prefix: str, **over: Any) -> dict[str, Any]:
        return {
            "bucket": self.bucket,
            "prefix": self.root + prefix,
            "endpointURL": self.s3.url,
            "credentialsSecretRef": {"name": "s3"},
            **over,
        }

    def wire(self, **over: Any) -> dict[str, Any]:
        """The RunSpec as the operator writes it."""
        return {
            "version": 1,
            "kind": "Profile",
            "namespace": "ns",
            "run": "lane.agent-1",
            "lane": "lane",
            "map": "lane.agent",
            "trafficClass": "agent",
            "store": self.location("store/"),
            "owner": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm", "uid": "u-1"},
            "transcripts": self.location("t/"),
            "windowSeconds": 7 * 86400,
            "minTranscripts": 2,
            "acceptance": {"minDecodeTokens": 100},
            "hotExpertsPerLayer": 8,
            "serverUrl": self.engine.url,
            "statusUrl": self.engine.url + "/status",
            "pendingSeconds": 5,
            **over,
        }

    def spec(self, **over: Any) -> RunSpec:
        return RunSpec.from_wire(self.wire(**over), "spec")

    def services(self, **over: Any) -> Services:
        def create(manifest: dict[str, Any]) -> bool:
            self.created.append(manifest)
            return True

        values: dict[str, Any] = {
            "s3_dir": self.folder / "creds",
            "counts_dir": self.engine.folder,
            "now": lambda: NOW,
            "create": create,
            "deadlines": QUICK,
        }
        return Services(**{**values, **over})
