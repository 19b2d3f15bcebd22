"""Help costs nothing, its examples are real, and usage errors say what to write."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rowmap_jobs.cli.commands import COMMANDS
from rowmap_jobs.cli.main import parser
from tests.cli.made import good, rowmap

GOLDEN = Path(__file__).parent / "golden"
NAMES = [each.name for each in COMMANDS]
TASK = "import sys; from rowmap_jobs.cli.main import main; main({!r}); print(*sys.modules)"


def test_the_first_help_is_the_golden_one() -> None:
    assert good("--help").out == (GOLDEN / "help.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["--help"], ["evaluate", "--help"], ["place"]])
def test_help_and_usage_errors_load_nothing_heavy(arguments: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-c", TASK.format(arguments)], capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    loaded = set(ran.stdout.splitlines()[-1].split())
    assert "rowmap_jobs.cli.commands.place" in loaded
    assert not loaded & {"numpy", "pydantic", "yaml", "rowmap_jobs.formats.base"}
    # Some ten times what it takes: a machine may be slow, and nothing compiled yet.
    assert after.ru_utime - before.ru_utime < 1


def examples(name: str) -> list[list[str]]:
    text = next(each.examples for each in COMMANDS if each.name == name)
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.parametrize("name", NAMES)
def test_every_help_has_examples_that_the_parser_takes(name: str) -> None:
    found = examples(name)
    assert 2 <= len(found) <= 4
    shown = good(name, "--help").out
    for each in found:
        assert each[:2] == ["rowmap", name]
        assert parser().parse_args(each[1:]).command.name == name
        assert f"rowmap {name}" in shown
    assert all(len(line) <= 100 for line in shown.splitlines()), name


def test_every_command_can_be_quiet_and_is_listed() -> None:
    listed = good("--help").out
    for each in COMMANDS:
        assert f"    {each.name} " in listed and each.line in listed
        assert "--quiet" in good(each.name, "--help").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: COMMAND"),
        (["plac"], "invalid choice: 'plac'"),
        (["place", "a.npz"], "one of the arguments --model --geometry is required"),
        (["place", "a.npz", "--model", "m"], "one of the arguments --hot "),
        (["place", "a.npz", "--model", "m", "--hot", "-3"], "found '-3', expected a whole number"),
        (["place", "a.npz", "--model", "m", "--hot", "x"], "found 'x', expected a whole number"),
        (["place", "a.npz", "--model", "m", "--hot", "1", "--hot-bytes", "1"], "not allowed with"),
        (["place", "a.npz", "--mod", "m", "--hot", "1"], "--model"),
        (["merge", "a.npz"], "required: -o/--output"),
        (["merge", "a.npz", "-o", "b", "--since", "soon"], "expected a date"),
        (["filter", "a.npz", "-o", "b"], "found no condition"),
        (["filter", "a.npz", "-o", "b", "--fidelity", "guess"], "found 'guess', expected some of"),
        (["import", "tensorrt", "x", "--model", "m", "-o", "y"], "found 'tensorrt', expected auto"),
        (["import", "auto", "x", "-o", "y"], "expected --model or --fingerprint"),
        (["import", "auto", "x", "--fingerprint", "c", "--unbound", "-o", "y"], "--unbound"),
        (
            ["import", "auto", "x", "z", "--model", "m", "--baseline", "b", "-o", "y"],
            "expected one FILE",
        ),
        (
            ["import", "auto", "x", "--model", "m", "--session-by", "(", "-o", "y"],
            "expected sequence, file or a regular expression",
        ),
        (["export", "tensorrt", "x", "-o", "y"], "found 'tensorrt', expected one of"),
        (["export", "imatrix", "x", "-o", "y"], "imatrix is only read: a census has no squared"),
        (["export", "imatrix", "x", "-o", "y"], "write llamacpp-pin for llama.cpp"),
        (["evaluate", "c"], "either --map or hot rows"),
        (["evaluate", "c", "--map", "m", "--hot", "3"], "either --map or hot rows"),
        (["evaluate", "c", "--hot", "3"], "one of --model and --geometry"),
        (["evaluate", "c", "--map", "m", "--model", "d"], "--map has its geometry"),
        (["evaluate", "c", "--map", "m", "--link", "55GB/s"], "together"),
        (["evaluate", "c", "--map", "m", "--other", "prose"], "expected NAME=VALUE"),
        (["evaluate", "c", "--map", "m", "--other", "a=b", "--other", "a=c"], "found 'a' twice"),
        (["blend", "a=b", "--model", "m", "--hot", "3"], "expected two or more"),
        (["blend", "a=b", "c=d", "--model", "m", "--global-rows", "3"], "hot rows by layer"),
        (
            ["blend", "a=b", "c=d", "--model", "m", "--hot", "3", "--weights", "a=1"],
            "a weight for each of a, c",
        ),
        (["place", "c", "--model", "m", "--hot-bytes", "9", "--quantum", "2"], "--hot with it"),
        (["drift", "c"], "required: --active"),
        (["report", "r", "--map", "m"], "--census and --map together"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(arguments: list[str], says: str) -> None:
    ran = rowmap(*arguments)
    assert ran.code == 2 and says in ran.line
