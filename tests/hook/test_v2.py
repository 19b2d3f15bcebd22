"""The hook on vLLM's V2 model runner: counts, preemption, drafts, bit-identical serving.

V2 is what vLLM runs wherever Triton is. Here it runs on a CPU with its Triton kernels in Triton's
interpreter (`interpreter/sitecustomize.py`): that stands for the accelerator, and is slow, so the
prompts are few and short. V1 counts the same tokens in a process of its own, and vLLM's own return
of routed experts is asked as well.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rowmap_jobs.formats import rowmap
from tests.hook import test_engine as engines

pytestmark = [pytest.mark.hook, pytest.mark.engine]

RIG = Path(__file__).parent / "interpreter"
SOURCE = inspect.getsource(textwrap)
TEXTS = [SOURCE[700 * index : 700 * index + 60 + 20 * index] for index in range(5)]
TOKENS, HOT, TOP_K = 8, 20, 4
SMALL = {"max_model_len": 160, "max_num_batched_tokens": 128, "max_num_seqs": 8, "block_size": 32}
TIGHT = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 6}
COUNT = {"EXPERTMAPS_MODE": "count"}
ANSWERS = {"texts": TEXTS, "params": {"max_tokens": TOKENS, "logprobs": 3}}
LIVE = {
    **ANSWERS, "salt": "live", "tags": [{"expertmaps_t": f"live{i}"} for i in range(len(TEXTS))],
}  # fmt: skip
CROWD = {
    "prompts": [list(range(100 + 40 * i, 120 + 40 * i)) for i in range(len(TEXTS))],
    "params": {"max_tokens": 24}, "salt": "crowd",
    "tags": [{"expertmaps_t": f"crowd{i}"} for i in range(len(TEXTS))],
}  # fmt: skip
"""As many requests as TIGHT has blocks (vLLM keeps one of six); all need two from token 33 on."""
FLUSH = {"texts": TEXTS[:1]}
"""One more request: a runner hears of a request's end with its next step."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
          "prompt_lookup_min": 1}  # fmt: skip
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
CIRCLES = {
    "prompts": [[7, 8, 9, 10] * 6, list(range(40, 52)) * 2],
    "params": {"max_tokens": 24},
    "salt": "circles",
}
"""Prompts that repeat themselves, so that drafts are found; their answers are not judged."""


def runs_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**item, "kwargs": {**SMALL, **item.get("kwargs", {})}} for item in items]


def run_v2(folder: Path, *items: dict[str, Any]) -> dict[str, Any]:
    paths = {"PYTHONPATH": f"{RIG}:{folder / 'mount'}"}
    return engines.run(folder, runs_of(*items), VLLM_USE_V2_MODEL_RUNNER="1", **paths)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("v2")


@pytest.fixture(scope="module")
def second(work: Path) -> dict[str, Any]:
    """V2: un-hooked; counting in both types, in a tight cache, with drafts, beside vLLM's own."""
    forced = {"forced": "t", "salt": "a"}
    bare = [{"forced": name} for name in ("u", "v")]
    several = {"texts": TEXTS[:1], "params": {"n": 2, "temperature": 0.5}, "tags": LIVE["tags"][:1]}
    tagged = {**CIRCLES, "tags": [{"expertmaps_t": f"drafted{i}"} for i in range(2)]}
    return run_v2(
        work / "second",
        {"name": "plain", "env": {}, "generate": [ANSWERS]},
        {"name": "count", "env": COUNT, "generate": [forced, *bare, LIVE, several, CROWD, FLUSH]},
        {"name": "tight", "env": COUNT, "kwargs": TIGHT, "generate": [forced, LIVE, CROWD, FLUSH]},
        {
            "name": "fp32", "env": COUNT, "kwargs": {"dtype": "float32"},
            "generate": [forced, LIVE, FLUSH],
        },
        {
            "name": "native", "env": COUNT, "kwargs": {"enable_return_routed_experts": True},
            "generate": [ANSWERS, forced],
        },
        {
            "name": "drafts", "env": COUNT, "metrics": [DRAFTED, ACCEPTED],
            "kwargs": {"speculative_config": DRAFTS, "disable_log_stats": False},
            "generate": [tagged, forced, FLUSH],
        },
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(work: Path, second: dict[str, Any]) -> dict[str, Any]:
    """V1, in both types: what V2 was fed."""
    generate = [{"prompts": fed(second), "tags": tags("t", second), "salt": "a"}, FLUSH]
    tagged = {**CIRCLES, "tags": [{"expertmaps_t": f"drafted{i}"} for i in range(2)]}
    return engines.run(
        work / "first",
        runs_of(
            {"name": "bf16", "env": COUNT, "generate": generate},
            {"name": "fp32", "env": COUNT, "generate": generate, "kwargs": {"dtype": "float32"}},
            {
                "name": "drafts", "env": COUNT, "metrics": [DRAFTED, ACCEPTED],
                "kwargs": {"speculative_config": DRAFTS, "disable_log_stats": False},
                "generate": [tagged, *generate],
            },
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def served(work: Path, second: dict[str, Any]) -> dict[str, Any]:
    """V2 with a map of its own counts, and with one that is not there."""
    found = engines.status_of(second["count"])
    assert found.geometry is not None and found.fingerprint is not None
    geometry = rowmap.Geometry(
        experts=found.geometry.experts, top_k=found.geometry.top_k, hot_rows=HOT,
        moe_layers=found.geometry.moe_layers, row_bytes=found.geometry.row_bytes,
    )  # fmt: skip
    order = np.argsort(-counts(work, "second", "count", "t").sum((0, 1)), kind="stable").tolist()
    layers = {
        layer: (order[index][:HOT], order[index][HOT:][::-1])
        for index, layer in enumerate(geometry.moe_layers)
    }
    (work / "map.json").write_bytes(rowmap.build(found.fingerprint, geometry, layers).to_bytes())
    serve = {"EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": str(work / "map.json")}
    return run_v2(
        work / "served",
        {"name": "serve", "env": serve, "generate": [ANSWERS], "rpc": "reload_weights"},
        {
            "name": "missing", "generate": [ANSWERS],
            "env": {**serve, "EXPERTMAPS_MAP": "/nowhere/rowmap.json"},
        },
    )  # fmt: skip


def fed(second: dict[str, Any]) -> list[list[int]]:
    answers = second["plain"]["results"][0]
    return [
        ids + one["ids"][:-1] for ids, one in zip(second["plain"]["prompts"], answers, strict=True)
    ]


def tags(name: str, second: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"expertmaps_t": f"{name}{index}", "expertmaps_seg": [len(ids), len(ids) + TOKENS - 1]}
        for index, ids in enumerate(second["plain"]["prompts"])
    ]


def files(work: Path, process: str, name: str, prefix: str) -> list[dict[str, Any]]:
    found = []
    for index in range(len(TEXTS)):
        path = work / process / name / "transcripts" / f"{prefix}{index}.npz"
        with np.load(path, allow_pickle=False) as file:
            found.append({key: file[key] for key in file.files})
    return found


def counts(work: Path, process: str, name: str, prefix: str) -> np.ndarray[Any, Any]:
    """int64[transcript, phase, layer, expert]."""
    return np.stack([item["counts"] for item in files(work, process, name, prefix)])


def expected_rows(second: dict[str, Any]) -> list[list[int]]:
    return [[len(ids), TOKENS - 1] for ids in second["plain"]["prompts"]]


def bare_answers(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: one[key] for key in ("ids", "logprobs")} for one in results]


def test_the_rig_runs_v2_and_counting_changes_no_answer(second: dict[str, Any]) -> None:
    plain, count = (engines.status_of(second[name]) for name in ("plain", "count"))
    assert (plain.runner, plain.phase, plain.error) == ("v2", "Serving", None)
    assert (count.runner, count.phase, count.error) == ("v2", "Serving", None)
    ready = engines.status_of(second["count"], "ready")
    assert (ready.phase, ready.steps) == ("Ready", 0)
    assert ready.counting is not None and ready.counting.prefill_rows == 0
    assert second["count"]["results"][3] == second["plain"]["results"][0]
    assert len({token for one in second["plain"]["results"][0] for token in one["ids"]}) > 15


@pytest.mark.parametrize("prefix", ["t", "live"])
@pytest.mark.parametrize("name", ["count", "tight", "fp32"])
def test_rows_on_v2_are_right(second: dict[str, Any], work: Path, name: str, prefix: str) -> None:
    found = files(work, "second", name, prefix)
    assert [item["rows"].tolist() for item in found] == expected_rows(second)
    for item in found:
        assert int(item["bad"]) == 0
        assert (item["counts"].sum(2) == item["rows"][:, None] * TOP_K).all()
    counting = engines.status_of(second[name]).counting
    assert counting is not None and counting.missed == 0


def test_forced_counts_on_v2_are_those_of_its_own_decode(work: Path, second: Any) -> None:
    assert "failed" not in second["count"]
    for name, limit in (("count", 0.005), ("fp32", 0.0)):
        forced, live = (counts(work, "second", name, prefix) for prefix in ("t", "live"))
        assert engines.moved(forced, live) <= limit


def test_counts_on_v2_are_those_of_v1(work: Path, first: dict[str, Any]) -> None:
    assert engines.status_of(first["bf16"]).runner == "v1"
    for name, other, limit in (("fp32", "fp32", 0.0), ("count", "bf16", 0.005)):
        left, right = counts(work, "second", name, "t"), counts(work, "first", other, "t")
        share = engines.moved(left, right)
        print(f"{other}: {share:.4%} of {left.sum()} selections moved between V1 and V2")
        assert share <= limit


def test_counts_on_v2_are_what_vllm_itself_returns(second: dict[str, Any], work: Path) -> None:
    """Of the same tokens, fed as one and decoded: not one selection is elsewhere."""
    for result, prefix in ((0, "live"), (1, "t")):
        own = []
        for one, (prompt, rest) in zip(
            second["native"]["results"][result], expected_rows(second), strict=True
        ):
            ids = np.concatenate([np.asarray(part) for part in one["routed"]])[: prompt + rest]
            assert ids.shape == (prompt + rest, 4, TOP_K)
            own.append([tally(ids[:prompt]), tally(ids[prompt:])])
        assert np.array_equal(counts(work, "second", "count", prefix), np.asarray(own))


def tally(ids: np.ndarray[Any, Any]) -> list[Any]:
    """Selections of each expert in each layer."""
    return [np.bincount(ids[:, layer].ravel(), minlength=32) for layer in range(ids.shape[1])]


def test_vllms_own_return_is_refused_by_name_and_goes_on(second: dict[str, Any]) -> None:
    found = engines.status_of(second["native"])
    assert found.error is not None and found.error.reason == "ReturnRoutedExpertsUnsupported"
    assert (found.phase, found.counting) == ("Failed", None)
    assert bare_answers(second["native"]["results"][0]) == second["plain"]["results"][0]


def test_preempted_rows_on_v2_are_apart(second: dict[str, Any], work: Path) -> None:
    """A preempted request comes back as a new one: what it is fed again counts nowhere else."""
    counting = engines.status_of(second["tight"]).counting
    assert counting is not None and counting.recomputed_rows >= 32
    found = files(work, "second", "tight", "crowd")
    assert sum(int(item["recomputed"]) for item in found) >= 32
    assert [item["rows"].tolist() for item in found] == [[20, 23]] * len(TEXTS)
    assert not any(int(item["recomputed"]) for item in files(work, "second", "count", "crowd"))
    for prefix in ("t", "crowd"):
        tight, wide = (counts(work, "second", name, prefix) for name in ("tight", "count"))
        assert engines.moved(tight, wide) <= 0.01


def test_cache_hits_and_samples_on_v2_show_as_what_they_are(
    second: dict[str, Any], work: Path
) -> None:
    rows = [item["rows"] for item in files(work, "second", "count", "v")]
    assert (np.stack(rows).sum(1) < np.asarray(expected_rows(second)).sum(1)).any()
    counting = engines.status_of(second["count"]).counting
    assert counting is not None and counting.skipped == {"ParallelSampling": 2}


@pytest.mark.parametrize("process", ["second", "first"])
def test_drafts_are_verified_apart_and_never_decode(
    request: pytest.FixtureRequest, work: Path, process: str
) -> None:
    """Speculative decoding on both runners: rows of drafts are those that vLLM tells itself."""
    result = request.getfixturevalue(process)["drafts"]
    counting, metrics = engines.status_of(result).counting, result["metrics"]
    assert counting is not None and counting.verify_rows > 0
    assert counting.verify_rows == metrics[DRAFTED] >= metrics[ACCEPTED]
    second = request.getfixturevalue("second")
    generated = 2 * CIRCLES["params"]["max_tokens"]  # type: ignore[index]
    forced_rows = len(TEXTS) * (TOKENS - 1)
    # Every decode row is the row of a token that was said; accepted drafts are in `verify`.
    live = counting.decode_rows - forced_rows
    assert 0 < live <= generated - 2 and live + metrics[ACCEPTED] >= generated - 2
    assert counting.skipped == {"Speculation": 2}
    name = "count" if process == "second" else "bf16"
    share = engines.moved(counts(work, process, "drafts", "t"), counts(work, process, name, "t"))
    assert share <= 0.005
    rows = [item["rows"].tolist() for item in files(work, process, "drafts", "t")]
    assert rows == expected_rows(second)


def test_answers_on_v2_with_a_map_are_the_same_bits(
    second: dict[str, Any], served: dict[str, Any]
) -> None:
    assert served["serve"]["results"][0] == second["plain"]["results"][0]
    found = engines.status_of(served["serve"])
    assert (found.runner, found.phase, found.error, found.generation) == ("v2", "Serving", None, 1)
    assert found.residency is not None
    assert (found.residency.hot_rows, found.residency.cold_rows) == (4 * HOT, 4 * (32 - HOT))
    assert "WeightReloadUnsupported" in served["serve"]["rpc"]


def test_a_refusal_on_v2_leaves_the_engine_serving(
    second: dict[str, Any], served: dict[str, Any]
) -> None:
    found = engines.status_of(served["missing"])
    assert found.error is not None and found.error.reason == "MapMissing"
    assert (found.phase, found.generation) == ("Failed", 0)
    assert served["missing"]["results"][0] == second["plain"]["results"][0]
