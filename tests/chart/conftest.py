"""Fixtures of the tests of the Helm chart."""

from __future__ import annotations

from tests.api.apiserver import api_server, namespace  # noqa: F401
from tests.api.conftest import crds  # noqa: F401
