"""New transcripts of another mix arrive; the next time of the schedule brings their map."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rowmap_jobs.formats.report import Report
from tests.demo import deploy
from tests.demo.kube import Kube, condition
from tests.e2e import stubs
from tests.e2e.watching import untouched

CLASS = "mixed"
MAP = f"{stubs.LANE}.{CLASS}"


def upload(kube: Kube, letters: str) -> None:
    """The class's traffic is now of these letters."""
    with deploy.s3(kube) as client:
        body = stubs.transcripts(letters, datetime.now(UTC))
        client.put_object(Bucket="transcripts", Key=f"{CLASS}/records.jsonl", Body=body)


def accepted(kube: Kube) -> Any:
    return (kube.get("em", MAP) or {}).get("status", {}).get("accepted") or {}


def test_the_next_run_follows_the_traffic_and_only_a_better_map_moves_the_lane(lane: Kube) -> None:
    upload(lane, "a")
    acceptance = {"minDecodeTokens": 100, "maxColdShareVsPositional": "10"}
    every_minute = stubs.expert_map(
        stubs.LANE, CLASS, schedule="* * * * *", timeZone="Europe/Berlin", acceptance=acceptance
    )
    stubs.apply(lane, stubs.traffic_class(CLASS, f"{CLASS}/"), every_minute)
    lane.kubectl("wait", "--for=condition=Ready", f"em/{MAP}", "--timeout=300s")
    stubs.edit(lane, activeTrafficClass=CLASS)
    stubs.until(lane, (CLASS, "True/LaneServing", "Verified"))
    first = accepted(lane)

    def judged() -> tuple[bool, str]:
        found = condition(lane.get("em", MAP), "Accepted")
        return found.get("reason") == "NotBetterThanCurrent", str(found)

    with untouched(lane):
        lane.until("a run on the same traffic moves nothing", judged, 300)
    assert accepted(lane) == first
    assert condition(lane.get("em", MAP), "Fresh")["status"] == "True"

    before = stubs.last_rollout(lane)
    upload(lane, "q")

    def moved() -> tuple[bool, str]:
        found = accepted(lane)
        return found["digest"] != first["digest"], str(condition(lane.get("em", MAP), "Accepted"))

    lane.until("the new mix has its map", moved, 480)
    stubs.until(lane, (CLASS, "True/LaneServing", "Verified"), 240, after=before)
    second = accepted(lane)
    active = (lane.get("lane", stubs.LANE) or {})["status"]["active"]["digest"]
    assert active == second["digest"]
    assert set(stubs.pods(lane).values()) == {active}
    with deploy.s3(lane) as client:
        report = Report.from_bytes(deploy.get(client, second["reportKey"]), "report.json")
    assert report.evidence is not None and report.evidence.change is not None
    change = report.evidence.change
    assert change.active_digest == first["digest"]
    assert change.new < change.active and change.interval.low > 0

    lane.kubectl("patch", "em", MAP, "--type", "merge", "-p", '{"spec":{"suspend":true}}')
    jobs = {job["metadata"]["name"] for job in lane.list("jobs", f"expertmaps.dev/map={MAP}")}
    minutes = [int(name.rpartition("-")[2]) for name in jobs]
    assert len(set(minutes)) == len(minutes) >= 3
