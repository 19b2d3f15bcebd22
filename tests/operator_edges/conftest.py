"""Fixtures of the operator's edges."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from expertmaps_operator.observe.kube import Kube
from tests.api.apiserver import (  # noqa: F401
    ApiServer,
    api_server,
    controller_manager,
    namespace,
)
from tests.api.conftest import crds  # noqa: F401
from tests.operator_edges.fake_api import FakeApi, serve


@pytest.fixture
def api() -> FakeApi:
    """The stand-in's objects and requests."""
    return FakeApi()


@pytest.fixture
def kube(api: FakeApi) -> Iterator[Kube]:
    """A client of the stand-in."""
    server, connected = serve(api)
    yield connected
    server.shutdown()
    server.server_close()
