"""The list of permissions against what the code asks of the stand-in API server."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from datetime import UTC, datetime

from expertmaps_operator.act.events import Recorder
from expertmaps_operator.act.executor import Executor
from expertmaps_operator.act.permissions import PERMISSIONS
from expertmaps_operator.lease import Lease
from expertmaps_operator.observe.index import Index
from expertmaps_operator.observe.kube import Kube
from expertmaps_operator.observe.ledger import Ledger
from expertmaps_operator.observe.resources import BY_KIND, WATCHED
from expertmaps_operator.observe.resync import Resync
from expertmaps_operator.plan import (
    ApplyWorkload,
    Create,
    DeleteConfigMap,
    DeleteJob,
    Event,
    PatchJob,
    Plan,
)
from tests.operator_edges import test_executor, test_snapshots
from tests.operator_edges.fake_api import FakeApi, Request, conflict, failure
from tests.operator_edges.objects import NS

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
GRANTED = {(one.group, one.resource, verb) for one in PERMISSIONS for verb in one.verbs}


def asked(requests: Iterable[Request]) -> set[tuple[str, str, str]]:
    """Requests as RBAC sees them."""
    found = set()
    for request in requests:
        before, after = request.path.split("/namespaces/")
        group = before.split("/")[2] if before.startswith("/apis/") else ""
        _, plural, *rest = after.split("/")
        verb = VERBS.get(request.method) or ("get" if rest else "list")
        found.add((group, "/".join([plural, *rest[1:]]), verb))
    return found


def test_all_that_is_asked_is_granted_and_all_that_is_granted_is_asked(
    api: FakeApi, kube: Kube
) -> None:
    test_snapshots.fill(api)
    api.answer(
        "PATCH", test_executor.SERVER, *failure(409, "x", conflict(test_executor.GATE[0], ""))
    )
    for kind, name in (
        ("ExpertLane", "lane-a"), ("ExpertMap", "lane-a.agent"), ("TrafficClass", "agent"),
    ):  # fmt: skip
        seen = test_snapshots.observer(kube).observe(kind, NS, name)
        assert seen is not None
        actions = (
            ApplyWorkload("server", "expertmaps.lane-a", {}, may_force_gate=True),
            Create({"kind": "Job", "metadata": {"name": "new"}}),
            Create({"kind": "ConfigMap", "metadata": {"name": "new"}}),
            PatchJob("new", {}),
            DeleteJob("new", "u"),
            DeleteConfigMap("new", "u"),
        )
        plan = Plan({"observedGeneration": 9}, actions if kind == "ExpertLane" else ())
        executor = Executor(kube, Recorder(kube, "x", lambda: datetime.now(UTC)), lambda: None)
        executor.execute(seen, plan)
        again = Recorder(kube, "x", lambda: datetime.now(UTC))
        again.post(seen, Event("Normal", "X", "x"))
        again.status_changed(seen.manifest["metadata"]["uid"])
        again.post(seen, Event("Normal", "X", "x"))
    lease = Lease(kube, [NS], "me")
    assert lease.acquire(threading.Event())
    lease.release()
    Resync(kube, [NS], Index(), Ledger(), lambda _: None, lambda: 1.0).once()
    watched = {(resource.group, resource.plural, "watch") for resource in WATCHED}
    assert asked(api.requests) | watched == GRANTED


def test_it_is_least() -> None:
    assert not any("*" in (one.group, one.resource, *one.verbs) for one in PERMISSIONS)
    assert not any(one.resource.startswith("secrets") for one in PERMISSIONS)
    for one in PERMISSIONS:
        assert list(one.verbs) == sorted(one.verbs)
    assert {one.resource.split("/")[0] for one in PERMISSIONS} == {
        resource.plural for resource in BY_KIND.values()
    }
    assert PERMISSIONS[0].rule() == {
        "apiGroups": ["expertmaps.dev"],
        "resources": ["trafficclasses"],
        "verbs": ["list", "watch"],
    }
