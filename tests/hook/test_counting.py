"""Forced counting is what real decode would have counted, and a profile leaves the lane as it was.

Boots of `vllm serve` one after the other: fp32 in count mode; then a bf16 lane that serves with an
empty compile cache, the operator's copy of it in count mode, and the lane once more; among the long
tests a lane with AOT artifacts and its copy.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expertmaps_hook_model as hook_model
import pytest

from expertmaps_operator.build.engine_copy import VOLUME_CACHE
from rowmap_jobs.assemble import Facts
from rowmap_jobs.engine import plain
from rowmap_jobs.evaluation.support import border_mask
from rowmap_jobs.formats import names
from rowmap_jobs.formats.rowmap import Fingerprint, Geometry, RowMap
from rowmap_jobs.formats.status import HookStatus
from rowmap_jobs.placement import hot_mask, place
from rowmap_jobs.replay import Replayed
from rowmap_jobs.sequences import Turn
from tests.hook import counting, serving
from tests.hook.serving import Server

pytestmark = [pytest.mark.hook, pytest.mark.full]

EACH = 16
"""Sessions of a class that are decoded: about 8,900 decode tokens, more than a map must have."""
SHARING, PREFIX = 8, 320
"""Transcripts with one system prompt, and its tokens."""
ONE_PROCESS = ("--distributed-executor-backend", "uni")
FP32 = ("--dtype", "float32", "--enforce-eager")

BUFFER = b"device_buffer"
"""The buffer that the capture writes to."""
CAPTURE = (BUFFER, b"routed_experts_capturer", b"capture_fn")
"""What a compiled graph with the capture is made of: the buffer, the module, the call."""
STORE = b"_copy__"
"""In the name of a generated kernel: it writes into a buffer that is not its own (aten.copy_)."""


@dataclass(frozen=True)
class Counted:
    """What was decoded and counted beside one engine."""

    live: counting.Decoded
    forced: Replayed
    geometry: Geometry
    status: HookStatus


@dataclass(frozen=True)
class Shared:
    """Transcripts with one long prefix, counted with and without a salt."""

    turns: list[Turn]
    salted: tuple[Replayed, Facts]
    bare: tuple[Replayed, Facts]
    fed: list[int]
    salted_rows: list[int]
    bare_rows: list[int]
    """Rows of transcripts with another prefix: fed, and counted whatever they should be."""


@dataclass(frozen=True)
class Served:
    """One boot of the lane: answers, status, and the cache folder's files when it had ended."""

    answers: list[dict[str, Any]]
    status: HookStatus
    files: dict[str, str]


@dataclass(frozen=True)
class Lane:
    """The lane before and after a profile, and the profile."""

    cache: Path
    map: RowMap
    first: Served
    counted: Counted
    shared: Shared
    foreign: tuple[counting.Decoded, Replayed]
    """What fp32 decoded, counted by force in bf16."""
    copy_cache: Path
    after_count: dict[str, str]
    second: Served


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("counting")


def counted(server: Server) -> tuple[counting.Runner, Counted]:
    runner = counting.Runner(server)
    live = runner.decode(counting.sessions(EACH))
    forced = runner.forced(live.turns)
    return runner, Counted(live, forced, runner.bench.geometry, server.status())


@pytest.fixture(scope="module")
def fp32(work: Path) -> Counted:
    owner = serving.lane()
    container = serving.counting(serving.lane_container(*ONE_PROCESS, *FP32), owner)
    with Server(work / "fp32", container, owner, {serving.LANE_CACHE: work / "none"}) as server:
        return counted(server)[1]


def map_of(found: Counted) -> RowMap:
    """The map of fp32 counts for the same checkpoint in its own bf16."""
    config = {"w13_weight": [32, 192, 192], "w2_weight": [32, 192, 96]}
    shapes = {
        layer: [[name, shape, "bfloat16"] for name, shape in config.items()]
        for layer in found.geometry.moe_layers
    }
    assert found.status.fingerprint is not None and isinstance(found.geometry.row_bytes, int)
    print_ = Fingerprint(
        shape=hook_model.shape_digest(shapes),
        router=found.status.fingerprint.router,
        quant="bf16",
        tokenizer=found.status.fingerprint.tokenizer,
    )
    geometry = found.geometry.model_copy(update={"row_bytes": found.geometry.row_bytes // 2})
    return place(found.live.decode.sum(axis=0), print_, geometry)


def files(folder: Path) -> dict[str, str]:
    """sha256 of every file below a folder; none is left out."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def ask(server: Server) -> list[dict[str, Any]]:
    """Greedy answers to recorded prompts, one at a time, with all that is said about them."""
    answers = []
    for index, records in enumerate(counting.sessions(4)):
        body = {
            **plain("moe", records[0]["prompt_token_ids"], f"salt-{index}"),
            **counting.SAMPLING,
            "max_tokens": 32,
            "logprobs": 5,
            "prompt_logprobs": 1,
        }
        answers.append(server.engine.complete(body))
    return answers


def serve(folder: Path, rows: RowMap, cache: Path, aot: bool = False) -> Served:
    """Boot the lane with its map and its cache folder, ask it some prompts, end it."""
    (folder / names.VOLUME_MAP).mkdir(parents=True)
    (folder / names.VOLUME_MAP / names.MAP_FILE).write_bytes(rows.to_bytes())
    owner = serving.lane()
    container = serving.serving(serving.lane_container(*ONE_PROCESS, aot=aot), owner)
    volumes = {names.VOLUME_MAP: folder / names.VOLUME_MAP, serving.LANE_CACHE: cache}
    with Server(folder, container, owner, volumes) as server:
        answers, status = ask(server), server.status()
    return Served(answers, status, files(cache))


def share(runner: counting.Runner) -> Shared:
    turns, other = (counting.sharing(SHARING, PREFIX, start) for start in (0, 50))
    fed = [len(turn.prompt) + len(turn.response) - 1 for turn in other]
    salted, bare = (runner.count(turns, salt) for salt in (True, False))
    salted_rows, bare_rows = (runner.rows(other, salt) for salt in (True, False))
    return Shared(turns, salted, bare, fed, salted_rows, bare_rows)


@pytest.fixture(scope="module")
def lane(work: Path, fp32: Counted) -> Lane:
    rows, cache = map_of(fp32), work / "lane"
    first = serve(work / "first", rows, cache)
    owner = serving.lane()
    container = serving.counting(serving.lane_container(*ONE_PROCESS), owner)
    with Server(work / "count", container, owner, {serving.LANE_CACHE: cache}) as server:
        runner, found = counted(server)
        shared = share(runner)
        foreign = (fp32.live, runner.forced(fp32.live.turns))
    after_count = files(cache)
    second = serve(work / "second", rows, cache)
    own = server.volumes[VOLUME_CACHE]
    return Lane(cache, rows, first, found, shared, foreign, own, after_count, second)


def selections(found: Counted) -> tuple[counting.I64, counting.I64]:
    """Decode selections int64[S,L,E]: live, forced."""
    return found.live.decode, counting.by_session(found.forced)


def check_whole(found: Counted) -> None:
    """Every turn that was decoded was counted by force too, none of them twice."""
    assert not found.forced.dropped
    turns = found.live.turns
    assert sum(sequence.turns for sequence in found.forced.sequences) == len(turns)
    # Some turns extend the one before and are fed as one sequence, and some do not.
    assert len(counting.sessions(EACH)) < len(found.forced.sequences) < len(turns)
    rows = sum(len(turn.response) - 1 for turn in turns)
    assert rows >= 8000
    layers, top_k = len(found.geometry.moe_layers), found.geometry.top_k
    assert found.live.decode.sum() == rows * layers * top_k
    assert found.status.counting is not None and found.status.counting.missed == 0


def test_in_fp32_forced_counts_are_those_of_real_decode(fp32: Counted) -> None:
    """The same responses give the same count for every expert of every layer: nothing moves."""
    check_whole(fp32)
    live, forced = selections(fp32)
    assert (forced == live).all()
    # Sequences of one turn: what the prompt chose is the same as well.
    turns = {lived.turn.id: lived.counts for one in fp32.live.sessions for lived in one}
    alone = [
        (turns[sequence.id].counts, counts.counts)
        for sequence, counts in zip(fp32.forced.sequences, fp32.forced.counts, strict=True)
        if sequence.turns == 1
    ]
    assert alone and all((one == other).all() for one, other in alone)


def test_in_bf16_at_most_half_a_percent_moves(lane: Lane) -> None:
    """Of the selections of real decode at most 0.5% are elsewhere in the forced count."""
    check_whole(lane.counted)
    live, forced = selections(lane.counted)
    share = counting.moved(forced, live)
    print(f"bf16: {share:.4%} of {live.sum()} selections moved")
    assert share <= 0.005


def check_border(live: counting.I64, forced: counting.I64, geometry: Geometry) -> int:
    """Experts on another side of the border are undecided ones; returns how many there are."""
    total = live.sum(axis=0)
    changed = hot_mask(total, geometry) != hot_mask(forced.sum(axis=0), geometry)
    assert not (changed & ~border_mask(total, geometry)).any()
    return int(changed.sum())


def test_in_bf16_only_undecided_rows_change_sides(lane: Lane) -> None:
    """An expert that is hot by one count and cold by the other (24 of 32 hot) has |z| < 2."""
    assert lane.counted.geometry.hot_rows == 24
    changed = check_border(*selections(lane.counted), lane.counted.geometry)
    print(f"bf16: {changed} rows change sides")


def test_numerics_that_differ_show_as_moved_selections(lane: Lane) -> None:
    """Responses decoded in fp32 and counted in bf16: the comparison sees what is not equal."""
    decoded, replayed = lane.foreign
    live, forced = decoded.decode, counting.by_session(replayed)
    share = counting.moved(forced, live)
    changed = check_border(live, forced, lane.counted.geometry)
    print(f"fp32 decode, bf16 count: {share:.4%} moved, {changed} rows change sides")
    assert 0 < share <= 0.01


def test_without_a_salt_rows_are_lost_and_the_runner_drops_them(lane: Lane) -> None:
    """A cached prefix is not fed again: the check of each transcript says so by name and number."""
    shared = lane.shared
    lost = [whole - rows for whole, rows in zip(shared.fed, shared.bare_rows, strict=True)]
    print(f"without a salt {sum(shared.bare_rows)} of {sum(shared.fed)} rows are counted")
    assert lost[0] == 0 and all(rows > 0 for rows in lost[1:])
    # Only whoever comes first finds nothing cached; a second try of the others does not help.
    replayed, facts = shared.bare
    assert facts.skipped == Counter(RowsLost=SHARING - 1)
    assert replayed.retried == SHARING - 1
    assert len(replayed.sequences) == 1
    assert replayed.counts[0].rows.sum() == len(replayed.sequences[0].tokens)


def test_with_a_salt_no_row_is_lost(lane: Lane) -> None:
    """The same transcripts with the runner's own salt: all are counted, at the first try."""
    assert lane.shared.salted_rows == lane.shared.fed
    replayed, facts = lane.shared.salted
    assert not facts.skipped and not replayed.retried
    assert {sequence.id for sequence in replayed.sequences} == {t.id for t in lane.shared.turns}
    assert facts.trick_check is not None
    assert facts.trick_check["moved"] <= 0.005 * facts.trick_check["selections"]


def test_a_profile_writes_nothing_to_the_compile_caches_of_the_lane(lane: Lane) -> None:
    """Every file below the lane's cache folder has the same bytes after a count boot."""
    first = lane.first.files
    assert lane.first.status.compile is not None and lane.first.status.compile.hit is False
    assert any(name.startswith("inductor/fxgraph/") for name in first)
    assert any(name.startswith("vllm/") for name in first)
    assert lane.after_count == first
    # In the lane's folder the copy would have left new files: it left them in its own.
    assert lane.counted.status.compile is not None and lane.counted.status.compile.hit is False
    assert set(files(lane.copy_cache)) - set(first)


def test_serving_after_a_profile_is_what_it_was(lane: Lane) -> None:
    """The same map, the same tokens and log-probabilities, and nothing is compiled anew."""
    first, second = lane.first, lane.second
    for found in (first.status, second.status):
        assert (found.phase, found.generation, found.error) == ("Serving", 1, None)
        assert found.map_digest == lane.map.digest
    assert second.status.compile is not None
    assert second.status.compile.hit is True and second.status.compile.cache_misses == 0
    assert second.files == first.files
    for before, after in zip(first.answers, second.answers, strict=True):
        assert len(before["token_ids"]) > 1 and before["logprobs"] and before["prompt_logprobs"]
        assert after == before


def artifacts(folder: Path) -> dict[str, bytes]:
    """The files that inductor left: generated code, compiled graphs, their pickles."""
    root = folder / "inductor"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "locks" not in path.parts
    }


def test_no_artifact_of_the_lane_contains_the_capture(lane: Lane) -> None:
    """The compiler traces the capture into the copy's graphs and code, and only there."""
    own, copied = artifacts(lane.cache), artifacts(lane.copy_cache)
    for name in CAPTURE:
        assert not [path for path, data in own.items() if name in data], name
        assert [path for path, data in copied.items() if name in data], name
    for graphs in ("fxgraph/", "aotautograd/"):
        assert any(path.startswith(graphs) for path in own)
    code, copied_code = (
        [data for path, data in one.items() if path.endswith(".py")] for one in (own, copied)
    )
    assert code and not any(STORE in data for data in code)
    assert any(STORE in data for data in copied_code)


def test_a_profile_leaves_aot_artifacts_alone(work: Path, fp32: Counted) -> None:
    """With vLLM's AOT artifacts too: no byte of them changes, and none knows the capture."""
    cache = work / "aot-lane"
    served = serve(work / "aot-first", map_of(fp32), cache, aot=True)
    assert served.status.compile is not None and served.status.compile.aot_compiled == 1
    owner = serving.lane()
    container = serving.counting(serving.lane_container(*ONE_PROCESS, aot=True), owner)
    with Server(work / "aot-count", container, owner, {serving.LANE_CACHE: cache}) as server:
        ask(server)
        found = server.status()
    assert found.compile is not None and found.compile.aot_compiled == 1
    assert found.counting is not None and found.counting.decode_rows > 0
    assert files(cache) == served.files
    own, copied = (
        {path.name for path in folder.rglob("*") if path.is_file() and BUFFER in path.read_bytes()}
        for folder in (cache, server.volumes[VOLUME_CACHE])
    )
    assert any(name.endswith("/rank_0_0/model") for name in served.files)
    assert not own and "model" in copied
