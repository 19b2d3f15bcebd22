"""Plans carried out against the stand-in API server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from expertmaps_operator.act import status
from expertmaps_operator.act.events import Recorder, shorten
from expertmaps_operator.act.executor import Executor
from expertmaps_operator.act.workload import WorkloadConflictError, dry_run
from expertmaps_operator.observe.kube import APPLY, MERGE, ApiError, Kube
from expertmaps_operator.observe.resources import EXPERT_LANE
from expertmaps_operator.observe.snapshots import Observed
from expertmaps_operator.plan import (
    ApplyWorkload,
    Create,
    DeleteConfigMap,
    DeleteJob,
    Event,
    PatchJob,
    Plan,
)
from expertmaps_operator.snapshot import Invalid, LaneSnapshot, Settings, Slots
from tests.operator_edges.fake_api import FakeApi, conflict, failure
from tests.operator_edges.objects import APPS, BATCH, CORE, CUSTOM, NS, deployment, lane

LANE = f"{CUSTOM}/expertlanes/lane-a"
SERVER = f"{APPS}/deployments/server"
READY = {
    "type": "Ready", "status": "True", "reason": "LaneServing", "message": "", "observedGeneration":
    1, "lastTransitionTime": "2026-01-01T00:00:00Z",
}  # fmt: skip
GATE = (".spec.minReadySeconds", ".spec.progressDeadlineSeconds")


def observed(api: FakeApi, before: dict[str, Any] | None = None) -> Observed:
    manifest = api.put(LANE, {**lane(), **({"status": before} if before else {})})
    workload = api.put(SERVER, deployment())
    settings: Any = Settings.__new__(Settings)
    snapshot = LaneSnapshot(
        lane=Invalid("lane-a", 1, ""), maps=(), traffic_class_exists=True, workload=workload,
        replica_sets=(), pods=(), map_objects={}, hook_config_maps=frozenset(), jobs=(),
        job_pods=(), slots=Slots(0, 0), settings=settings,
    )  # fmt: skip
    return Observed(EXPERT_LANE, manifest, snapshot)


def executor(kube: Kube, guard: Any = lambda: None) -> Executor:
    return Executor(kube, Recorder(kube, "here", lambda: datetime(2026, 1, 1, tzinfo=UTC)), guard)


def test_status_is_applied_first_with_the_version_that_was_seen(api: FakeApi, kube: Kube) -> None:
    seen = observed(api)
    plan = Plan(
        status={"observedGeneration": 1, "rollout": None, "conditions": [READY]},
        actions=(DeleteJob("old", "u"),),
        events=(Event("Normal", "LaneServing", "well"),),
    )
    result = executor(kube).execute(seen, plan)
    assert not result.look_again
    assert result.status == {"observedGeneration": 1, "conditions": [READY]}
    assert [(one.method, one.path) for one in api.writes()] == [
        ("PATCH", f"{LANE}/status"),
        ("DELETE", f"{BATCH}/jobs/old"),
        ("POST", f"{CORE}/events"),
    ]
    apply = api.writes()[0]
    assert apply.content_type == APPLY
    assert apply.query == {"fieldManager": "expertmaps-operator", "force": "true"}
    assert apply.body["metadata"] == {
        "name": "lane-a",
        "namespace": NS,
        "uid": "uid-lane-a",
        "resourceVersion": seen.manifest["metadata"]["resourceVersion"],
    }
    assert "spec" not in apply.body


def test_an_equal_status_is_not_written(api: FakeApi, kube: Kube) -> None:
    foreign = {**READY, "type": "example.com/Audited"}
    before = {"conditions": [foreign, READY], "replicas": 2}
    result = executor(kube).execute(
        observed(api, before), Plan(status={"replicas": 2, "conditions": [READY, foreign]})
    )
    assert result.status is None
    assert api.writes() == []


def test_what_the_plan_leaves_out_is_a_change() -> None:
    before = {"replicas": 2, "rollout": {"id": "x"}, "conditions": [READY]}
    assert status.differs(before, {"replicas": 2, "conditions": [READY]})
    assert status.differs(before, {"replicas": 2, "rollout": {"id": "x"}, "conditions": []})
    assert not status.differs({}, status.wanted({"rollout": None}))


def test_conditions_of_others_are_never_applied() -> None:
    foreign = {**READY, "type": "example.com/Audited"}
    assert status.wanted({"conditions": [READY, foreign]}) == {"conditions": [READY]}


@pytest.mark.parametrize(("code", "again"), [(409, True), (404, False)])
def test_a_changed_object_drops_the_plan(api: FakeApi, kube: Kube, code: int, again: bool) -> None:
    seen = observed(api)
    api.answer("PATCH", f"{LANE}/status", *failure(code, "x"))
    plan = Plan(status={"replicas": 1}, actions=(DeleteJob("old", "u"),))
    assert executor(kube).execute(seen, plan).look_again is again
    assert len(api.writes()) == 1


def test_a_failed_step_ends_the_turn(api: FakeApi, kube: Kube) -> None:
    seen = observed(api)
    api.answer("DELETE", f"{BATCH}/jobs/a", *failure(500, "InternalError"))
    plan = Plan(None, (DeleteJob("a", "u"), DeleteJob("b", "u")), (Event("Normal", "X", "x"),))
    with pytest.raises(ApiError, match="HTTP 500"):
        executor(kube).execute(seen, plan)
    assert [one.path for one in api.writes()] == [f"{BATCH}/jobs/a"]


def test_the_guard_is_asked_before_every_write(api: FakeApi, kube: Kube) -> None:
    left = [2]

    def guard() -> None:
        if not left[0]:
            raise RuntimeError("not any more")
        left[0] -= 1

    plan = Plan({"replicas": 1}, (DeleteJob("a", "u"), DeleteJob("b", "u")))
    with pytest.raises(RuntimeError):
        executor(kube, guard).execute(observed(api), plan)
    assert [one.path for one in api.writes()] == [f"{LANE}/status", f"{BATCH}/jobs/a"]


def test_create_twice_is_success(api: FakeApi, kube: Kube) -> None:
    made = {"kind": "ConfigMap", "metadata": {"name": "c", "namespace": NS}, "data": {"a": "b"}}
    plan = Plan(None, (Create(made), Create(made)))
    executor(kube).execute(observed(api), plan)
    first, second = api.writes()
    assert first == second
    assert first.path == f"{CORE}/configmaps"
    assert first.body["apiVersion"] == "v1"


def test_create_is_bounded_to_our_kinds_and_namespace(api: FakeApi, kube: Kube) -> None:
    for wrong in (
        {"kind": "Secret", "metadata": {"name": "c"}},
        {"kind": "Job", "metadata": {"name": "c", "namespace": "elsewhere"}},
    ):
        with pytest.raises((KeyError, ValueError)):
            executor(kube).execute(observed(api), Plan(None, (Create(wrong),)))
    assert api.writes() == []


@pytest.mark.parametrize("code", [404, 409])
def test_deleting_what_is_gone_or_another_is_success(api: FakeApi, kube: Kube, code: int) -> None:
    seen = observed(api)
    api.answer("DELETE", f"{BATCH}/jobs/j", *failure(code, "x"))
    api.answer("DELETE", f"{CORE}/configmaps/c", *failure(code, "x"))
    executor(kube).execute(seen, Plan(None, (DeleteJob("j", "u1"), DeleteConfigMap("c", "u2"))))
    for request, uid in zip(api.writes(), ("u1", "u2"), strict=True):
        assert request.body["preconditions"] == {"uid": uid}
        assert request.body["propagationPolicy"] == "Background"


def test_patch_job_is_a_merge_patch(api: FakeApi, kube: Kube) -> None:
    seen = observed(api)
    api.put(f"{BATCH}/jobs/j", {})
    patch = {"spec": {"ttlSecondsAfterFinished": 60}}
    executor(kube).execute(seen, Plan(None, (PatchJob("j", patch), PatchJob("gone", patch))))
    request = api.writes()[0]
    assert (request.content_type, request.body) == (MERGE, patch)


def apply(may_force: bool = True) -> Plan:
    patch = {"metadata": {"labels": {"expertmaps.dev/lane": "lane-a"}}, "spec": {}}
    return Plan(None, (ApplyWorkload("server", "expertmaps.lane-a", patch, may_force),))


def test_apply_workload_names_manager_and_uid_and_does_not_force(api: FakeApi, kube: Kube) -> None:
    executor(kube).execute(observed(api), apply())
    request = api.writes()[0]
    assert request.query == {"fieldManager": "expertmaps.lane-a"}
    assert request.body["metadata"]["uid"] == "uid-server"
    assert request.body["kind"] == "Deployment"


def test_gate_fields_at_their_defaults_are_forced_with_a_fence(api: FakeApi, kube: Kube) -> None:
    seen = observed(api)
    api.objects[SERVER]["spec"] |= {"progressDeadlineSeconds": 600}
    api.answer("PATCH", SERVER, *failure(409, "Conflict", *(conflict(f, "kubectl") for f in GATE)))
    executor(kube).execute(seen, apply())
    first, second = api.writes()
    assert "force" not in first.query
    assert second.query["force"] == "true"
    assert second.body["metadata"]["resourceVersion"] == str(api.version)


@pytest.mark.parametrize(
    ("spec", "fields", "may_force"),
    [
        ({"minReadySeconds": 30}, GATE[:1], True),
        ({"progressDeadlineSeconds": 900}, GATE, True),
        ({}, (*GATE, ".spec.replicas"), True),
        ({}, GATE, False),
    ],
)
def test_a_users_value_is_never_forced_over(
    api: FakeApi, kube: Kube, spec: dict[str, int], fields: tuple[str, ...], may_force: bool
) -> None:
    seen = observed(api)
    api.objects[SERVER]["spec"] |= spec
    causes = (conflict(one, "kubectl") for one in fields)
    api.answer("PATCH", SERVER, *failure(409, "Conflict", *causes))
    with pytest.raises(WorkloadConflictError) as refused:
        executor(kube).execute(seen, apply(may_force))
    assert refused.value.conflicts == tuple(f"{one}: kubectl" for one in fields)
    assert len(api.writes()) == 1


def test_a_conflict_without_fields_is_no_conflict_of_managers(api: FakeApi, kube: Kube) -> None:
    seen = observed(api)
    api.answer("PATCH", SERVER, *failure(409, "Conflict"))
    with pytest.raises(ApiError):
        executor(kube).execute(seen, apply())
    assert len(api.writes()) == 1


def test_dry_run_tells_fields_with_their_managers(api: FakeApi, kube: Kube) -> None:
    api.put(SERVER, deployment())
    env = '.spec.template.spec.containers[name="vllm"].env[name="PYTHONPATH"].value'
    api.answer(
        "PATCH", SERVER, *failure(409, "Conflict", conflict(env, "helm"), conflict(GATE[0], "x"))
    )
    found = dry_run(kube, NS, "server", "expertmaps.lane-a", {"spec": {}})
    assert found == (f"{env}: helm", f"{GATE[0]}: x")
    assert api.writes()[0].query == {"fieldManager": "expertmaps.lane-a", "dryRun": "All"}
    assert dry_run(kube, NS, "server", "expertmaps.lane-a", {}) == ()
    assert dry_run(kube, NS, "gone", "expertmaps.lane-a", {}) == ()
    renamed = ("FieldValueRequired", "spec.template.spec.containers[1].image", "Required value")
    api.answer("PATCH", SERVER, *failure(422, "Invalid", renamed))
    assert dry_run(kube, NS, "server", "m", {}) == (
        "spec.template.spec.containers[1].image: invalid: Required value",
    )


def test_events_are_told_once_per_change_of_status(api: FakeApi, kube: Kube) -> None:
    seen = observed(api)
    act = executor(kube)
    said = Event("Warning", "EnvConflict", "PYTHONPATH is taken")
    for _ in range(3):
        act.execute(seen, Plan(None, (), (said,)))
    assert len(api.writes()) == 1
    act.execute(seen, Plan({"replicas": 1}, (), (said,)))
    event = api.writes()[-1]
    assert event.method == "PATCH"
    assert event.body["count"] == 2
    posted = api.writes()[0].body
    assert posted["involvedObject"]["uid"] == "uid-lane-a"
    assert (posted["type"], posted["reason"], posted["count"]) == ("Warning", "EnvConflict", 1)


def test_an_event_that_cannot_be_posted_does_not_fail_the_turn(api: FakeApi, kube: Kube) -> None:
    seen = observed(api)
    act = executor(kube)
    said = Event("Normal", "X", "x")
    api.answer("POST", f"{CORE}/events", *failure(403, "Forbidden"))
    act.execute(seen, Plan(None, (), (said,)))
    act.execute(seen, Plan(None, (), (said,)))
    assert [one.method for one in api.writes()] == ["POST", "POST"]


def test_long_messages_are_cut() -> None:
    assert len(shorten("x" * 5000)) == 1024
    assert shorten("short") == "short"
