"""The whole evidence of a census: parts by hand, parts left out, and its place in a report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from rowmap_jobs.evaluation import Speed, evaluate, evidence
from rowmap_jobs.formats import report as report_format
from rowmap_jobs.formats.base import FormatError, canonical_json
from rowmap_jobs.formats.census import Census
from rowmap_jobs.formats.evidence import Evidence
from rowmap_jobs.formats.report import Report
from rowmap_jobs.formats.rowmap import Geometry, RowMap
from rowmap_jobs.formats.run import Counted
from rowmap_jobs.judgement import word
from rowmap_jobs.placement import place
from tests.evaluation.test_shares import LOPSIDED, TWO_BY_THREE
from tests.evaluation.traffic import census_of, drawn, layout, popular
from tests.formats.samples import FINGERPRINT, digest

SHAPE = layout(2, 32, 20, top_k=2)
SPEED = Speed(
    link_bytes_per_second=1e6,
    memory_bytes_per_second=1e8,
    measured_share=0.375,
    measured_tokens_per_second=5000.0,
    concurrency=4,
)


def own_map(data: Census, shape: Geometry = SHAPE) -> RowMap:
    return place(data.decode(), FINGERPRINT, shape)


def traffic(name: str, seed: int, sessions: int = 14) -> Census:
    rng = np.random.default_rng(seed)
    counts = drawn(popular(2, 32, seed), [100] * sessions, 2, rng, noise=0.3)
    created = list(range(sessions))
    return census_of(counts, SHAPE, traffic_class=name, created=created)


def everything() -> tuple[Census, Evidence]:
    agent, prose = traffic("agent", 0), traffic("prose", 1)
    found = evidence(
        agent,
        SHAPE,
        own_map(agent),
        active=own_map(prose),
        other_maps={"prose": own_map(prose)},
        other_censuses={"prose": prose, "agent": agent},
        speed=SPEED,
    )
    return agent, found


def test_two_by_three_by_hand() -> None:
    data = census_of(LOPSIDED, TWO_BY_THREE)
    found = evidence(data, TWO_BY_THREE, own_map(data, TWO_BY_THREE))
    assert found.baselines.oracle == pytest.approx(4 / 20)
    assert found.baselines.random == pytest.approx(2 / 3)
    assert found.baselines.headroom == pytest.approx((2 / 3 - 1 / 2) / (2 / 3 - 1 / 5))
    assert found.worst_layers == (0, 1)
    assert [point.own for point in found.convergence] == [pytest.approx(3 / 6)]
    assert found.bands[0].sessions == 2 and found.bands[0].own == pytest.approx(10 / 20)


def test_parts_without_input_are_left_out() -> None:
    data = traffic("agent", 0)
    found = evidence(data, SHAPE, own_map(data))
    missing = (found.against_active, found.change, found.drift, found.matrix, found.roofline)
    assert missing == (None,) * 5 and found.effects == ()
    wire = found.to_wire()
    assert not {"againstActive", "change", "drift", "matrix", "roofline"} & set(wire)


def test_parts_agree_with_each_other() -> None:
    agent, found = everything()
    own = evaluate(agent, SHAPE, {}).own
    assert found.change is not None and found.drift is not None and found.matrix is not None
    assert found.change.new == pytest.approx(own) == found.drift.refit
    assert found.change.active == pytest.approx(found.drift.active)
    assert found.change.improvement == pytest.approx(found.drift.regret)
    assert found.change.interval == found.drift.interval
    assert found.matrix.classes == ("agent", "prose")
    assert found.matrix.shares[0][0] == pytest.approx(own)
    prose = evaluate(traffic("prose", 1), SHAPE, {}).own
    assert found.matrix.shares[1][1] == pytest.approx(prose)
    # The active map is prose's.
    assert found.matrix.shares[1][0] == pytest.approx(found.change.active)
    assert [effect.traffic_class for effect in found.effects] == ["prose"]
    assert found.effects[0].then == pytest.approx(found.matrix.shares[0][1])
    assert found.effects[0].now < found.effects[0].then
    assert found.against_active is not None
    moved = found.change.rows_moved
    assert found.against_active.churn * 24 == pytest.approx(moved)


def test_speed_of_both_maps_and_of_the_other_class() -> None:
    _, found = everything()
    assert found.roofline is not None and found.roofline.now is not None
    assert found.roofline.rows_per_step == 4
    assert found.roofline.predicted.low > found.roofline.now.high
    assert found.roofline.ceiling > found.roofline.predicted.low
    there = found.effects[0].tokens_per_second
    assert there is not None and there.high < found.roofline.predicted.low
    assert 4 in {item.rows for item in found.unique}


def test_measured_distinct_experts_replace_expected_ones() -> None:
    agent = traffic("agent", 0)
    steps = np.array([0, 0, 0, 10], dtype=np.int64)
    touched = np.array([[0, 0], [0, 0], [0, 0], [30, 50]], dtype=np.int64)
    data = replace(agent, steps=steps, touched=touched)
    found = evidence(data, SHAPE, own_map(data), speed=SPEED)
    plain = evidence(agent, SHAPE, own_map(agent), speed=SPEED)
    assert found.roofline is not None and plain.roofline is not None
    own = evaluate(agent, SHAPE, {}).own
    # 3 and 5 rows of 10 bytes a step.
    assert found.roofline.slow_bytes_per_token == pytest.approx(80 * own)
    assert plain.roofline.slow_bytes_per_token < 2 * 10 * 8 * own


def test_a_map_from_elsewhere_is_judged_as_it_is() -> None:
    agent, prose = traffic("agent", 0), traffic("prose", 1)
    foreign = evidence(agent, SHAPE, own_map(prose), active=own_map(agent))
    assert foreign.change is not None and foreign.change.improvement < 0
    assert foreign.matrix is None
    # Drift asks what a refit would reach, whatever map is proposed.
    own = evaluate(agent, SHAPE, {}).own
    assert foreign.drift is not None and foreign.drift.refit == pytest.approx(own)
    headroom = foreign.baselines.headroom
    assert headroom is not None and headroom < 0.5


def test_another_class_without_a_map_gets_its_own() -> None:
    agent, prose = traffic("agent", 0), traffic("prose", 1)
    mine = own_map(agent)
    with_map = evidence(
        agent, SHAPE, mine, other_maps={"prose": own_map(prose)}, other_censuses={"prose": prose}
    )
    without = evidence(agent, SHAPE, mine, other_censuses={"prose": prose})
    assert with_map.matrix == without.matrix is not None


def test_a_census_without_decode_has_evidence_and_no_numbers_from_nothing() -> None:
    empty = census_of(np.zeros((2, 2, 32)), SHAPE)
    prose = traffic("prose", 1)
    found = evidence(
        empty, SHAPE, own_map(empty), active=own_map(prose), other_censuses={"prose": prose}
    )
    assert found.support.never_seen == 64 and found.skew.gini == 0.0
    assert found.matrix is None and found.drift is not None and not found.drift.recommend
    canonical_json(found.to_wire())


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("rows", "map"),
        ("active", "active map"),
        ("map", "map of class prose"),
        ("census", "census of class prose"),
    ],
)
def test_what_does_not_fit_is_named(where: str, source: str) -> None:
    agent, other = traffic("agent", 0), layout(1, 32, 20, top_k=2)
    strange = census_of(drawn(popular(1, 32, 0), [9], 2, np.random.default_rng(0)), other)
    rows = own_map(strange, other)
    given: dict[str, Any] = {
        "rows": {"rows": rows},
        "active": {"active": rows},
        "map": {"other_maps": {"prose": rows}, "other_censuses": {"prose": agent}},
        "census": {"other_censuses": {"prose": strange}},
    }[where]
    with pytest.raises(FormatError) as refused:
        evidence(agent, SHAPE, **{"rows": own_map(agent), **given})
    assert refused.value.source == source and "expected [0, 1]" in str(refused.value)


def from_files() -> Report:
    """A report without a cluster: no run, no lane."""
    data, found = everything()
    rows, result = own_map(data), evaluate(data, SHAPE, {})
    return Report(
        traffic_class="agent",
        created=1_795_000_000,
        window=data.header.window,
        digest=rows.digest,
        row_set_digest=rows.row_set_digest,
        census_digest=digest("census"),
        verdict=word(result, found),
        accepted=True,
        reason="Accepted",
        message="cold share",
        fingerprint=FINGERPRINT,
        geometry=SHAPE,
        capture=data.header.capture,
        selection=data.header.selection,
        counted=Counted(
            sessions=14, transcripts=14, decode_tokens=1400, prefill_tokens=0, considered=14
        ),
        cold=result.shares(),
        own_interval=result.interval,
        layers=result.layers,
        evidence=found,
    )


def test_a_report_reads_back_as_it_was_written() -> None:
    written = from_files()
    raw = canonical_json(written.to_wire())
    assert Report.from_bytes(raw, "report.json") == written
    assert "run" not in json.loads(raw) and "lane" not in json.loads(raw)


def test_the_committed_schema_is_the_models_and_a_report_fits_it() -> None:
    path = Path(report_format.__file__).with_name("report.schema.json")
    assert path.read_text(encoding="utf-8") == report_format.schema_text(), (
        "write it anew: python -m rowmap_jobs.formats.report > " + str(path)
    )
    schema = json.loads(path.read_text(encoding="utf-8"))
    checker = jsonschema.Draft202012Validator(schema)
    checker.check_schema(schema)
    wire = json.loads(canonical_json(from_files().to_wire()))
    assert list(checker.iter_errors(wire)) == []
    wire["evidence"]["skew"]["gini"] = "steep"
    assert [list(error.path) for error in checker.iter_errors(wire)] != []
    bare = {**wire, "evidence": None, "surprise": 1}
    assert any("surprise" in error.message for error in checker.iter_errors(bare))
