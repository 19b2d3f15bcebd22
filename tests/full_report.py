"""The report of `make test-full`: its tests with their times, and the benchmarks' output.

    python -m tests.full_report

Runs the benchmarks, and writes tests/reports/<date>-<commit>.md from .work/full.xml, which
`tests/run.py full` left there.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "tests/reports"
RESULTS = ROOT / ".work/full.xml"
BENCHES = (
    ("bench_placement",),
    ("bench_evaluation",),
    ("bench_report",),
    ("bench_import", "--bytes", "1000000000"),
    ("simulate",),
    ("bench_counting",),
    ("bench_hook_cost",),
    ("bench_hook_throughput",),
)


def output(*command: str) -> str:
    """What a command prints; a failure is part of it."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    failed = f"\n(exit code {done.returncode})\n{done.stderr[-2000:]}" if done.returncode else ""
    return (done.stdout.strip() + failed).strip()


def machine() -> str:
    model = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    )
    return f"{os.cpu_count()} x {model}, {platform.system()} {platform.release()}"


def tests() -> list[str]:
    """One line a test: seconds, verdict, name."""
    lines = ["| seconds | result | test |", "| --- | --- | --- |"]
    for case in ElementTree.parse(RESULTS).getroot().iter("testcase"):
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        lines.append(
            f"| {float(case.get('time', 0)):.0f} | {bad[0] if bad else 'passed'} | {name} |"
        )
    return lines


def main() -> int:
    if not RESULTS.exists():
        print(f"{RESULTS.relative_to(ROOT)}: found none, expected what tests/run.py full leaves")
        return 1
    commit = output("git", "rev-parse", "--short", "HEAD")
    dirty = (
        " with changes" if output("git", "status", "--porcelain", "--untracked-files=no") else ""
    )
    lines = [
        "# make test-full",
        "",
        f"Commit {commit}{dirty}, {time.strftime('%Y-%m-%d')}, {machine()}.",
        "",
        *tests(),
    ]
    for bench in BENCHES:
        command = (sys.executable, "-m", f"tests.bench.{bench[0]}", *bench[1:])
        print("$", " ".join(command[1:]), flush=True)
        lines += ["", f"`python {' '.join(command[1:])}`", "", "```text", output(*command), "```"]
    REPORTS.mkdir(exist_ok=True)
    path = REPORTS / f"{time.strftime('%Y-%m-%d')}-{commit}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
