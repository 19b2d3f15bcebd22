"""Every condition type, condition reason and event reason, in one place."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Types of conditions, by kind: see each kind's module."""

    READY = "Ready"
    PROFILING = "Profiling"
    ACCEPTED = "Accepted"
    STORE_READY = "StoreReady"
    FRESH = "Fresh"
    PROGRESSING = "Progressing"
    VERIFIED = "Verified"
    HASH_HIT = "HashHit"
    ROLLED_BACK = "RolledBack"
    PAUSED = "Paused"


class Reason(StrEnum):
    """Reasons of conditions and events. A runner's own reasons (verdicts) are passed through."""

    # Any kind.
    INVALID_SPEC = "InvalidSpec"

    # ExpertMap.
    LANE_NOT_FOUND = "LaneNotFound"
    TRAFFIC_CLASS_NOT_FOUND = "TrafficClassNotFound"
    WORKLOAD_NOT_FOUND = "WorkloadNotFound"
    CONTAINER_NOT_FOUND = "ContainerNotFound"
    VOLUME_NOT_SHAREABLE = "VolumeNotShareable"
    MAP_ACCEPTED = "MapAccepted"
    NO_MAP_YET = "NoMapYet"
    PROFILE_RUNNING = "ProfileRunning"
    PROFILE_SUCCEEDED = "ProfileSucceeded"
    PROFILE_FAILED = "ProfileFailed"
    PROFILE_DEADLINE_EXCEEDED = "ProfileDeadlineExceeded"
    WAITING_FOR_ACCELERATOR = "WaitingForAccelerator"
    WAITING_FOR_LANE = "WaitingForLane"
    WAITING_FOR_SLOT = "WaitingForSlot"
    WRITE_VERIFIED = "WriteVerified"
    NOT_PROBED = "NotProbed"
    MEASURED_RECENTLY = "MeasuredRecently"
    TWO_PERIODS_OLD = "TwoPeriodsOld"
    NEVER_MEASURED = "NeverMeasured"
    ENGINE_POD_FAILED = "EnginePodFailed"
    ENGINE_OUT_OF_MEMORY = "EngineOutOfMemory"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    NO_VERDICT = "NoVerdict"

    # ExpertLane: why nothing is touched.
    NO_TRAFFIC_CLASS = "NoTrafficClass"
    NO_ACCEPTED_MAP = "NoAcceptedMap"
    DIGEST_HELD = "DigestHeld"
    UNSAFE_STRATEGY = "UnsafeStrategy"
    ENV_CONFLICT = "EnvConflict"
    FIELD_CONFLICT = "FieldConflict"
    WORKLOAD_CLAIMED = "WorkloadClaimed"
    WORKLOAD_HAS_CONTROLLER = "WorkloadHasController"
    LANE_NOT_HEALTHY = "LaneNotHealthy"
    NO_SLOT = "NoSlot"
    SCALED_TO_ZERO = "ScaledToZero"
    PAUSED = "Paused"
    MAP_UNAVAILABLE = "MapUnavailable"
    GEOMETRY_MISMATCH = "GeometryMismatch"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    FINGERPRINT_MISMATCH = "FingerprintMismatch"
    FETCHING_MAP = "FetchingMap"

    # ExpertLane: a rollout and its result.
    ROLLOUT_STARTED = "RolloutStarted"
    CANARY = "Canary"
    ROLLING = "Rolling"
    ROLLOUT_COMPLETE = "RolloutComplete"
    ROLLOUT_STOPPED = "RolloutStopped"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    ROLLBACK_FAILED = "RollbackFailed"
    NOT_ROLLED_BACK = "NotRolledBack"
    USER_CHANGE = "UserChange"
    SUPERSEDED = "Superseded"
    TEMPLATE_REVERTED = "TemplateReverted"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    POD_FAILED = "PodFailed"
    POD_UNSCHEDULABLE = "PodUnschedulable"
    HOOK_FAILED = "HookFailed"
    HOOK_NOT_LOADED = "HookNotLoaded"
    MAP_DIGEST_MISMATCH = "MapDigestMismatch"
    STATUS_UNREACHABLE = "StatusUnreachable"
    STATUS_INVALID = "StatusInvalid"
    PODS_NOT_READY = "PodsNotReady"
    LANE_SERVING = "LaneServing"
    SERVING_UNHOOKED = "ServingUnhooked"
    IDLE = "Idle"
    ALL_PODS_REPORT_DIGEST = "AllPodsReportDigest"
    COMPILE_CACHE_HIT = "CompileCacheHit"
    COMPILE_CACHE_MISS = "CompileCacheMiss"
    NO_COMPILE_EVIDENCE = "NoCompileEvidence"
    NOT_PAUSED = "NotPaused"

    # TrafficClass.
    TRANSCRIPTS_FOUND = "TranscriptsFound"
    NOT_PROFILED = "NotProfiled"

    # Events.
    PROFILE_STARTED = "ProfileStarted"
    MAP_REJECTED = "MapRejected"
    TRAFFIC_CLASS_SWITCHED = "TrafficClassSwitched"
    TEMPLATE_RESTORED = "TemplateRestored"


class RolloutState(StrEnum):
    """States of status.rollout of a lane."""

    CANARY = "Canary"
    ROLLING = "Rolling"
    VERIFIED = "Verified"
    STOPPED = "Stopped"
    ROLLING_BACK = "RollingBack"
    ROLLED_BACK = "RolledBack"
    ROLLBACK_FAILED = "RollbackFailed"
    SUPERSEDED = "Superseded"
