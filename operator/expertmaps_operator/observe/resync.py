"""Lists everything every few minutes: each object is looked at again, and a watch that has stalled
(kopf's tasks can end without ending the process) is found out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from ..queue import Key
from .index import Index
from .kube import ApiError, Kube
from .ledger import Ledger, Missed
from .resources import WATCHED

INTERVAL_SECONDS = 300.0
GRACE_SECONDS = 75.0
"""How long after a list a watch may take to deliver what the list showed."""

log = logging.getLogger(__name__)


class Resync:
    """The periodic list."""

    def __init__(
        self,
        kube: Kube,
        namespaces: Iterable[str],
        index: Index,
        ledger: Ledger,
        add: Callable[[Key], None],
        clock: Callable[[], float],
    ) -> None:
        self._kube, self._namespaces = kube, tuple(namespaces)
        self._index, self._ledger, self._add, self._clock = index, ledger, add, clock
        self.last_success = clock()

    def once(self) -> list[Missed]:
        """Queue a look at everything; returns what no watch has delivered yet. Raises ApiError."""
        self._ledger.begin_list(self._clock())
        keys: set[Key] = set()
        suspects: list[Missed] = []
        for namespace in self._namespaces:
            for resource in WATCHED:
                found = self._kube.list_all(resource, namespace, resource.selector)
                for manifest in found:
                    if self._ledger.is_gone(resource.kind, manifest):
                        continue
                    keys |= self._index.keys(resource, manifest, deleted=False)
                suspects += self._ledger.suspect(resource.kind, found)
                names = {str(item["metadata"]["name"]) for item in found}
                for _, _, name in self._ledger.forget_absent(resource.kind, namespace, names):
                    gone = {"metadata": {"namespace": namespace, "name": name}}
                    keys |= self._index.keys(resource, gone, deleted=True)
        for key in sorted(keys):
            self._add(key)
        self.last_success = self._clock()
        return suspects

    def still_missing(self, suspects: list[Missed]) -> list[Missed]:
        """Those that have not been delivered since."""
        return [item for item in suspects if self._ledger.is_missing(item)]

    def run(self, stop: threading.Event, on_stale: Callable[[str], None]) -> None:
        """Resync until stopped; `on_stale` is told in one line when a watch missed something."""
        while not stop.is_set():
            suspects: list[Missed] = []
            try:
                suspects = self.once()
            except ApiError as error:
                log.error("resync: %s", error)
            if stop.wait(GRACE_SECONDS):
                return
            missing = self.still_missing(suspects)
            if missing:
                kind, namespace, name = missing[0].place
                on_stale(
                    f"the watch of {kind} missed {len(missing)} changes, the first of "
                    f"{namespace}/{name} (resourceVersion {missing[0].version})"
                )
                return
            if stop.wait(INTERVAL_SECONDS - GRACE_SECONDS):
                return
