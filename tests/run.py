"""Run test stages in order, print how long each took, and close with one summary line.

Stages: lint, unit (with lint), api, hook, e2e, full (what is too long for the others). A failing
stage does not hide the later ones' results, but the long ones are left out once the fast ones
failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
WORK = ROOT / ".work"

LINT = (
    (str(BIN / "ruff"), "check", "."),
    (str(BIN / "ruff"), "format", "--check", "."),
    (str(BIN / "mypy"), "operator/expertmaps_operator", "rowmap_jobs"),
    (str(BIN / "lint-imports"), "--config", "pyproject.toml"),
)
BROWSER = (sys.executable, "-m", "tests.report.install")
MARKS = {
    "unit": ("not api and not hook and not e2e",),
    "api": ("api",),
    # Engines boot one at a time; beside them run the tests that need torch alone.
    "hook": ("hook and engine and not full", "hook and not engine and not full"),
    "e2e": ("e2e and not full",),
    "full": ("full",),
}
"""What each stage runs; more than one at the same time."""
WORKERS = {"unit": ("-n", "auto", "--dist", "loadfile")}
CLUSTER = ("install", "build", "vllm", "up", "images")


def run(command: tuple[str, ...], env: dict[str, str]) -> int:
    """Run one command from the top of the checkout; its output goes through."""
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def environment() -> dict[str, str]:
    paths = [str(ROOT / "operator"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    # All workers of the fast tests have to collect the same tests in the same order.
    return {
        "PYTHONHASHSEED": "0",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
    }


def lint(env: dict[str, str]) -> int:
    """Number of linters that object."""
    return sum(1 for command in LINT if run(command, env))


def prepare(stage: str, env: dict[str, str]) -> int:
    """What a stage needs on the machine: binaries for api, vLLM for hook, a cluster for e2e."""
    tool = str(ROOT / "tests/cluster/cluster")
    steps = {
        "unit": (),
        "api": ("install", "build"),
        "hook": ("install", "vllm"),
        "e2e": CLUSTER,
        "full": CLUSTER,
    }[stage]
    return next((code for step in steps if (code := run((tool, step), env))), 0)


def tests(stage: str, env: dict[str, str]) -> tuple[int, int]:
    """(passed, failed) of one stage; a stage that could not start counts as one failure."""
    if prepare(stage, env):
        return 0, 1
    if stage == "unit":
        run(BROWSER, env)  # without a browser its tests fail, and the others still run
    first, *others = MARKS[stage]
    with ThreadPoolExecutor() as pool:
        beside = [
            pool.submit(part, f"{stage}{place}", marks, env, WORK / f"{stage}{place}.log")
            for place, marks in enumerate(others, 2)
        ]
        results = [part(stage, first, env), *(item.result() for item in beside)]
    for place in range(2, len(MARKS[stage]) + 1):
        print((WORK / f"{stage}{place}.log").read_text(), flush=True)
    return sum(good for good, _ in results), sum(bad for _, bad in results)


def part(name: str, marks: str, env: dict[str, str], log: Path | None = None) -> tuple[int, int]:
    """(passed, failed) of one pytest, which writes to a log or through."""
    report = WORK / f"{name}.xml"
    report.unlink(missing_ok=True)
    pytest = (sys.executable, "-m", "pytest", "-q", "-m", marks, f"--junitxml={report}")
    command = (*pytest, *WORKERS.get(name, ()), "--durations=5")
    if log is None:
        code = run(command, env)
    else:
        with log.open("w") as file:
            code = subprocess.run(
                command, cwd=ROOT, env=env, check=False, stdout=file, stderr=subprocess.STDOUT
            ).returncode
    if not report.exists():
        return 0, 1
    suite = ElementTree.parse(report).getroot().find("testsuite")
    numbers = {} if suite is None else suite.attrib
    bad = int(numbers.get("failures", 0)) + int(numbers.get("errors", 0))
    passed = int(numbers.get("tests", 0)) - bad - int(numbers.get("skipped", 0))
    return passed, max(bad, 1 if code else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=("lint", *MARKS))
    stages = parser.parse_args().stages
    WORK.mkdir(exist_ok=True)
    env, times, passed, failed = environment(), {}, 0, 0
    for stage in stages:
        if failed and stage in ("hook", "e2e", "full"):
            print(f"{stage}: left out, since an earlier stage failed", flush=True)
            continue
        start = time.monotonic()
        if stage in ("lint", "unit"):
            failed += lint(env)
        if stage != "lint":
            good, bad = tests(stage, env)
            passed, failed = passed + good, failed + bad
        times[stage] = time.monotonic() - start
    for stage, seconds in times.items():
        print(f"{stage}: {seconds / 60:.1f} minutes")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
