"""Scripts of cases for the engine's Python list their cases; none may be left out of its list."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SCRIPTS = sorted(set(Path(__file__).parent.glob("*_cases.py")) - {Path(__file__)})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_function_of_a_script_is_used(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    written = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert written
    assert [name for name in written if len(re.findall(rf"\b{name}\b", text)) == 1] == []
