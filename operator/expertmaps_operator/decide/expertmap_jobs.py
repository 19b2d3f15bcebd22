"""What the Job of a run and its pods say, without judging it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from rowmap_jobs.formats.base import FormatError
from rowmap_jobs.formats.run import Verdict, parse_verdict

from ..build.runner import PROBE, RUNNER
from ..snapshot import Manifest, MapSnapshot
from .conditions import parse_timestamp
from .expertmap_schedule import minute_of

OOM_KILLED = "OOMKilled"
DEADLINE_EXCEEDED = "DeadlineExceeded"


@dataclass(frozen=True)
class Ended:
    """How a Job ended."""

    complete: bool
    reason: str
    message: str
    at: datetime


@dataclass(frozen=True)
class Exit:
    """The last end of a container."""

    container: str
    code: int
    reason: str
    restarts: int

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason and self.reason != "Error" else ""
        again = f" after {self.restarts} restarts" if self.restarts else ""
        return f"container {self.container} ended with exit code {self.code}{why}{again}"


def owned_jobs(snapshot: MapSnapshot, uid: str) -> list[Manifest]:
    """Jobs of this very ExpertMap, newest run first: one deleted and made again has others."""
    found = [job for job in snapshot.jobs if _owned_by(job, uid)]
    return sorted(found, key=lambda job: minute_of(name_of(job)), reverse=True)


def name_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def uid_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("uid") or "")


def terminating(manifest: Manifest) -> bool:
    return bool(manifest["metadata"].get("deletionTimestamp"))


def created_at(manifest: Manifest) -> datetime | None:
    text = manifest["metadata"].get("creationTimestamp")
    return parse_timestamp(str(text)) if text else None


def ended(job: Manifest) -> Ended | None:
    """How the Job ended; None while it goes on."""
    for item in (job.get("status") or {}).get("conditions") or []:
        if item.get("type") in ("Complete", "Failed") and item.get("status") == "True":
            since = item.get("lastTransitionTime") or job["metadata"].get("creationTimestamp")
            return Ended(
                complete=item["type"] == "Complete",
                reason=str(item.get("reason") or ""),
                message=str(item.get("message") or ""),
                at=parse_timestamp(str(since)),
            )
    return None


def pods_of(snapshot: MapSnapshot, job: Manifest) -> list[Manifest]:
    """The Job's pods, newest first."""
    found = [pod for pod in snapshot.pods if _owned_by(pod, uid_of(job))]
    return sorted(
        found,
        key=lambda pod: (str(pod["metadata"].get("creationTimestamp") or ""), name_of(pod)),
        reverse=True,
    )


def statuses(pod: Manifest) -> Iterator[Manifest]:
    """Status of every container, in start order."""
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def container(pod: Manifest, name: str) -> Manifest:
    """Status of a container; empty while it has none."""
    return next((item for item in statuses(pod) if item.get("name") == name), {})


def waiting(status: Manifest) -> Manifest:
    """Why a container waits: reason and message; empty when it does not."""
    found: Manifest = (status.get("state") or {}).get("waiting") or {}
    return found


def last_exit(status: Manifest) -> Exit | None:
    """How a container last ended."""
    for state in (status.get("state") or {}, status.get("lastState") or {}):
        if found := state.get("terminated"):
            return Exit(
                container=str(status.get("name")),
                code=int(found.get("exitCode") or 0),
                reason=str(found.get("reason") or ""),
                restarts=int(status.get("restartCount") or 0),
            )
    return None


def restarted_after(status: Manifest) -> Exit | None:
    """How a container ended before its last restart: its end with the pod is no failure."""
    found = (status.get("lastState") or {}).get("terminated")
    return last_exit({**status, "state": {}}) if found else None


def engine_started(pod: Manifest, engine: str) -> bool:
    """Whether the engine once answered its startup probe in this pod."""
    runner = container(pod, RUNNER).get("state") or {}
    return bool(container(pod, engine).get("started")) or bool(
        runner.get("running") or runner.get("terminated")
    )


def unschedulable(pod: Manifest) -> str | None:
    """The scheduler's message when it finds no node."""
    for item in (pod.get("status") or {}).get("conditions") or []:
        if item.get("type") == "PodScheduled" and item.get("status") == "False":
            return str(item.get("message") or item.get("reason") or "no node fits")
    return None


def verdict_of(pods: Sequence[Manifest], name: str, run: str) -> tuple[Verdict | None, str | None]:
    """The newest verdict of a container, or what is wrong with its message."""
    problem: str | None = None
    for pod in pods:
        ends = (container(pod, name).get("state") or {}).get("terminated") or {}
        message = ends.get("message")
        if not message:
            continue
        source = f"termination message of {name} in pod {name_of(pod)}"
        try:
            verdict = parse_verdict(str(message), source)
        except FormatError as error:
            problem = problem or str(error)
            continue
        if verdict.run == run:
            return verdict, None
        problem = problem or f"{source}: run: found {verdict.run!r}, expected {run!r}"
    return None, problem


def probe_verdict(pods: Sequence[Manifest], run: str) -> Verdict | None:
    """What the newest probe found."""
    return verdict_of(pods, PROBE, run)[0]


def _owned_by(manifest: Manifest, uid: str) -> bool:
    owners = manifest["metadata"].get("ownerReferences") or []
    return any(owner.get("uid") == uid for owner in owners)
