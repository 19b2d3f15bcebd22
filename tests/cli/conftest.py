"""Censuses and maps of two classes, made once by the command itself."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from tests.cli.made import HOT, MODEL, good, records

hypothesis.settings.register_profile("shared-machine", deadline=None, max_examples=40)
hypothesis.settings.load_profile("shared-machine")

WHEN = "2026-09-17T10:00Z"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with code.npz, prose.npz, code.json and prose.json; nobody writes into it."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("code", "prose"):
        source = records(folder / name, name)
        census, rows = folder / f"{name}.npz", folder / f"{name}.json"
        what = ("import", "auto", source, "--model", MODEL, "--class", name, "--created", WHEN)
        good(*what, "-o", census)
        good("place", census, "--model", MODEL, "--hot", HOT, "-o", rows)
    return folder
