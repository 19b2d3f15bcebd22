"""The recorded traffic of a class as objects of a bucket, with dates that have not aged out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODEL = HERE / "moe"
CLASSES = ("code", "prose")
NEWEST_AGE = timedelta(hours=1)


def files(cls: str, part: str = "transcripts") -> list[Path]:
    """The committed files of a class; `part` is transcripts or heldout."""
    found = [p for p in (HERE / part / cls).iterdir() if p.name.endswith((".jsonl", ".jsonl.gz"))]
    return sorted(found)


def parse(name: str, content: bytes) -> list[dict[str, Any]]:
    """The lines of one file or object."""
    if name.endswith(".gz"):
        content = gzip.decompress(content)
    return [json.loads(line) for line in content.decode().split("\n") if line]


def _read(path: Path) -> list[dict[str, Any]]:
    return parse(path.name, path.read_bytes())


def records(cls: str, part: str = "transcripts") -> Iterator[dict[str, Any]]:
    """Every line of a class, as committed."""
    for path in files(cls, part):
        yield from _read(path)


def created(record: dict[str, Any]) -> datetime | None:
    """When a record was made, as far as it says so."""
    if "created" in record:
        return datetime.fromisoformat(record["created"])
    response = record.get("response") or {}
    if "created" in response:
        return datetime.fromtimestamp(response["created"], UTC)
    return None


def _shifted(record: dict[str, Any], by: timedelta) -> dict[str, Any]:
    out = dict(record)
    if "created" in out:
        moment = datetime.fromisoformat(out["created"]) + by
        out["created"] = moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if out.get("response"):
        seconds = out["response"]["created"] + int(by.total_seconds())
        out["response"] = {**out["response"], "created": seconds}
    return out


def encode(lines_of_file: list[dict[str, Any]], compress: bool) -> bytes:
    """JSON lines; the compressed form is the same for the same lines."""
    text = "".join(
        json.dumps(r, ensure_ascii=False, separators=(",", ":")) + "\n" for r in lines_of_file
    )
    return gzip.compress(text.encode(), mtime=0) if compress else text.encode()


def lines(cls: str, now: datetime, part: str = "transcripts") -> list[tuple[str, bytes]]:
    """(object key, content) of every file, the newest record one hour older than `now`."""
    content = {path: _read(path) for path in files(cls, part)}
    dates = [d for found in content.values() for r in found if (d := created(r)) is not None]
    whole = now.astimezone(UTC).replace(microsecond=0)
    by = whole - NEWEST_AGE - max(dates)
    return [
        (f"{cls}/{path.name}", encode([_shifted(r, by) for r in found], path.suffix == ".gz"))
        for path, found in content.items()
    ]
