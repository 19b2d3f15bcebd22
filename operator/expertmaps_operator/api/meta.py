"""What all kinds share: metadata, conditions and the base of their models."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rowmap_jobs.formats.base import Digest
from rowmap_jobs.formats.s3 import LocalRef, Name, S3Location

__all__ = [
    "Condition",
    "Digest",
    "LocalRef",
    "Meta",
    "Name",
    "S3Location",
    "SpecModel",
    "StatusModel",
    "cel",
    "duration_seconds",
    "quantity_bytes",
]

SHORT_NAME_MAX = 25
"""Names of lanes and classes stay short enough for the names of their children."""


class SpecModel(BaseModel):
    """Part of a spec: unknown fields are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, alias_generator=to_camel
    )


class StatusModel(BaseModel):
    """Part of a status: fields of other versions are ignored."""

    model_config = ConfigDict(
        extra="ignore", frozen=True, populate_by_name=True, alias_generator=to_camel
    )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object: camelCase keys, unset fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Meta(StatusModel):
    """The metadata that decisions look at."""

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    annotations: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None


class Condition(StatusModel):
    """metav1.Condition."""

    type: str = Field(max_length=316, description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
        description="Why, in one CamelCase word.",
    )
    message: str = Field(max_length=32768, description="Why, in a sentence, and what to do.")
    observed_generation: int = Field(
        default=0, description="Generation of the spec that the condition speaks of."
    )
    last_transition_time: str = Field(
        description="When status last changed (RFC 3339).",
        json_schema_extra={"format": "date-time"},
    )


Conditions = Annotated[
    list[Condition],
    Field(
        default_factory=list,
        max_length=16,
        description="What holds now; wait for them with kubectl wait.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    ),
]


def cel(rule: str, message: str, **more: str) -> dict[str, str]:
    """One x-kubernetes-validations rule; the message says what to write."""
    return {"rule": rule, "message": message, **more}


_DURATION = re.compile(r"^(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$")
DURATION_PATTERN = r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$"
_SUFFIX = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
QUANTITY_PATTERN = r"^[0-9]+(k|M|G|T|Ki|Mi|Gi|Ti)?$"


def duration_seconds(text: str) -> int:
    """Seconds of a duration such as 168h or 1h30m. Raises ValueError."""
    match = _DURATION.match(text)
    if match is None or not text:
        raise ValueError(f"found {text!r}, expected a duration such as 168h or 1h30m")
    hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def quantity_bytes(text: str) -> int:
    """Bytes of a whole Kubernetes quantity such as 180Gi. Raises ValueError."""
    match = re.match(r"^(\d+)([a-zA-Z]*)$", text)
    if match is None or match.group(2) not in _SUFFIX:
        raise ValueError(f"found {text!r}, expected whole bytes such as 180Gi")
    return int(match.group(1)) * _SUFFIX[match.group(2)]
