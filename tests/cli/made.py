"""Traffic of the tiny model in tests/model: routing that is made up, and the files made of it."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowmap_jobs.cli.main import main

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = ROOT / "tests" / "model" / "moe"
LAYERS, EXPERTS, TOP_K, HOT = 4, 32, 4, 24
PROMPT = 24


@cache
def taste(traffic: str) -> npt.NDArray[np.float64]:
    """Log-weights [layers, experts] of a class of traffic."""
    seed = sum(traffic.encode())
    return np.random.default_rng(seed).normal(0.0, 1.3, (LAYERS, EXPERTS))


@cache
def routed(traffic: str, session: int, rows: int) -> npt.NDArray[np.uint8]:
    """Ids uint8[rows, layers, k] as vLLM returns them, distinct in each row."""
    rng = np.random.default_rng([sum(traffic.encode()), session])
    liking = taste(traffic) + rng.normal(0.0, 0.3, (LAYERS, EXPERTS))
    keys = liking[None] + rng.gumbel(size=(rows, LAYERS, EXPERTS))
    return np.argsort(-keys, axis=2)[:, :, :TOP_K].astype(np.uint8)


def records(folder: Path, traffic: str, sessions: int = 12, rows: int = 724) -> Path:
    """A folder of routed-experts arrays, a file and sidecar a session."""
    folder.mkdir()
    for session in range(sessions):
        np.save(folder / f"{traffic}{session:02}-0.npy", routed(traffic, session, rows))
        tokens = {"prompt_tokens": PROMPT, "completion_tokens": rows - PROMPT + 1}
        (folder / f"{traffic}{session:02}-0.json").write_text(json.dumps(tokens))
    return folder


@dataclass(frozen=True)
class Ran:
    """How a command line ended."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on stderr of a refusal."""
        assert self.code in (2, 3) and self.out == "", self
        assert self.err.startswith("rowmap: ") and self.err.count("\n") == 1, self.err
        return self.err.removeprefix("rowmap: ").rstrip("\n")

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def rowmap(*arguments: object) -> Ran:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return Ran(code, out.getvalue(), err.getvalue())


def good(*arguments: object) -> Ran:
    """A command line that must end well."""
    ran = rowmap(*arguments)
    assert ran.code == 0, ran
    return ran
