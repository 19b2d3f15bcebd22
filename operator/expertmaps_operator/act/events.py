"""Events about our objects: one per text, counted, never more often than the status moves."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rowmap_jobs.formats.names import FIELD_MANAGER

from ..observe.kube import MERGE, ApiError, Kube, Manifest
from ..observe.resources import EVENT
from ..observe.snapshots import Observed
from ..plan import Event

MAX_MESSAGE = 1024
MAX_OBJECTS = 4096

log = logging.getLogger(__name__)


class Recorder:
    """Posts events. One that cannot be posted is logged and dropped: it decides nothing."""

    def __init__(self, kube: Kube, instance: str, clock: Callable[[], datetime]) -> None:
        self._kube, self._instance, self._clock = kube, instance, clock
        self._lock = threading.Lock()
        self._posted: OrderedDict[str, set[str]] = OrderedDict()
        """Per object UID: names of events posted since its status last changed."""

    def status_changed(self, uid: str) -> None:
        """From here on, the object's events count again."""
        with self._lock:
            self._posted.pop(uid, None)

    def post(self, observed: Observed, event: Event) -> None:
        """Post an event about the object, unless it said the same since its status changed."""
        uid = str(observed.manifest["metadata"]["uid"])
        message = shorten(event.message)
        name = event_name(observed.name, uid, event, message)
        with self._lock:
            posted = self._posted.setdefault(uid, set())
            self._posted.move_to_end(uid)
            if len(self._posted) > MAX_OBJECTS:
                self._posted.popitem(last=False)
            if name in posted:
                return
            posted.add(name)
        try:
            self._create_or_count(observed, event, message, name)
        except ApiError as error:
            log.warning("event not posted: %s", error)
            with self._lock:
                posted.discard(name)

    def _create_or_count(self, observed: Observed, event: Event, message: str, name: str) -> None:
        now = self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = self._manifest(observed, event, message, name, now)
        try:
            self._kube.request(
                "POST", EVENT.path(observed.namespace), {"fieldManager": FIELD_MANAGER}, body
            )
            return
        except ApiError as error:
            if error.status != 409:
                raise
        before = self._kube.get(EVENT, observed.namespace, name) or {}
        count = before.get("count")
        again = {"count": (count if isinstance(count, int) else 0) + 1, "lastTimestamp": now}
        self._kube.request(
            "PATCH",
            EVENT.path(observed.namespace, name),
            {"fieldManager": FIELD_MANAGER},
            again,
            MERGE,
        )

    def _manifest(
        self, observed: Observed, event: Event, message: str, name: str, now: str
    ) -> Manifest:
        metadata = observed.manifest["metadata"]
        about: dict[str, Any] = {
            "apiVersion": observed.resource.api_version,
            "kind": observed.resource.kind,
            "namespace": observed.namespace,
            "name": observed.name,
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        }
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": observed.namespace},
            "involvedObject": about,
            "type": event.type,
            "reason": event.reason[:128],
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance[:128],
        }


def shorten(message: str) -> str:
    """An event's message within the API's limit, cut with an ellipsis."""
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 3] + "..."


def event_name(about: str, uid: str, event: Event, message: str) -> str:
    """The name that the same text about the same object always gets."""
    text = "\0".join((uid, event.type, event.reason, message))
    return f"{about}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
