"""TrafficClass: what one kind of traffic is, and where its transcripts are."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .meta import DURATION_PATTERN, Conditions, Meta, S3Location, SpecModel, StatusModel


class Transcripts(SpecModel):
    """Where recorded transcripts are."""

    s3: S3Location = Field(
        description="Objects of JSON lines (.jsonl or .jsonl.gz): one recorded request and "
        "response a line."
    )


class ReplaySpec(SpecModel):
    """How transcripts are chosen and counted."""

    max_transcripts: int = Field(
        default=500, ge=1, le=20000, description="At most this many transcripts are counted."
    )
    max_response_tokens: int = Field(
        default=8192,
        ge=1,
        le=1048576,
        description="Of a longer response, a random window of this many tokens is counted.",
    )
    sampling: Literal["Uniform"] = Field(
        default="Uniform", description="How sessions are drawn when there are too many."
    )
    seed: int = Field(default=0, ge=0, le=2147483647, description="Seed of the draw.")
    concurrency: int = Field(
        default=8, ge=1, le=256, description="Requests sent to the profile's engine at a time."
    )


class TrafficClassSpec(SpecModel):
    """What the traffic is, and how much of it is counted."""

    transcripts: Transcripts = Field(description="Where the recorded transcripts are.")
    window: Annotated[str, Field(pattern=DURATION_PATTERN, min_length=2, max_length=32)] = Field(
        default="168h",
        description="Only transcripts younger than this are counted, by each record's created, "
        "else the object's LastModified.",
    )
    min_transcripts: int = Field(
        default=12, ge=1, le=20000, description="Sessions that a profile needs at least."
    )
    replay: ReplaySpec = Field(
        default_factory=ReplaySpec, description="How transcripts are chosen and counted."
    )


class TrafficClassStatus(StatusModel):
    """What the last profile run found."""

    observed_generation: int = Field(default=0, description="Generation that was last looked at.")
    conditions: Conditions
    sessions: int | None = Field(default=None, description="Sessions counted by the last run.")
    decode_tokens: int | None = Field(
        default=None, description="Decode tokens counted by the last run."
    )
    last_run: str | None = Field(default=None, description="Name of the last profile run.")


class TrafficClass(StatusModel):
    """The object as decisions see it."""

    metadata: Meta
    spec: TrafficClassSpec
    status: TrafficClassStatus = Field(default_factory=TrafficClassStatus)
