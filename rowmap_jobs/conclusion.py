"""What a census comes to: its map, the judgement, the report, an accepted map's ConfigMap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import assemble, judgement, manifest, store
from .assemble import Facts
from .edges.s3 import Bucket
from .evaluation import Evaluation, evaluate, evidence
from .formats import census as census_format
from .formats import names
from .formats.base import canonical_json
from .formats.census import Census
from .formats.evidence import Evidence
from .formats.report import Report
from .formats.rowmap import Fingerprint, Geometry, RowMap
from .formats.run import RunSpec, Verdict
from .log import say
from .placement import place
from .reasons import Reason, RunError
from .report import Plots, render
from .sequences import Sequence
from .services import Services


@dataclass(frozen=True)
class Counted:
    """A census with what is known of its run."""

    census: Census
    sequences: list[Sequence]
    facts: Facts
    fingerprint: Fingerprint
    geometry: Geometry


def conclude(spec: RunSpec, services: Services, bucket: Bucket, counted: Counted) -> Verdict:
    """Store census, map and report, create the ConfigMap of an accepted map. Raises RunError."""
    data, geometry, facts = counted.census, counted.geometry, counted.facts
    census_digest = store.put_census(bucket, census_format.to_bytes(data))
    rows = place(data.decode(), counted.fingerprint, geometry)
    others = other_maps(spec, bucket, geometry, facts)
    active = active_map(spec, bucket, counted)
    evaluation = evaluate(data, geometry, others, spec.replay.seed)
    found = evidence(data, geometry, rows, active, others, seed=spec.replay.seed)
    reason, message = judge(spec, evaluation, found)
    numbers = assemble.counted(data, counted.sequences, facts)
    store.put_map(bucket, rows)
    report = assemble.report(
        spec,
        int(services.now().timestamp()),
        data,
        census_digest,
        rows,
        evaluation,
        found,
        numbers,
        facts,
        (reason, message),
    )
    report_key = put_reports(spec, bucket, report, Plots.of(data.decode(), rows, active))
    config_map = None
    if reason is Reason.ACCEPTED:
        made = manifest.config_map(spec, rows)
        config_map = str(made["metadata"]["name"])
        services.create(made)
    say(f"{reason}: {message}")
    return Verdict(
        run=spec.run,
        outcome="Accepted" if reason is Reason.ACCEPTED else "Rejected",
        reason=reason,
        message=message,
        digest=rows.digest,
        row_set_digest=rows.row_set_digest,
        config_map=config_map,
        census_digest=census_digest,
        report_key=report_key,
        fingerprint=counted.fingerprint,
        geometry=geometry,
        cold=evaluation.shares(),
        counted=numbers,
    )


def judge(spec: RunSpec, evaluation: Evaluation, found: Evidence) -> tuple[Reason, str]:
    """Accepted, or why not; a good map must beat the active one too, where there is one."""
    reason, message = judgement.decide(evaluation, spec.acceptance, found)
    if reason is not Reason.ACCEPTED or found.change is None:
        return reason, message
    better, numbers = judgement.improves(found.change, spec.acceptance.min_improvement_points)
    return (
        (reason, f"{message}; {numbers}") if better else (Reason.NOT_BETTER_THAN_CURRENT, numbers)
    )


def put_reports(spec: RunSpec, bucket: Bucket, report: Report, plots: Plots) -> str:
    """Store report.json and report.html; returns the key of the former."""
    prefix, class_ = bucket.location.prefix, spec.traffic_class or ""
    json_key = names.report_key(prefix, spec.lane, class_, spec.run, "json")
    html_key = names.report_key(prefix, spec.lane, class_, spec.run, "html")
    store.put_report(bucket, json_key, canonical_json(report.to_wire()), "application/json")
    page = render(report, plots)
    store.put_report(bucket, html_key, page.encode("utf-8"), "text/html; charset=utf-8")
    return json_key


def active_map(spec: RunSpec, bucket: Bucket, counted: Counted) -> RowMap | None:
    """The class's accepted map, when it speaks of this model; else noted, and nothing has to beat
    it: a map of another model cannot be used any more.
    """
    if spec.active_map_digest is None:
        return None
    rows = _readable(bucket, spec.active_map_digest, "the active map", counted.facts)
    if rows is None:
        return None
    if rows.fingerprint != counted.fingerprint or rows.geometry != counted.geometry:
        counted.facts.notes.append(
            "No comparison with the active map: it was made for another model or geometry."
        )
        return None
    return rows


def other_maps(
    spec: RunSpec, bucket: Bucket, geometry: Geometry, facts: Facts
) -> Mapping[str, RowMap]:
    """Accepted maps of the lane's other classes; one that cannot be compared is noted."""
    out = {}
    for name, digest in sorted(spec.other_map_digests.items()):
        rows = _readable(bucket, digest, f"the map of class {name}", facts)
        if rows is None:
            continue
        if assemble.comparable(rows, geometry):
            out[name] = rows
        else:
            facts.notes.append(f"No comparison with the map of class {name}: other layers.")
    return out


def _readable(bucket: Bucket, digest: str, what: str, facts: Facts) -> RowMap | None:
    """A map of the store; one that is gone or damaged is noted. Raises RunError for the rest."""
    try:
        return store.get_map(bucket, digest)
    except RunError as error:
        if error.reason not in (Reason.OBJECT_NOT_FOUND, Reason.CHECKSUM_MISMATCH):
            raise
        facts.notes.append(f"No comparison with {what}: {error.message}")
        say(str(error))
        return None
