"""Fixtures: one S3 server for the session, a stand-in engine and mounted credentials a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.fake_engine import FakeEngine
from tests.jobs.s3_server import S3Server, start
from tests.jobs.world import World


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = start(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    fake = FakeEngine(tmp_path / "run" / "transcripts")
    yield fake
    fake.close()


@pytest.fixture
def world(s3: S3Server, engine: FakeEngine, tmp_path: Path) -> World:
    return World(s3, engine, tmp_path, s3.bucket("data"), f"{uuid.uuid4().hex[:12]}/")
