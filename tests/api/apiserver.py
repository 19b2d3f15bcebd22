"""A real kube-apiserver with its etcd on free ports, for the time of a test session.

Other folders of tests get the fixtures with

    from tests.api.apiserver import api_server, controller_manager  # noqa: F401

in their conftest.py; one server is shared by all of them.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config

from tests.children import end_with_parent
from tests.ports import free_ports

TOKEN = (
    "expertmaps-tests"  # of a server that only this machine reaches and that ends with the tests
)
BOOT_SECONDS = 60
BUILD = "tests/cluster/cluster build"
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "statefulset-controller",
    "job-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "disruption-controller",
)


def find_binary(name: str) -> Path:
    """A tool of the local cluster: in EXPERTMAPS_BIN, else in the newest folder of the cache."""
    chosen = os.environ.get("EXPERTMAPS_BIN")
    cache = Path(os.environ.get("EXPERTMAPS_CACHE", "/var/cache/expertmaps"))
    folders = [Path(chosen)] if chosen else []
    folders += sorted(cache.glob("bin-*"), key=lambda one: one.stat().st_mtime, reverse=True)
    for folder in folders:
        path = folder / name
        if os.access(path, os.X_OK):
            return path
    looked = ", ".join(map(str, folders)) or f"{cache}/bin-*"
    pytest.fail(f"no {name} in {looked}: make it with {BUILD}", pytrace=False)


def wait_for(what: str, check: Callable[[], bool], seconds: float, pause: float = 0.05) -> None:
    """Poll until the check is true."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)


@dataclass
class _Processes:
    """Child processes; none outlives this one."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str | Path) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                preexec_fn=end_with_parent,
            )

    def check(self) -> None:
        for name, process in self.running.items():
            if process.poll() is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{log[-3000:]}")

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()
        self.running.clear()


@dataclass
class ApiServer:
    """A running API server."""

    url: str
    kubeconfig: Path
    """Of a user who may do everything."""
    folder: Path
    boot_seconds: float
    _processes: _Processes

    def client(self, user: str = "", groups: Sequence[str] = ()) -> client.ApiClient:
        """A new ApiClient of the Python client, as another user where one is named."""
        api = config.new_client_from_config(str(self.kubeconfig))
        if user:
            api.default_headers["Impersonate-User"] = user
        for group in groups:  # one header is all that the client can send
            api.default_headers["Impersonate-Group"] = group
        return api

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl of the server's own version."""
        command = [str(find_binary("kubectl")), *arguments]
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "KUBECONFIG": str(self.kubeconfig),
        }
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, env=environment
        )
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done

    def start_controller_manager(self) -> None:
        """Start the controllers of workloads, unless they run."""
        if "kube-controller-manager" in self._processes.running:
            return
        self._processes.start(
            "kube-controller-manager",
            find_binary("kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            "--secure-port=0",
            "--leader-elect=false",
            "--use-service-account-credentials=false",
            f"--controllers={','.join(CONTROLLERS)}",
        )

    def stop(self) -> None:
        """End it and remove what it kept."""
        self._processes.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _write_certificate(folder: Path) -> None:
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -keyout server.key -out server.crt -subj /CN=expertmaps-tests"
    command += " -addext subjectAltName=IP:127.0.0.1,DNS:localhost"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


def _write_access(folder: Path, url: str) -> Path:
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    cluster = {"server": url, "certificate-authority": str(folder / "server.crt")}
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [{"name": "tests", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    return path


def _start(folder: Path) -> ApiServer:
    began = time.monotonic()
    etcd, peer, port = free_ports(3)
    url = f"https://127.0.0.1:{port}"
    processes = _Processes(folder)
    try:
        processes.start(
            "etcd",
            find_binary("etcd"),
            f"--data-dir={folder}/etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        _write_certificate(folder)
        kubeconfig = _write_access(folder, url)
        processes.start(
            "kube-apiserver",
            find_binary("kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--authorization-mode=RBAC",
            # Pods are never run here, and nothing makes the ServiceAccounts that it asks for.
            "--disable-admission-plugins=ServiceAccount",
            f"--token-auth-file={folder}/tokens.csv",
            f"--tls-cert-file={folder}/server.crt",
            f"--tls-private-key-file={folder}/server.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder}/server.crt",
            f"--service-account-signing-key-file={folder}/server.key",
        )
        context = ssl.create_default_context(cafile=str(folder / "server.crt"))
        request = urllib.request.Request(
            f"{url}/readyz", headers={"Authorization": f"Bearer {TOKEN}"}
        )

        def ready() -> bool:
            processes.check()
            try:
                with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_for("the API server is ready", ready, BOOT_SECONDS)
    except BaseException:
        processes.stop()
        raise
    return ApiServer(url, kubeconfig, folder, time.monotonic() - began, processes)


def start_api_server() -> ApiServer:
    """Start a server; tried again where another process took one of its ports meanwhile."""
    for attempt in range(3):
        folder = Path(tempfile.mkdtemp(prefix="expertmaps-api-"))
        try:
            return _start(folder)
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if attempt == 2 or "address already in use" not in str(error):
                raise
    raise AssertionError


_SERVER = pytest.StashKey[ApiServer]()


@pytest.fixture(scope="session")
def api_server(pytestconfig: pytest.Config) -> ApiServer:
    """A real API server; it ends with the session."""
    if _SERVER not in pytestconfig.stash:
        server = start_api_server()
        pytestconfig.add_cleanup(server.stop)
        pytestconfig.stash[_SERVER] = server
    return pytestconfig.stash[_SERVER]


@pytest.fixture(scope="session")
def controller_manager(api_server: ApiServer) -> Iterator[ApiServer]:
    """The API server with the controllers of Deployments, StatefulSets, Jobs and owners."""
    api_server.start_controller_manager()
    yield api_server


@pytest.fixture
def namespace(api_server: ApiServer) -> str:
    """A new namespace."""
    body = client.V1Namespace(metadata=client.V1ObjectMeta(generate_name="test-"))
    return str(client.CoreV1Api(api_server.client()).create_namespace(body).metadata.name)
