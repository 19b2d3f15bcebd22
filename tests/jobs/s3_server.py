"""A real S3 server for the tests: SeaweedFS on free loopback ports, and objects in it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions

from tests.children import end_with_parent
from tests.ports import free_ports

KEYS = {"admin": ("AKADMIN", "secret-admin"), "rw": ("AKRW", "secret-rw"), "ro": ("AKRO", "ro")}
ACTIONS = {"admin": ["Admin"], "rw": ["Read", "Write", "List"], "ro": ["Read", "List"]}


@dataclass
class S3Server:
    """A running server; `client` is its administrator."""

    url: str
    client: Any
    process: subprocess.Popen[bytes]

    def bucket(self, name: str) -> str:
        """Make a bucket, once: each has volumes of its own, and there are not many."""
        if name not in [item["Name"] for item in self.client.list_buckets()["Buckets"]]:
            self.client.create_bucket(Bucket=name)
        return name

    def put(self, bucket: str, key: str, body: bytes) -> None:
        self.client.put_object(Bucket=bucket, Key=key, Body=body)

    def get(self, bucket: str, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        listed = self.client.list_objects_v2(Bucket=bucket, Prefix=prefix)
        return [item["Key"] for item in listed.get("Contents", [])]

    def stop(self) -> None:
        # Its data is thrown away: an orderly end takes half a minute.
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def start(folder: Path) -> S3Server:
    """Start a server that keeps its data in `folder`."""
    identities = [
        {
            "name": name,
            "credentials": [{"accessKey": KEYS[name][0], "secretKey": KEYS[name][1]}],
            "actions": ACTIONS[name],
        }
        for name in KEYS
    ]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    names = ["master", "volume", "filer", "s3"]
    ports = free_ports(2 * len(names))
    arguments = [f"-{n}.port={p}" for n, p in zip(names, ports[::2], strict=True)]
    arguments += [f"-{n}.port.grpc={p}" for n, p in zip(names, ports[1::2], strict=True)]
    process = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "weed"),
            "server",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *arguments,
            "-s3",
            # Their fixed defaults would keep a second server from starting.
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={config}",
            "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false",
            "-volume.max=40",
        ],
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
        preexec_fn=end_with_parent,
    )
    url = f"http://127.0.0.1:{ports[6]}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=KEYS["admin"][0],
        aws_secret_access_key=KEYS["admin"][1],
        config=botocore.config.Config(
            s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}
        ),
    )
    server = S3Server(url, client, process)
    try:
        _wait(server, folder)
    except BaseException:
        server.stop()
        raise
    return server


def _wait(server: S3Server, folder: Path) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            server.client.create_bucket(Bucket="ready")
            server.put("ready", "ready", b"1")
            return
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            ended = server.process.poll() is not None
            if ended or time.monotonic() > end:
                raise RuntimeError((folder / "log").read_text()[-2000:]) from None
            time.sleep(0.1)
