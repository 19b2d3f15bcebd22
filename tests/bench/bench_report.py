"""How long the full report of a large census takes: CPU seconds, best of five.

`python -m tests.bench.bench_report`: 1,000 transcripts of as many sessions on 40 layers of 384
experts, top-6, 295 hot, with an active map, a second class and a predicted speed: the shares that
decide, all of the evidence, report.json and report.html. The bar is 10 seconds.
"""

from __future__ import annotations

import sys
import time

from rowmap_jobs.cli.work import judged
from rowmap_jobs.cli.work.judged import Case
from rowmap_jobs.evaluation import Speed
from rowmap_jobs.evaluation.resample import BOOTSTRAPS
from rowmap_jobs.formats.base import canonical_json, sha256_digest
from rowmap_jobs.formats.report import Report
from rowmap_jobs.placement import place
from rowmap_jobs.report import Plots, render
from tests.bench.bench_evaluation import cpu_seconds, large
from tests.evaluation.traffic import GEOMETRY

LIMIT = 10.0
RESAMPLES = 200
"""At least so many: fewer would make the number easier than what it is compared with."""


def prepared() -> Case:
    """The case of a lane with a map in force and another class; what is read, not computed."""
    census, other = large(1000, 0), large(100, 2)
    fingerprint = census.header.fingerprint
    return Case(
        census=census,
        census_digest=sha256_digest(b"large"),
        rows=place(census.decode(), fingerprint, GEOMETRY),
        active=place(other.decode(), fingerprint, GEOMETRY),
        other_censuses={"prose": other},
        speed=Speed(340e9, 4.2e12, 0.25, 89.3),
    )


def full(case: Case) -> tuple[bytes, bytes]:
    """report.json and report.html, as `rowmap evaluate --report-dir` makes them."""
    others = judged.maps_of_others(case)
    evaluation = judged.judged(case, others)
    report = judged.report(case, evaluation, judged.found(case, others), 1_789_632_000)
    page = render(report, Plots.of(case.census.decode(), case.rows, case.active))
    return canonical_json(report.to_wire()), page.encode()


def parts(case: Case) -> str:
    """Where the time goes, of one run."""
    out = []
    at = time.process_time()

    def done(name: str) -> None:
        nonlocal at
        out.append(f"{name} {time.process_time() - at:.2f}")
        at = time.process_time()

    others = judged.maps_of_others(case)
    evaluation = judged.judged(case, others)
    done("shares")
    seen = judged.found(case, others)
    done("evidence")
    report = judged.report(case, evaluation, seen, 1_789_632_000)
    canonical_json(report.to_wire())
    done("report.json")
    render(report, Plots.of(case.census.decode(), case.rows, case.active))
    done("report.html")
    return ", ".join(out)


def main() -> int:
    case = prepared()
    wire, page = full(case)
    report = Report.from_bytes(wire, "report.json")
    assert report.evidence is not None and report.evidence.roofline is not None
    assert report.counted.transcripts == 1000 and BOOTSTRAPS >= RESAMPLES
    seconds = cpu_seconds(lambda: full(case))
    sys.stdout.write(
        f"full report of {report.counted.transcripts:,} transcripts, "
        f"{int(case.census.counts.sum()):,} selections, {BOOTSTRAPS:,} resamples: "
        f"{seconds:.2f} CPU seconds, best of five (bar {LIMIT:g}); "
        f"{len(wire):,} and {len(page):,} bytes\n{parts(case)}\n"
    )
    return 0 if seconds < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
