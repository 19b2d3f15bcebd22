"""What the watches have delivered, so that a resync sees what they missed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Place = tuple[str, str, str]
"""Kind, namespace, name."""


@dataclass(frozen=True)
class Missed:
    """A version that a list showed and that a watch has not delivered yet."""

    place: Place
    uid: str
    version: str


@dataclass
class Ledger:
    """The newest version of each object that a watch delivered."""

    _seen: dict[Place, tuple[str, str, float]] = field(default_factory=dict)
    """UID, resourceVersion, and when it was delivered."""
    _gone: dict[Place, str] = field(default_factory=dict)
    """UID of objects whose deletion was delivered since the last list."""
    _last: dict[str, float] = field(default_factory=dict)
    _list_began: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def delivered(self, kind: str, manifest: Mapping[str, Any], deleted: bool, now: float) -> None:
        """Note an event of a watch."""
        place, uid, version = place_of(kind, manifest)
        with self._lock:
            self._last[kind] = now
            if deleted:
                self._seen.pop(place, None)
                self._gone[place] = uid
            else:
                self._seen[place] = (uid, version, now)

    def last_event(self) -> dict[str, float]:
        """When the watch of each kind last delivered something."""
        with self._lock:
            return dict(self._last)

    def begin_list(self, now: float) -> None:
        """A list starts: deletions delivered before it no longer matter."""
        with self._lock:
            self._gone.clear()
            self._list_began = now

    def is_gone(self, kind: str, manifest: Mapping[str, Any]) -> bool:
        """Whether the deletion of a listed object has been delivered since the list began."""
        place, uid, _ = place_of(kind, manifest)
        with self._lock:
            return self._gone.get(place) == uid

    def suspect(self, kind: str, manifests: list[dict[str, Any]]) -> list[Missed]:
        """Listed versions that no watch has delivered; the watch may still be on its way."""
        listed = [Missed(*place_of(kind, manifest)) for manifest in manifests]
        return [item for item in listed if self.is_missing(item)]

    def is_missing(self, item: Missed) -> bool:
        """Whether neither that version, nor a later one, nor the deletion has been delivered."""
        with self._lock:
            if self._gone.get(item.place) == item.uid:
                return False
            uid, version, _ = self._seen.get(item.place, ("", "", 0.0))
        if not uid:
            return True
        if uid != item.uid:
            # Of two objects of one name, the one that was delivered may be the newer.
            return not _at_least(version, item.version)
        return version != item.version and not _at_least(version, item.version)

    def forget_absent(self, kind: str, namespace: str, names: set[str]) -> list[Place]:
        """Drop and return objects of a kind that were there before the list, and are not in it.

        A watch that had to begin anew lists first, and a list has no deletions.
        """
        with self._lock:
            gone = [
                place
                for place, (_, _, when) in self._seen.items()
                if place[:2] == (kind, namespace)
                and place[2] not in names
                and when < self._list_began
            ]
            for place in gone:
                del self._seen[place]
        return gone


def place_of(kind: str, manifest: Mapping[str, Any]) -> tuple[Place, str, str]:
    """Where an object is, its UID and its version."""
    metadata = manifest.get("metadata") or {}
    place = (kind, str(metadata.get("namespace", "")), str(metadata.get("name", "")))
    return place, str(metadata.get("uid", "")), str(metadata.get("resourceVersion", ""))


def _at_least(version: str, other: str) -> bool:
    # Versions of one kind are comparable whole numbers (KEP-5504); others are only ever equal.
    if version.isdecimal() and other.isdecimal():
        return int(version) >= int(other)
    return version == other
