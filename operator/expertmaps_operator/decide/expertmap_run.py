"""What a run has come to: going on, ended with a result, or not to be waited for any longer."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from rowmap_jobs.formats.run import Verdict

from ..api.expertlane import ExpertLane
from ..api.reasons import Reason
from ..build.profile_job import engine_name
from ..build.runner import PROBE, RUNNER
from ..snapshot import Manifest
from . import expertmap_jobs as jobs
from .conditions import Status, timestamp
from .expertmap_checks import Scene

MAX_RESTARTS = 3
BACKING_OFF = "CrashLoopBackOff"
IMAGE_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName"})
CONFIG_REASONS = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)


@dataclass(frozen=True)
class Result:
    """The end of a run. `verdict` is what its runner said, when it said something."""

    outcome: str
    reason: str
    message: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Progress:
    """A run that goes on, as the condition Profiling says it, and when to look again."""

    status: Status
    reason: str
    message: str
    until: datetime | None = None
    """When it has to have its engine ready."""


def look(scene: Scene, job: Manifest, now: datetime) -> Result | Progress:
    """What the Job and its pods say."""
    pods = jobs.pods_of(scene.facts, job)
    engine = _engine(scene, job)
    end = jobs.ended(job)
    if end is not None:
        return _result(job, pods, end, engine)
    pod = pods[0] if pods else None
    if pod is not None and jobs.engine_started(pod, engine):
        return _counting(job, pod, engine)
    if pod is not None and (failed := _crash_loop(pod, engine)) is not None:
        return failed
    return _pending(scene, job, pod, engine, now)


def gone(name: str) -> Result:
    """A Job that was seen and is not there any more."""
    return Result(
        "Failed",
        Reason.NO_VERDICT,
        f"Job {name} was deleted before its result was recorded",
    )


def _engine(scene: Scene, job: Manifest) -> str:
    """The engine's container: the native sidecar of the Job's own template."""
    pod = (job.get("spec") or {}).get("template", {}).get("spec") or {}
    for item in pod.get("initContainers") or []:
        if item.get("restartPolicy") == "Always":
            return str(item["name"])
    lane = scene.facts.lane
    return engine_name(lane.spec.container_name) if isinstance(lane, ExpertLane) else ""


def _counting(job: Manifest, pod: Manifest, engine: str) -> Progress:
    before = jobs.restarted_after(jobs.container(pod, engine))
    note = f"; {before}" if before is not None else ""
    return Progress("True", Reason.PROFILE_RUNNING, f"run {jobs.name_of(job)} counts{note}")


def _crash_loop(pod: Manifest, engine: str) -> Result | None:
    """An engine that keeps ending before it is ready: the Job itself would wait for it forever."""
    status = jobs.container(pod, engine)
    looping = jobs.waiting(status).get("reason") == BACKING_OFF
    if not looping and int(status.get("restartCount") or 0) < MAX_RESTARTS:
        return None
    last = jobs.last_exit(status)
    if last is None:
        return None
    return _engine_failed(last)


def _engine_failed(last: jobs.Exit) -> Result:
    if last.reason == jobs.OOM_KILLED:
        return Result(
            "Failed",
            Reason.ENGINE_OUT_OF_MEMORY,
            f"{last}: raise the memory limit of the lane's container",
        )
    return Result(
        "Failed", Reason.ENGINE_POD_FAILED, f"{last} before it was ready: see the container's log"
    )


def _pending(
    scene: Scene, job: Manifest, pod: Manifest | None, engine: str, now: datetime
) -> Result | Progress:
    seconds = scene.map.spec.profile.pending_deadline_seconds
    since = (jobs.created_at(pod) if pod else None) or jobs.created_at(job) or now
    until = since + timedelta(seconds=seconds)
    state = _why_pending(job, pod, engine, until)
    if now < until:
        return state
    return Result(
        "Failed",
        Reason.PROFILE_DEADLINE_EXCEEDED,
        f"the engine was not ready within spec.profile.pendingDeadlineSeconds ({seconds}); last: "
        f"{state.reason}: {state.message}",
    )


def _why_pending(job: Manifest, pod: Manifest | None, engine: str, until: datetime) -> Progress:
    run = jobs.name_of(job)
    if pod is None:
        return Progress("True", Reason.PROFILE_RUNNING, f"run {run}: the Job has no pod yet", until)
    message = jobs.unschedulable(pod)
    if message is not None:
        return Progress(
            "False",
            Reason.WAITING_FOR_ACCELERATOR,
            f"run {run}: pod {jobs.name_of(pod)} finds no node: {message}",
            until,
        )
    for status in jobs.statuses(pod):
        wait = jobs.waiting(status)
        why, place = str(wait.get("reason")), f"container {status.get('name')}"
        detail = f"run {run}: {place}: {why}: {wait.get('message') or 'see the events of the pod'}"
        if why in IMAGE_REASONS:
            return Progress("False", Reason.IMAGE_PULL_FAILED, detail, until)
        if why in CONFIG_REASONS:
            return Progress("False", Reason.ENGINE_POD_FAILED, detail, until)
    before = jobs.last_exit(jobs.container(pod, engine))
    note = f"; {before}" if before is not None else ""
    return Progress(
        "True", Reason.PROFILE_RUNNING, f"run {run}: the engine is not ready yet{note}", until
    )


def _result(job: Manifest, pods: list[Manifest], end: jobs.Ended, engine: str) -> Result:
    """The verdict of the runner, else of the probe, else what Kubernetes knows."""
    run = jobs.name_of(job)
    verdict, problem = jobs.verdict_of(pods, RUNNER, run)
    if verdict is None:
        probe, bad_probe = jobs.verdict_of(pods, PROBE, run)
        verdict = probe if probe is not None and probe.outcome == "Failed" else None
        problem = problem or bad_probe
    if end.reason == jobs.DEADLINE_EXCEEDED and (verdict is None or verdict.outcome == "Failed"):
        last = f"; last: {verdict.reason}: {verdict.message}" if verdict is not None else ""
        return Result(
            "Failed",
            Reason.PROFILE_DEADLINE_EXCEEDED,
            f"run {run} did not end within spec.profile.pendingDeadlineSeconds and "
            f"activeDeadlineSeconds{last}",
        )
    if verdict is not None and verdict.outcome in ("Accepted", "Rejected", "Failed"):
        return Result(verdict.outcome, verdict.reason, verdict.message, verdict)
    if verdict is not None:
        problem = f"outcome: found {verdict.outcome}, expected Accepted, Rejected or Failed"
    if problem is not None:
        return Result("Failed", Reason.NO_VERDICT, f"run {run} left no readable verdict: {problem}")
    return _without_verdict(run, pods, end, engine)


def _without_verdict(run: str, pods: list[Manifest], end: jobs.Ended, engine: str) -> Result:
    for pod in pods:
        crashed = jobs.restarted_after(jobs.container(pod, engine))
        if crashed is None:
            found = jobs.last_exit(jobs.container(pod, engine))
            crashed = found if found is not None and found.reason == jobs.OOM_KILLED else None
        if crashed is not None:
            return _engine_failed(crashed)
        for status in jobs.statuses(pod):
            ended = jobs.last_exit(status)
            name = status.get("name")
            if ended is None or ended.code == 0 or name == engine:
                continue
            reason = Reason.NO_VERDICT if name in (RUNNER, PROBE) else Reason.ENGINE_POD_FAILED
            return Result("Failed", reason, f"{ended}: see the container's log")
        state = pod.get("status") or {}
        if state.get("reason"):
            text = f"pod {jobs.name_of(pod)}: {state['reason']}: {state.get('message') or ''}"
            return Result("Failed", Reason.ENGINE_POD_FAILED, text)
    return Result(
        "Failed",
        Reason.NO_VERDICT,
        f"Job {run} ended without a verdict ({end.reason or 'Complete'}: {end.message or 'no pod'} "
        f"at {timestamp(end.at)})",
    )
