"""A namespace in memory that is changed by plans, step by step, and by what a test does to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from expertmaps_operator.decide.conditions import timestamp
from expertmaps_operator.plan import Create, DeleteJob, Event, PatchJob, Plan
from expertmaps_operator.snapshot import MapObject, MapSnapshot, Slots
from tests.operator.expertmap_world import (
    START,
    container_status,
    ended,
    expert_map,
    finished,
    map_object,
    pod,
    row_map,
    snapshot,
    verdict,
)


class CrashError(Exception):
    """The operator's process ended in the middle of a plan."""


@dataclass
class Cluster:
    """Objects of one namespace, changed only by plans and by the test."""

    status: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: list[dict[str, Any]] = field(default_factory=list)
    config_maps: set[str] = field(default_factory=set)
    maps: dict[str, MapObject] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    created: list[str] = field(default_factory=list)
    now: datetime = START
    uids: int = 0

    def snapshot(self) -> MapSnapshot:
        going = [item for item in self.jobs.values() if not item["status"].get("conditions")]
        return snapshot(
            expert_map(copy.deepcopy(self.status), **self.spec),
            jobs=tuple(copy.deepcopy(list(self.jobs.values()))),
            pods=tuple(copy.deepcopy(self.pods)),
            map_objects=dict(self.maps),
            slots=Slots(profiles=len(going), rollouts=0),
            lane_profiles=len(going),
        )

    def turn(self, decide: Callable[[MapSnapshot, datetime], Plan], crash_after: int = 99) -> Plan:
        """Decide and carry out; CrashError after so many steps."""
        plan = decide(self.snapshot(), self.now)
        steps: list[Callable[[], None]] = [lambda: self._write(plan)]
        steps += [self._step(action) for action in plan.actions]
        steps += [self._post(event) for event in plan.events]
        for number, step in enumerate(steps):
            if number >= crash_after:
                raise CrashError
            step()
        return plan

    def _write(self, plan: Plan) -> None:
        if plan.status is not None:
            self.status = copy.deepcopy(dict(plan.status))

    def _post(self, event: Event) -> Callable[[], None]:
        return lambda: self.events.append(event)

    def _step(self, action: Any) -> Callable[[], None]:
        match action:
            case Create(manifest):
                return lambda: self._create(manifest)
            case DeleteJob(name, uid):
                return lambda: self._delete(name, uid)
            case PatchJob(name, patch):
                return lambda: self._patch(name, patch)
        raise AssertionError(action)

    def _create(self, manifest: Mapping[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "ConfigMap":
            self.config_maps.add(name)
            return
        assert manifest["kind"] == "Job"
        if name in self.jobs:
            return
        assert self.config_maps, "the hook's files come before the Job"
        self.uids += 1
        made = copy.deepcopy(dict(manifest))
        made["metadata"]["uid"] = f"uid-{self.uids}"
        made["metadata"]["creationTimestamp"] = timestamp(self.now)
        made["status"] = {}
        self.jobs[name] = made
        self.created.append(name)

    def _delete(self, name: str, uid: str) -> None:
        if name in self.jobs and self.jobs[name]["metadata"]["uid"] == uid:
            del self.jobs[name]
            owners = {item["metadata"]["uid"] for item in self.jobs.values()}
            self.pods = [
                item
                for item in self.pods
                if item["metadata"]["ownerReferences"][0]["uid"] in owners
            ]

    def _patch(self, name: str, patch: Mapping[str, Any]) -> None:
        if name in self.jobs:
            self.jobs[name]["spec"].update(patch["spec"])

    def end_run(self, outcome: str, reason: str = "") -> None:
        """The Job that goes on ends with a verdict."""
        for name, item in self.jobs.items():
            if item["status"].get("conditions"):
                continue
            said = verdict(name, outcome, reason)
            if outcome == "Accepted":
                self.maps[row_map().digest] = map_object(row_map())
            end = ended(0 if outcome != "Failed" else 42, said.to_message().decode())
            self.pods.append(
                pod(
                    item,
                    name=f"{name}-x",
                    at=self.now,
                    mains=(container_status("runner", end),),
                )
            )
            kind = "Complete" if outcome != "Failed" else "Failed"
            item["status"] = finished(kind, at=self.now)

    def wait(self, **duration: float) -> None:
        self.now += timedelta(**duration)

    def going(self) -> list[str]:
        return [name for name, item in self.jobs.items() if not item["status"].get("conditions")]
