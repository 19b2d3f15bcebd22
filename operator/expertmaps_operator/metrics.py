"""Metrics of the operator. Labels are names of objects, reasons and digests: never contents."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from .queue import Key

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All series, in a registry of their own."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self._reconciles = Counter(
            "expertmaps_reconcile", "Looks at an object, by result.", ["kind", "result"],
            registry=registry,
        )  # fmt: skip
        self._duration = Histogram(
            "expertmaps_reconcile_duration_seconds", "Time that one look took.", ["kind"],
            registry=registry, buckets=_BUCKETS,
        )  # fmt: skip
        self._depth = Gauge(
            "expertmaps_queue_depth", "Objects that are due or worked on.", registry=registry
        )
        self._last_event = Gauge(
            "expertmaps_watch_last_event_timestamp_seconds",
            "When the watch of a kind last delivered something.", ["kind"], registry=registry,
        )  # fmt: skip
        self._lane_info = Gauge(
            "expertmaps_lane_info", "1, with the map in force of the lane (empty: none).",
            ["namespace", "lane", "traffic_class", "digest"], registry=registry,
        )  # fmt: skip
        self._lane_condition = Gauge(
            "expertmaps_lane_condition", "1 for the status that a condition of the lane has.",
            ["namespace", "lane", "condition", "status"], registry=registry,
        )  # fmt: skip
        self._rollouts = Counter(
            "expertmaps_rollouts", "Rollouts that ended, by result.", ["result"],
            registry=registry,
        )  # fmt: skip
        self._profiles = Counter(
            "expertmaps_profile_runs", "Profile runs that ended.", ["outcome", "reason"],
            registry=registry,
        )  # fmt: skip
        self._cold = Gauge(
            "expertmaps_map_cold_selection_ratio",
            "Share of expert reads from slow memory with the accepted map (left-out sessions).",
            ["namespace", "map"], registry=registry,
        )  # fmt: skip
        self._accepted = Gauge(
            "expertmaps_map_accepted_timestamp_seconds", "When the map was accepted.",
            ["namespace", "map"], registry=registry,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._series: dict[Key, set[tuple[Gauge, tuple[str, ...]]]] = {}

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def depth(self, value: int) -> None:
        self._depth.set(value)

    def delivered(self, kind: str) -> None:
        """A watch delivered something."""
        self._last_event.labels(kind).set(time.time())

    def reconciled(self, kind: str, result: str, seconds: float) -> None:
        self._reconciles.labels(kind, result).inc()
        self._duration.labels(kind).observe(seconds)

    def state(self, key: Key, status: Mapping[str, Any]) -> None:
        """Show what an object's status says now."""
        series: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        if key.kind == "ExpertLane":
            series = self._lane_series(key, status)
        elif key.kind == "ExpertMap":
            series = self._map_series(key, status)
        with self._lock:
            before = self._series.pop(key, set())
            for gauge, labels in before - set(series):
                gauge.remove(*labels)
            for (gauge, labels), value in series.items():
                gauge.labels(*labels).set(value)
            if series:
                self._series[key] = set(series)

    def forget(self, key: Key) -> None:
        """The object is gone."""
        with self._lock:
            for gauge, labels in self._series.pop(key, set()):
                gauge.remove(*labels)

    def moved(self, key: Key, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Count what ended between two statuses of an object."""
        if key.kind == "ExpertLane":
            rollout = _ended(before.get("rollout"), after.get("rollout"), "id")
            if rollout:
                self._rollouts.labels(str(rollout.get("state", ""))).inc()
        elif key.kind == "ExpertMap":
            run = _ended(before.get("run"), after.get("run"), "name")
            if run:
                self._profiles.labels(str(run.get("outcome", "")), str(run.get("reason", ""))).inc()

    def _lane_series(
        self, key: Key, status: Mapping[str, Any]
    ) -> dict[tuple[Gauge, tuple[str, ...]], float]:
        active = _mapping(status.get("active"))
        place = (key.namespace, key.name)
        shown = (str(active.get("trafficClass", "")), str(active.get("digest", "")))
        series: dict[tuple[Gauge, tuple[str, ...]], float] = {
            (self._lane_info, (*place, *shown)): 1.0
        }
        for item in status.get("conditions") or []:
            for value in ("True", "False", "Unknown"):
                labels = (*place, str(item.get("type", "")), value)
                series[self._lane_condition, labels] = float(item.get("status") == value)
        return series

    def _map_series(
        self, key: Key, status: Mapping[str, Any]
    ) -> dict[tuple[Gauge, tuple[str, ...]], float]:
        accepted = _mapping(status.get("accepted"))
        labels = (key.namespace, key.name)
        series: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        percent = _number(accepted.get("coldSharePercent"))
        if percent is not None:
            series[self._cold, labels] = percent / 100
        moment = _moment(accepted.get("acceptedAt"))
        if moment is not None:
            series[self._accepted, labels] = moment
        return series


def _ended(before: object, after: object, identity: str) -> Mapping[str, Any] | None:
    """`after` when it has ended and `before` had not (or was another)."""
    old, new = _mapping(before), _mapping(after)
    if not new.get("finishedAt"):
        return None
    if old.get(identity) == new.get(identity) and old.get("finishedAt"):
        return None
    return new


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


def _moment(value: object) -> float | None:
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None
