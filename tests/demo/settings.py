"""Where the demo runs and what it deploys, from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER_TOOL = ROOT / "tests/cluster/cluster"
MODEL = ROOT / "tests/model/moe"
LOCAL_IMAGE = "docker.io/expertmaps/expertmaps"
CLASSES = ("code", "prose")
LANE = "lane-a"
WORKLOAD = "vllm-lane-a"
HOT_EXPERTS = 24
"""75% of the demo model's 32 experts a layer."""


class DemoError(RuntimeError):
    """The demo cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """One demo."""

    local: bool
    """True: the local cluster of tests/cluster; False: the current kubeconfig context."""
    namespace: str
    image: str
    """Prefix of the images: `<prefix>-operator:<tag>`, `-runner` and `-s3`."""
    tag: str
    lane_image: str | None = None
    """Image with vLLM for the lane; None: a bare image with `lane_venv` mounted from the node."""
    lane_venv: str | None = None
    """Path of a vLLM environment on every node."""
    replicas: int = 1


def from_environment() -> Settings:
    """CLUSTER, IMAGE, TAG, LANE_IMAGE, NAMESPACE. Raises DemoError."""
    cluster = os.environ.get("CLUSTER", "local")
    if cluster not in ("local", "current"):
        raise DemoError(f"CLUSTER: found {cluster!r}, expected local or current")
    image = os.environ.get("IMAGE", LOCAL_IMAGE if cluster == "local" else "")
    if not image:
        raise DemoError(
            "IMAGE: found nothing, expected the prefix of images that your cluster can pull: "
            "<prefix>-operator:<tag>, <prefix>-runner:<tag> and <prefix>-s3:<tag> (see README.md)"
        )
    lane_image, lane_venv = os.environ.get("LANE_IMAGE"), os.environ.get("LANE_VENV")
    if cluster == "current" and not (lane_image or lane_venv):
        raise DemoError("LANE_IMAGE: found nothing, expected an image with vLLM 0.32 for CPUs")
    return Settings(
        local=cluster == "local",
        namespace=os.environ.get("NAMESPACE", "expertmaps-demo"),
        image=image,
        tag=os.environ.get("TAG", "dev"),
        lane_image=lane_image or None,
        lane_venv=lane_venv or None,
    )
