"""`python -m tests.demo up|down`: see `make demo` and `make demo-down`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from tests.demo import deploy
from tests.demo.job import Demo
from tests.demo.kube import Kube, cluster_environment
from tests.demo.settings import CLUSTER_TOOL, ROOT, DemoError, Settings, from_environment
from tests.demo.table import table

START = time.monotonic()


def say(text: str) -> None:
    """One line of progress with the minutes since the start."""
    print(f"[{(time.monotonic() - START) / 60:5.1f} min] {text}", flush=True)


def local_cluster() -> None:
    """Everything the local cluster needs, step by step; each is quick when it is done already."""
    if os.geteuid() != 0:
        raise DemoError("make demo: found a normal user, expected root on a machine of its own")
    steps = {
        "install": "Debian packages",
        "build": "Kubernetes and its tools from source (the first time half an hour on two cores)",
        "vllm": "vLLM for CPUs",
        "up": "one-node Kubernetes",
        "images": "images of this repository",
    }
    for step, text in steps.items():
        say(f"cluster {step}: {text}")
        code = subprocess.run([str(CLUSTER_TOOL), step], cwd=ROOT, check=False).returncode
        if code:
            raise DemoError(f"tests/cluster/cluster {step}: exit code {code}; see the lines above")


def up(settings: Settings) -> None:
    """Run the main job and print the table."""
    if settings.local:
        local_cluster()
    kube = kube_for(settings)
    deploy.nothing_stands(kube, settings)
    demo = Demo(settings, kube, say)
    demo.run()
    print()
    print(table(demo))
    print()
    print("reports:", *(f"  {line}" for line in deploy.fetch_reports(demo.kube)), sep="\n")
    say("done; look around, then `make demo-down`:")
    if settings.local:
        print('  eval "$(tests/cluster/cluster env)"')
    print(f"  kubectl config set-context --current --namespace {settings.namespace}")
    print("  kubectl get tc,em,lane")


def down(settings: Settings) -> None:
    """Remove what `up` made."""
    if settings.local:
        subprocess.run([str(CLUSTER_TOOL), "down"], cwd=ROOT, check=True)
        return
    deploy.remove(kube_for(settings))


def kube_for(settings: Settings) -> Kube:
    """kubectl with the right kubeconfig."""
    env = cluster_environment() if settings.local else dict(os.environ)
    return Kube(settings.namespace, env, say)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.demo", description=__doc__)
    parser.add_argument("what", choices=("up", "down"))
    what = parser.parse_args().what
    try:
        settings = from_environment()
        (up if what == "up" else down)(settings)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
