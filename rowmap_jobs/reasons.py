"""Why a run ended: the reasons of verdicts, and which of them another try may cure."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The reason of a Verdict."""

    # A run that did its work.
    ACCEPTED = "Accepted"
    PROBED = "Probed"
    FETCHED = "Fetched"
    # A run that did its work and rejects the map.
    TOO_FEW_DECODE_TOKENS = "TooFewDecodeTokens"
    COLD_SHARE_TOO_HIGH = "ColdShareTooHigh"
    NO_SKEW = "NoSkew"
    NOT_BETTER_THAN_CURRENT = "NotBetterThanCurrent"
    # The store and the transcripts' bucket.
    BUCKET_NOT_FOUND = "BucketNotFound"
    ACCESS_DENIED = "AccessDenied"
    INVALID_CREDENTIALS = "InvalidCredentials"
    CREDENTIALS_MISSING = "CredentialsMissing"
    ENDPOINT_UNREACHABLE = "EndpointUnreachable"
    WRONG_REGION = "WrongRegion"
    STORE_ERROR = "StoreError"
    OBJECT_NOT_FOUND = "ObjectNotFound"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    # The transcripts.
    NO_TRANSCRIPTS = "NoTranscripts"
    TOO_FEW_TRANSCRIPTS = "TooFewTranscripts"
    ONLY_BROKEN_TRANSCRIPTS = "OnlyBrokenTranscripts"
    # The engine.
    ENGINE_NOT_READY = "EngineNotReady"
    ENGINE_FAILED = "EngineFailed"
    ENGINE_UNAUTHORIZED = "EngineUnauthorized"
    HOOK_NOT_LOADED = "HookNotLoaded"
    HOOK_FAILED = "HookFailed"
    NO_EXPERTS = "NoExperts"
    COUNTING_FAILED = "CountingFailed"
    # The map.
    TOO_MANY_HOT_ROWS = "TooManyHotRows"
    GEOMETRY_MISMATCH = "GeometryMismatch"
    CONFIG_MAP_FORBIDDEN = "ConfigMapForbidden"
    CONFIG_MAP_FAILED = "ConfigMapFailed"
    # The run itself.
    INVALID_RUN_SPEC = "InvalidRunSpec"
    INTERRUPTED = "Interrupted"
    INTERNAL_ERROR = "InternalError"


RETRYABLE = frozenset(
    {
        Reason.ENDPOINT_UNREACHABLE,
        Reason.STORE_ERROR,
        Reason.ENGINE_NOT_READY,
        Reason.ENGINE_FAILED,
        Reason.CONFIG_MAP_FAILED,
        Reason.INTERRUPTED,
        Reason.INTERNAL_ERROR,
    }
)
"""Reasons that another try may cure (exit code 1); a failure for any other one is final."""


class RunError(Exception):
    """A run cannot go on: a reason and one line that says what was found and what to do."""

    def __init__(self, reason: Reason, message: str) -> None:
        self.reason = reason
        self.message = one_line(message)
        super().__init__(f"{reason}: {self.message}")

    @property
    def final(self) -> bool:
        """True when another try would not change the outcome."""
        return self.reason not in RETRYABLE


def one_line(text: str, limit: int = 1000) -> str:
    """`text` in one line of at most `limit` characters."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
