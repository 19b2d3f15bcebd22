"""Recorded traffic of the demo model, really decoded by a server and counted by the runner.

What the server decodes here is counted while it does so (live) and is then traffic that was
recorded: the runner's own code feeds prompt and response as one prompt (forced).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowmap_jobs import profile
from rowmap_jobs.assemble import Facts
from rowmap_jobs.counts import Counts
from rowmap_jobs.edges import http
from rowmap_jobs.engine import Engine, forced, plain
from rowmap_jobs.formats import names
from rowmap_jobs.formats.census import DECODE
from rowmap_jobs.formats.run import RunSpec
from rowmap_jobs.ids import TOKENS
from rowmap_jobs.profile import Bench
from rowmap_jobs.replay import ForcedCounter, Replayed, fresh_id, in_parallel, replay
from rowmap_jobs.sequences import Turn, build
from rowmap_jobs.services import Services
from tests.hook.serving import Server
from tests.model import fixture

I64 = npt.NDArray[np.int64]
Records = list[dict[str, Any]]

# Without a penalty the demo model runs in circles.
SAMPLING = {"temperature": 0, "repetition_penalty": 1.3, "return_token_ids": True}
HOT = 24


@dataclass(frozen=True)
class Lived:
    """One turn that a server decoded, with the counts of that decode."""

    turn: Turn
    counts: Counts


@dataclass(frozen=True)
class Decoded:
    """Sessions that were really decoded, and how long all of it took."""

    sessions: list[list[Lived]]
    seconds: float

    @property
    def turns(self) -> list[Turn]:
        return [lived.turn for session in self.sessions for lived in session]

    @property
    def decode(self) -> I64:
        """Decode selections int64[S,L,E] of the live counts."""
        return np.stack([sum_of([lived.counts for lived in session]) for session in self.sessions])


def sum_of(counts: list[Counts]) -> I64:
    """Decode selections int64[L,E] of several counts."""
    return np.asarray(sum(one.counts[DECODE] for one in counts), np.int64)


def sessions(each: int) -> list[Records]:
    """The first sessions of every class, turns in order of time."""
    out = []
    for cls in fixture.CLASSES:
        found: dict[str, Records] = {}
        whole = [r for r in fixture.records(cls) if r.get("token_ids")]
        for record in sorted(whole, key=lambda r: str(r["created"])):
            found.setdefault(record["session"], []).append(record)
        out += list(found.values())[:each]
    return out


def run_spec(server: Server, concurrency: int = 8) -> RunSpec:
    """A run of the runner beside this server."""
    wire = {
        "version": 1,
        "kind": "Profile",
        "namespace": "ns",
        "run": "lane.mixed-1",
        "lane": "lane",
        "map": "lane.mixed",
        "trafficClass": "mixed",
        "store": {"bucket": "expertmaps"},
        "owner": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "vllm", "uid": "u"},
        "replay": {"concurrency": concurrency},
        "hotExpertsPerLayer": HOT,
        "serverUrl": server.url,
        "statusUrl": server.status_url,
    }
    return RunSpec.from_wire(wire, "spec")


def services(server: Server) -> Services:
    """The runner's surroundings: the count files are where the engine's container writes them."""
    folder = server.volumes[names.VOLUME_RUN] / names.COUNTS_DIR
    return Services(s3_dir=Path("/nowhere"), counts_dir=folder)


class Runner:
    """The runner beside a server in count mode."""

    def __init__(self, server: Server, concurrency: int = 8) -> None:
        self.spec, self.services = run_spec(server, concurrency), services(server)
        self.bench: Bench = profile.prepare(self.spec, self.services)

    def counter(self, salted: bool = True) -> ForcedCounter:
        """Feeds single sequences; without a salt as if the runner knew of none."""
        engine, folder = self.bench.engine, self.services.counts_dir
        if not salted:
            engine = Engine(engine.server_url, engine.status_url, send=_unsalted)
        return ForcedCounter(engine, self.bench.ready.model.name, folder, self.bench.shape)

    def count(self, turns: list[Turn], salted: bool = True) -> tuple[Replayed, Facts]:
        """What the runner counts of recorded turns, and what it tells about them."""
        bench = dataclasses.replace(self.bench, engine=self.counter(salted).engine)
        facts = Facts((0, 1), considered=len(turns))
        return profile.count(self.spec, self.services, bench, turns, facts), facts

    def rows(self, turns: list[Turn], salted: bool) -> list[int]:
        """Rows that the hook counts of each turn, whatever they should be."""
        counter, out = self.counter(salted), []
        for turn in turns:
            fed, name = [*turn.prompt, *turn.response[:-1]], fresh_id()
            segments = [len(turn.prompt), len(fed)]
            counter.engine.complete(forced(counter.model, fed, name, fresh_id(), segments))
            counts = counter.wait(name)
            assert not isinstance(counts, str), counts
            out.append(int(counts.rows.sum()))
        return out

    def forced(self, turns: list[Turn]) -> Replayed:
        """Forced counts of recorded turns, without the runner's checks on a sample."""
        rules, longest = self.spec.replay, self.bench.ready.model.max_model_len
        found, dropped = build(turns, longest, rules.max_response_tokens, rules.seed)
        assert not dropped, dropped
        return replay(self.counter(), found, self.bench.workers)

    def decode(self, recorded: list[Records]) -> Decoded:
        """Really decode the prompts of sessions, as many tokens as were recorded, and count."""
        start = time.monotonic()
        items = list(enumerate(recorded))
        done = in_parallel(lambda item: self._session(*item), items, self.bench.workers)
        return Decoded(done, time.monotonic() - start)

    def _session(self, index: int, records: Records) -> list[Lived]:
        """Turns that extended the one before extend what is said now."""
        out: list[Lived] = []
        for number, record in enumerate(records):
            prompt = record["prompt_token_ids"]
            if out:
                before = records[number - 1]
                said = before["prompt_token_ids"] + before["token_ids"]
                if prompt[: len(said)] == said:
                    turn = out[-1].turn
                    prompt = [*turn.prompt, *turn.response, *prompt[len(said) :]]
            out.append(self._turn(index, number, prompt, len(record["token_ids"])))
        return out

    def _turn(self, session: int, number: int, prompt: list[int], tokens: int) -> Lived:
        counter, name = self.counter(), fresh_id()
        choice = counter.engine.complete(
            {
                **plain(counter.model, prompt, fresh_id()),
                **SAMPLING,
                "max_tokens": tokens,
                "vllm_xargs": {names.XARG_TRANSCRIPT: name},
            }
        )
        counts = counter.wait(name)
        assert not isinstance(counts, str), counts
        ids = choice["token_ids"]
        # The last generated token is never fed, whether it ends the turn or not.
        assert counts.rows.tolist() == [len(prompt), len(ids) - 1]
        key = hashlib.sha256(f"{session}/{number}".encode()).digest()
        return Lived(Turn(key, session, prompt, ids, TOKENS, number), counts)


def by_session(replayed: Replayed) -> I64:
    """Decode selections int64[S,L,E] of what the runner counted."""
    found: dict[int, list[Counts]] = {}
    for sequence, counts in zip(replayed.sequences, replayed.counts, strict=True):
        found.setdefault(sequence.session, []).append(counts)
    return np.stack([sum_of(found[session]) for session in sorted(found)])


def moved(left: I64, right: I64) -> float:
    """Share of selections that are elsewhere, session by session: nothing cancels."""
    assert left.sum() == right.sum()
    return float(np.abs(left - right).sum() / 2 / right.sum())


def _unsalted(url: str, body: dict[str, Any] | None, key: str | None, timeout: float) -> Any:
    """The runner's HTTP, as if it knew nothing of `cache_salt`."""
    if body is not None:
        body = {name: value for name, value in body.items() if name != "cache_salt"}
    return http.request(url, body, key, timeout)


def sharing(size: int, prefix: int, start: int = 0) -> list[Turn]:
    """Recorded turns of as many sessions that begin with one long system prompt.

    Another `start` gives another system prompt, which no earlier request has left in a cache.
    """
    taken = sessions(size)
    longest = max((r["prompt_token_ids"] for records in taken for r in records), key=len)
    whole = [records[0] for records in taken]
    assert len(longest) >= start + prefix
    return [
        Turn(
            hashlib.sha256(f"shared/{index}".encode()).digest(),
            index,
            longest[start : start + prefix] + record["prompt_token_ids"][:64],
            record["token_ids"][:64],
            TOKENS,
            index,
        )
        for index, record in enumerate(whole[:size])
    ]
