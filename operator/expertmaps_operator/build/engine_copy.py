"""The engine of a profile: the lane's own container in count mode, unable to harm the lane.

What the copy keeps decides whether the counted model is the served one; what it drops keeps it out
of the lane's Services, caches and files.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

from rowmap_jobs.formats import names

from ..api.expertlane import ExpertLane
from ..api.reasons import Reason
from ..snapshot import Manifest
from .runner import Refusal

CACHE_MOUNT = "/var/cache/expertmaps"
VOLUME_CACHE = "expertmaps-cache"
OUR_VOLUMES = frozenset({names.VOLUME_HOOK, names.VOLUME_MAP, names.VOLUME_RUN, VOLUME_CACHE})

# Caches of compilers, by the variable that places them. The first two are always set, because
# their default places may lie on a volume of the lane.
CACHES = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "XDG_CACHE_HOME": "xdg",
}
ALWAYS = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR")
XDG, HF_HOME = "XDG_CACHE_HOME", "HF_HOME"
PLUGINS, PLUGIN = "VLLM_PLUGINS", "expertmaps"
PYTHONPATH = "PYTHONPATH"

# Volumes that belong to one pod alone. Any other may be the lane's and is mounted read-only.
PRIVATE = frozenset({"emptyDir", "ephemeral"})

MIN_CAPTURE_SLOTS = 64
DROPPED_FIELDS = ("livenessProbe", "resizePolicy", "restartPolicy", "restartPolicyRules")

Env = list[dict[str, Any]]


def engine_container(
    container: Manifest, lane: ExpertLane, volumes: Mapping[str, Manifest], pending: int, slots: int
) -> dict[str, Any] | Refusal:
    """The lane's container as a native sidecar in count mode.

    `pending` is how long it may take to become ready, `slots` how many transcripts it counts at a
    time. Refused (EnvConflict) when the user's environment would keep the hook out.
    """
    engine = stripped(container)
    env = _count_env(engine, lane, slots)
    if isinstance(env, Refusal):
        return env
    for field in DROPPED_FIELDS:
        engine.pop(field, None)
    lifecycle = {k: v for k, v in (engine.pop("lifecycle", None) or {}).items() if k == "postStart"}
    if lifecycle:
        engine["lifecycle"] = lifecycle
    ports = [
        {key: value for key, value in port.items() if key not in ("hostPort", "hostIP")}
        for port in engine.pop("ports", None) or []
    ]
    if ports:
        engine["ports"] = ports
    return {
        **engine,
        "restartPolicy": "Always",
        "env": env,
        "startupProbe": _startup_probe(engine, lane.spec.server.port, pending),
        "volumeMounts": [
            *_read_only(engine.get("volumeMounts") or [], volumes),
            {"name": names.VOLUME_HOOK, "mountPath": names.HOOK_MOUNT, "readOnly": True},
            {"name": names.VOLUME_RUN, "mountPath": names.RUN_DIR},
            {"name": VOLUME_CACHE, "mountPath": CACHE_MOUNT},
        ],
    }


def init_container(container: Manifest, volumes: Mapping[str, Manifest]) -> dict[str, Any]:
    """A copy of a user's init container that cannot write to what the lane shares with it."""
    init = stripped(container)
    init.pop("resizePolicy", None)
    return {**init, "volumeMounts": _read_only(init.get("volumeMounts") or [], volumes)}


def volume_copy(volume: Manifest) -> dict[str, Any]:
    """A copy of a user's volume, without tokens: they would be those of the runner's identity."""
    out: dict[str, Any] = copy.deepcopy(dict(volume))
    if "projected" in out:
        sources = out["projected"].get("sources") or []
        out["projected"]["sources"] = [
            source for source in sources if "serviceAccountToken" not in source
        ]
    return out


def stripped(container: Manifest) -> dict[str, Any]:
    """A deep copy without what the operator itself wrote into the template at adoption."""
    out: dict[str, Any] = copy.deepcopy(dict(container))
    out["volumeMounts"] = [
        mount for mount in out.get("volumeMounts") or [] if mount.get("name") not in OUR_VOLUMES
    ]
    env = []
    for item in out.get("env") or []:
        if str(item.get("name", "")).startswith("EXPERTMAPS_"):
            continue
        if item.get("name") == PYTHONPATH and "value" in item:
            rest = _without_hook(str(item["value"]))
            if not rest:
                continue
            item = {**item, "value": rest}
        env.append(item)
    out["env"] = env
    return out


def _without_hook(path: str) -> str:
    return ":".join(part for part in path.split(":") if part and part != names.HOOK_MOUNT)


def _count_env(engine: Manifest, lane: ExpertLane, slots: int) -> Env | Refusal:
    env: Env = list(engine.get("env") or [])
    place = f"container {lane.spec.container_name}"
    plugins = _find(env, PLUGINS)
    if plugins is not None:
        listed = [part.strip() for part in str(plugins.get("value", "")).split(",") if part.strip()]
        if "valueFrom" in plugins or PLUGIN not in listed:
            wanted = ",".join([*listed, PLUGIN])
            return Refusal(
                Reason.ENV_CONFLICT,
                f"{place}: env {PLUGINS} keeps the hook out; write {PLUGINS}={wanted}",
            )
    path = _find(env, PYTHONPATH)
    if path is not None and "valueFrom" in path:
        return Refusal(
            Reason.ENV_CONFLICT,
            f"{place}: env {PYTHONPATH} has a valueFrom; write "
            f"{PYTHONPATH}={names.HOOK_MOUNT}:<yours> as a value",
        )
    own = str(path.get("value", "")) if path is not None else ""
    env = _set(env, PYTHONPATH, f"{names.HOOK_MOUNT}:{own}" if own else names.HOOK_MOUNT)
    for name, value in {
        names.ENV_MODE: names.MODE_COUNT,
        names.ENV_DIR: names.RUN_DIR,
        names.ENV_STATUS_PORT: str(lane.spec.hook.status_port),
        names.ENV_CAPTURE_SLOTS: str(max(MIN_CAPTURE_SLOTS, slots)),
    }.items():
        env = _set(env, name, value)
    return _own_caches(env)


def _own_caches(env: Env) -> Env:
    xdg = _find(env, XDG)
    if xdg is not None and xdg.get("value") and _find(env, HF_HOME) is None:
        # Models are found below XDG_CACHE_HOME unless HF_HOME says where; they are only read.
        env = _set(env, HF_HOME, f"{str(xdg['value']).rstrip('/')}/huggingface")
    for name, folder in CACHES.items():
        if name in ALWAYS or _find(env, name) is not None:
            env = _set(env, name, f"{CACHE_MOUNT}/{folder}")
    return env


def _find(env: Env, name: str) -> dict[str, Any] | None:
    """The item that holds: of several with one name, Kubernetes takes the last."""
    return next((item for item in reversed(env) if item.get("name") == name), None)


def _set(env: Env, name: str, value: str) -> Env:
    """`env` with the value in the place of the item that held, so that $(NAME) still resolves."""
    held = _find(env, name)
    new = {"name": name, "value": value}
    if held is None:
        return [*env, new]
    out = [new if item is held else item for item in env]
    return [item for item in out if item is new or item.get("name") != name]


def _read_only(mounts: list[Any], volumes: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    out = []
    for mount in mounts:
        volume = volumes.get(str(mount.get("name")), {})
        private = any(kind in volume for kind in PRIVATE)
        out.append(dict(mount) if private else {**mount, "readOnly": True})
    return out


def _startup_probe(engine: Manifest, port: int, pending: int) -> dict[str, Any]:
    """The container's own, else its readiness probe: the runner starts when it succeeds.

    It may fail as long as the run may be pending, because the copy compiles with empty caches.
    """
    default = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 5}
    found = engine.get("startupProbe") or engine.get("readinessProbe") or default
    probe = copy.deepcopy(dict(found))
    period = int(probe.get("periodSeconds") or 10)
    probe["successThreshold"] = 1
    probe["failureThreshold"] = max(
        int(probe.get("failureThreshold") or 3), math.ceil(pending / period)
    )
    return probe
