"""Killing the operator, and the states of a run in which it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.demo.kube import Kube

Reached = Callable[[Kube, str], bool]
"""Whether the run of a map, named second, is in a state."""


def lose_operator(kube: Kube) -> None:
    """Its pod goes without a word, as with a lost node; a new one comes at once."""
    kube.kubectl(
        "delete", "pod", "-l", "app.kubernetes.io/component=operator",
        "--grace-period=0", "--force",
    )  # fmt: skip


def kill_operator(kube: Kube) -> None:
    """SIGKILL, without a chance to give the Lease back.

    Then a new pod: a restart in the old one would wait for the kubelet's back-off.
    """
    kube.until("the operator runs", lambda: (bool(operators(kube)), ""), 60, every=0.1)
    found = operators(kube)
    for process in found:
        os.kill(process, signal.SIGKILL)
    assert found
    lose_operator(kube)


def operators(kube: Kube) -> list[int]:
    """Processes of the operator of this namespace, as this machine sees them."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            ours = f"--namespace={kube.namespace}".encode() in words
            if ours and words[1:3] == [b"-m", b"expertmaps_operator"] and _in_a_pod(folder):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _in_a_pod(folder: Path) -> bool:
    return "kubepods" in (folder / "cgroup").read_text(encoding="utf-8")


def run_pod(kube: Kube, name: str) -> Any:
    """The pod of a map's run; without a status while there is none."""
    pods = kube.list("pods", f"expertmaps.dev/map={name}")
    return pods[0] if pods else {"status": {}}


def container(kube: Kube, name: str, which: str) -> Any:
    """State of a container of the run's pod."""
    status = run_pod(kube, name)["status"]
    found = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    return next((one["state"] for one in found if one["name"] == which), {})


def started(state: Any) -> bool:
    """Whether a container runs or ran."""
    return bool({"running", "terminated"} & state.keys())


def run_of(kube: Kube, name: str) -> Any:
    """status.run of a map."""
    return ((kube.get("em", name) or {}).get("status") or {}).get("run") or {}


def job_ended(kube: Kube, name: str) -> bool:
    """The run's Job succeeded."""
    jobs = kube.list("jobs", f"expertmaps.dev/map={name}")
    return any(job["status"].get("succeeded") for job in jobs)


ENGINES = ("engine", "vllm")
"""Names of the engine's container: the stand-in's and the demo's."""

PROFILE: dict[str, Reached] = {
    "written": lambda kube, name: bool(run_of(kube, name)),
    "job": lambda kube, name: bool(kube.list("jobs", f"expertmaps.dev/map={name}")),
    # A container that lives for a second may never be told as running.
    "probing": lambda kube, name: started(container(kube, name, "probe")),
    "booting": lambda kube, name: any("running" in container(kube, name, it) for it in ENGINES),
    "counting": lambda kube, name: started(container(kube, name, "runner")),
    "ended": job_ended,
    "accepted": lambda kube, name: run_of(kube, name).get("outcome") == "Accepted",
}


def end_of_a_profile(kube: Kube, name: str, seconds: float) -> str:
    """The map is accepted, with one run and one Job, which may go now; returns its digest."""

    def accepted() -> tuple[bool, str]:
        status = (kube.get("em", name) or {}).get("status") or {}
        ready = {c["type"]: c["status"] for c in status.get("conditions", [])}
        return ready.get("Ready") == "True" and ready.get("Profiling") == "False", str(status)

    kube.until(f"{name} is accepted", accepted, seconds, every=0.5)
    status = (kube.get("em", name) or {})["status"]
    assert status["run"]["outcome"] == "Accepted"
    jobs = kube.list("jobs", f"expertmaps.dev/map={name}")
    assert [job["metadata"]["name"] for job in jobs] == [status["run"]["name"]], "one run, one Job"
    kube.until(f"the Job of {name} may go", lambda: (_may_go(kube, name), ""), 60)
    return str(status["accepted"]["digest"])


def _may_go(kube: Kube, name: str) -> bool:
    jobs = kube.list("jobs", f"expertmaps.dev/map={name}")
    return all(job["spec"].get("ttlSecondsAfterFinished") is not None for job in jobs)
