"""ExpertMap: the map of one traffic class on one lane, and how it is measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .meta import Conditions, Digest, LocalRef, Meta, SpecModel, StatusModel

DECIMAL_PATTERN = r"^[0-9]{1,6}(\.[0-9]{1,6})?$"
Decimal = Annotated[str, Field(pattern=DECIMAL_PATTERN, max_length=16)]


class ProfileSpec(SpecModel):
    """The profile Job: a copy of the lane's pod in count mode with a runner beside it."""

    pending_deadline_seconds: int = Field(
        default=3600,
        ge=1,
        le=604800,
        description="How long the engine of a run may take to be scheduled and to become ready.",
    )
    active_deadline_seconds: int = Field(
        default=7200, ge=1, le=604800, description="How long a run may take once it is scheduled."
    )
    backoff_limit: int = Field(
        default=1, ge=0, le=10, description="Pods tried again within one run."
    )
    ttl_seconds_after_finished: int = Field(
        default=86400,
        ge=0,
        le=31536000,
        description="How long a finished run's Job stays after its result is recorded.",
    )
    priority_class_name: str = Field(
        default="",
        max_length=253,
        description="PriorityClass of the run's pod; the lane's own is never inherited.",
    )


class AcceptanceSpec(SpecModel):
    """When a measured map is good enough to be used."""

    min_decode_tokens: int = Field(
        default=8000, ge=0, le=1000000000, description="Decode tokens counted at least."
    )
    max_cold_share_percent: Decimal | None = Field(
        default=None,
        description='Highest share of expert reads from slow memory, in percent, such as "5" '
        "(leave-one-session-out).",
    )
    max_cold_share_vs_positional: Decimal | None = Field(
        default="0.5",
        description="Highest cold share as a ratio to that of a map by position.",
    )
    min_improvement_points: Decimal = Field(
        default="0.2",
        description="Percentage points of cold share that a new map must be better by than the "
        "accepted one on the same transcripts (leave-one-session-out); the low end of the "
        "difference's interval must be above zero too.",
    )


class ExpertMapSpec(SpecModel):
    """Which map this is, and how it is measured."""

    lane_ref: LocalRef = Field(description="The ExpertLane that the map is for; immutable.")
    traffic_class_ref: LocalRef = Field(description="The TrafficClass that is measured; immutable.")
    schedule: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Measure again at these times, in a CronJob's format, such as '0 3 * * 1'. The "
        "first run starts at once.",
    )
    time_zone: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Time zone of the schedule, such as Europe/Berlin; UTC without it.",
    )
    suspend: bool = Field(
        default=False,
        description="Start no run but those that runAt asks for; one that goes on is not stopped.",
    )
    starting_deadline_seconds: int | None = Field(
        default=None,
        ge=0,
        le=31536000,
        description="How late a scheduled run may start; a later one is left out. Without it the "
        "newest missed run is made up for, however late.",
    )
    run_at: str | None = Field(
        default=None,
        max_length=64,
        json_schema_extra={"format": "date-time"},
        description="Measure again once, after this time (RFC 3339). The first run starts at once.",
    )
    profile: ProfileSpec = Field(default_factory=ProfileSpec, description="The Job that measures.")
    acceptance: AcceptanceSpec = Field(
        default_factory=AcceptanceSpec, description="When a measured map may be used."
    )


class AcceptedMap(StatusModel):
    """The newest accepted map."""

    digest: Digest = Field(description="sha256 of the map's bytes.")
    row_set_digest: Digest = Field(description="Hash of its hot sets: equal ones need no rollout.")
    run: str = Field(description="Profile run that made it.")
    accepted_at: str = Field(
        description="When it was accepted.", json_schema_extra={"format": "date-time"}
    )
    cold_share_percent: str | None = Field(
        default=None, description="Cold share with this map, leave-one-session-out."
    )
    positional_cold_share_percent: str | None = Field(
        default=None, description="Cold share with a map by position."
    )
    other_cold_share_percent: dict[str, str] | None = Field(
        default=None,
        max_length=256,
        description="Cold share of this class's traffic with the map of another class, by class.",
    )
    decode_tokens: int | None = Field(default=None, description="Decode tokens counted.")
    sessions: int | None = Field(default=None, description="Sessions counted.")
    report_key: str | None = Field(
        default=None, description="Object key of report.json; report.html is beside it."
    )


class ProfileRun(StatusModel):
    """One profile run."""

    name: str = Field(description="Name of the run's Job.")
    generation: int = Field(default=0, description="Generation of the spec that asked for it.")
    started_at: str = Field(
        description="When it was started.", json_schema_extra={"format": "date-time"}
    )
    finished_at: str | None = Field(
        default=None, description="When it ended.", json_schema_extra={"format": "date-time"}
    )
    job_uid: str | None = Field(
        default=None, description="UID of the run's Job; absent until the Job was seen."
    )
    outcome: str | None = Field(default=None, description="Accepted, Rejected or Failed.")
    reason: str | None = Field(default=None, description="Why, in one word.")
    message: str | None = Field(default=None, description="Why, in a sentence.")
    engine_seconds: str | None = Field(
        default=None, description="Seconds until the run's engine was ready."
    )
    count_seconds: str | None = Field(default=None, description="Seconds of counting.")
    sessions: int | None = Field(default=None, description="Sessions counted.")
    decode_tokens: int | None = Field(default=None, description="Decode tokens counted.")


class ExpertMapStatus(StatusModel):
    """What is known of the map."""

    observed_generation: int = Field(default=0, description="Generation that was last looked at.")
    conditions: Conditions
    accepted: AcceptedMap | None = Field(default=None, description="The newest accepted map.")
    run: ProfileRun | None = Field(
        default=None, description="The newest run; running while it has no finishedAt."
    )
    failed_attempts: int = Field(default=0, description="Runs failed since the last success.")
    last_schedule_time: str | None = Field(
        default=None,
        description="The newest time of the schedule for which a run was started.",
        json_schema_extra={"format": "date-time"},
    )
    last_successful_time: str | None = Field(
        default=None,
        description="When the newest run ended that measured, whether its map is used or not.",
        json_schema_extra={"format": "date-time"},
    )


class ExpertMap(StatusModel):
    """The object as decisions see it."""

    metadata: Meta
    spec: ExpertMapSpec
    status: ExpertMapStatus = Field(default_factory=ExpertMapStatus)
