"""What a run needs from outside, in one place, so that a test can stand in for any of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .edges import s3
from .edges.s3 import Bucket
from .engine import Deadlines
from .formats import names
from .formats.run import RunSpec
from .formats.s3 import S3Location
from .reasons import Reason, RunError


def create_in_cluster(manifest: dict[str, Any]) -> bool:
    """Create a ConfigMap with the pod's ServiceAccount; False when it exists."""
    from .edges import kube  # the client takes a second to import, and a probe needs none

    return kube.create_config_map(kube.in_cluster(), manifest)


def now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


@dataclass(frozen=True)
class Services:
    """Places and edges of a run."""

    s3_dir: Path
    counts_dir: Path
    api_key: str | None = None
    now: Callable[[], datetime] = now
    create: Callable[[dict[str, Any]], bool] = create_in_cluster
    deadlines: Deadlines = field(default_factory=Deadlines)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Services:
        """The services of a runner's container."""
        run_dir = Path(environ.get(names.ENV_DIR) or names.RUN_DIR)
        return cls(
            s3_dir=Path(environ.get(names.ENV_S3_DIR) or names.S3_MOUNT),
            counts_dir=run_dir / names.COUNTS_DIR,
            api_key=environ.get(names.ENV_API_KEY) or None,
        )

    def store(self, spec: RunSpec) -> Bucket:
        """The lane's store."""
        return s3.open_bucket(spec.store, self.s3_dir, "store")

    def transcripts(self, spec: RunSpec) -> Bucket:
        """The class's transcripts. Raises RunError when the RunSpec names none."""
        location: S3Location | None = spec.transcripts
        if location is None:
            raise RunError(
                Reason.INVALID_RUN_SPEC, "EXPERTMAPS_RUN: transcripts: found none, expected them"
            )
        return s3.open_bucket(location, self.s3_dir, "transcripts")
