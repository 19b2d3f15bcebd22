"""Preflight: two launches, equal hashes or the factors that differ by name."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expertmaps_hook as hook
import expertmaps_hook_env as env
import expertmaps_hook_preflight as preflight
import pytest

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
MODEL = Path(__file__).parents[1] / "model" / "moe"
RUN = subprocess.run
HOOK = Path(__file__).parents[2] / "rowmap_jobs" / "hook"


def asked(hashes: str, parts: dict[str, str], factors: dict[str, str]) -> dict[str, Any]:
    return {"hashes": {"compile": hashes}, "parts": parts, "factors": factors}


def test_equal_launches_differ_in_nothing() -> None:
    one = asked("a", {"env": "1"}, {"env.A": "x"})
    found = preflight.compare(one, one)
    assert found["equal"] and found["differs"] == []


def test_factors_are_named_one_by_one() -> None:
    left = asked(
        "a", {"env": "1", "model": "2", "load": "3"},
        {"env.A": "x", "env.B": "y", "model.dtype": "bf16", "load.path": "here"},
    )  # fmt: skip
    right = asked(
        "b", {"env": "9", "model": "8", "load": "3"},
        {"env.A": "z", "env.C": "y", "model.dtype": "fp32", "load.path": "there"},
    )  # fmt: skip
    found = preflight.compare(left, right)
    assert not found["equal"]
    assert found["differs"] == [
        {"factor": "env.A", "left": "x", "right": "z"},
        {"factor": "env.B", "left": "y", "right": None},
        {"factor": "env.C", "left": None, "right": "y"},
        {"factor": "model.dtype", "left": "bf16", "right": "fp32"},
    ]


def test_a_part_without_a_field_that_differs_is_named_itself() -> None:
    found = preflight.compare(asked("a", {"kernel": "1"}, {}), asked("b", {"kernel": "2"}, {}))
    assert found["differs"] == [{"factor": "kernel", "left": "1", "right": "2"}]


@pytest.mark.parametrize(
    ("hashes", "parts", "named"),
    [
        (["compile"], [], ["hash.compile"]),
        (["compile", "config"], ["env"], ["env", "hash.config"]),
        (["compile", "env"], ["model"], ["model", "hash.env"]),
        (["compile", "env", "config"], ["env", "model"], ["env", "model"]),
        (["compile"], ["inductor"], ["inductor"]),
        (["compile", "autotune"], ["inductor"], ["hash.autotune", "inductor"]),
        (["compile", "caches"], ["cache"], ["cache", "hash.compile"]),
        (["caches"], [], ["hash.caches"]),
    ],
)
def test_no_hash_differs_without_a_factor(
    hashes: list[str], parts: list[str], named: list[str]
) -> None:
    def side(value: str) -> dict[str, Any]:
        changed = {"hashes": hashes, "parts": parts}
        return {"factors": {}, **{key: dict.fromkeys(of, value) for key, of in changed.items()}}

    found = preflight.compare(side("left"), side("right"))
    assert not found["equal"]
    assert sorted(item["factor"] for item in found["differs"]) == sorted(named)
    assert {(item["left"], item["right"]) for item in found["differs"]} == {("left", "right")}


def test_equal_hashes_with_caches_elsewhere_are_not_equal() -> None:
    sides = [
        {
            "hashes": {"compile": "a", "caches": folder},
            "parts": {"cache": folder},
            "factors": {"cache.vllm": folder, "cache.triton": "/t"},
        }
        for folder in ("/one", "/two")
    ]
    found = preflight.compare(*sides)
    assert not found["equal"]
    assert found["differs"] == [{"factor": "cache.vllm", "left": "/one", "right": "/two"}]


@dataclass
class Part:
    counts: int = 1
    ignored: int = 2
    strict: float = 0.5

    def compute_hash(self) -> str:
        return f"{self.counts} {self.strict:.1f}"


def test_fields_that_the_hash_reads_are_found() -> None:
    part = Part()
    assert preflight.hashed_fields(part) == ["counts", "strict"]
    assert part == Part()


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["vllm", "serve", "m", "--x"], ["m", "--x"]),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], ["--model", "m"]),
    ],
)
def test_arguments_follow_the_servers_name(command: list[str], arguments: list[str]) -> None:
    assert preflight.engine_arguments(command) == arguments


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", "{}", '{"command": "vllm serve"}', '{"command": ["sleep"]}',
        '{"command": ["vllm", "serve"], "env": {"A": 1}}',
        '{"command": ["vllm", "serve"], "env": []}',
    ],
)  # fmt: skip
def test_a_launch_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(env.HookError) as caught:
        preflight.read_launch(tmp_path / "l.json")
    assert caught.value.reason == "LaunchInvalid"


def test_a_command_without_two_files_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["one.json"]) == 2
    assert capsys.readouterr().err.startswith("LaunchInvalid")
    assert preflight.main(["/nowhere/one.json", "/nowhere/two.json"]) == 2


def test_the_command_prints_the_answer_and_exits_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("one.json", "two.json")]
    for path, env_value in zip(paths, ("x", "y"), strict=True):
        launch = {"command": ["vllm", "serve", "m"], "env": {"VLLM_A": env_value}}
        Path(path).write_text(json.dumps(launch))

    def ask(launch: preflight.Launch) -> dict[str, Any]:
        value = launch["env"]["VLLM_A"]
        return asked(value, {"env": value}, {"env.VLLM_A": value})

    monkeypatch.setattr(preflight, "ask", ask)
    assert preflight.main([paths[0], paths[0]]) == 0
    assert json.loads(capsys.readouterr().out)["equal"] is True
    assert preflight.main(paths) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["differs"] == [{"factor": "env.VLLM_A", "left": "x", "right": "y"}]


def test_a_launch_that_vllm_refuses_is_a_named_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = "import sys; sys.exit('unrecognized arguments: --no-such')"
    monkeypatch.setattr(
        preflight.subprocess,
        "run",
        lambda command, **more: RUN([preflight.sys.executable, "-c", failing], **more),
    )
    with pytest.raises(env.HookError) as caught:
        preflight.ask({"command": ["vllm", "serve", "--no-such"], "env": {}})
    assert caught.value.reason == "PreflightFailed" and "--no-such" in caught.value.message


def test_the_environment_is_this_ones_with_the_launchs_changes() -> None:
    launch = {"command": [], "env": {"A": "2", "GONE": None, "NEW": "3"}}
    found = preflight.environment(launch, {"A": "1", "GONE": "x", "KEPT": "y"})
    assert found == {"A": "2", "NEW": "3", "KEPT": "y", hook.OWNER_MARK: "preflight"}


def test_a_variable_that_only_one_launch_names_is_unset_for_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A template that drops a variable of the pod it is compared in differs from it."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    asked: list[dict[str, str]] = []

    def ask(launch: Any) -> dict[str, Any]:
        asked.append(preflight.environment(launch, os.environ))
        return {"factors": {}, "parts": {}}

    monkeypatch.setattr(preflight, "ask", ask)
    monkeypatch.setattr(preflight, "compare", lambda *_: {"equal": True})
    for name, given in (("live", {"VLLM_USE_V2_MODEL_RUNNER": "1"}), ("new", {"NEW": "1"})):
        command = ["vllm", "serve"]
        (tmp_path / name).write_text(json.dumps({"command": command, "env": given}))
    assert preflight.main([str(tmp_path / "live"), str(tmp_path / "new")]) == 0
    live, new = asked
    assert live["VLLM_USE_V2_MODEL_RUNNER"] == "1" and "NEW" not in live
    assert new["NEW"] == "1" and "VLLM_USE_V2_MODEL_RUNNER" not in new
    assert live["PATH"] == new["PATH"] == os.environ["PATH"]


def test_a_variable_that_one_launch_unsets_is_the_pods_own_for_the_other() -> None:
    live = {"command": [], "env": {}}
    new = {"command": [], "env": {"VLLM_USE_V2_MODEL_RUNNER": None}}
    pod = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert "VLLM_USE_V2_MODEL_RUNNER" in preflight.environment(preflight.beside(live, new), pod)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in preflight.environment(preflight.beside(new, live), pod)


def test_help_says_what_a_launch_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["--help"]) == 0
    assert '{"command": ["vllm", "serve", ...]' in capsys.readouterr().out


def test_values_are_one_short_line() -> None:
    assert preflight.shown({"b": {2, 1}, "a": None}) == '{"a": null, "b": ["1", "2"]}'
    assert preflight.shown(object()) == '"object"'
    assert len(preflight.shown("x" * 5000)) < 200
    assert preflight.shown("x" * 5000) != preflight.shown("x" * 4999 + "y")


SERVE = ["vllm", "serve", str(MODEL), "--max-model-len", "1024"]
PLUGINS = {"VLLM_PLUGINS": "expertmaps"}
MAP_A = {**PLUGINS, "EXPERTMAPS_MODE": "serve", "EXPERTMAPS_MAP": "/maps/a.json"}
LAUNCHES: dict[str, dict[str, Any]] = {
    "a": {"command": SERVE, "env": MAP_A},
    "b": {"command": SERVE, "env": {**MAP_A, "EXPERTMAPS_MAP": "/maps/b.json"}},
    "count": {"command": SERVE, "env": {**PLUGINS, "EXPERTMAPS_MODE": "count"}},
    "plugins": {"command": SERVE, "env": {**MAP_A, "VLLM_PLUGINS": None}},
    "tokens": {"command": [*SERVE, "--max-num-batched-tokens", "1024"], "env": MAP_A},
    "dtype": {"command": [*SERVE, "--dtype", "float32"], "env": MAP_A},
    "elsewhere": {"command": SERVE, "env": {**MAP_A, "TORCHINDUCTOR_CACHE_DIR": "/elsewhere"}},
    "options": {"command": SERVE, "env": {**MAP_A, "TORCHINDUCTOR_MAX_AUTOTUNE": "1"}},
}


ASK = (
    "import json, sys, expertmaps_hook_preflight as preflight;"
    "print(json.dumps(preflight.ask(json.load(sys.stdin))))"
)


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Map a's launch compared with each other one, every launch asked in real vLLM."""

    def run(launch: dict[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            [PYTHON, "-c", ASK],
            env={**os.environ, "PYTHONPATH": str(HOOK), "HF_HUB_OFFLINE": "1"},
            input=json.dumps(launch), capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(2) as pool:
        asked_of = dict(zip(LAUNCHES, pool.map(run, LAUNCHES.values()), strict=True))
    return {
        name: preflight.compare(asked_of["a"], found)
        for name, found in asked_of.items()
        if name != "a"
    }


@pytest.mark.hook
@pytest.mark.parametrize("name", ["b", "count"])
def test_another_map_and_counting_find_the_same_caches(
    answers: dict[str, dict[str, Any]], name: str
) -> None:
    assert answers[name]["equal"], answers[name]
    assert answers[name]["differs"] == []


@pytest.mark.hook
@pytest.mark.parametrize(
    ("name", "factor", "left", "right"),
    [
        ("plugins", "env.VLLM_PLUGINS", '["expertmaps"]', "null"),
        ("tokens", "scheduler_config.max_num_batched_tokens", "2048", "1024"),
        ("dtype", "model_config.dtype", '"torch.bfloat16"', '"torch.float32"'),
    ],
)
def test_what_makes_a_cold_boot_is_named(
    answers: dict[str, dict[str, Any]], name: str, factor: str, left: str, right: str
) -> None:
    found = answers[name]
    assert not found["equal"] and found["left"]["compile"] != found["right"]["compile"]
    assert {"factor": factor, "left": left, "right": right} in found["differs"]
    assert (found["left"]["env"] == found["right"]["env"]) == (name != "plugins")
    assert (found["left"]["autotune"] == found["right"]["autotune"]) == (name == "plugins")


@pytest.mark.hook
def test_folders_and_options_of_the_compiler_are_those_of_the_launch(
    answers: dict[str, dict[str, Any]],
) -> None:
    elsewhere, options = answers["elsewhere"], answers["options"]
    assert not elsewhere["equal"]
    assert elsewhere["left"]["compile"] == elsewhere["right"]["compile"]
    assert [item["factor"] for item in elsewhere["differs"]] == ["cache.inductor"]
    assert elsewhere["differs"][0]["right"] == '"/elsewhere"'
    assert not options["equal"]
    assert {"factor": "inductor.max_autotune", "left": "false", "right": "true"} in options[
        "differs"
    ]


BELOW_ROOT = ["cache.autotune", "cache.compile", "cache.deep_gemm", "cache.vllm"]
NAMED: dict[str, list[str]] = {
    "nothing": [],
    "home": [*BELOW_ROOT, "cache.triton"],
    "xdg": BELOW_ROOT,
    "empty xdg": BELOW_ROOT,
    "vllm": BELOW_ROOT,
    "same by another name": [],
    "autotune": ["cache.autotune"],
    "skipped": ["cache.autotune_skips"],
    "none skipped": ["cache.autotune_skips"],
    "inductor": ["cache.inductor"],
    "triton": ["cache.triton"],
    "triton home": ["cache.triton"],
    "deep gemm": ["cache.deep_gemm"],
    "two": ["cache.triton", "env.VLLM_PLUGINS"],
    "compile": ["cache.compile"],
    "additional": ["additional_config.a"],
    "encoder": ["compilation_config.compile_mm_encoder"],
    "max autotune": ["inductor.max_autotune"],
    "no graph cache": ["cache.inductor_graphs"],
    "no caches": ["cache.compile_enabled"],
    "functorch": ["functorch.functionalize_rng_ops"],
    "unnamed": ["hash.compile", "hash.config"],
    "multimodal": ["multimodal_config.mm_encoder_attn_dtype"],
    "multimodal, not compiled": [],
    "another device": ["cache.autotune", "cache.flashinfer"],
    "another workspace": ["cache.flashinfer"],
    "max autotune, mega artifact": ["inductor.max_autotune"],
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("preflight_cases.py")
    work = tmp_path_factory.mktemp("work").resolve()
    done = subprocess.run(
        [PYTHON, str(script), str(HOOK), str(MODEL), str(work)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == NAMED.keys()
    return found


@pytest.mark.hook
@pytest.mark.parametrize("name", NAMED)
def test_one_difference_is_one_reason(cases: dict[str, dict[str, Any]], name: str) -> None:
    found = cases[name]
    assert [item["factor"] for item in found["differs"]] == sorted(NAMED[name]), found
    assert found["equal"] == (not NAMED[name])
    assert all(item["left"] != item["right"] for item in found["differs"])
