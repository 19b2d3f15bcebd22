"""Rules of the CRDs that OpenAPI cannot say, in CEL; every message says what to write.

Rules hang on models and fields by name, so that one table shows all of them.
"""

from __future__ import annotations

from rowmap_jobs.formats.s3 import NAME_PATTERN, S3Location

from .expertmap import DECIMAL_PATTERN
from .meta import DURATION_PATTERN, QUANTITY_PATTERN, SHORT_NAME_MAX, cel

Rules = list[dict[str, str]]


def _short_name(what: str) -> Rules:
    return [
        cel(
            f"size(self.metadata.name) <= {SHORT_NAME_MAX}",
            f"metadata.name: write at most {SHORT_NAME_MAX} characters, so that the names of what "
            f"is made for the {what} fit",
        ),
        cel(
            "!self.metadata.name.contains('.')",
            "metadata.name: write a name without a dot, because an ExpertMap is named "
            "<lane>.<class>",
        ),
    ]


ROOT_RULES: dict[str, Rules] = {
    "TrafficClass": _short_name("traffic class"),
    "ExpertLane": _short_name("lane"),
    "ExpertMap": [
        cel(
            "self.metadata.name == self.spec.laneRef.name + '.' + self.spec.trafficClassRef.name",
            "metadata.name: write <lane>.<class>, the names in spec.laneRef and "
            "spec.trafficClassRef with a dot between",
            messageExpression="'metadata.name: write ' + self.spec.laneRef.name + '.' + "
            "self.spec.trafficClassRef.name + ' (<lane>.<class>), so that there is one map of a "
            "class on a lane'",
        )
    ],
}
"""By kind; `self` is the whole object."""

MODEL_RULES: dict[str, Rules] = {
    "ExpertLaneSpec": [
        cel(
            "self.hook.statusPort != self.server.port",
            "write a hook.statusPort that differs from server.port",
        )
    ],
    "ResidencySpec": [
        cel(
            "has(self.hotExpertsPerLayer) != has(self.hotBytes)",
            "write exactly one of hotExpertsPerLayer and hotBytes",
        )
    ],
    "ExpertMapSpec": [
        cel(
            "has(self.schedule) || !has(self.timeZone)",
            "write a schedule beside timeZone, or leave timeZone out",
        ),
        cel(
            "has(self.schedule) || !has(self.startingDeadlineSeconds)",
            "write a schedule beside startingDeadlineSeconds, or leave that out",
        ),
    ],
    "UpdateSpec": [
        cel(
            "self.progressDeadlineSeconds > self.minReadySeconds",
            "write a progressDeadlineSeconds that is greater than minReadySeconds",
        )
    ],
    "S3Location": [
        cel(
            "!(has(self.credentialsSecretRef) && has(self.serviceAccountName))",
            "write credentialsSecretRef or serviceAccountName, not both",
        ),
        cel(
            "self.addressingStyle != 'Virtual' || !self.bucket.contains('.') || "
            "(has(self.endpointURL) && self.endpointURL.startsWith('http://'))",
            "write addressingStyle: Path, because the name of a bucket with a dot matches no "
            "certificate when it is part of the host",
        ),
        cel(
            "!has(self.caBundleConfigMapRef) || !has(self.endpointURL) || "
            "self.endpointURL.startsWith('https://')",
            "write an endpointURL that starts with https://, or leave out caBundleConfigMapRef",
        ),
    ],
}
"""By model, wherever it is used; `self` is the object of the model."""


def _short_reference(kind: str) -> Rules:
    return [
        cel(
            f"size(self.name) <= {SHORT_NAME_MAX}",
            f"name: write at most {SHORT_NAME_MAX} characters, as the name of the {kind} has",
        ),
        cel(
            "!self.name.contains('.')",
            f"name: write a name without a dot, as the name of the {kind} has",
        ),
        cel(
            "self == oldSelf",
            f"immutable: create another ExpertMap for another {kind}",
        ),
    ]


FIELD_RULES: dict[tuple[str, str], Rules] = {
    ("ExpertLaneSpec", "workloadRef"): [
        cel("self == oldSelf", "immutable: create another ExpertLane for another workload")
    ],
    ("ExpertLaneSpec", "activeTrafficClass"): [
        cel(
            "!self.contains('.')",
            "write a name without a dot, as the name of the TrafficClass has",
        )
    ],
    ("ResidencySpec", "hotBytes"): [
        cel("self.matches('[1-9]')", "write more than 0 bytes, such as 180Gi")
    ],
    ("RollbackSpec", "holdDuration"): [
        cel("self.matches('[1-9]')", "write more than 0, such as 1h")
    ],
    ("ExpertMapSpec", "laneRef"): _short_reference("ExpertLane"),
    ("ExpertMapSpec", "trafficClassRef"): _short_reference("TrafficClass"),
    ("AcceptanceSpec", "maxColdSharePercent"): [
        cel(
            f"!self.matches(r'{DECIMAL_PATTERN}') || double(self) <= 100.0",
            'write at most "100"',
        )
    ],
    ("ExpertMapSpec", "schedule"): [
        cel(
            "!self.contains('TZ')",
            "write the time zone in spec.timeZone, not in the schedule",
        ),
        cel(
            r"self.contains('TZ') || self.matches(r'^(@(yearly|annually|monthly|weekly|daily|"
            r"midnight|hourly)|[^ ]+( +[^ ]+){4})$')",
            "write five fields (minute, hour, day of month, month, day of week) such as "
            "'0 3 * * 1', or @daily",
        ),
    ],
    ("TrafficClassSpec", "window"): [
        cel("self.matches('[1-9]')", "write more than 0, such as 168h")
    ],
}
"""By model and field; `self` is the value of the field."""


def _pattern(model: type, field: str) -> str:
    for meta in model.model_fields[field].metadata:  # type: ignore[attr-defined]
        pattern = getattr(meta, "pattern", None)
        if pattern is not None:
            return str(pattern)
    raise LookupError(f"{model.__name__}.{field} has no pattern")


PATTERN_MESSAGES: dict[str, str] = {
    NAME_PATTERN: "write a name: lower-case letters, digits, '-' and '.', with a letter or digit "
    "at both ends",
    DURATION_PATTERN: "write a duration in hours, minutes and seconds, such as 168h or 1h30m",
    QUANTITY_PATTERN: "write whole bytes with an optional suffix, such as 180Gi",
    DECIMAL_PATTERN: 'write a number of at most six digits before and after the dot, such as "0.5"',
    _pattern(S3Location, "bucket"): "write the bucket's name: lower-case letters, digits, '-' and "
    "'.', with a letter or digit at both ends",
    _pattern(S3Location, "prefix"): "write a prefix that does not start with / and ends with /, "
    "such as prod/",
    _pattern(S3Location, "endpoint_url"): "write an address such as https://host:9000, without "
    "query",
}
"""Patterns of specs become CEL rules, because a refusal should not show a regular expression."""
