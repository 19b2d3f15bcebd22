"""A vLLM lane's pod as a lane adopts it, its memory limit lowered in place by the kubelet."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expertmaps_operator.api.expertlane import ExpertLane, MapInForce
from expertmaps_operator.api.meta import quantity_bytes
from expertmaps_operator.build.hook_configmap import hook_config_map
from expertmaps_operator.build.workload import Gate, workload_patch
from expertmaps_operator.snapshot import HookFiles
from rowmap_jobs.formats import names, rowmap
from rowmap_jobs.formats.status import HookStatus
from rowmap_jobs.hook import manifest
from tests.demo.ask import get_json, post
from tests.demo.kube import Kube, Object, condition
from tests.demo.lanes import SCRIPT, host_venv
from tests.hook import memory_group, skewed_maps
from tests.hook.window_prompts import prompt

LANE, WORKLOAD = "memory", "vllm-memory"
BOOT_SECONDS, RESIZE_SECONDS = 900, 300
PEAK = "10Gi"
"""Limit that holds the boot: model, key-value cache, three processes, pages of the files."""
INSIDE = Path(__file__).parent / "inside.py"
FLAGS = ("--enforce-eager", "--no-enable-prefix-caching")
"""Every window is the same work, and a boot compiles nothing."""
REQUESTS, PROMPT, TOKENS = 3, 8, 12
"""Of a window; ids in each prompt, and in each answer."""


def owner(namespace: str) -> ExpertLane:
    """The lane whose fields the Deployment gets; no operator watches it."""
    spec = {
        "workloadRef": {"name": WORKLOAD},
        "containerName": "vllm",
        "residency": {"hotExpertsPerLayer": skewed_maps.HOT},
        "store": {"s3": {"bucket": "expertmaps"}},
    }
    metadata = {"name": LANE, "namespace": namespace}
    return ExpertLane.model_validate({"metadata": metadata, "spec": spec})


def deployment(kube: Kube, model: Path, cache: Path) -> None:
    """The Deployment and Service as a user writes them, with no pod yet."""
    words = [sys.executable, str(SCRIPT), WORKLOAD, "--namespace", kube.namespace]
    words += ["--model", str(model), "--cache", str(cache), "--venv", host_venv()]
    words += ["--replicas", "0", "--memory", "2Gi", "--memory-limit", PEAK]
    words += ["--max-model-len", "512", *(f"--arg={flag}" for flag in FLAGS)]
    listed = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    container = listed["items"][0]["spec"]["template"]["spec"]["containers"][0]
    container["resizePolicy"] = [{"resourceName": "memory", "restartPolicy": "NotRequired"}]
    # Not by `apply`: kubectl would give the fields of that to the next server-side apply.
    kube.kubectl("create", "-f", "-", stdin=json.dumps(listed))


def adopt(kube: Kube, rows: rowmap.RowMap | None) -> None:
    """The operator's own fields for a map; for none, the hook counts."""
    hook = HookFiles(manifest.digest(), manifest.files(), tuple(manifest.items()), "")
    workload = kube.get("deployment", WORKLOAD)
    assert workload is not None
    digest = rows.digest if rows is not None else "sha256:" + 64 * "0"
    in_force = MapInForce(traffic_class="code", digest=digest, hook_digest=hook.digest)
    lane = owner(kube.namespace)
    patch = workload_patch(lane, workload, in_force, hook.items, Gate.RELEASED)
    if rows is None:
        env = patch["spec"]["template"]["spec"]["containers"][0]["env"]
        next(item for item in env if item["name"] == names.ENV_MODE)["value"] = names.MODE_COUNT
    else:
        _apply(kube, _map(rows))
    _apply(kube, hook_config_map(LANE, kube.namespace, workload, hook))
    _apply(kube, patch)


def _apply(kube: Kube, item: Object) -> None:
    """As the operator does."""
    manager = f"--field-manager={names.workload_manager(LANE)}"
    kube.kubectl("apply", "--server-side", manager, "-f", "-", stdin=json.dumps(item))


def _map(rows: rowmap.RowMap) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": names.map_configmap(LANE, rows.digest)},
        "data": {names.MAP_FILE: rows.to_bytes().decode()},
    }


class Pod:
    """The lane's one pod while it serves."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.kube, self.name = kube, name
        self._uid = self.get()["metadata"]["uid"]

    def get(self) -> Object:
        found = self.kube.get("pod", self.name)
        assert found is not None, f"{self.name} is gone"
        return found

    def container(self) -> Object:
        """Its status of the server's container."""
        found: Object = self.get()["status"]["containerStatuses"][0]
        return found

    def status(self) -> HookStatus:
        """What the hook says."""
        with self.kube.forward(f"pod/{self.name}", names.DEFAULT_STATUS_PORT) as url:
            return HookStatus.from_wire(get_json(url + "/status"), self.name)

    def inside(self) -> dict[str, Any]:
        """What inside.py tells."""
        words = ("exec", "-i", self.name, "--", "python3", "-", names.RUN_DIR)
        found: dict[str, Any] = json.loads(self.kube.kubectl(*words, stdin=INSIDE.read_text()))
        return found

    def read(self, path: str) -> bytes:
        """A file of the container."""
        return base64.b64decode(self.kube.kubectl("exec", self.name, "--", "base64", path))

    def window(self, tag: bool = False) -> dict[str, Any]:
        """The same requests, one at a time: answers, seconds, and faults for each token."""
        before, start = self.inside()["faults"], time.monotonic()
        with self.kube.forward(f"pod/{self.name}", 8000) as url:
            choices = [_complete(url, index, tag) for index in range(REQUESTS)]
        seconds = time.monotonic() - start
        tokens = sum(len(one["token_ids"]) for one in choices)
        return {
            "ids": [one["token_ids"] for one in choices],
            "logprobs": [one["logprobs"]["token_logprobs"] for one in choices],
            "tokensPerSecond": round(tokens / seconds, 2),
            "majorFaultsPerToken": round((self.inside()["faults"] - before) / tokens, 1),
        }

    def counts(self) -> list[skewed_maps.Order]:
        """What the hook counted of the first window's requests."""
        folder = f"{names.RUN_DIR}/{names.COUNTS_DIR}"
        files = [self.read(f"{folder}/w{index}.npz") for index in range(REQUESTS)]
        return [skewed_maps.counted(io.BytesIO(data)) for data in files]

    def lower(self, limit: int) -> dict[str, Any]:
        """Ask the kubelet for a lower limit; its words when it refuses, and the seconds it took.

        It compares all that is charged to the pod with the new limit, pages of files included, and
        refuses while that is more, though the kernel could evict them: they are evicted here, and
        the kubelet's own next try succeeds.
        """
        resources = {"name": "vllm", "resources": {"limits": {"memory": f"{limit >> 20}Mi"}}}
        patch = json.dumps({"spec": {"containers": [resources]}})
        self.kube.kubectl("patch", "pod", self.name, "--subresource", "resize", "-p", patch)
        self.kube.until("the kubelet answers", lambda: self._answered(limit), RESIZE_SECONDS, 0.2)
        refusal = condition(self.get(), "PodResizeInProgress").get("message")
        memory_group.Group.of_pod(self._uid).reclaim()
        seconds = self.kube.until(
            "the limit is lower", lambda: (self._lowered(limit), self._words()), RESIZE_SECONDS
        )
        return {"refusal": refusal, "seconds": round(seconds, 1)}

    def _lowered(self, limit: int) -> bool:
        resources = self.container().get("resources") or {}
        return quantity_bytes(resources["limits"]["memory"]) == limit

    def _answered(self, limit: int) -> tuple[bool, str]:
        refused = condition(self.get(), "PodResizeInProgress").get("reason") == "Error"
        return refused or self._lowered(limit), self._words()

    def _words(self) -> str:
        kinds = ("PodResizePending", "PodResizeInProgress")
        return str([condition(self.get(), kind) for kind in kinds])


def _complete(url: str, index: int, tag: bool) -> Any:
    body: dict[str, Any] = {
        "model": "moe",
        "prompt": prompt(index, PROMPT),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
    }
    if tag:
        body["vllm_xargs"] = {names.XARG_TRANSCRIPT: f"w{index}"}
    return post(url + "/v1/completions", body, timeout=600)["choices"][0]


@contextlib.contextmanager
def pod(kube: Kube) -> Iterator[Pod]:
    """The Deployment's pod, booted; gone afterwards."""
    kube.kubectl("scale", "deployment", WORKLOAD, "--replicas=1")
    try:
        seconds = kube.until("the lane is ready", lambda: _ready(kube), BOOT_SECONDS, 1)
        kube.say(f"  ready after {seconds:.0f} s")
        yield Pod(kube, kube.list("pods", f"app={WORKLOAD}")[0]["metadata"]["name"])
    finally:
        kube.kubectl("scale", "deployment", WORKLOAD, "--replicas=0")
        kube.kubectl("wait", "--for=delete", "pod", "-l", f"app={WORKLOAD}", "--timeout=120s")


def _ready(kube: Kube) -> tuple[bool, str]:
    pods = kube.list("pods", f"app={WORKLOAD}")
    if len(pods) != 1:
        return False, f"{len(pods)} pods"
    for status in pods[0]["status"].get("containerStatuses", []):
        log = ("logs", "-p", pods[0]["metadata"]["name"], "--tail=200")
        assert status["restartCount"] == 0, kube.kubectl(*log, check=False)
    return condition(pods[0], "Ready").get("status") == "True", pods[0]["status"]["phase"]
