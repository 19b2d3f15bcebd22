"""The S3 edge and the store, against a real server."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from rowmap_jobs import store
from rowmap_jobs.edges import s3 as edge
from rowmap_jobs.edges.s3 import Bucket, ConditionUnsupportedError, PreconditionFailedError
from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import sha256_digest
from rowmap_jobs.formats.s3 import S3Location
from rowmap_jobs.reasons import RunError
from tests.formats.samples import row_map
from tests.jobs.world import World


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No retries and no waiting for addresses where nothing listens."""
    monkeypatch.setattr(edge, "ATTEMPTS", 1)
    monkeypatch.setattr(edge, "CONNECT_SECONDS", 2)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")


def location(world: World, **over: Any) -> S3Location:
    return S3Location.from_wire(world.location("store/", **over), "store")


def opened(world: World, **over: Any) -> Bucket:
    return edge.open_bucket(location(world, **over), world.folder / "creds", "store")


def refused(do: Any) -> RunError:
    with pytest.raises(RunError) as caught:
        do()
    assert "\n" not in caught.value.message
    return caught.value


def test_list_get_put_delete(world: World) -> None:
    bucket = opened(world)
    body = bytes(range(256)) * 9000
    bucket.put(f"{world.store}a", body, "application/octet-stream")
    assert bucket.get(f"{world.store}a", len(body)) == body
    assert [(item.key, item.size) for item in bucket.list()] == [(f"{world.store}a", len(body))]
    assert max(len(chunk) for chunk in bucket.stream(f"{world.store}a")) <= 1 << 20
    with pytest.raises(PreconditionFailedError):
        bucket.put(f"{world.store}a", b"other", "text/plain", only_new=True)
    bucket.delete(f"{world.store}a")
    assert list(bucket.list()) == []


def test_more_than_a_thousand_objects_are_listed(world: World, monkeypatch: Any) -> None:
    bucket = opened(world)
    for number in range(5):
        bucket.put(f"{world.store}{number}", b"", "text/plain")
    paginator = bucket._client.get_paginator("list_objects_v2")
    pages = paginator.paginate(
        Bucket=world.bucket, Prefix=world.store, PaginationConfig={"PageSize": 2}
    )
    monkeypatch.setattr(type(paginator), "paginate", lambda *_a, **_k: pages)
    assert len(list(bucket.list())) == 5


def test_an_object_over_its_limit_is_refused(world: World) -> None:
    bucket = opened(world)
    bucket.put(f"{world.store}a", b"x" * 100, "text/plain")
    error = refused(lambda: bucket.get(f"{world.store}a", 99))
    assert error.reason == "ChecksumMismatch" and "found more than 99 bytes" in error.message


@pytest.mark.parametrize(
    ("over", "reason", "final"),
    [
        ({"bucket": "no-such-bucket"}, "BucketNotFound", True),
        ({"endpointURL": "http://127.0.0.1:{port}"}, "EndpointUnreachable", False),
        ({"endpointURL": "http://no-such-host.invalid"}, "EndpointUnreachable", False),
    ],
)
def test_places_that_are_not_there(
    world: World, over: dict[str, Any], reason: str, final: bool
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody else gets it, and nobody listens
        port = taken.getsockname()[1]
        place = {key: value.format(port=port) for key, value in over.items()}
        error = refused(opened(world, **place).check_bucket)
    assert (error.reason, error.final) == (reason, final)
    assert "s3://" in error.message


def test_identities_that_may_not(world: World) -> None:
    world.credentials("store", "ro")
    error = refused(lambda: store.probe(opened(world), "run"))
    assert (error.reason, error.final) == ("AccessDenied", True)
    folder = world.folder / "creds" / "store"
    (folder / "AWS_SECRET_ACCESS_KEY").write_text("wrong")
    error = refused(lambda: store.probe(opened(world), "run"))
    assert (error.reason, error.final) == ("InvalidCredentials", True)
    (folder / "AWS_ACCESS_KEY_ID").write_text("NOBODY")
    error = refused(lambda: store.probe(opened(world), "run"))
    assert error.reason == "InvalidCredentials" and "wrong" not in error.message


def test_a_named_secret_that_is_not_mounted(world: World) -> None:
    shutil.rmtree(world.folder / "creds" / "store")
    error = refused(lambda: opened(world))
    assert error.reason == "CredentialsMissing" and error.final
    assert "Secret s3: found no AWS_ACCESS_KEY_ID and no AWS_SECRET_ACCESS_KEY" in error.message


@pytest.mark.parametrize("key", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"])
@pytest.mark.parametrize("value", [b"part1\npart2", b"part1 part2", b"part1\xff", "pärt1".encode()])
def test_a_key_that_no_header_carries_is_refused_and_never_shown(
    world: World, key: str, value: bytes
) -> None:
    (world.folder / "creds" / "store" / key).write_bytes(value)
    error = refused(lambda: opened(world))
    assert (error.reason, error.final) == ("InvalidCredentials", True)
    assert key in error.message and "part" not in error.message


def test_the_text_of_a_failed_request_is_not_repeated(world: World) -> None:
    cause = botocore.exceptions.HTTPClientError(error="Invalid header value b'TOKEN'")
    error = refused(lambda: edge._raise(cause, "s3://b/"))
    assert error.reason == "EndpointUnreachable" and "TOKEN" not in error.message


@pytest.mark.parametrize("over", [{"region": "bad region/"}, {"endpointURL": "http://[1"}])
def test_an_address_that_no_client_takes_is_named(world: World, over: dict[str, str]) -> None:
    error = refused(lambda: opened(world, **over))
    assert error.reason == "StoreError" and next(iter(over.values())) in error.message


def test_half_a_secret_is_refused_by_the_missing_key(world: World) -> None:
    (world.folder / "creds" / "store" / "AWS_SECRET_ACCESS_KEY").unlink()
    for over in ({}, {"credentialsSecretRef": None}):
        error = refused(lambda over=over: opened(world, **over))
        assert error.reason == "CredentialsMissing"
        assert "found no AWS_SECRET_ACCESS_KEY," in error.message


def test_without_a_secret_the_default_chain_is_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(world.folder / "creds" / "store")
    none = {"credentialsSecretRef": None}
    error = refused(lambda: store.probe(opened(world, **none), "run"))
    assert error.reason == "CredentialsMissing"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKRW")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-rw")
    store.probe(opened(world, **none), "run")
    # The session keeps the identity that it found.
    edge._session.cache_clear()


def test_a_named_bundle_that_is_not_mounted(world: World) -> None:
    error = refused(lambda: opened(world, caBundleConfigMapRef={"name": "ca"}))
    assert error.reason == "CredentialsMissing" and "give ConfigMap ca the key ca.crt" in str(error)


def settings_of(world: World, **over: Any) -> Any:
    return opened(world, **over)._client.meta.config


def test_settings_of_the_client(world: World, tmp_path: Path) -> None:
    config = settings_of(world)
    assert config.s3["addressing_style"] == "path"
    assert config.request_checksum_calculation == "when_required"
    assert config.response_checksum_validation == "when_required"
    assert settings_of(world, endpointURL=None).s3["addressing_style"] == "auto"
    assert settings_of(world, addressingStyle="Virtual").s3["addressing_style"] == "virtual"
    supported = settings_of(world, checksumMode="WhenSupported")
    assert supported.request_checksum_calculation == "when_supported"
    assert settings_of(world, region="eu-central-1").region_name == "eu-central-1"
    bundle = world.folder / "creds" / "store-ca" / "ca.crt"
    bundle.parent.mkdir()
    bundle.write_text("certificates")
    assert opened(world)._client._endpoint.http_session._verify == str(bundle)


def error_of(code: str, status: int) -> botocore.exceptions.ClientError:
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return botocore.exceptions.ClientError(answer, "PutObject")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (error_of("NoSuchBucket", 404), "BucketNotFound"),
        (error_of("NoSuchKey", 404), "ObjectNotFound"),
        (error_of("AccessDenied", 403), "AccessDenied"),
        (error_of("SomethingForbidden", 403), "AccessDenied"),
        (error_of("ExpiredToken", 400), "InvalidCredentials"),
        (error_of("PermanentRedirect", 301), "WrongRegion"),
        (error_of("SlowDown", 503), "StoreError"),
        (error_of("InternalError", 500), "StoreError"),
        (botocore.exceptions.NoCredentialsError(), "CredentialsMissing"),
        (botocore.exceptions.EndpointConnectionError(endpoint_url="x"), "EndpointUnreachable"),
        (botocore.exceptions.ReadTimeoutError(endpoint_url="x"), "EndpointUnreachable"),
        (botocore.exceptions.SSLError(endpoint_url="x", error="e"), "EndpointUnreachable"),
        (botocore.exceptions.ParamValidationError(report="r"), "StoreError"),
    ],
)
def test_reasons_of_errors(error: Exception, reason: str) -> None:
    assert edge.reason_of(error) == reason


def test_a_map_is_stored_once_and_read_back(world: World) -> None:
    bucket, rows = opened(world), row_map()
    assert store.put_map(bucket, rows) == rows.digest == store.put_map(bucket, rows)
    assert store.get_map(bucket, rows.digest) == rows


def test_a_store_that_holds_other_bytes_under_a_digest(world: World) -> None:
    bucket, rows = opened(world), row_map()
    key = names.map_key(world.store, rows.digest)
    world.put(key, b"{}\n")
    for do in (lambda: store.put_map(bucket, rows), lambda: store.get_map(bucket, rows.digest)):
        error = refused(do)
        assert error.reason == "ChecksumMismatch" and error.final
        assert key in error.message and sha256_digest(b"{}\n") in error.message


def test_bytes_of_the_right_digest_that_are_no_map(world: World) -> None:
    digest = sha256_digest(b"{}\n")
    world.put(names.map_key(world.store, digest), b"{}\n")
    error = refused(lambda: store.get_map(opened(world), digest))
    assert error.reason == "ChecksumMismatch" and "fingerprint: found none" in error.message


def test_a_map_that_is_gone(world: World) -> None:
    error = refused(lambda: store.get_map(opened(world), "sha256:" + "0" * 64))
    assert (error.reason, error.final) == ("ObjectNotFound", True)


def test_a_server_without_conditional_writes(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Bucket.put

    def put(self: Bucket, key: str, data: bytes, kind: str, only_new: bool = False) -> None:
        if only_new:
            raise ConditionUnsupportedError
        plain(self, key, data, kind)

    monkeypatch.setattr(Bucket, "put", put)
    store.probe(opened(world), "run")
    assert "does not implement If-None-Match" in capsys.readouterr().err
    assert store.put_map(opened(world), row_map()) == row_map().digest


def test_a_server_that_ignores_the_condition(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Bucket.put
    monkeypatch.setattr(
        Bucket, "put", lambda self, key, data, kind, only_new=False: plain(self, key, data, kind)
    )
    store.probe(opened(world), "run")
    assert "ignores If-None-Match" in capsys.readouterr().err


def test_a_probe_that_may_not_delete_leaves_its_object(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = opened(world)
    denied = error_of("AccessDenied", 403)
    monkeypatch.setattr(bucket._client, "delete_object", lambda **_: (_ for _ in ()).throw(denied))
    store.probe(bucket, "run")
    assert world.keys("store/probes/") == [f"{world.store}probes/run"]
