"""Fixtures of the tests that talk to a real API server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.api.apiserver import (  # noqa: F401
    ApiServer,
    api_server,
    controller_manager,
    namespace,
)

CRDS = Path(__file__).parents[2] / "crds"
PLURALS = ("trafficclasses", "expertlanes", "expertmaps")


@pytest.fixture(scope="session")
def crds(api_server: ApiServer) -> ApiServer:  # noqa: F811
    """The API server with the CRDs of the checkout."""
    api_server.kubectl("apply", "--server-side", *(f"-f={CRDS}/{one}.yaml" for one in PLURALS))
    names = [f"crd/{one}.expertmaps.dev" for one in PLURALS]
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=30s", *names)
    return api_server
