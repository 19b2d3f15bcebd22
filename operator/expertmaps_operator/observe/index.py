"""From an object that changed to the keys that have to be looked at.

Lanes and maps are remembered with the names that they refer to. An event only says "look": a key
too many costs a look, and one that is missed comes with the resync.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rowmap_jobs.formats.names import LABEL_LANE, LABEL_MAP, LABEL_ROLE, ROLE_FETCH

from ..queue import Key
from . import facts
from .resources import (
    CONFIG_MAP,
    DEPLOYMENT,
    EXPERT_LANE,
    EXPERT_MAP,
    JOB,
    POD,
    TRAFFIC_CLASS,
    Resource,
)

_Name = tuple[str, str]
"""Namespace, name."""


@dataclass
class Index:
    """What the lanes and maps refer to, kept up by the events themselves."""

    _lanes: dict[_Name, tuple[str, str]] = field(default_factory=dict)
    """Lane to its workload and its active class."""
    _maps: dict[_Name, tuple[str, str]] = field(default_factory=dict)
    """Map to its lane and its class."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def keys(self, resource: Resource, manifest: Mapping[str, Any], deleted: bool) -> set[Key]:
        """Keys to look at after an event on the object."""
        metadata = manifest.get("metadata") or {}
        namespace, name = str(metadata.get("namespace", "")), str(metadata.get("name", ""))
        with self._lock:
            if resource == EXPERT_LANE:
                return self._lane(namespace, name, manifest, deleted)
            if resource == EXPERT_MAP:
                return self._map(namespace, name, manifest, deleted)
            if resource == TRAFFIC_CLASS:
                return self._class(namespace, name)
            if resource == DEPLOYMENT:
                return self._workload(namespace, name, manifest, deleted)
            if resource == POD:
                return self._pod(namespace, manifest)
            if resource == JOB:
                return self._job(namespace, manifest, deleted)
            if resource == CONFIG_MAP:
                return self._config_map(namespace, manifest)
        return set()

    def _lane(
        self, namespace: str, name: str, manifest: Mapping[str, Any], deleted: bool
    ) -> set[Key]:
        if deleted:
            workload, _ = self._lanes.pop((namespace, name), ("", ""))
            left = {Key(DEPLOYMENT.kind, namespace, workload)} if workload else set()
            return self._of_lane(namespace, name) | left
        spec = _mapping(manifest.get("spec"))
        workload = str(_mapping(spec.get("workloadRef")).get("name", ""))
        self._lanes[namespace, name] = (workload, str(spec.get("activeTrafficClass") or ""))
        return self._of_lane(namespace, name)

    def _map(
        self, namespace: str, name: str, manifest: Mapping[str, Any], deleted: bool
    ) -> set[Key]:
        spec = _mapping(manifest.get("spec"))
        lane = str(_mapping(spec.get("laneRef")).get("name", ""))
        traffic_class = str(_mapping(spec.get("trafficClassRef")).get("name", ""))
        if deleted:
            self._maps.pop((namespace, name), None)
        else:
            self._maps[namespace, name] = (lane, traffic_class)
        keys = {Key(EXPERT_MAP.kind, namespace, name)}
        if lane:
            keys.add(Key(EXPERT_LANE.kind, namespace, lane))
        if traffic_class:
            keys.add(Key(TRAFFIC_CLASS.kind, namespace, traffic_class))
        return keys

    def _class(self, namespace: str, name: str) -> set[Key]:
        keys = {Key(TRAFFIC_CLASS.kind, namespace, name)}
        for (space, lane), (_, active) in self._lanes.items():
            if space == namespace and active == name:
                keys.add(Key(EXPERT_LANE.kind, namespace, lane))
        for (space, expert_map), (_, traffic_class) in self._maps.items():
            if space == namespace and traffic_class == name:
                keys.add(Key(EXPERT_MAP.kind, namespace, expert_map))
        return keys

    def _workload(
        self, namespace: str, name: str, manifest: Mapping[str, Any], deleted: bool
    ) -> set[Key]:
        lanes = self._lanes_of_workload(namespace, name)
        claimed = facts.labels_of(manifest).get(LABEL_LANE)
        if claimed:
            lanes.add(claimed)
        if claimed and not deleted and self._lanes.get((namespace, claimed), ("",))[0] != name:
            # Its lane may be gone: only a look can tell whether it is not known yet.
            return {Key(DEPLOYMENT.kind, namespace, name)} | _lane_keys(namespace, lanes)
        if deleted or _is_new(manifest):
            # Maps wait for a workload that is not there; its later changes concern the lane alone.
            return {key for lane in lanes for key in self._of_lane(namespace, lane)}
        return _lane_keys(namespace, lanes)

    def _pod(self, namespace: str, manifest: Mapping[str, Any]) -> set[Key]:
        labels = facts.labels_of(manifest)
        if LABEL_MAP in labels:
            return {Key(EXPERT_MAP.kind, namespace, labels[LABEL_MAP])}
        if labels.get(LABEL_ROLE) == ROLE_FETCH and LABEL_LANE in labels:
            return _lane_keys(namespace, [labels[LABEL_LANE]])
        workload = workload_of_pod(manifest)
        return _lane_keys(namespace, self._lanes_of_workload(namespace, workload))

    def _job(self, namespace: str, manifest: Mapping[str, Any], deleted: bool) -> set[Key]:
        labels = facts.labels_of(manifest)
        keys: set[Key] = set()
        if LABEL_MAP in labels:
            keys.add(Key(EXPERT_MAP.kind, namespace, labels[LABEL_MAP]))
        elif LABEL_LANE in labels:
            keys |= _lane_keys(namespace, [labels[LABEL_LANE]])
        if facts.is_profile(manifest) and (deleted or facts.finished(manifest)):
            # A slot became free: every map may be the one that waits for it.
            keys |= {Key(EXPERT_MAP.kind, space, name) for space, name in self._maps}
        return keys

    def _config_map(self, namespace: str, manifest: Mapping[str, Any]) -> set[Key]:
        lane = facts.labels_of(manifest).get(LABEL_LANE)
        if not lane:
            return set()
        if (namespace, lane) in self._lanes:
            return self._of_lane(namespace, lane)
        # Left by a lane that is gone: its workload's look collects it.
        owners = _mapping(manifest.get("metadata")).get("ownerReferences") or []
        names = {str(item.get("name")) for item in owners if item.get("kind") == DEPLOYMENT.kind}
        left = {Key(DEPLOYMENT.kind, namespace, name) for name in names}
        return self._of_lane(namespace, lane) | left

    def _of_lane(self, namespace: str, lane: str) -> set[Key]:
        keys = _lane_keys(namespace, [lane])
        for (space, name), (its_lane, _) in self._maps.items():
            if space == namespace and its_lane == lane:
                keys.add(Key(EXPERT_MAP.kind, namespace, name))
        return keys

    def _lanes_of_workload(self, namespace: str, workload: str) -> set[str]:
        return {
            lane
            for (space, lane), (its_workload, _) in self._lanes.items()
            if space == namespace and workload and its_workload == workload
        }


def workload_of_pod(pod: Mapping[str, Any]) -> str:
    """Name of the Deployment that a pod seems to be of: its ReplicaSet's without the hash."""
    owner = facts.controller_of(pod) or {}
    suffix = "-" + facts.labels_of(pod).get("pod-template-hash", "")
    name = str(owner.get("name", ""))
    if owner.get("kind") != "ReplicaSet" or suffix == "-" or not name.endswith(suffix):
        return ""
    return name.removesuffix(suffix)


def _is_new(workload: Mapping[str, Any]) -> bool:
    return not (workload.get("status") or {}).get("observedGeneration")


def _lane_keys(namespace: str, lanes: Iterable[str]) -> set[Key]:
    return {Key(EXPERT_LANE.kind, namespace, lane) for lane in lanes}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
