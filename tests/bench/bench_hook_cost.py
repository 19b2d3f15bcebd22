"""What the hook adds to one step of the engine: CPU time, Python calls, memory.

    python -m tests.bench.bench_hook_cost

The hook's own wrappers around a runner that does nothing, in the engine's Python: modes `off`
(mounted, idle), `serve` and `count` (decode steps of 1 and 32 requests; 40 layers of 384 experts,
top 6, on one CPU thread). Prints JSON; bars: 5 us idle, 50 us serve, count is reported. Nothing
else uses a vLLM meanwhile, so it needs no lock and takes about half a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.hook.serving import PYTHON

ROOT = Path(__file__).resolve().parents[2]
BARS = {"off": 5.0, "serve": 50.0}


def main() -> int:
    command = [PYTHON, str(ROOT / "tests/hook/cost.py"), str(ROOT / "rowmap_jobs/hook")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for item in found:
        bar = BARS.get(item["mode"])
        item["bar"] = bar
        item["within"] = bar is None or item["microseconds"]["median"] <= bar
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
