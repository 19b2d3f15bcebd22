"""The store: content-addressed artifacts whose sha256 is checked at every write and read."""

from __future__ import annotations

from .edges.s3 import Bucket, ConditionUnsupportedError, PreconditionFailedError
from .formats import census, names, rowmap
from .formats.base import FormatError, sha256_digest
from .formats.rowmap import RowMap
from .log import say
from .reasons import Reason, RunError

MAX_CENSUS_BYTES = census.MAX_UNPACKED
PROBE_BODY = b"expertmaps: a runner may write and read here\n"


def put_map(bucket: Bucket, built: RowMap) -> str:
    """Store a row map; returns its digest."""
    return _put(bucket, names.map_key(bucket.location.prefix, built.digest), built.to_bytes())


def put_census(bucket: Bucket, raw: bytes) -> str:
    """Store the bytes of a census; returns their digest."""
    return _put(bucket, names.census_key(bucket.location.prefix, sha256_digest(raw)), raw)


def put_report(bucket: Bucket, key: str, raw: bytes, content_type: str) -> None:
    """Store a report under the run's name and read it back; a second try of the run replaces it."""
    bucket.put(key, raw, content_type)
    _verify(bucket, key, sha256_digest(raw), len(raw))


def get_map(bucket: Bucket, digest: str) -> RowMap:
    """Read a row map by digest and validate it whole.

    Raises RunError: ObjectNotFound, ChecksumMismatch (bytes of another digest, or not a map).
    """
    key = names.map_key(bucket.location.prefix, digest)
    raw = bucket.get(key, rowmap.MAX_MAP_BYTES)
    try:
        return rowmap.parse(raw, bucket.url(key), digest)
    except FormatError as error:
        raise RunError(Reason.CHECKSUM_MISMATCH, f"{error}: the object was changed") from None


def probe(bucket: Bucket, run: str) -> None:
    """Prove that this identity can write and read below the prefix, before an engine boots.

    A server that ignores or lacks `If-None-Match` is only spoken of: contents are addressed by
    sha256 and read back, so a lost condition cannot harm. Raises RunError.
    """
    bucket.check_bucket()
    key = names.probe_key(bucket.location.prefix, run)
    bucket.put(key, PROBE_BODY, "text/plain")
    _verify(bucket, key, sha256_digest(PROBE_BODY), len(PROBE_BODY))
    try:
        bucket.put(key, PROBE_BODY, "text/plain", only_new=True)
        say(f"{bucket.url(key)}: the server ignores If-None-Match")
    except PreconditionFailedError:
        say(f"{bucket.url(key)}: write, read and If-None-Match work")
    except ConditionUnsupportedError:
        say(f"{bucket.url(key)}: the server does not implement If-None-Match")
    try:
        bucket.delete(key)
    except RunError as error:
        say(f"{bucket.url(key)}: left in place ({error.reason})")


def _put(bucket: Bucket, key: str, raw: bytes) -> str:
    """Write once (`If-None-Match: *`), then read back, whoever wrote it."""
    digest = sha256_digest(raw)
    content_type = "application/json" if key.endswith(".json") else "application/octet-stream"
    try:
        bucket.put(key, raw, content_type, only_new=True)
    except PreconditionFailedError:
        say(f"{bucket.url(key)}: is there already")
    except ConditionUnsupportedError:
        bucket.put(key, raw, content_type)
    _verify(bucket, key, digest, len(raw))
    return digest


def _verify(bucket: Bucket, key: str, digest: str, size: int) -> None:
    actual = sha256_digest(bucket.get(key, max(size, 1) * 2 + 4096))
    if actual != digest:
        raise RunError(
            Reason.CHECKSUM_MISMATCH,
            f"{bucket.url(key)}: sha256: found {actual}, expected {digest}: "
            "delete the object and run again",
        )
