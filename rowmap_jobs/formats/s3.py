"""Where objects are: the one type for every place in S3."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .base import Strict

NAME_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
Name = Annotated[str, Field(min_length=1, max_length=253, pattern=NAME_PATTERN)]

CREDENTIAL_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class LocalRef(Strict):
    """Names an object in the same namespace."""

    name: Name = Field(description="Name of the object, in the same namespace.")


class S3Location(Strict):
    """A bucket and prefix, how to reach them, and whose identity is used."""

    bucket: str = Field(
        min_length=3,
        max_length=63,
        pattern=r"^[a-z0-9][a-z0-9.-]*[a-z0-9]$",
        description="Name of the bucket; it must exist.",
    )
    prefix: str = Field(
        default="",
        max_length=512,
        pattern=r"^([^/].*/)?$",
        description="Start of every object key, ending in a slash; empty for the whole bucket.",
    )
    region: str = Field(
        default="us-east-1", max_length=64, description="Region that requests are signed for."
    )
    endpoint_url: str | None = Field(
        default=None,
        max_length=512,
        pattern=r"^https?://[^/?#\s]+(/[^?#\s]*)?$",
        alias="endpointURL",
        description="Address of an S3-compatible server; leave out for AWS.",
    )
    addressing_style: Literal["Auto", "Path", "Virtual"] = Field(
        default="Auto",
        description="Where the bucket's name goes: Path (in the path), Virtual (in the host) or "
        "Auto (Path when endpointURL is set).",
    )
    checksum_mode: Literal["WhenRequired", "WhenSupported"] = Field(
        default="WhenRequired",
        description="When SDK checksums are sent; many S3-compatible servers refuse WhenSupported. "
        "Contents are always checked by sha256 besides.",
    )
    ca_bundle_config_map_ref: LocalRef | None = Field(
        default=None,
        description="ConfigMap with key ca.crt: certificates (PEM) that the endpoint is checked "
        "against.",
    )
    credentials_secret_ref: LocalRef | None = Field(
        default=None,
        description="Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if temporary, "
        "AWS_SESSION_TOKEN; mounted into the runner alone.",
    )
    service_account_name: Name | None = Field(
        default=None,
        description="ServiceAccount whose cloud identity the runner uses instead of a Secret.",
    )

    @model_validator(mode="after")
    def _one_identity(self) -> Self:
        if self.credentials_secret_ref is not None and self.service_account_name is not None:
            raise ValueError("credentialsSecretRef or serviceAccountName, not both")
        return self
