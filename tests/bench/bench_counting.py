"""How much faster forced counting is than decoding the same responses and counting meanwhile.

    python -m tests.bench.bench_counting [--each 8] [--concurrency 8 1] [--repeats 5]

Boots the demo model once (`vllm serve`, the operator's copy of a lane, bf16, torch.compile).
For each concurrency: `--each` sessions of each class are really decoded, as many tokens as were
recorded, one run; then the runner's own code counts prompts and responses by force, best of
`--repeats`. Wall clock, the wait for the hook's files included. Prints JSON; `ratio` is decode
over forced.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rowmap_jobs.replay import Replayed
from tests.hook import counting, serving
from tests.hook.serving import Server


def timed(runner: counting.Runner, decoded: counting.Decoded) -> tuple[float, Replayed]:
    start = time.monotonic()
    replayed = runner.forced(decoded.turns)
    return time.monotonic() - start, replayed


def measure(server: Server, each: int, concurrency: int, repeats: int) -> dict[str, Any]:
    """One decode, and forced counts of what it gave."""
    runner = counting.Runner(server, concurrency)
    decoded = runner.decode(counting.sessions(each))
    runs = [timed(runner, decoded) for _ in range(repeats)]
    seconds, (_, replayed) = sorted(run[0] for run in runs), runs[0]
    live, forced = decoded.decode, counting.by_session(replayed)
    rows = sum(len(turn.response) - 1 for turn in decoded.turns)
    return {
        "concurrency": concurrency,
        "transcripts": len(decoded.turns),
        "sequences": len(replayed.sequences),
        "fed_rows": sum(len(sequence.tokens) for sequence in replayed.sequences),
        "decode_rows": rows,
        "selections": int(live.sum()),
        "moved_share": counting.moved(forced, live),
        "decode_s": round(decoded.seconds, 2),
        "forced_s": [round(value, 2) for value in seconds],
        "decode_rows_per_s": round(rows / decoded.seconds, 1),
        "forced_decode_rows_per_s": round(rows / seconds[0], 1),
        "ratio": round(decoded.seconds / seconds[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=8, help="sessions of a class")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    owner = serving.lane()
    container = serving.counting(serving.lane_container(), owner)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        volumes = {serving.LANE_CACHE: folder / "lane"}
        with Server(folder / "count", container, owner, volumes) as server:
            found = [
                measure(server, args.each, concurrency, args.repeats)
                for concurrency in args.concurrency
            ]
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
