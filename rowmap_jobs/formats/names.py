"""Names that several parts must spell alike: labels, annotations, EXPERTMAPS_* and object names."""

from __future__ import annotations

import re

GROUP = "expertmaps.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

# Labels (values carry at most 63 characters, so digests appear as 16 hex digits).
LABEL_LANE = f"{GROUP}/lane"
LABEL_MAP = f"{GROUP}/map"
LABEL_CLASS = f"{GROUP}/traffic-class"
LABEL_DIGEST = f"{GROUP}/digest"
LABEL_ROLE = f"{GROUP}/role"

ROLE_PROFILE = "profile"
ROLE_FETCH = "fetch"
ROLE_MAP = "map"
ROLE_HOOK = "hook"

# Annotations.
ANNOTATION_MAP_DIGEST = f"{GROUP}/map-digest"
ANNOTATION_HOOK_DIGEST = f"{GROUP}/hook-digest"
ANNOTATION_ROW_SET_DIGEST = f"{GROUP}/row-set-digest"
ANNOTATION_CLASS = f"{GROUP}/traffic-class"
ANNOTATION_DELETION_POLICY = f"{GROUP}/deletion-policy"
ANNOTATION_RUN_SPEC_HASH = f"{GROUP}/run-spec-hash"

# Environment of the hook. Everything here is constant after a lane is adopted.
ENV_MODE = "EXPERTMAPS_MODE"
ENV_MAP = "EXPERTMAPS_MAP"
ENV_DIR = "EXPERTMAPS_DIR"
ENV_COLD_DIR = "EXPERTMAPS_COLD_DIR"
ENV_TIER = "EXPERTMAPS_TIER"
ENV_STATUS_PORT = "EXPERTMAPS_STATUS_PORT"
ENV_RUN = "EXPERTMAPS_RUN"
"""JSON of the RunSpec; read by the runner only."""
ENV_API_KEY = "EXPERTMAPS_API_KEY"
"""The model server's API key, where it has one; read by the runner only."""
ENV_TERMINATION_LOG = "EXPERTMAPS_TERMINATION_LOG"
ENV_S3_DIR = "EXPERTMAPS_S3_DIR"
ENV_CAPTURE_SLOTS = "EXPERTMAPS_CAPTURE_SLOTS"
ENV_DEVICE_GUARD = "EXPERTMAPS_DEVICE_GUARD_BYTES"
ENV_HOST_GUARD = "EXPERTMAPS_HOST_GUARD_BYTES"

MODE_OFF = "off"
MODE_SERVE = "serve"
MODE_COUNT = "count"
TIER_OVERLAY = "overlay"
TIER_MLOCK = "mlock"

# Places inside a pod.
HOOK_MOUNT = "/opt/expertmaps/hook"
MAP_MOUNT = "/etc/expertmaps"
MAP_FILE = "rowmap.json"
MAP_PATH = f"{MAP_MOUNT}/{MAP_FILE}"
RUN_DIR = "/var/run/expertmaps"
STATUS_FILE = "status.json"
COUNTS_DIR = "transcripts"
"""Folder below EXPERTMAPS_DIR where the hook writes `<transcript id>.npz` in count mode."""
DEFAULT_STATUS_PORT = 9477
TERMINATION_LOG = "/dev/termination-log"
S3_MOUNT = "/etc/expertmaps/s3"
"""Below it: `transcripts/` and `store/` (the Secrets) and `<name>-ca/ca.crt` (the ConfigMaps)."""

# Request fields of a forced count (vLLM: `vllm_xargs` of /v1/completions).
XARG_TRANSCRIPT = "expertmaps_t"
XARG_SEGMENTS = "expertmaps_seg"
"""Flat list [start, end, start, end, ...] of absolute positions, ends exclusive, ascending."""

# Volumes added to a lane's pod template.
VOLUME_HOOK = "expertmaps-hook"
VOLUME_MAP = "expertmaps-map"
VOLUME_RUN = "expertmaps-run"

FIELD_MANAGER = "expertmaps-operator"
"""Field manager of status and children; on a workload it is `expertmaps.<lane>`."""

_HEX16 = re.compile(r"^sha256:([0-9a-f]{16})[0-9a-f]{48}$")


def hex16(digest: str) -> str:
    """First 16 hex digits of a full digest, for labels and object names. Raises ValueError."""
    match = _HEX16.match(digest)
    if match is None:
        raise ValueError(f"digest: found {digest[:80]!r}, expected sha256:<64 hex digits>")
    return match.group(1)


def workload_manager(lane: str) -> str:
    """Field manager under which a lane's fields on the workload are applied."""
    return f"expertmaps.{lane}"


def map_configmap(lane: str, digest: str) -> str:
    """Name of the ConfigMap that holds a row map for a lane (at most 46 characters)."""
    return f"{lane}-map-{hex16(digest)}"


def hook_configmap(lane: str, digest: str) -> str:
    """Name of the ConfigMap that holds the hook files for a lane (at most 47 characters)."""
    return f"{lane}-hook-{hex16(digest)}"


def fetch_job(lane: str, digest: str) -> str:
    """Name of the Job that makes a missing map ConfigMap again from the store."""
    return f"{lane}-fetch-{hex16(digest)}"


def profile_job(map_name: str, unix_minute: int) -> str:
    """Name of one profile run: `<lane>.<class>-<unix minute>` (at most 60 characters)."""
    return f"{map_name}-{unix_minute}"


def _hex(digest: str) -> str:
    hex16(digest)
    return digest.removeprefix("sha256:")


def map_key(prefix: str, digest: str) -> str:
    """Object key of a row map below the store's prefix (content-addressed)."""
    return f"{prefix}maps/sha256/{_hex(digest)}/rowmap.json"


def census_key(prefix: str, digest: str) -> str:
    """Object key of a census."""
    return f"{prefix}census/sha256/{_hex(digest)}/census.npz"


def report_key(prefix: str, lane: str, traffic_class: str, run: str, ext: str) -> str:
    """Object key of a run's report (`ext` is json or html)."""
    return f"{prefix}reports/{lane}/{traffic_class}/{run}/report.{ext}"


def probe_key(prefix: str, run: str) -> str:
    """Object key that a run writes to prove write access before an engine boots."""
    return f"{prefix}probes/{run}"
