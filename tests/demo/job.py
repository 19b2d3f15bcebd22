"""The steps of the main job; each leaves what it saw in `Demo.seen`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.demo import deploy
from tests.demo.ask import Answers, ask, differing, get_json
from tests.demo.kube import Kube, Object, condition, describe
from tests.demo.settings import CLASSES, LANE, WORKLOAD, DemoError, Settings

BOOT_SECONDS = 900
PROFILE_SECONDS = 1800
FAILED = ("Stopped", "RollingBack", "RolledBack", "RollbackFailed")


@dataclass
class Boot:
    """One boot of the lane's pod, as the cluster and the process saw it."""

    what: str
    seconds: float
    digest: str | None
    compile: dict[str, int] | None


@dataclass
class Seen:
    """What the demo saw."""

    answers: dict[str, Answers] = field(default_factory=dict)
    boots: list[Boot] = field(default_factory=list)
    profile_seconds: dict[str, float] = field(default_factory=dict)
    switch_seconds: dict[str, float] = field(default_factory=dict)


class Demo:
    """The main job on one cluster."""

    def __init__(self, settings: Settings, kube: Kube, say: Callable[[str], None]) -> None:
        self.settings, self.kube, self.say = settings, kube, say
        self.seen = Seen()

    def run(self) -> None:
        """Everything, in order. Raises DemoError."""
        self.prepare()
        self.boot_unhooked()
        self.measure()
        self.adopt(CLASSES[0])
        self.switch(CLASSES[1])
        self.switch(CLASSES[0])
        self.compare()

    def prepare(self) -> None:
        """Object store, transcripts, operator, and the lane as its owner runs it."""
        self.say("namespace, object store and transcripts")
        deploy.namespace(self.kube, self.settings)
        deploy.object_store(self.kube, self.settings)
        counts = deploy.upload_transcripts(self.kube, time.time())
        self.say(f"  uploaded {counts}")
        if not self.settings.local:
            deploy.upload_model(self.kube)
        self.say("operator, from its Helm chart")
        deploy.operator(self.kube, self.settings)
        self.say("the lane: a vLLM Deployment of its own, without us")
        deploy.lane(self.kube, self.settings)

    def boot_unhooked(self) -> None:
        """Wait for the lane as it is and ask it the prompts."""
        self.kube.until("the un-hooked lane is ready", self._workload_ready, BOOT_SECONDS)
        self._note_boot("first, un-hooked", hooked=False)
        self.seen.answers["un-hooked"] = self._ask()

    def measure(self) -> None:
        """Apply the resources without a switch; wait for both profiles and their maps."""
        self.say("two TrafficClasses, one ExpertLane, two ExpertMaps; the operator profiles")
        deploy.resources(self.kube, self.settings)
        for name in CLASSES:
            map_name = f"{LANE}.{name}"
            accepted = functools.partial(self._accepted, map_name)
            self.kube.until(f"map {map_name} is accepted", accepted, PROFILE_SECONDS)
            run = self._map(map_name)["status"]["run"]
            self.seen.profile_seconds[name] = _between(run["startedAt"], run["finishedAt"])
            self.say(f"  {map_name}: {self._map(map_name)['status']['accepted']['digest'][:23]}...")

    def adopt(self, traffic_class: str) -> None:
        """The first switch: hook and map are mounted, the pod boots again."""
        self.say(f"the lane adopts the map of {traffic_class}")
        self._move(traffic_class, f"adopts {traffic_class}")
        self.seen.answers[f"map of {traffic_class}"] = self._ask()

    def switch(self, traffic_class: str) -> None:
        """One kubectl patch; wait until every pod reports the other digest."""
        self.say(f"kubectl patch: switch to {traffic_class}")
        self._move(traffic_class, f"swapped to {traffic_class}")
        again = f"map of {traffic_class}" in self.seen.answers
        label = f"back on {traffic_class}" if again else f"map of {traffic_class}"
        self.seen.answers[label] = self._ask()

    def compare(self) -> None:
        """Equal token ids in every state; every swap a compile-cache hit. Raises DemoError."""
        first = self.seen.answers["un-hooked"]
        for label, answers in self.seen.answers.items():
            if different := differing(first, answers):
                raise DemoError(f"answers {label}: prompts {different} differ from un-hooked")
        for boot in self.seen.boots:
            if boot.what.startswith("swapped") and not is_hit(boot.compile):
                raise DemoError(f"{boot.what}: compile evidence {boot.compile}, expected hits only")
        self.say(f"{len(first)} prompts: equal token ids in {len(self.seen.answers)} states")

    def digest(self, traffic_class: str) -> str:
        """Digest of the accepted map of a class."""
        return str(self._map(f"{LANE}.{traffic_class}")["status"]["accepted"]["digest"])

    def status(self) -> Object:
        """GET /status of the newest pod of the lane, through a port-forward."""
        with self.kube.forward(f"pod/{self._pod()['metadata']['name']}", 9477) as url:
            return get_json(url + "/status")

    def _move(self, traffic_class: str, what: str) -> None:
        start = time.monotonic()
        deploy.patch_class(self.kube, traffic_class)
        digest = self.digest(traffic_class)
        self.kube.until(
            f"lane reports the map of {traffic_class}",
            lambda: self._active(traffic_class, digest),
            BOOT_SECONDS,
        )
        self.seen.switch_seconds[what] = time.monotonic() - start
        self._note_boot(what, hooked=True)

    def _ask(self) -> Answers:
        with self.kube.forward(f"pod/{self._pod()['metadata']['name']}", 8000) as url:
            return ask(url)

    def _note_boot(self, what: str, hooked: bool) -> None:
        pod = self._pod()
        seconds = _between(pod["metadata"]["creationTimestamp"], _ready_since(pod))
        report = self.status() if hooked else {}
        boot = Boot(what, seconds, report.get("mapDigest"), report.get("compile"))
        self.seen.boots.append(boot)
        self.say(f"  boot ({what}): {seconds:.0f} s, {spoken(boot.compile)}")

    def _pod(self) -> Object:
        pods = [
            pod
            for pod in self.kube.list("pods", f"app={WORKLOAD}")
            if "deletionTimestamp" not in pod["metadata"]
        ]
        if not pods:
            raise DemoError(f"pods of {WORKLOAD}: found none, expected one")
        return max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def _map(self, name: str) -> Object:
        found = self.kube.get("expertmap", name)
        if found is None:
            raise DemoError(f"ExpertMap {name}: found none")
        return found

    def _workload_ready(self) -> tuple[bool, str]:
        status = (self.kube.get("deployment", WORKLOAD) or {}).get("status", {})
        ready = status.get("readyReplicas", 0)
        return ready >= self.settings.replicas, f"{ready} ready pods"

    def _accepted(self, name: str) -> tuple[bool, str]:
        item = self._map(name)
        run = (item.get("status") or {}).get("run") or {}
        if run.get("outcome") in ("Failed", "Rejected"):
            raise DemoError(f"{name}: {run.get('reason')}: {run.get('message')}")
        ready = condition(item, "Ready").get("status") == "True"
        return ready, describe(item, "Profiling", "Accepted")

    def _active(self, traffic_class: str, digest: str) -> tuple[bool, str]:
        item = self.kube.get("expertlane", LANE)
        status: dict[str, Any] = (item or {}).get("status") or {}
        if (status.get("rollout") or {}).get("state") in FAILED:
            raise DemoError(f"{LANE}: {describe(item, 'Progressing', 'Ready')}")
        active = status.get("active") or {}
        there = active.get("trafficClass") == traffic_class and active.get("digest") == digest
        ready = condition(item, "Ready").get("status") == "True"
        return there and ready, describe(item, "Progressing", "Ready")


def spoken(evidence: dict[str, int] | None) -> str:
    """What the process says of its compile caches."""
    if not evidence:
        return "no hook"
    hits = evidence.get("cacheHits", 0) + evidence.get("aotLoaded", 0)
    misses = evidence.get("cacheMisses", 0) + evidence.get("aotCompiled", 0)
    return f"compile cache: {hits} hits, {misses} misses"


def is_hit(evidence: dict[str, int] | None) -> bool:
    """Whether the process loaded its compiled code and compiled nothing."""
    if not evidence:
        return False
    loaded = evidence.get("cacheHits", 0) + evidence.get("aotLoaded", 0)
    compiled = evidence.get("cacheMisses", 0) + evidence.get("aotCompiled", 0)
    return loaded > 0 and compiled == 0


def _ready_since(pod: Object) -> str:
    return next(
        str(c["lastTransitionTime"]) for c in pod["status"]["conditions"] if c["type"] == "Ready"
    )


def _between(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
