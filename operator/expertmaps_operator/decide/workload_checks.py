"""What a workload must be like before a lane touches it; each refusal says what to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rowmap_jobs.formats import names

from ..api.expertlane import ExpertLane
from ..api.reasons import Reason
from ..build import workload_fields as fields
from .lane_target import Refusal
from .pods import PodView

HOOK_PLUGIN = "expertmaps"
PYTHONPATH = "PYTHONPATH"
VLLM_PLUGINS = "VLLM_PLUGINS"


@dataclass(frozen=True)
class Checked:
    """What the checks look at. The workload is there."""

    lane: ExpertLane
    workload: Mapping[str, Any]
    conflicts: tuple[str, ...]
    pods: tuple[PodView, ...]

    @property
    def where(self) -> str:
        return f"Deployment {self.lane.spec.workload_ref.name}"

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.workload.get("spec") or {}

    @property
    def container(self) -> Mapping[str, Any]:
        return fields.container(self.workload, self.lane.spec.container_name) or {}

    def patch(self, spec: Mapping[str, Any]) -> str:
        """A ready-made command that changes the workload's spec."""
        body = json.dumps({"spec": spec}, separators=(",", ":"))
        name, namespace = self.lane.spec.workload_ref.name, self.lane.metadata.namespace
        return f"kubectl -n {namespace} patch deployment {name} --type strategic -p '{body}'"

    def container_patch(self, part: Mapping[str, Any]) -> str:
        """A ready-made command that changes the lane's container."""
        own = {"name": self.lane.spec.container_name, **part}
        return self.patch({"template": {"spec": {"containers": [own]}}})


Check = Callable[[Checked], Refusal | None]


def presence(
    lane: ExpertLane,
    workload: Mapping[str, Any] | None,
    conflicts: tuple[str, ...] = (),
    pods: tuple[PodView, ...] = (),
) -> Checked | Refusal:
    """The facts to check, or why there is no workload to look at."""
    where = f"Deployment {lane.spec.workload_ref.name}"
    if workload is None:
        text = f"{where}: found none in namespace {lane.metadata.namespace}; make it, or a lane "
        return Refusal(
            Reason.WORKLOAD_NOT_FOUND,
            text + "whose spec.workloadRef names the right one",
            writable=False,
        )
    if workload["metadata"].get("deletionTimestamp"):
        return Refusal(Reason.WORKLOAD_NOT_FOUND, f"{where}: it is being deleted", writable=False)
    return Checked(lane, workload, conflicts, pods)


def first_refusal(checked: Checked, checks: tuple[Check, ...]) -> Refusal | None:
    """The first check that fails."""
    return next((found for check in checks if (found := check(checked)) is not None), None)


def check_container(c: Checked) -> Refusal | None:
    """The named container is in the template."""
    if c.container:
        return None
    found = ", ".join(str(item.get("name")) for item in fields.containers(c.workload)) or "none"
    return Refusal(
        Reason.CONTAINER_NOT_FOUND,
        f"{c.where}: containers: found {found}, expected {c.lane.spec.container_name}; write one "
        "of them in the lane's spec.containerName",
        writable=False,
    )


def check_controller(c: Checked) -> Refusal | None:
    """No controller above the workload would take our fields out again."""
    owners = c.workload["metadata"].get("ownerReferences") or ()
    owner = next((item for item in owners if item.get("controller")), None)
    if owner is None:
        return None
    return Refusal(
        Reason.WORKLOAD_HAS_CONTROLLER,
        f"{c.where}: {owner.get('kind')} {owner.get('name')} controls it and would undo the "
        "lane's fields; expected a workload without a controller",
        writable=False,
    )


def check_claim(c: Checked) -> Refusal | None:
    """No other lane has the workload."""
    labels = c.workload["metadata"].get("labels") or {}
    label = labels.get(names.LABEL_LANE)
    clash = next((item for item in c.conflicts if names.LABEL_LANE in item), None)
    if label in (None, c.lane.metadata.name) and clash is None:
        return None
    holder = label if label not in (None, c.lane.metadata.name) else _manager(clash or "")
    return Refusal(
        Reason.WORKLOAD_CLAIMED,
        f"{c.where}: label {names.LABEL_LANE}: found {holder}, expected {c.lane.metadata.name}: a "
        "workload has one lane; delete this lane, or the other one and then the label: kubectl -n "
        f"{c.lane.metadata.namespace} label deployment {c.lane.spec.workload_ref.name} "
        f"{names.LABEL_LANE}-",
        writable=False,
    )


def check_paused(c: Checked) -> Refusal | None:
    """The workload's own rollouts are not paused."""
    if not c.spec.get("paused"):
        return None
    return Refusal(
        Reason.UNSAFE_STRATEGY,
        f"{c.where}: spec.paused: found true, expected false; write: kubectl -n "
        f"{c.lane.metadata.namespace} rollout resume deployment {c.lane.spec.workload_ref.name}",
    )


_ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def check_strategy(c: Checked) -> Refusal | None:
    """One pod at a time, and the old one goes first: two do not fit on one device."""
    strategy = c.spec.get("strategy") or {}
    count = fields.replicas(c.workload)
    if strategy.get("type") == "Recreate":
        if count == 1:
            return None
        found = f"Recreate with {count} replicas"
    else:
        rolling = strategy.get("rollingUpdate") or {}
        surge = _resolved(rolling.get("maxSurge", "25%"), count, up=True)
        unavailable = _resolved(rolling.get("maxUnavailable", "25%"), count, up=False)
        # Where both come out as 0 the Deployment's controller takes 1 as maxUnavailable.
        if surge == 0 and unavailable in (0, 1):
            return None
        found = (
            f"maxSurge {rolling.get('maxSurge', '25%')} ({surge} of {count} pods) and "
            f"maxUnavailable {rolling.get('maxUnavailable', '25%')} ({unavailable})"
        )
    fix = c.patch({"strategy": _ROLLING})
    return Refusal(
        Reason.UNSAFE_STRATEGY,
        f"{c.where}: spec.strategy: found {found}, expected RollingUpdate with maxSurge 0 and "
        f"maxUnavailable 1 (or Recreate with one replica); write: {fix}",
    )


def _resolved(value: int | str, count: int, up: bool) -> int:
    text = str(value)
    if not text.endswith("%"):
        return int(text)
    share = int(text[:-1]) * count
    return -(-share // 100) if up else share // 100


def check_gate_fields(c: Checked) -> Refusal | None:
    """Nobody else has a value of their own in the fields that hold a rollout at one pod."""
    for conflict in c.conflicts:
        field, default = fields.GATE_DEFAULTS.get(_field(conflict), (None, 0))
        if field is None or c.spec.get(field, default) == default:
            continue
        return Refusal(
            Reason.UNSAFE_STRATEGY,
            f"{c.where}: spec.{field}: found {c.spec.get(field)} set by {_manager(conflict)}, "
            "expected none: the lane needs the field during a rollout; take it out of the "
            "manifest, give the lane spec.update.minReadySeconds and progressDeadlineSeconds "
            f"instead, and write: {c.patch({field: None})}",
            writable=False,
        )
    return None


def check_replicas(c: Checked) -> Refusal | None:
    """There are pods to roll."""
    if fields.replicas(c.workload) > 0:
        return None
    return Refusal(
        Reason.SCALED_TO_ZERO,
        f"{c.where}: spec.replicas: found 0, expected at least 1; the lane goes on when it is "
        "scaled up",
    )


def check_requests(c: Checked) -> Refusal | None:
    """The scheduler knows what is scarce, so that two pods never share one device or memory."""
    resources = c.container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    if resources.get("claims") or any(key == "memory" or "/" in key for key in wanted):
        return None
    example = c.container_patch({"resources": {"requests": {"memory": "<what one pod needs>"}}})
    return Refusal(
        Reason.UNSAFE_STRATEGY,
        f"{c.where}: container {c.lane.spec.container_name}: resources.requests: found neither "
        "memory nor a device, expected the one that is scarce, so that an old and a new pod are "
        f"never on it together; write, for example: {example}",
    )


def check_env(c: Checked) -> Refusal | None:
    """The user's own variables let the hook be loaded."""
    return _check_python_path(c) or _check_plugins(c) or _check_env_conflicts(c)


def _check_python_path(c: Checked) -> Refusal | None:
    entry = fields.named(c.container.get("env"), PYTHONPATH)
    if entry is None:
        return None
    where = f"{c.where}: container {c.lane.spec.container_name}: env {PYTHONPATH}"
    if "valueFrom" in entry:
        return Refusal(
            Reason.ENV_CONFLICT,
            f"{where}: found valueFrom, expected a value that starts with {names.HOOK_MOUNT}",
        )
    value = str(entry.get("value") or "")
    if value == names.HOOK_MOUNT or value.startswith(names.HOOK_MOUNT + ":"):
        return None
    wanted = f"{names.HOOK_MOUNT}:{value}" if value else names.HOOK_MOUNT
    fix = c.container_patch({"env": [{"name": PYTHONPATH, "value": wanted}]})
    return Refusal(
        Reason.ENV_CONFLICT, f"{where}: found {value!r}, expected {wanted}; write: {fix}"
    )


def _check_plugins(c: Checked) -> Refusal | None:
    value = fields.env_value(c.container, VLLM_PLUGINS)
    if value is None or HOOK_PLUGIN in [part.strip() for part in value.split(",")]:
        return None
    wanted = f"{value},{HOOK_PLUGIN}" if value else HOOK_PLUGIN
    fix = c.container_patch({"env": [{"name": VLLM_PLUGINS, "value": wanted}]})
    return Refusal(
        Reason.ENV_CONFLICT,
        f"{c.where}: container {c.lane.spec.container_name}: env {VLLM_PLUGINS}: found {value!r}, "
        f"expected it to name {HOOK_PLUGIN}; write: {fix}",
    )


def _foreign(c: Checked) -> list[str]:
    """Conflicts but those on fields that only a lane names (after `kubectl rollout undo`)."""
    return [item for item in c.conflicts if not fields.only_ours(_field(item))]


def _check_env_conflicts(c: Checked) -> Refusal | None:
    clash = next((item for item in _foreign(c) if ".env[" in _field(item)), None)
    if clash is None:
        return None
    return Refusal(
        Reason.ENV_CONFLICT,
        f"{c.where}: {_field(clash)}: found a value set by {_manager(clash)}, expected none; take "
        "the variable out of the manifest: the lane sets it",
    )


def check_conflicts(c: Checked) -> Refusal | None:
    """Nobody else holds another field that the lane has to write."""
    clash = next((item for item in _foreign(c) if _field(item) not in fields.GATE_DEFAULTS), None)
    if clash is None:
        return None
    return Refusal(
        Reason.FIELD_CONFLICT,
        f"{c.where}: {_field(clash)}: found {_manager(clash)} there, expected that nobody else "
        "sets what the lane needs; take the field out of the manifest",
    )


def check_serving(c: Checked) -> Refusal | None:
    """At first adoption the workload serves by itself: it must when the hook gives up."""
    if fields.in_template(c.workload) is not None:
        return None
    if any(pod.ready and not pod.terminating and pod.map_digest is None for pod in c.pods):
        return None
    return Refusal(
        Reason.LANE_NOT_HEALTHY,
        f"{c.where}: found no ready pod, expected one that serves without the hook before the "
        "lane is adopted; see kubectl -n "
        f"{c.lane.metadata.namespace} describe deployment {c.lane.spec.workload_ref.name}",
    )


DURING: tuple[Check, ...] = (
    check_container,
    check_controller,
    check_claim,
    check_paused,
    check_strategy,
    check_gate_fields,
    check_requests,
    check_env,
    check_conflicts,
    check_replicas,
)
"""What has to hold as long as a rollout goes on."""

RELEASING: tuple[Check, ...] = (
    check_controller,
    check_claim,
    check_paused,
    check_strategy,
    check_gate_fields,
    check_replicas,
)
"""What has to hold while the workload gets its own template back."""

BEFORE: tuple[Check, ...] = (*DURING, check_serving)
"""What has to hold before one is started."""


def _field(conflict: str) -> str:
    return conflict.partition(": ")[0]


def _manager(conflict: str) -> str:
    return conflict.partition(": ")[2] or "another manager"


def startup_budget_seconds(holder: Mapping[str, Any]) -> int | None:
    """How long the container's startup probe lets it start; None without such a probe."""
    probe = holder.get("startupProbe")
    if not probe:
        return None
    period = int(probe.get("periodSeconds") or 10)
    failures = int(probe.get("failureThreshold") or 3)
    return int(probe.get("initialDelaySeconds") or 0) + period * failures
