"""helm as the tests call it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.api.apiserver import find_binary

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/expertmaps"
KUBERNETES = "1.34.4"
"""What helm takes the cluster for, where it asks none."""
Manifest = dict[str, Any]


def helm(*arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm with nothing of this machine's own configuration."""
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "KUBECONFIG": str(kubeconfig)}
        return subprocess.run(
            [str(find_binary("helm")), *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )


def template(values: Manifest | None = None, namespace: str = "ops") -> list[Manifest]:
    """The manifests of a release named expertmaps."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(values or {}, file)
        file.flush()
        done = helm(
            *("template", "expertmaps", str(CHART), "-n", namespace, "-f", file.name),
            *("--kube-version", KUBERNETES),
        )
    if done.returncode:
        raise AssertionError(done.stderr)
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def pick(manifests: list[Manifest], kind: str, name: str = "") -> list[Manifest]:
    """Those of a kind whose name ends so."""
    return [
        one for one in manifests if one["kind"] == kind and one["metadata"]["name"].endswith(name)
    ]
