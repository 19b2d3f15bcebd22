"""S3: boto3 clients of an S3Location and the errors they raise, as reasons."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import boto3
import botocore.config
import botocore.exceptions

from ..formats.s3 import CREDENTIAL_KEYS, S3Location
from ..reasons import Reason, RunError, one_line

CONNECT_SECONDS = 10
READ_SECONDS = 60
ATTEMPTS = 4
CHUNK_BYTES = 1 << 20

T = TypeVar("T")

_CODES = {
    "NoSuchBucket": Reason.BUCKET_NOT_FOUND,
    "NoSuchKey": Reason.OBJECT_NOT_FOUND,
    "NotFound": Reason.OBJECT_NOT_FOUND,
    "404": Reason.OBJECT_NOT_FOUND,
    "AccessDenied": Reason.ACCESS_DENIED,
    "AllAccessDisabled": Reason.ACCESS_DENIED,
    "AccountProblem": Reason.ACCESS_DENIED,
    "403": Reason.ACCESS_DENIED,
    "InvalidAccessKeyId": Reason.INVALID_CREDENTIALS,
    "SignatureDoesNotMatch": Reason.INVALID_CREDENTIALS,
    "ExpiredToken": Reason.INVALID_CREDENTIALS,
    "InvalidToken": Reason.INVALID_CREDENTIALS,
    "PermanentRedirect": Reason.WRONG_REGION,
    "AuthorizationHeaderMalformed": Reason.WRONG_REGION,
    "301": Reason.WRONG_REGION,
}
_ADVICE = {
    Reason.BUCKET_NOT_FOUND: "create the bucket or correct `bucket` and `endpointURL`",
    Reason.ACCESS_DENIED: "allow this identity to list, read and write below the prefix",
    Reason.INVALID_CREDENTIALS: "correct the keys in the Secret that credentialsSecretRef names",
    Reason.WRONG_REGION: "set `region` to the region of the bucket",
    Reason.ENDPOINT_UNREACHABLE: "check `endpointURL`, network policies and caBundleConfigMapRef",
    Reason.CREDENTIALS_MISSING: "set credentialsSecretRef or serviceAccountName",
    Reason.STORE_ERROR: "see the server's own log",
    Reason.OBJECT_NOT_FOUND: "the object was deleted or the prefix changed",
}


@dataclass(frozen=True)
class ObjectInfo:
    """One listed object: key, bytes, when it was written last."""

    key: str
    size: int
    modified: datetime


class PreconditionFailedError(Exception):
    """`If-None-Match: *` and the object exists."""


class ConditionUnsupportedError(Exception):
    """The server does not implement `If-None-Match`."""


class Bucket:
    """The objects of one S3Location; every method raises RunError with a reason of the store."""

    def __init__(self, client: Any, location: S3Location) -> None:
        self._client = client
        self.location = location

    def url(self, key: str) -> str:
        """How messages name an object."""
        return f"s3://{self.location.bucket}/{key}"

    def check_bucket(self) -> None:
        """Refuse a bucket that is not there; a server that forbids the question is not refused."""
        bucket = self.location.bucket
        try:
            self._client.head_bucket(Bucket=bucket)
        except botocore.exceptions.ClientError as error:
            if _status(error) == 404:
                _refuse(Reason.BUCKET_NOT_FOUND, f"s3://{bucket}", "no such bucket")
            if _status(error) not in (400, 403):
                _raise(error, f"s3://{bucket}")
        except botocore.exceptions.BotoCoreError as error:
            _raise(error, f"s3://{bucket}")

    def list(self) -> Iterator[ObjectInfo]:
        """All objects below the prefix, in the server's order."""
        place = self.url(self.location.prefix)
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.location.bucket, Prefix=self.location.prefix
        )
        iterator = iter(pages)
        while (page := _call(lambda: next(iterator, None), place)) is not None:
            for item in page.get("Contents", ()):
                yield ObjectInfo(item["Key"], int(item["Size"]), item["LastModified"])

    def get(self, key: str, limit: int) -> bytes:
        """The object's bytes; more than `limit` of them are refused unread."""
        place = self.url(key)
        out = bytearray()
        for chunk in self.stream(key):
            out += chunk
            if len(out) > limit:
                raise RunError(
                    Reason.CHECKSUM_MISMATCH,
                    f"{place}: size: found more than {limit} bytes, expected at most {limit}",
                )
        return bytes(out)

    def stream(self, key: str) -> Iterator[bytes]:
        """The object's bytes in chunks of at most 1 MiB."""
        place = self.url(key)
        got = _call(lambda: self._client.get_object(Bucket=self.location.bucket, Key=key), place)
        with closing(got["Body"]) as body:
            while chunk := _call(lambda: body.read(CHUNK_BYTES), place):
                yield chunk

    def put(self, key: str, data: bytes, content_type: str, only_new: bool = False) -> None:
        """Write an object.

        With `only_new` an existing one raises PreconditionFailedError, and a server without
        conditional writes ConditionUnsupportedError.
        """
        condition = {"IfNoneMatch": "*"} if only_new else {}
        try:
            self._client.put_object(
                Bucket=self.location.bucket,
                Key=key,
                Body=data,
                ContentType=content_type,
                **condition,
            )
        except botocore.exceptions.ClientError as error:
            if only_new and _status(error) in (409, 412):
                raise PreconditionFailedError from None
            if only_new and (_status(error) == 501 or _code(error) == "NotImplemented"):
                raise ConditionUnsupportedError from None
            _raise(error, self.url(key))
        except botocore.exceptions.BotoCoreError as error:
            _raise(error, self.url(key))

    def delete(self, key: str) -> None:
        """Remove an object."""
        _call(
            lambda: self._client.delete_object(Bucket=self.location.bucket, Key=key),
            self.url(key),
        )


def open_bucket(location: S3Location, base: Path, name: str) -> Bucket:
    """A Bucket with the identity mounted for `name` ("store" or "transcripts") below `base`.

    `<base>/<name>/` holds the Secret's keys as files, `<base>/<name>-ca/ca.crt` the certificates.
    Without a mounted Secret the identity is boto3's own chain (a ServiceAccount's, or the
    environment's), unless the location names a Secret: then CredentialsMissing.
    """
    keys = _credentials(location, base / name, name)
    bundle = base / f"{name}-ca" / "ca.crt"
    if location.ca_bundle_config_map_ref is not None and not bundle.is_file():
        raise RunError(
            Reason.CREDENTIALS_MISSING,
            f"{bundle}: found no file, expected certificates (PEM): give ConfigMap "
            f"{location.ca_bundle_config_map_ref.name} the key ca.crt",
        )
    mode = "when_required" if location.checksum_mode == "WhenRequired" else "when_supported"
    config = botocore.config.Config(
        connect_timeout=CONNECT_SECONDS,
        read_timeout=READ_SECONDS,
        retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
        s3={"addressing_style": _addressing(location)},
        request_checksum_calculation=mode,
        response_checksum_validation=mode,
    )
    try:
        client = _session().client(
            "s3",
            region_name=location.region,
            endpoint_url=location.endpoint_url,
            verify=str(bundle) if bundle.is_file() else None,
            config=config,
            **keys,
        )
    except (ValueError, botocore.exceptions.BotoCoreError) as error:
        raise RunError(
            Reason.STORE_ERROR,
            f"{name}: endpointURL {location.endpoint_url}, region {location.region}: found "
            f"{type(error).__name__}, expected an address and a region that S3 clients accept",
        ) from None
    return Bucket(client, location)


@functools.cache
def _session() -> Any:
    """One session a process: it keeps the service's description, which takes long to load."""
    return boto3.session.Session()


def _addressing(location: S3Location) -> str:
    if location.addressing_style == "Auto":
        return "path" if location.endpoint_url else "auto"
    return location.addressing_style.lower()


def _credentials(location: S3Location, folder: Path, name: str) -> dict[str, str]:
    arguments = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
    out = {}
    for argument, key in zip(arguments, CREDENTIAL_KEYS, strict=True):
        path = folder / key
        if path.is_file():
            out[argument] = _key(path, f"{name}: key {key} of the Secret")
    secret = location.credentials_secret_ref
    needed = (out.get("aws_access_key_id"), out.get("aws_secret_access_key"))
    if all(needed):
        return {key: value for key, value in out.items() if value}
    if secret is None and not any(needed):
        return {}
    of = f"Secret {secret.name}" if secret is not None else f"the Secret mounted at {folder}"
    missing = [k for k, v in zip(CREDENTIAL_KEYS, needed, strict=False) if not v]
    raise RunError(
        Reason.CREDENTIALS_MISSING,
        f"{name}: {of}: found no {' and no '.join(missing)}, "
        "expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    )


def _key(path: Path, place: str) -> str:
    """One key of a Secret; a header cannot carry spaces, line ends or other bytes than ASCII."""
    try:
        value = path.read_bytes().decode("ascii").strip()
    except UnicodeDecodeError:
        value = " "
    if any(character <= " " or character == "\x7f" for character in value):
        raise RunError(
            Reason.INVALID_CREDENTIALS,
            f"{place}: found bytes that no key has (a line end, a space, not ASCII), expected one "
            "word; write the Secret again",
        )
    return value


def _call(do: Callable[[], T], place: str) -> T:
    try:
        return do()
    except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
        _raise(error, place)


def _status(error: botocore.exceptions.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _code(error: botocore.exceptions.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def reason_of(error: Exception) -> Reason:
    """The reason for an error of botocore."""
    if isinstance(error, botocore.exceptions.ClientError):
        by_code = _CODES.get(_code(error))
        if by_code is not None:
            return by_code
        by_status = {401: Reason.INVALID_CREDENTIALS, 403: Reason.ACCESS_DENIED}
        return by_status.get(_status(error), Reason.STORE_ERROR)
    missing = (
        botocore.exceptions.NoCredentialsError,
        botocore.exceptions.PartialCredentialsError,
        botocore.exceptions.CredentialRetrievalError,
        botocore.exceptions.TokenRetrievalError,
    )
    if isinstance(error, missing):
        return Reason.CREDENTIALS_MISSING
    # ConnectionError: no route or name; HTTPClientError: timeouts, TLS, a connection cut.
    unreachable = (
        botocore.exceptions.ConnectionError,
        botocore.exceptions.HTTPClientError,
        botocore.exceptions.IncompleteReadError,
    )
    if isinstance(error, unreachable):
        return Reason.ENDPOINT_UNREACHABLE
    return Reason.STORE_ERROR


def _raise(error: Exception, place: str) -> NoReturn:
    if isinstance(error, botocore.exceptions.ClientError):
        text = str(error.response.get("Error", {}).get("Message", "")) or f"HTTP {_status(error)}"
        found = f"{_code(error)} ({text})"
    elif type(error) is botocore.exceptions.HTTPClientError:
        # Its text repeats what was sent, headers included.
        found = type(error).__name__
    else:
        found = str(error)
    _refuse(reason_of(error), place, found)


def _refuse(reason: Reason, place: str, found: str) -> NoReturn:
    raise RunError(reason, f"{place}: found {one_line(found, 400)}: {_ADVICE[reason]}") from None
