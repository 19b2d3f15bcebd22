"""One operator per namespace: a Lease in each watched namespace, held while anything is written.

The Leases are acquired in the order of their namespaces, so that two operators with overlapping
namespaces wait for each other and never hold a part of the other's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from .observe.kube import ApiError, Kube, Manifest
from .observe.resources import LEASE

NAME = "expertmaps-operator"
DURATION_SECONDS = 30
RENEW_SECONDS = 5.0
DEADLINE_SECONDS = 15.0
"""A holder that has not renewed for this long is done. A write that it began before has ended when
another may take over: DEADLINE_SECONDS + kube.REQUEST_SECONDS < DURATION_SECONDS."""

log = logging.getLogger(__name__)


class LeaseLostError(Exception):
    """This process may not write any more."""

    loggable = True


class Lease:
    """The Leases of all watched namespaces as one."""

    def __init__(
        self,
        kube: Kube,
        namespaces: Iterable[str],
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube, self._identity, self._clock = kube, identity, clock
        self._namespaces = tuple(sorted(namespaces))
        self._lock = threading.Lock()
        self._released = False
        self._renewed: dict[str, float] = {}
        self._watched: dict[str, tuple[str, float]] = {}
        """Of Leases of others: the version last seen, and since when it has not changed."""

    def held(self) -> bool:
        """Whether all Leases are ours and fresh enough to write."""
        limit = self._clock() - DEADLINE_SECONDS
        renewed = dict(self._renewed)
        return all(renewed.get(namespace, -1e18) > limit for namespace in self._namespaces)

    def guard(self) -> None:
        """Raise LeaseLostError unless they are held; called before every write."""
        if not self.held():
            raise LeaseLostError("the Lease is not held: nothing is written")

    def acquire(self, stop: threading.Event) -> bool:
        """Wait until all are held, renewing those that are; False when stopped first."""
        while not stop.is_set():
            for namespace in self._namespaces:
                if not self._try(namespace):
                    break
            else:
                return True
            stop.wait(RENEW_SECONDS)
        return False

    def renew(self, stop: threading.Event, on_loss: Callable[[str], None]) -> None:
        """Renew until stopped; `on_loss` is told in one line when they cannot be kept."""
        while not stop.wait(RENEW_SECONDS):
            for namespace in self._namespaces:
                if not self._try(namespace) and self._is_taken(namespace):
                    on_loss(f"another operator holds the Lease {namespace}/{NAME}")
                    return
            if not self.held():
                on_loss(f"the Lease was not renewed for {DEADLINE_SECONDS:g} s")
                return

    def release(self) -> None:
        """Give them up, so that a successor need not wait. Never raises."""
        with self._lock:
            self._released = True
            for namespace in self._namespaces:
                if self._renewed.pop(namespace, None) is None:
                    continue
                try:
                    current = self._kube.get(LEASE, namespace, NAME)
                    if current is not None and _holder(current) == self._identity:
                        self._write(namespace, current, holder="")
                except ApiError as error:
                    log.warning("lease not released: %s", error)

    def _is_taken(self, namespace: str) -> bool:
        return namespace in self._watched

    def _try(self, namespace: str) -> bool:
        """Create, renew or take over one Lease; False when it is another's or out of reach."""
        with self._lock:
            return not self._released and self._try_locked(namespace)

    def _try_locked(self, namespace: str) -> bool:
        began = self._clock()
        try:
            current = self._kube.get(LEASE, namespace, NAME)
            if current is not None and not self._may_take(namespace, current):
                self._renewed.pop(namespace, None)
                return False
            self._write(namespace, current, holder=self._identity)
        except ApiError as error:
            log.warning("lease: %s", error)
            return False
        # Counted from before the request: the server's clock of it started no earlier.
        self._renewed[namespace] = began
        self._watched.pop(namespace, None)
        return True

    def _may_take(self, namespace: str, current: Manifest) -> bool:
        holder = _holder(current)
        if holder in ("", self._identity):
            return True
        version = str(current["metadata"]["resourceVersion"])
        now = self._clock()
        seen, since = self._watched.get(namespace, ("", now))
        if seen != version:
            if namespace not in self._watched:
                log.info("waiting for the Lease %s/%s, held by %s", namespace, NAME, holder)
            self._watched[namespace] = (version, now)
            return False
        # By our own clock since it last changed: clocks of nodes may differ.
        duration = (current.get("spec") or {}).get("leaseDurationSeconds")
        return now - since > (duration if isinstance(duration, int) else DURATION_SECONDS)

    def _write(self, namespace: str, current: Manifest | None, holder: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = (current or {}).get("spec") or {}
        same = before.get("holderIdentity") == holder
        transitions = int(before.get("leaseTransitions") or 0)
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": DURATION_SECONDS,
            "acquireTime": before.get("acquireTime") if same else now,
            "renewTime": now,
            "leaseTransitions": transitions if same or current is None else transitions + 1,
        }
        metadata = {"name": NAME, "namespace": namespace}
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "spec": spec}
        if current is None:
            self._kube.request("POST", LEASE.path(namespace), None, {**body, "metadata": metadata})
            return
        # The version fences the write: of two that take it over, one is refused.
        fenced = {**metadata, "resourceVersion": current["metadata"]["resourceVersion"]}
        self._kube.request("PUT", LEASE.path(namespace, NAME), None, {**body, "metadata": fenced})


def _holder(lease: Manifest) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")
