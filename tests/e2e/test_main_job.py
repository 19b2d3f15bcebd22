"""The main job with real parts: what a user reads after `make demo`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rowmap_jobs.formats import census, names, rowmap, status
from rowmap_jobs.formats.report import Report
from tests.demo import deploy
from tests.demo.ask import differing
from tests.demo.evaluate import other_shares
from tests.demo.job import Demo, is_hit
from tests.demo.kube import condition
from tests.demo.settings import CLASSES, LANE, WORKLOAD
from tests.demo.table import table
from tests.e2e.conftest import outside


def test_answers_are_equal_without_us_with_each_map_and_after_switching_back(demo: Demo) -> None:
    answers = demo.seen.answers
    first = answers["un-hooked"]
    assert len(first) == 20
    assert len(set(first.values())) == 20, "the prompts' answers differ from each other"
    assert len(answers) == 4
    for label, other in answers.items():
        assert differing(first, other) == [], label


def test_every_swap_was_a_compile_cache_hit_by_evidence_from_the_process(demo: Demo) -> None:
    swapped = [boot for boot in demo.seen.boots if boot.what.startswith("swapped")]
    assert len(swapped) == 2
    assert all(is_hit(boot.compile) for boot in swapped), swapped
    lane = demo.kube.get("lane", LANE)
    assert condition(lane, "HashHit")["reason"] == "CompileCacheHit"


def test_the_pods_reported_the_digest_of_each_class(demo: Demo) -> None:
    digests = {name: demo.digest(name) for name in CLASSES}
    assert len(set(digests.values())) == 2
    seen = [boot.digest for boot in demo.seen.boots]
    assert seen == [None, digests["code"], digests["prose"], digests["code"]]


def test_the_lane_says_what_holds(demo: Demo) -> None:
    lane = demo.kube.get("lane", LANE)
    assert lane is not None
    state = lane["status"]
    assert state["observedGeneration"] == lane["metadata"]["generation"]
    found = {c["type"]: (c["status"], c["reason"]) for c in state["conditions"]}
    assert found == {
        "Ready": ("True", "LaneServing"),
        "Progressing": ("False", "Idle"),
        "Verified": ("True", "AllPodsReportDigest"),
        "HashHit": ("True", "CompileCacheHit"),
        "RolledBack": ("False", "NotRolledBack"),
        "Paused": ("False", "NotPaused"),
    }
    assert state["active"]["trafficClass"] == state["effectiveTrafficClass"] == "code"
    assert state["active"] == state["lastKnownGood"]
    assert [item["state"] for item in state["history"]] == ["Verified"] * 3


def test_kubectl_wait_works_as_the_readme_says(demo: Demo) -> None:
    jsonpath = "--for=jsonpath={.status.active.trafficClass}=code"
    demo.kube.kubectl("wait", jsonpath, f"lane/{LANE}", "--timeout=10s")
    demo.kube.kubectl("wait", "--for=condition=Ready", f"em/{LANE}.prose", "--timeout=10s")
    demo.kube.kubectl("wait", "--for=condition=Ready", "tc/prose", "--timeout=10s")


def test_maps_are_far_colder_than_by_position_and_than_the_other_map(demo: Demo) -> None:
    for name in CLASSES:
        item = demo.kube.get("em", f"{LANE}.{name}")
        assert item is not None
        accepted = item["status"]["accepted"]
        own = float(accepted["coldSharePercent"])
        other = float(next(iter(other_shares(demo.kube, name).values())))
        assert own <= 0.5 * float(accepted["positionalColdSharePercent"])
        assert own <= 0.6 * other
        assert accepted["decodeTokens"] >= 8000
        assert accepted["sessions"] >= 12


def test_the_store_holds_what_the_digests_name(demo: Demo) -> None:
    with deploy.s3(demo.kube) as client:
        for name in CLASSES:
            digest = demo.digest(name)
            raw = deploy.get(client, names.map_key(deploy.STORE["prefix"], digest))
            assert rowmap.parse(raw, digest, digest).digest == digest
            item = demo.kube.get("em", f"{LANE}.{name}")
            assert item is not None
            body = deploy.get(client, item["status"]["accepted"]["reportKey"])
            report = Report.from_bytes(body, "report.json")
            assert report.accepted
            assert report.digest == digest
            key = names.census_key(deploy.STORE["prefix"], report.census_digest)
            counted = deploy.get(client, key)
            assert "sha256:" + hashlib.sha256(counted).hexdigest() == report.census_digest
            assert census.parse(counted, key).header.capture.missed == 0


def test_reports_are_self_contained_pages_without_transcript_text(demo: Demo) -> None:
    pages = [path for path in deploy.fetch_reports(demo.kube) if path.suffix == ".html"]
    assert len(pages) == 2
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "<html" in text
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text


def test_the_pod_reports_hook_rows_and_fingerprint(demo: Demo) -> None:
    parsed = status.parse(json.dumps(demo.status()).encode(), "status port")
    assert parsed.mode == "serve"
    assert parsed.error is None
    assert parsed.map_digest == demo.digest("code")
    assert parsed.residency is not None
    assert parsed.residency.hot_rows == 4 * 24
    assert parsed.residency.cold_rows == 4 * 8


def test_only_the_runner_held_credentials(demo: Demo) -> None:
    for pod in demo.kube.list("pods"):
        spec = pod["spec"]
        secret_volumes = {v["name"] for v in spec.get("volumes", []) if "secret" in v}
        holders = {
            c["name"]
            for c in [*spec["containers"], *spec.get("initContainers", [])]
            if secret_volumes & {m["name"] for m in c.get("volumeMounts", [])}
        }
        assert holders <= {"runner", "probe"}, (pod["metadata"]["name"], holders)


def test_the_workload_carries_our_fields_and_no_gate_after_the_rollout(demo: Demo) -> None:
    workload = demo.kube.get("deployment", WORKLOAD)
    assert workload is not None
    assert workload["metadata"]["labels"][names.LABEL_LANE] == LANE
    assert workload["spec"].get("minReadySeconds", 0) == 0
    assert workload["spec"]["progressDeadlineSeconds"] == 600
    env = {e["name"] for e in workload["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert {"PYTHONPATH", "EXPERTMAPS_MODE", "EXPERTMAPS_MAP"} <= env


def test_nothing_outside_the_namespace_was_touched(demo: Demo, before: dict[str, Any]) -> None:
    assert outside(demo.kube) == before


def test_the_closing_table_has_a_row_for_each_class_and_boot(demo: Demo) -> None:
    text = table(demo)
    print(text)
    assert all(name in text for name in CLASSES)
    assert text.count("boot ") == 4
