"""ExpertLane: one model server workload and the traffic class that it serves now."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rowmap_jobs.formats.s3 import NAME_PATTERN

from .meta import (
    DURATION_PATTERN,
    QUANTITY_PATTERN,
    Conditions,
    Digest,
    Meta,
    Name,
    S3Location,
    SpecModel,
    StatusModel,
)

Quantity = Annotated[str, Field(pattern=QUANTITY_PATTERN, max_length=24)]
ContainerName = Annotated[str, Field(min_length=1, max_length=63, pattern=NAME_PATTERN)]


class WorkloadRef(SpecModel):
    """The workload whose pods are the lane."""

    api_version: Literal["apps/v1"] = Field(
        default="apps/v1", description="API version of the workload."
    )
    kind: Literal["Deployment"] = Field(default="Deployment", description="Kind of the workload.")
    name: Name = Field(description="Name of the workload, in the same namespace.")


class Server(SpecModel):
    """How the model server is reached inside its pod."""

    port: int = Field(default=8000, ge=1, le=65535, description="Port of the OpenAI API (HTTP).")


class ResidencySpec(SpecModel):
    """How many expert rows stay in fast memory; frozen in status.geometry by the first map."""

    hot_experts_per_layer: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Expert rows in fast memory in every MoE layer; or give hotBytes.",
    )
    hot_bytes: Quantity | None = Field(
        default=None,
        description="Fast memory for expert rows per accelerator, scales included, such as 180Gi; "
        "or give hotExpertsPerLayer.",
    )


class Store(SpecModel):
    """Where censuses, maps and reports are kept."""

    s3: S3Location = Field(description="Bucket and prefix; objects there are never deleted.")


class HookSpec(SpecModel):
    """The hook inside the model server."""

    status_port: int = Field(
        default=9477,
        ge=1,
        le=65535,
        description="Port on which the hook serves /status and /metrics.",
    )


class UpdateSpec(SpecModel):
    """How a rollout proceeds."""

    progress_deadline_seconds: int = Field(
        default=1800,
        ge=1,
        le=86400,
        description="How long a pod may take to become ready with its map; then the rollout has "
        "failed.",
    )
    min_ready_seconds: int = Field(
        default=10,
        ge=0,
        le=86400,
        description="How long each pod is ready before the next one goes.",
    )


class RollbackSpec(SpecModel):
    """What a failed rollout leads to."""

    enabled: bool = Field(
        default=True,
        description="Go back to the last verified map (or, before there is one, to the workload's "
        "own template) when a pod fails with a new map; false: the rollout stops where it is.",
    )
    hold_duration: Annotated[str, Field(pattern=DURATION_PATTERN, min_length=2, max_length=32)] = (
        Field(
            default="1h",
            description="How long the map of a rollout that was rolled back is not tried again.",
        )
    )


class ExpertLaneSpec(SpecModel):
    """What the lane is, and what it should serve."""

    workload_ref: WorkloadRef = Field(
        description="The workload whose pods are the lane, in the same namespace; immutable."
    )
    container_name: ContainerName = Field(
        description="Container of the model server in the pod template."
    )
    engine: Literal["VLLM"] = Field(default="VLLM", description="The model server's engine.")
    server: Server = Field(default_factory=Server, description="How the server is reached.")
    residency: ResidencySpec = Field(description="How many expert rows stay in fast memory.")
    active_traffic_class: Name | None = Field(
        default=None,
        max_length=25,
        description="The switch: the traffic class whose map the lane serves with. Absent: the "
        "lane is left as it is.",
    )
    store: Store = Field(description="Where censuses, maps and reports are kept.")
    hook: HookSpec = Field(default_factory=HookSpec, description="The hook in the model server.")
    update: UpdateSpec = Field(default_factory=UpdateSpec, description="How a rollout proceeds.")
    rollback: RollbackSpec = Field(
        default_factory=RollbackSpec, description="What a failed rollout leads to."
    )
    deletion_policy: Literal["Retain", "Restore"] = Field(
        default="Retain",
        description="What the deletion of this object does to the workload. Retain: it serves on "
        "with its map. Restore: it gets its own pod template back, which restarts its pods.",
    )
    paused: bool = Field(
        default=False, description="Freeze the lane in place: nothing of it is changed."
    )


class MapInForce(StatusModel):
    """A map and the hook it runs with."""

    traffic_class: str = Field(description="Traffic class of the map.")
    digest: Digest = Field(description="sha256 of the map.")
    hook_digest: Digest = Field(description="Digest of the hook.")


class Rollout(StatusModel):
    """One move of the lane from a map (or none) to another."""

    id: str = Field(description="Identifies the rollout.")
    from_: MapInForce | None = Field(
        default=None, alias="from", description="The last verified map; absent: un-hooked."
    )
    to: MapInForce = Field(description="Where the lane is going.")
    state: str = Field(
        description="Canary, Rolling, Verified, Stopped, RollingBack, RolledBack, RollbackFailed "
        "or Superseded."
    )
    started_at: str = Field(
        description="When it started.", json_schema_extra={"format": "date-time"}
    )
    state_since: str = Field(
        description="When the state was entered.", json_schema_extra={"format": "date-time"}
    )
    step_since: str = Field(
        description="When a pod last became good; the progress deadline counts from here.",
        json_schema_extra={"format": "date-time"},
    )
    template_hash: str = Field(
        default="", description="Hash of the user's own template when the rollout started."
    )
    good_pods: int = Field(
        default=0,
        description="Pods that are ready and report the digest (of the map to go back to, while "
        "rolling back).",
    )
    applied: bool = Field(
        default=False,
        description="Whether the workload was seen with the template of the rollout (or of the "
        "way back, while rolling back).",
    )
    generation: int = Field(
        default=0, description="Generation of the lane's spec when the state was entered."
    )
    finished_at: str | None = Field(
        default=None, description="When it ended.", json_schema_extra={"format": "date-time"}
    )
    reason: str | None = Field(default=None, description="Why it failed, in one word.")
    message: str | None = Field(default=None, description="Why it failed, in a sentence.")


class LaneGeometry(StatusModel):
    """Shape of every map of this lane, frozen by the first accepted one."""

    digest: Digest = Field(description="Hash of the geometry.")
    experts: str = Field(description="Experts per MoE layer (a number, or several by layer).")
    top_k: int = Field(description="Experts that a token selects per layer.")
    hot_rows: str = Field(description="Hot rows per layer.")
    moe_layers: int = Field(description="Number of MoE layers.")


class ExpertLaneStatus(StatusModel):
    """What is known of the lane."""

    observed_generation: int = Field(default=0, description="Generation that was last looked at.")
    conditions: Conditions
    active: MapInForce | None = Field(
        default=None, description="The map in force; changes only when all desired pods report it."
    )
    last_known_good: MapInForce | None = Field(
        default=None,
        description="The map of the last rollout or rollback whose pods were all good.",
    )
    rollout: Rollout | None = Field(default=None, description="The newest rollout.")
    history: list[Rollout] = Field(
        default_factory=list, max_length=10, description="Finished rollouts, newest first."
    )
    geometry: LaneGeometry | None = Field(
        default=None, description="Shape of every map of this lane."
    )
    replicas: int = Field(default=0, description="Desired pods.")
    updated_replicas: int = Field(default=0, description="Pods of the newest template.")
    ready_replicas: int = Field(default=0, description="Pods that are ready.")
    effective_traffic_class: str | None = Field(
        default=None, description="The traffic class that the lane should serve now."
    )


class ExpertLane(StatusModel):
    """The object as decisions see it."""

    metadata: Meta
    spec: ExpertLaneSpec
    status: ExpertLaneStatus = Field(default_factory=ExpertLaneStatus)
