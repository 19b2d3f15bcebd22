"""The watches: kopf as the engine that lists, streams and reconnects, and nothing else of it.

Only `on.event` handlers: they write no finalizer and no annotation. Its posting of events, its
peering and its scanning for namespaces and CRDs (which needs cluster-wide rights) are off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import kopf

from .resources import WATCHED, Resource

OnEvent = Callable[[Resource, dict[str, Any], bool], None]
"""Resource, object, whether it was deleted. Called on the event loop: it must not wait."""

# Says that it handles no signals outside of the main thread: they are handled in main.
logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)


class Watches:
    """All watches, in a thread with an event loop of its own."""

    def __init__(self, namespaces: Sequence[str], on_event: OnEvent) -> None:
        self._namespaces, self._on_event = tuple(namespaces), on_event
        self._thread = threading.Thread(target=self._run, name="watches", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def begin_stop(self) -> None:
        """Have the streams end."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for their end."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def problem(self) -> str | None:
        """Why there are no watches any more, in one line; None while they run."""
        if self._thread.is_alive():
            return None
        return f"the watches ended: {self._error or 'without an error'}"

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            self._error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await kopf.operator(
            registry=_registry(self._on_event),
            settings=_settings(),
            standalone=True,
            # Left out, kopf asks the system for a user name, and an image has none for its uid.
            identity=cast(Any, "expertmaps-operator"),
            namespaces=list(self._namespaces),
            stop_flag=self._stop,
        )


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True
    # Streams end by themselves now and then: one that a proxy has silently cut is not kept long.
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 30
    settings.queueing.exit_timeout = 1
    for resource in WATCHED:
        if resource.selector:
            key = (resource.api_version, resource.plural)
            settings.watching.label_selectors[key] = resource.selector
    return settings


def _registry(on_event: OnEvent) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.login(id="login", registry=registry)(_login)
    for resource in WATCHED:
        kopf.on.event(resource.api_version, resource.plural, id=resource.plural, registry=registry)(
            _handler(resource, on_event)
        )
    return registry


def _handler(resource: Resource, on_event: OnEvent) -> Callable[..., Any]:
    async def handle(event: Any, **_: Any) -> None:
        on_event(resource, dict(event["object"]), event["type"] == "DELETED")

    return handle


def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """As `kube.connect`: $KUBECONFIG when set, else the pod's ServiceAccount, else ~/.kube/config.

    kopf asks again after a 401, so a token that was rotated is read anew.
    """
    if not os.environ.get("KUBECONFIG"):
        found = kopf.login_with_service_account(**kwargs)
        if found is not None:
            return found
    return kopf.login_with_kubeconfig(**kwargs)
