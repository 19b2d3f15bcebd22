"""A lane's `vllm serve` on this machine: the operator's own containers, their mounts as folders.

`lane_container` is what a user's Deployment has, `serving` what adoption makes of it, `counting`
the copy of a profile. `Server` runs one of them: where a kubelet would mount a volume, its path
in the environment becomes that of the volume's folder.
"""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertmaps_operator.api.expertlane import ExpertLane
from expertmaps_operator.build.engine_copy import VOLUME_CACHE, engine_container
from expertmaps_operator.build.runner import Refusal
from expertmaps_operator.build.workload import lane_env
from rowmap_jobs.engine import Engine
from rowmap_jobs.formats import names
from rowmap_jobs.formats.status import HookStatus
from tests.children import end_with_parent
from tests.hook import layout
from tests.ports import free_ports

PYTHON = os.environ.get(
    "EXPERTMAPS_VLLM_PYTHON", "/var/cache/expertmaps/vllm-0.32.0/venv/bin/python"
)
MODEL = Path(__file__).resolve().parents[1] / "model" / "moe"
BOOT_SECONDS, STOP_SECONDS = 1500, 90
STARTED = "Application startup complete"
SLOTS = 64
LANE_CACHE, LANE_MOUNT = "lane-cache", "/cache"

Container = dict[str, Any]


def lane() -> ExpertLane:
    """The lane of the containers here."""
    spec = {
        "workloadRef": {"name": "vllm"},
        "containerName": "vllm",
        "residency": {"hotExpertsPerLayer": 24},
        "store": {"s3": {"bucket": "expertmaps"}},
        "hook": {"statusPort": free_ports(1)[0]},
    }
    return ExpertLane.model_validate(
        {"metadata": {"name": "lane", "namespace": "ns"}, "spec": spec}
    )


def lane_container(*arguments: str, aot: bool = False) -> Container:
    """A user's container: every cache of a compiler, and the home, on the lane's own volume.

    With AOT artifacts a CPU compiles in every boot, since this vLLM cannot load them again.
    """
    env = {
        "HOME": f"{LANE_MOUNT}/home",
        "USER": "vllm",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_AOT_COMPILE": str(int(aot)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CACHE_ROOT": f"{LANE_MOUNT}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{LANE_MOUNT}/inductor",
        "TRITON_CACHE_DIR": f"{LANE_MOUNT}/triton",
        "XDG_CACHE_HOME": f"{LANE_MOUNT}/xdg",
    }
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL),
        "--served-model-name", "moe", "--max-model-len", "2048", "--shutdown-timeout", "20",
    ]  # fmt: skip
    return {
        "name": "vllm",
        "image": "vllm",
        "command": [*command, *arguments],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        "volumeMounts": [{"name": LANE_CACHE, "mountPath": LANE_MOUNT}],
    }


def serving(container: Container, owner: ExpertLane) -> Container:
    """The container once the lane has adopted its workload."""
    out = copy.deepcopy(container)
    env = lane_env(str(owner.spec.hook.status_port))
    out["env"] += [{"name": name, "value": value} for name, value in env.items()]
    out["volumeMounts"] += [
        {"name": names.VOLUME_HOOK, "mountPath": names.HOOK_MOUNT},
        {"name": names.VOLUME_MAP, "mountPath": names.MAP_MOUNT},
        {"name": names.VOLUME_RUN, "mountPath": names.RUN_DIR},
    ]
    return out


def counting(container: Container, owner: ExpertLane) -> Container:
    """The engine of a profile: the operator's copy of the adopted container."""
    volumes = {LANE_CACHE: {"name": LANE_CACHE, "persistentVolumeClaim": {"claimName": "c"}}}
    out = engine_container(serving(container, owner), owner, volumes, BOOT_SECONDS, SLOTS)
    assert not isinstance(out, Refusal), out
    return out


class Server:
    """One container's process below `folder`, which holds the volumes that are the pod's own."""

    def __init__(
        self, folder: Path, container: Container, owner: ExpertLane, shared: Mapping[str, Path]
    ) -> None:
        self.folder, self.port = folder, free_ports(1)[0]
        self.status_url = f"http://127.0.0.1:{owner.spec.hook.status_port}/status"
        self.url = f"http://127.0.0.1:{self.port}"
        self.volumes = {name: folder / name for name in (names.VOLUME_RUN, VOLUME_CACHE)}
        self.volumes |= {names.VOLUME_HOOK: folder / names.VOLUME_HOOK, **shared}
        for path in (*self.volumes.values(), folder / "tmp"):
            path.mkdir(parents=True, exist_ok=True)
        layout.mount(self.volumes[names.VOLUME_HOOK])
        self.lines: list[str] = []
        self._started = threading.Event()
        self._process = subprocess.Popen(
            ["flock", "--no-fork", "/tmp/vllm.lock", *container["command"], f"--port={self.port}"],
            env=self.environment(container),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def environment(self, container: Container) -> dict[str, str]:
        """The container's variables, its mount paths replaced by the folders of the volumes."""
        mounts = {m["mountPath"]: self.volumes[m["name"]] for m in container["volumeMounts"]}
        out = {"PATH": os.environ["PATH"], "TMPDIR": str(self.folder / "tmp")}
        for item in container["env"]:
            value = str(item["value"])
            for path, place in mounts.items():
                if value == path or value.startswith(f"{path}/"):
                    value = str(place) + value.removeprefix(path)
                    break
            out[item["name"]] = value
        return out

    def _read(self) -> None:
        assert self._process.stdout is not None
        with (self.folder / "log").open("w") as log:
            for line in self._process.stdout:
                log.write(line)
                log.flush()
                self.lines.append(line)
                if STARTED in line:
                    self._started.set()
        self._started.set()

    def wait(self) -> None:
        """Until it serves."""
        assert self._started.wait(BOOT_SECONDS), "vLLM did not start in time"
        assert any(STARTED in line for line in self.lines[-50:]), "".join(self.lines[-60:])

    @property
    def engine(self) -> Engine:
        """The server as the runner talks to it."""
        return Engine(self.url, self.status_url)

    def status(self) -> HookStatus:
        """What the hook says."""
        found = self.engine.status()
        assert found is not None
        return found

    def __enter__(self) -> Server:
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it as a kubelet does."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._reader.join(STOP_SECONDS)
