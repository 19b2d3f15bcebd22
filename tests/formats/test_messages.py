"""RunSpec, Verdict, status, S3Location, names: what operator, runner and hook tell each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats import names, run, status
from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.run import MAX_VERDICT_BYTES, ColdShares, Counted, Verdict
from rowmap_jobs.formats.s3 import S3Location
from tests.formats.samples import FINGERPRINT, digest, geometry


def spec(**over: Any) -> dict[str, Any]:
    return {
        "kind": "Profile",
        "namespace": "ns",
        "run": "r",
        "lane": "l",
        "store": {"bucket": "maps"},
        "owner": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "d", "uid": "u"},
        **over,
    }


def test_a_run_spec_has_defaults_and_survives_the_wire() -> None:
    read = run.RunSpec.from_wire(spec(store={"bucket": "maps", "endpointURL": "http://s3"}), "x")
    assert read.store.endpoint_url == "http://s3"
    assert read.replay.max_transcripts == 500 and read.min_transcripts == 12
    assert run.RunSpec.from_wire(read.to_wire(), "x") == read


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"kind": "Bake"}, "kind: found Bake, expected Input should be 'Profile' or 'Fetch'"),
        ({"digest": "sha256:1"}, "digest: found sha256:1, expected String should match pattern"),
        ({"store": {"bucket": "a"}}, "store.bucket: found a, expected String should have at"),
        ({"replay": {"sampling": "Best"}}, "replay.sampling: found Best, expected Input should"),
        ({"surprise": 1}, "surprise: found 1, expected Extra inputs are not permitted"),
    ],
)
def test_a_wrong_run_spec_names_the_place(over: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        run.RunSpec.from_wire(spec(**over), "EXPERTMAPS_RUN")
    assert str(refused.value).startswith(f"EXPERTMAPS_RUN: {message}")


@pytest.mark.parametrize(
    ("over", "place"),
    [
        ({"prefix": "/a/"}, "prefix"),
        ({"prefix": "a"}, "prefix"),
        ({"bucket": "A_b"}, "bucket"),
        ({"endpointURL": "s3.example"}, "endpointURL"),
        ({"addressingStyle": "path"}, "addressingStyle"),
        (
            {"credentialsSecretRef": {"name": "a"}, "serviceAccountName": "b"},
            "top level: found dict, expected credentialsSecretRef or serviceAccountName, not both",
        ),
    ],
)
def test_a_wrong_location_names_the_place(over: dict[str, Any], place: str) -> None:
    with pytest.raises(FormatError) as refused:
        S3Location.from_wire({"bucket": "maps", **over}, "store")
    assert str(refused.value).startswith(f"store: {place}")


def verdict(**over: Any) -> Verdict:
    values: dict[str, Any] = {
        "run": "lane.agent-1",
        "outcome": "Accepted",
        "reason": "Accepted",
        "message": "fine",
        "digest": digest("map"),
        "fingerprint": FINGERPRINT,
        "geometry": geometry(),
        "cold": ColdShares(own=0.1, in_sample=0.05, positional=0.3),
        "counted": Counted(
            sessions=1, transcripts=1, decode_tokens=1, prefill_tokens=1, considered=1
        ),
    }
    return Verdict(**{**values, **over})


def test_a_verdict_survives_the_termination_message() -> None:
    raw = verdict().to_message()
    assert len(raw) <= MAX_VERDICT_BYTES
    assert run.parse_verdict(raw, "termination message") == verdict()


@given(st.text(max_size=1000), st.integers(1, 200))
def test_a_verdict_always_fits(message: str, layers: int) -> None:
    rows = {str(i): 2 for i in range(layers)}
    big = geometry(hot_rows=rows, moe_layers=tuple(range(layers)))
    text = message.encode("utf-8", "replace").decode()
    raw = verdict(message=text, geometry=big).to_message()
    assert len(raw) <= MAX_VERDICT_BYTES
    assert run.parse_verdict(raw, "x").digest == digest("map")


@given(st.binary(max_size=200))
def test_random_bytes_are_no_verdict_and_no_status(raw: bytes) -> None:
    for parse in (run.parse_verdict, status.parse):
        with pytest.raises(FormatError):
            parse(raw, "x")


def test_sizes_are_bounded() -> None:
    with pytest.raises(FormatError, match="size: found 4097 bytes, expected at most 4096"):
        run.parse_verdict(" " * 4097, "x")
    with pytest.raises(FormatError, match="size: found 1048577 bytes"):
        status.parse(b" " * ((1 << 20) + 1), "x")


@pytest.mark.parametrize(
    ("evidence", "hit"),
    [
        ({"cacheHits": 3, "cacheMisses": 0}, True),
        ({"cacheHits": 3, "cacheMisses": 1}, False),
        ({"cacheHits": 0, "cacheMisses": 0, "aotLoaded": 1}, True),
        ({"cacheHits": 0, "cacheMisses": 0, "aotLoaded": 1, "aotCompiled": 1}, False),
        ({"cacheHits": 3, "cacheMisses": 0, "autotuneFiles": 2}, True),
        ({"cacheHits": 3, "cacheMisses": 0, "autotuneFiles": 2, "autotuneWritten": 1}, False),
        ({"cacheHits": 0, "cacheMisses": 0}, None),
    ],
)
def test_compile_evidence(evidence: dict[str, int], hit: bool | None) -> None:
    assert status.CompileEvidence.from_wire(evidence, "x").hit is hit


def test_names_fit_and_carry_sixteen_digits() -> None:
    full = "sha256:" + "ab" * 32
    lane, of = "l" * 25, "c" * 25
    assert names.hex16(full) == "ab" * 8
    assert len(names.map_configmap(lane, full)) <= 63
    assert len(names.hook_configmap(lane, full)) <= 63
    assert len(names.fetch_job(lane, full)) <= 63
    assert len(names.profile_job(f"{lane}.{of}", 29_000_000)) <= 63
    assert names.map_key("p/", full) == f"p/maps/sha256/{'ab' * 32}/rowmap.json"
    assert names.census_key("", full) == f"census/sha256/{'ab' * 32}/census.npz"
    assert names.report_key("p/", "l", "c", "r", "html") == "p/reports/l/c/r/report.html"


@pytest.mark.parametrize("wrong", ["ab" * 32, "sha256:AB", "sha256:" + "g" * 64, ""])
def test_a_short_digest_is_no_name(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected sha256:<64 hex digits>"):
        names.hex16(wrong)


def test_wire_is_camel_case_without_unset_fields() -> None:
    wire = json.loads(verdict().to_message())
    assert "rowSetDigest" not in wire and wire["cold"]["inSample"] == 0.05
    assert wire["geometry"]["expertParallel"] is None
