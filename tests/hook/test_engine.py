"""The hook in real vLLM: counts, bit-identical serving, refusals, cache hits.

Each group of runs is one process of the engine's Python; only one vLLM runs at a time on a
machine.
"""

from __future__ import annotations

import inspect
import json
import json.decoder
import os
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import layout
import numpy as np
import pytest

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats import status as contract
from rowmap_jobs.hook import manifest

pytestmark = [pytest.mark.hook, pytest.mark.engine]

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
HERE = Path(__file__).parent
MODEL = HERE.parent / "model" / "moe"
PORT = 9488
SOURCE = inspect.getsource(textwrap) + inspect.getsource(json.decoder)
TEXTS = [
    SOURCE[start : start + 40 + 11 * index] for index, start in enumerate(range(0, 14000, 700))
]
ANSWERS = {
    "texts": TEXTS,
    "params": {"max_tokens": 48, "logprobs": 3, "temperature": 1.0, "seed": 11},
}
ALONE = {**ANSWERS, "salt": "c1", "concurrency": 1}
BY_FOUR = {**ANSWERS, "salt": "c4", "concurrency": 4}
# vLLM's own seeded sampling does not work on a CPU with chunked prefill.
GREEDY = {"texts": TEXTS, "params": {"max_tokens": 48}}
TIGHT = {
    "max_num_batched_tokens": 32, "enable_chunked_prefill": True, "num_gpu_blocks_override": 10,
    "max_model_len": 160, "block_size": 32,
}  # fmt: skip


def run(
    folder: Path, runs: list[dict[str, Any]], before: tuple[str, ...] = (), **env: str
) -> dict[str, Any]:
    """Run engines one after the other in one process; results by name."""
    folder.mkdir(parents=True)
    mount = folder / "mount"
    mount.mkdir()
    layout.mount(mount)
    for item in runs:
        item.setdefault("model", str(MODEL))
        item["env"] = {
            "EXPERTMAPS_DIR": str(folder / item["name"]),
            "EXPERTMAPS_STATUS_PORT": str(PORT),
            **item["env"],
        }
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"out": str(folder / "out.json"), "runs": runs}))
    done = subprocess.run(
        ["flock", "/tmp/vllm.lock", *before, PYTHON, str(HERE / "engine.py"), str(plan)],
        env={**os.environ, "PYTHONPATH": str(mount), "EXPERTMAPS_MODE": "off", **env},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    (folder / "log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads((folder / "out.json").read_text())
    failed = {name: item["failed"] for name, item in results.items() if "failed" in item}
    assert not failed, failed
    return results


def status_of(result: dict[str, Any], place: str = "status") -> contract.HookStatus:
    return contract.HookStatus.from_wire(result[place], place)


def rows_of(result: dict[str, Any]) -> list[list[int]]:
    """Prefill and decode rows of each transcript: the last generated id is never fed."""
    return [[len(ids), 47] for ids in result["plain"]["prompts"]]


def counts_of(folder: Path, prefix: str) -> list[dict[str, Any]]:
    found = []
    for index in range(len(TEXTS)):
        with np.load(folder / "transcripts" / f"{prefix}{index}.npz", allow_pickle=False) as file:
            found.append({name: file[name] for name in file.files})
    return found


def table(found: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    return np.stack([item["counts"] for item in found])


def moved(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> float:
    """Share of selections that differ."""
    assert left.sum() == right.sum()
    return float(np.abs(left - right).sum() / 2 / right.sum())


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def counted(work: Path) -> dict[str, Any]:
    """One process: un-hooked, counted in bfloat16 and float32, with chunks, preemption, 2 slots."""
    count = {"EXPERTMAPS_MODE": "count"}
    live = [{"expertmaps_t": f"live{index}"} for index in range(len(TEXTS))]
    return run(
        work / "counted",
        [
            {"name": "plain", "env": {}, "generate": [ANSWERS, ALONE, BY_FOUR]},
            {
                "name": "count",
                "env": count,
                "kwargs": {"block_size": 32},
                "generate": [
                    {"forced": "t", "salt": "a"},
                    {"forced": "u"},
                    {"forced": "v"},
                    {**ANSWERS, "salt": "b", "tags": live},
                    {
                        "texts": TEXTS[:1],
                        "params": {"n": 2, "temperature": 0.5},
                        "tags": [live[0]],
                    },
                ],
            },
            {
                "name": "fp32",
                "env": count,
                "kwargs": {"dtype": "float32"},
                "generate": [{"forced": "t", "salt": "a"}],
            },
            {
                "name": "tight",
                "env": count,
                "kwargs": TIGHT,
                "generate": [
                    {"forced": "t", "salt": "a"},
                    {**GREEDY, "salt": "b", "tags": live},
                    {"texts": TEXTS[:1]},
                ],
            },
            {
                "name": "slots",
                "env": {**count, "EXPERTMAPS_CAPTURE_SLOTS": "2"},
                "generate": [{"forced": "t", "salt": "a"}],
            },
        ],
    )


@pytest.fixture(scope="module")
def maps(work: Path, counted: dict[str, Any]) -> dict[str, rowmap.RowMap]:
    """A map from the counts, and another one with the layers' tables exchanged."""
    found = status_of(counted["count"])
    assert found.geometry is not None and found.fingerprint is not None
    decode = table(counts_of(work / "counted" / "count", "t"))[:, 1].sum(0)
    geometry = rowmap.Geometry(
        experts=found.geometry.experts, top_k=found.geometry.top_k, hot_rows=20,
        moe_layers=found.geometry.moe_layers, row_bytes=found.geometry.row_bytes,
    )  # fmt: skip
    made = {}
    for name, tables in (("a", decode), ("b", decode[::-1, ::-1])):
        order = np.argsort(-tables, kind="stable").tolist()
        layers = {
            layer: (order[index][:20], order[index][20:][::-1])
            for index, layer in enumerate(geometry.moe_layers)
        }
        made[name] = rowmap.build(found.fingerprint, geometry, layers)
        (work / f"{name}.json").write_bytes(made[name].to_bytes())
    assert made["a"].row_set_digest != made["b"].row_set_digest
    return made


def test_off_reports_and_changes_nothing(counted: dict[str, Any]) -> None:
    found = status_of(counted["plain"])
    assert (found.mode, found.phase, found.error) == ("off", "Serving", None)
    assert status_of(counted["plain"], "ready").phase == "Ready"
    assert found.hook_digest == manifest.digest()
    tokens = {token for answer in counted["plain"]["results"][0] for token in answer["ids"]}
    assert len(tokens) > 100


def test_counting_does_not_change_answers(counted: dict[str, Any]) -> None:
    assert counted["count"]["results"][3] == counted["plain"]["results"][0]


@pytest.mark.parametrize("name", ["count", "fp32", "tight"])
def test_forced_rows_are_right(counted: dict[str, Any], work: Path, name: str) -> None:
    found = counts_of(work / "counted" / name, "t")
    assert [item["rows"].tolist() for item in found] == rows_of(counted)
    assert all(int(item["bad"]) == 0 for item in found)
    for item in found:
        assert (item["counts"].sum(2) == item["rows"][:, None] * 4).all()
        assert (item["counts"] <= item["rows"][:, None, None]).all()
    counting = status_of(counted[name]).counting
    assert counting is not None and counting.missed == 0


def test_without_a_salt_rows_are_lost_and_it_shows(counted: dict[str, Any], work: Path) -> None:
    found = counts_of(work / "counted" / "count", "v")
    rows, expected = np.stack([item["rows"] for item in found]), np.asarray(rows_of(counted))
    assert rows.sum() < expected.sum()
    assert (rows != expected).any(1).sum() >= 10


def test_forced_counts_are_those_of_real_decode(counted: dict[str, Any], work: Path) -> None:
    forced = counts_of(work / "counted" / "count", "t")
    live = counts_of(work / "counted" / "count", "live")
    assert [item["rows"].tolist() for item in live] == rows_of(counted)
    assert moved(table(forced), table(live)) < 0.005


def test_chunks_and_preemption_count_each_row_once(counted: dict[str, Any], work: Path) -> None:
    counting = status_of(counted["tight"]).counting
    assert counting is not None and counting.recomputed_rows > 0
    forced = counts_of(work / "counted" / "tight", "t")
    live = counts_of(work / "counted" / "tight", "live")
    assert [item["rows"].tolist() for item in live] == rows_of(counted)
    assert sum(int(item["recomputed"]) for item in live) > 0
    assert moved(table(forced), table(counts_of(work / "counted" / "count", "t"))) < 0.01


def test_too_few_slots_are_told_at_once(counted: dict[str, Any], work: Path) -> None:
    folder = work / "counted" / "slots" / "transcripts"
    written = {path.stem for path in folder.glob("*.npz")}
    skipped = {path.stem: path.read_text().strip() for path in folder.glob("*.skip")}
    assert set(skipped.values()) == {"NoSlot"}
    assert written | set(skipped) == {f"t{index}" for index in range(len(TEXTS))}
    counting = status_of(counted["slots"]).counting
    assert counting is not None and counting.skipped == {"NoSlot": len(skipped)}


def test_parallel_samples_are_skipped(counted: dict[str, Any]) -> None:
    counting = status_of(counted["count"]).counting
    assert counting is not None and counting.skipped == {"ParallelSampling": 2}


@pytest.mark.parametrize(
    ("name", "dtype", "limit"), [("fp32", "float32", 0.0005), ("count", "bfloat16", 0.01)]
)
def test_counts_are_those_of_transformers(
    counted: dict[str, Any], work: Path, name: str, dtype: str, limit: float
) -> None:
    answers = counted["plain"]["results"][0]
    fed = [
        [ids + answer["ids"][:-1], len(ids)]
        for ids, answer in zip(counted["plain"]["prompts"], answers, strict=True)
    ]
    plan, out = work / f"recount-{dtype}.json", work / f"recount-{dtype}.npy"
    plan.write_text(json.dumps(fed))
    subprocess.run(
        [PYTHON, str(HERE / "recount.py"), str(MODEL), str(plan), str(out), dtype],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=900,
        check=True,
    )
    found = table(counts_of(work / "counted" / name, "t"))
    share = moved(found, np.load(out))
    print(f"{dtype}: {share:.4%} of {found.sum()} selections moved")
    assert share <= limit


REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "missing": ("MapMissing", {"env": {"EXPERTMAPS_MAP": "/nowhere/rowmap.json"}}),
    "invalid": ("MapInvalid", {"env": {"EXPERTMAPS_MAP": "{work}/invalid.json"}}),
    "other": ("FingerprintMismatch", {"env": {"EXPERTMAPS_MAP": "{work}/other.json"}}),
    "memory": ("ColdDirInMemory", {"env": {"EXPERTMAPS_COLD_DIR": "/dev/shm"}}),
    "lock": ("LockFailed", {"env": {"EXPERTMAPS_TIER": "mlock"}, "memlock": 65536}),
    "mode": ("SettingInvalid", {"env": {"EXPERTMAPS_MODE": "rowmap"}}),
}


@pytest.fixture(scope="module")
def served(work: Path, counted: dict[str, Any], maps: dict[str, rowmap.RowMap]) -> dict[str, Any]:
    """One process without IPC_LOCK: the overlay tier, and everything that is refused."""
    raw = (work / "a.json").read_bytes()
    (work / "invalid.json").write_bytes(raw.replace(b'"topK":4', b'"topK":5'))
    router = maps["a"].fingerprint.router
    (work / "other.json").write_bytes(raw.replace(router.encode(), b"sha256:" + b"0" * 64))
    serve = {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": f"{work}/a.json"}
    runs: list[dict[str, Any]] = [
        {
            "name": "overlay",
            "env": serve,
            "generate": [ANSWERS, ALONE, BY_FOUR],
            "rpc": "reload_weights",
        },
        {"name": "port", "env": serve, "generate": [ANSWERS], "occupy": PORT},
    ]
    for name, (_, change) in REFUSALS.items():
        env = {key: value.format(work=work) for key, value in change.get("env", {}).items()}
        runs.append({"name": name, **change, "env": {**serve, **env}, "generate": [ANSWERS]})
    drop = ("setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock")
    return run(work / "served", runs, drop)


@pytest.mark.parametrize("tier", ["overlay", "mlock"])
def test_served_answers_are_the_same_bits(
    counted: dict[str, Any],
    served: dict[str, Any],
    compiled: dict[str, Any],
    maps: dict[str, rowmap.RowMap],
    tier: str,
) -> None:
    result = {**served, **compiled}[tier]
    assert result["results"][0] == counted["plain"]["results"][0]
    found = status_of(result)
    assert (found.phase, found.error, found.generation) == ("Serving", None, 1)
    assert found.map_digest == maps["a"].digest
    assert found.row_set_digest == maps["a"].row_set_digest
    assert found.fingerprint == maps["a"].fingerprint
    residency = found.residency
    assert residency is not None and residency.tier == tier
    assert (residency.hot_rows, residency.cold_rows) == (80, 48)
    assert residency.move_bytes_per_second is not None and residency.move_bytes_per_second > 0
    (kernel,) = residency.kernels
    assert (kernel.name, kernel.layers) == ("CPUUnquantizedExperts", 4)
    assert kernel.ran_on == "x86-64 CPU"
    assert (residency.locked_bytes >= residency.hot_bytes) == (tier == "mlock")


def test_a_weight_reload_is_refused_by_name(served: dict[str, Any]) -> None:
    assert "WeightReloadUnsupported" in served["overlay"]["rpc"]


def test_a_taken_port_keeps_the_rows(counted: dict[str, Any], served: dict[str, Any]) -> None:
    found = status_of(served["port"])
    assert found.error is not None and found.error.reason == "StatusPortInUse"
    assert (found.phase, found.generation) == ("Serving", 1)
    assert served["port"]["results"][0] == counted["plain"]["results"][0]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_leaves_the_engine_serving(
    counted: dict[str, Any], served: dict[str, Any], name: str
) -> None:
    found = status_of(served[name])
    assert found.error is not None and found.error.reason == REFUSALS[name][0], found.error
    assert (found.phase, found.generation) == ("Failed", 0)
    assert found.map_digest is None and found.residency is None
    assert served[name]["results"][0] == counted["plain"]["results"][0]


def test_nothing_is_left_on_disk(served: dict[str, Any], work: Path) -> None:
    for name in ("overlay", "port", "lock"):
        assert [path.name for path in (work / "served" / name).iterdir()] == ["status.json"]


@pytest.fixture(scope="module")
def compiled(work: Path, maps: dict[str, rowmap.RowMap]) -> dict[str, Any]:
    """Three processes with one inductor cache: cold with map a, then map b, then un-hooked."""
    cache = work / "inductor"
    env = {"VLLM_USE_AOT_COMPILE": "0", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    common = {"kwargs": {"enforce_eager": False}, "generate": [ANSWERS, ALONE, BY_FOUR]}
    found: dict[str, Any] = {}
    for name, more in (
        ("a", {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": f"{work}/a.json"}),
        ("b", {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": f"{work}/b.json"}),
        ("plain", {"EXPERTMAPS_MODE": "off"}),
    ):
        runs: list[dict[str, Any]] = [{"name": name, "env": more, **common}]
        if name == "plain":  # here the process may lock memory
            locked = {
                "EXPERTMAPS_MODE": "serve", "EXPERTMAPS_TIER": "mlock",
                "EXPERTMAPS_MAP": f"{work}/a.json",
            }  # fmt: skip
            runs.append({"name": "mlock", "env": locked, "generate": [ANSWERS]})
        found.update(run(work / f"compiled-{name}", runs, **env))
    count = {"name": "count", "env": {"EXPERTMAPS_MODE": "count"}, **common}
    count["generate"] = [ANSWERS, {"forced": "t", "salt": "a"}]
    count["broken"] = [ANSWERS]
    env["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor-count")
    found.update(run(work / "compiled-count", [_reference(count), count], **env))
    shutil.rmtree(cache)
    return found


def _reference(count: dict[str, Any]) -> dict[str, Any]:
    off = {"EXPERTMAPS_MODE": "off"}
    return {**count, "name": "first", "generate": [ANSWERS], "env": off, "broken": []}


def test_another_map_hits_the_compile_cache(
    compiled: dict[str, Any], maps: dict[str, rowmap.RowMap]
) -> None:
    cold, warm = (status_of(compiled[name]) for name in ("a", "b"))
    assert cold.compile is not None and warm.compile is not None
    assert cold.compile.cache_misses > 0 and cold.compile.hit is False
    assert warm.compile.cache_misses == 0 and warm.compile.cache_hits > 0 and warm.compile.hit
    assert warm.map_digest == maps["b"].digest


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_answers_are_the_same_bits_alone_and_by_four(
    counted: dict[str, Any],
    served: dict[str, Any],
    compiled: dict[str, Any],
    how: str,
    concurrency: int,
) -> None:
    """Ids and logprobs of 20 prompts, `concurrency` at a time."""
    plain, mapped = {
        "eager": (counted["plain"], served["overlay"]),
        "compiled": (compiled["plain"], compiled["a"]),
    }[how]
    assert status_of(mapped).generation == 1
    place = {1: 1, 4: 2}[concurrency]
    answers = plain["results"][place]
    assert mapped["results"][place] == answers
    assert len(answers) == 20 and all(len(answer["logprobs"]) == 48 for answer in answers)
    assert len({token for answer in answers for token in answer["ids"]}) > 100


def test_compiled_answers_are_the_same_bits(compiled: dict[str, Any]) -> None:
    plain = compiled["plain"]["results"][0]
    for name in ("a", "b", "count"):
        assert compiled[name]["results"][0] == plain, name


def test_counting_that_breaks_in_a_compiled_engine_leaves_it_serving(
    compiled: dict[str, Any],
) -> None:
    """The compiled model looks the capture up at each step: it has to be there still."""
    (answers,), said = compiled["count"]["broken"]
    assert answers == compiled["first"]["results"][0]
    found = contract.HookStatus.from_wire(said, "status")
    assert found.error is not None
    assert (found.phase, found.error.reason) == ("Failed", "CountFailed")


def test_compiled_counts_are_those_of_eager(
    compiled: dict[str, Any], counted: dict[str, Any], work: Path
) -> None:
    found = counts_of(work / "compiled-count" / "count", "t")
    assert [item["rows"].tolist() for item in found] == rows_of(counted)
    assert all(int(item["bad"]) == 0 for item in found)
