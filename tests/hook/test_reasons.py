"""The reasons with which the hook gives up are an interface: the README has all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "LaunchInvalid", "PreflightFailed",  # the preflight's own, on its standard error
    "SegmentsInvalid", "TranscriptIdInvalid", "WriteFailed",  # of one transcript, as `skipped`
}  # fmt: skip


def said(tree: ast.AST) -> Iterator[str]:
    """First words of every HookError, and every constant that names something unsupported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.endswith("Unsupported") and node.value.isalpha():
                yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "as_failure":
            yield from (arg.value for arg in node.args[1:] if isinstance(arg, ast.Constant))
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name == "HookError" and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def test_the_readme_explains_every_reason_and_no_other() -> None:
    files = sorted((ROOT / "rowmap_jobs/hook").glob("*.py"))
    found = {reason for path in files for reason in said(ast.parse(path.read_text()))}
    readme = (ROOT / "README.md").read_text()
    table = readme.partition("The hook's reasons")[2].partition("\n\nOn a CPU")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    explained = {word.strip(" `") for row in rows for word in row.split(",")}
    assert len(found) > 30
    assert found - ELSEWHERE - explained == set()
    source = "".join(path.read_text() for path in files)
    assert [reason for reason in sorted(explained) if f'"{reason}"' not in source] == []
