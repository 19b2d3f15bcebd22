"""Writes against a real API server: what server-side apply does there."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from expertmaps_operator.act.events import Recorder
from expertmaps_operator.act.executor import Executor, Result
from expertmaps_operator.act.workload import WorkloadConflictError, dry_run
from expertmaps_operator.lease import Lease
from expertmaps_operator.observe.kube import APPLY, ApiError, Kube
from expertmaps_operator.observe.resources import DEPLOYMENT, EVENT, EXPERT_LANE, JOB, LEASE
from expertmaps_operator.observe.snapshots import Observed, Observer
from expertmaps_operator.observe.status_port import StatusPorts
from expertmaps_operator.plan import (
    Action,
    ApplyWorkload,
    Create,
    DeleteJob,
    Event,
    PatchJob,
    Plan,
)
from expertmaps_operator.snapshot import HookFiles, Settings
from rowmap_jobs.formats import names
from tests.api.apiserver import ApiServer
from tests.api.objects import minimal

pytestmark = pytest.mark.api

SETTINGS = Settings("runner", "account", "Always", 1, 1, HookFiles("d", {}, (), "1"))
READY = {
    "type": "Ready", "status": "True", "reason": "LaneServing", "message": "well",
    "observedGeneration": 1, "lastTransitionTime": "2026-01-01T00:00:00Z",
}  # fmt: skip
SERVER = "vllm-lane-a"


@pytest.fixture
def real(crds: ApiServer) -> Kube:
    return Kube(crds.client())


@pytest.fixture
def place(real: Kube, namespace: str) -> str:
    """A namespace with a lane and its Deployment, made as kubectl create makes it."""
    real.request("POST", EXPERT_LANE.path(namespace), None, minimal("ExpertLane"))
    real.request("POST", DEPLOYMENT.path(namespace), {"fieldManager": "kubectl"}, workload())
    return namespace


def workload(**spec: Any) -> dict[str, Any]:
    container = {
        "name": "vllm",
        "image": "vllm",
        "env": [{"name": "PYTHONPATH", "value": "/users"}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": SERVER},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "x"}},
            "template": {
                "metadata": {"labels": {"app": "x"}},
                "spec": {"containers": [container]},
            },
            **spec,
        },
    }


def look(kube: Kube, namespace: str) -> Observed:
    observer = Observer(kube, SETTINGS, [namespace], StatusPorts(), lambda _: None, lambda *_: ())
    seen = observer.observe("ExpertLane", namespace, "lane-a")
    assert seen is not None
    return seen


def act(kube: Kube, seen: Observed, *actions: Action, **plan: Any) -> Result:
    recorder = Recorder(kube, "here", lambda: datetime.now(UTC))
    given: dict[str, Any] = {"status": None, **plan}
    executor, planned = Executor(kube, recorder, lambda: None), Plan(actions=actions, **given)
    try:
        return executor.execute(seen, planned)
    except ApiError as error:
        # The Deployment's controller wrote between read and patch.
        if error.status != 409:
            raise
        return executor.execute(seen, planned)


def deployment(kube: Kube, namespace: str) -> dict[str, Any]:
    found = kube.get(DEPLOYMENT, namespace, SERVER)
    assert found is not None
    return found


def fields(lane: str = "lane-a", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"labels": {names.LABEL_LANE: lane}}, "spec": spec}


def apply(lane: str = "lane-a", may_force: bool = True, **spec: Any) -> ApplyWorkload:
    manager = names.workload_manager(lane)
    return ApplyWorkload(SERVER, manager, fields(lane, **spec), may_force)


GATE: dict[str, Any] = {"minReadySeconds": 864000, "progressDeadlineSeconds": 864001}


def test_a_status_seen_in_an_older_version_is_fenced_off(real: Kube, place: str) -> None:
    first, second = look(real, place), look(real, place)
    assert not act(real, first, status={"conditions": [READY], "replicas": 1}).look_again
    assert act(real, second, status={"conditions": [READY], "replicas": 7}).look_again
    status = look(real, place).manifest["status"]
    assert status["replicas"] == 1


def test_a_status_that_is_there_is_not_written_again(real: Kube, place: str) -> None:
    act(real, look(real, place), status={"conditions": [READY], "replicas": 1})
    seen = look(real, place)
    assert act(real, seen, status={"conditions": [READY], "replicas": 1}).status is None
    before = seen.manifest["metadata"]["resourceVersion"]
    assert look(real, place).manifest["metadata"]["resourceVersion"] == before


def test_a_lane_that_was_made_again_is_another(real: Kube, place: str) -> None:
    seen = look(real, place)
    real.request("DELETE", EXPERT_LANE.path(place, "lane-a"))
    assert not act(real, seen, status={"replicas": 1}).look_again
    real.request("POST", EXPERT_LANE.path(place), None, minimal("ExpertLane"))
    assert act(real, seen, status={"replicas": 1}).look_again


def test_conditions_of_others_stay_and_ours_go_when_left_out(real: Kube, place: str) -> None:
    audited = {**READY, "type": "example.com/Audited"}
    body = {
        "apiVersion": EXPERT_LANE.api_version,
        "kind": "ExpertLane",
        "metadata": {"name": "lane-a"},
        "status": {"conditions": [audited]},
    }
    path = EXPERT_LANE.path(place, "lane-a", "status")
    real.request("PATCH", path, {"fieldManager": "auditor"}, body, APPLY)
    paused = {**READY, "type": "Paused"}
    act(real, look(real, place), status={"conditions": [READY, paused, audited]})
    act(real, look(real, place), status={"conditions": [paused, audited]})
    types = [one["type"] for one in look(real, place).manifest["status"]["conditions"]]
    assert sorted(types) == ["Paused", "example.com/Audited"]
    real.request("PATCH", path, {"fieldManager": "auditor"}, {**body, "status": {}}, APPLY)
    types = [one["type"] for one in look(real, place).manifest["status"]["conditions"]]
    assert types == ["Paused"]


def test_a_second_lane_cannot_claim_the_workload(real: Kube, place: str) -> None:
    seen = look(real, place)
    act(real, seen, apply())
    with pytest.raises(WorkloadConflictError) as refused:
        act(real, seen, apply("lane-b"))
    claim = f".metadata.labels.{names.LABEL_LANE}: expertmaps.lane-a"
    assert refused.value.conflicts == (claim,)
    found = dry_run(real, place, SERVER, "expertmaps.lane-b", fields("lane-b"))
    assert found == (claim,)
    assert deployment(real, place)["metadata"]["labels"][names.LABEL_LANE] == "lane-a"


def test_the_gate_closes_over_defaults_and_its_release_gives_them_back(
    real: Kube, place: str
) -> None:
    spec = deployment(real, place)["spec"]
    assert spec["progressDeadlineSeconds"] == 600
    seen = look(real, place)
    act(real, seen, apply(**GATE))
    assert deployment(real, place)["spec"] | GATE == deployment(real, place)["spec"]
    act(real, seen, apply(minReadySeconds=10, progressDeadlineSeconds=864001))
    assert deployment(real, place)["spec"]["minReadySeconds"] == 10
    act(real, seen, apply())
    released = deployment(real, place)
    assert released["spec"]["progressDeadlineSeconds"] == 600
    assert "minReadySeconds" not in released["spec"]
    assert released["metadata"]["labels"] == {names.LABEL_LANE: "lane-a"}


def test_the_gate_of_a_workload_from_kubectl_apply(crds: ApiServer, real: Kube, place: str) -> None:
    manifest = json.dumps(workload(minReadySeconds=30))
    crds.kubectl("apply", "-n", place, "-f", "-", stdin=manifest)
    with pytest.raises(WorkloadConflictError) as refused:
        act(real, look(real, place), apply(**GATE))
    assert ".spec.minReadySeconds: kubectl-client-side-apply" in refused.value.conflicts
    assert deployment(real, place)["spec"]["minReadySeconds"] == 30
    crds.kubectl("apply", "-n", place, "-f", "-", stdin=json.dumps(workload()))
    act(real, look(real, place), apply(**GATE))
    assert deployment(real, place)["spec"]["minReadySeconds"] == GATE["minReadySeconds"]
    crds.kubectl("apply", "-n", place, "-f", "-", stdin=json.dumps(workload()))
    assert deployment(real, place)["spec"]["minReadySeconds"] == GATE["minReadySeconds"]


def test_a_users_deadline_is_never_forced_over(real: Kube, namespace: str) -> None:
    real.request("POST", EXPERT_LANE.path(namespace), None, minimal("ExpertLane"))
    own = workload(progressDeadlineSeconds=900)
    real.request("POST", DEPLOYMENT.path(namespace), {"fieldManager": "helm"}, own)
    with pytest.raises(WorkloadConflictError) as refused:
        act(real, look(real, namespace), apply(**GATE))
    assert refused.value.conflicts == (".spec.progressDeadlineSeconds: helm",)
    assert deployment(real, namespace)["spec"]["progressDeadlineSeconds"] == 900


def test_what_only_a_lane_names_is_taken_back_after_kubectl_rollout_undo(
    real: Kube, place: str
) -> None:
    def mapped(digest: str) -> dict[str, Any]:
        found = template()
        found["template"]["metadata"] = {"annotations": {names.ANNOTATION_MAP_DIGEST: digest}}
        volume = {"name": names.VOLUME_MAP, "configMap": {"name": digest, "optional": True}}
        found["template"]["spec"]["volumes"] = [volume]
        return found

    act(real, look(real, place), apply(**mapped("one")))
    undone = {"spec": mapped("other")}
    real.request(
        "PATCH",
        DEPLOYMENT.path(place, SERVER),
        {"fieldManager": "kubectl-rollout"},
        undone,
        "application/strategic-merge-patch+json",
    )
    act(real, look(real, place), apply(**mapped("two")))
    found = deployment(real, place)["spec"]["template"]
    assert found["metadata"]["annotations"][names.ANNOTATION_MAP_DIGEST] == "two"
    assert [v["configMap"]["name"] for v in found["spec"]["volumes"]] == ["two"]


def template(**container: Any) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "vllm", **container}]}}}


def test_the_dry_run_tells_conflicts_and_writes_nothing(real: Kube, place: str) -> None:
    before = deployment(real, place)
    ours = template(env=[{"name": "PYTHONPATH", "value": "/opt/expertmaps/hook"}])
    found = dry_run(real, place, SERVER, "expertmaps.lane-a", fields(**GATE, **ours))
    assert sorted(found) == [
        ".spec.progressDeadlineSeconds: kubectl",
        '.spec.template.spec.containers[name="vllm"].env[name="PYTHONPATH"].value: kubectl',
    ]
    after = deployment(real, place)
    # A controller may write the status meanwhile.
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert after["spec"] == before["spec"]


def test_the_dry_run_tells_of_a_container_that_was_renamed(real: Kube, place: str) -> None:
    spec: dict[str, Any] = {"template": {"spec": {"containers": [{"name": "gone", "env": []}]}}}
    found = dry_run(real, place, SERVER, "expertmaps.lane-a", fields(**spec))
    assert len(found) == 1
    assert found[0].startswith("spec.template.spec.containers[1].image: invalid: ")


def test_fields_are_released_by_a_smaller_patch(real: Kube, place: str) -> None:
    seen = look(real, place)
    volumes = [{"name": names.VOLUME_RUN, "emptyDir": {}}]
    mounts = [{"name": names.VOLUME_RUN, "mountPath": names.RUN_DIR}]
    env = [{"name": names.ENV_MODE, "value": "serve"}]
    full = template(env=env, volumeMounts=mounts)
    full["template"]["spec"]["volumes"] = volumes
    act(real, seen, apply(**full))
    pod = deployment(real, place)["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"][0]["env"]] == ["PYTHONPATH", names.ENV_MODE]
    act(real, seen, ApplyWorkload(SERVER, "expertmaps.lane-a", {}))
    after = deployment(real, place)
    assert "labels" not in after["metadata"]
    assert "volumes" not in after["spec"]["template"]["spec"]
    container = after["spec"]["template"]["spec"]["containers"][0]
    assert container["env"] == [{"name": "PYTHONPATH", "value": "/users"}]
    assert "volumeMounts" not in container


def test_an_apply_never_makes_a_workload(real: Kube, place: str) -> None:
    seen = look(real, place)
    real.request("DELETE", DEPLOYMENT.path(place, SERVER))
    whole = workload()["spec"]
    with pytest.raises(Exception, match=r"HTTP (404|409)"):
        act(real, seen, apply(**whole))
    assert real.get(DEPLOYMENT, place, SERVER) is None


def test_jobs_are_made_once_patched_and_deleted_by_uid(real: Kube, place: str) -> None:
    seen = look(real, place)
    spec = {"restartPolicy": "Never", "containers": [{"name": "runner", "image": "x"}]}
    made = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"template": {"spec": spec}}}
    act(real, seen, Create(made), Create(made))
    act(real, seen, PatchJob("j", {"spec": {"ttlSecondsAfterFinished": 60}}))
    there = real.get(JOB, place, "j")
    assert there is not None
    assert there["spec"]["ttlSecondsAfterFinished"] == 60
    act(real, seen, DeleteJob("j", "00000000-0000-0000-0000-000000000000"))
    assert real.get(JOB, place, "j") is not None
    act(real, seen, DeleteJob("j", there["metadata"]["uid"]))
    assert real.get(JOB, place, "j") is None
    act(real, seen, DeleteJob("j", there["metadata"]["uid"]))


def test_an_event_is_one_object_with_a_count(real: Kube, place: str) -> None:
    said = Event("Warning", "EnvConflict", "x" * 3000)
    for _ in range(3):
        act(real, look(real, place), events=(said,))
    about = (one for one in real.list_all(EVENT, place) if one["reason"] == said.reason)
    found = list(about)  # the Deployment's controller, where it runs, has events of its own
    assert [(one["reason"], one["count"], len(one["message"])) for one in found] == [
        ("EnvConflict", 3, 1024)
    ]


def test_of_two_leases_one_is_held_and_a_release_passes_it_on(real: Kube, place: str) -> None:
    stopped = threading.Event()
    mine, other = Lease(real, [place], "me"), Lease(real, [place], "other")
    assert mine.acquire(stopped)

    class Once:
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 1

        def wait(self, _: float) -> bool:
            return True

    once: Any = Once()
    assert not other.acquire(once)
    mine.release()
    assert other.acquire(stopped)
    assert not mine.held()
    there = real.get(LEASE, place, "expertmaps-operator")
    assert there is not None
    assert there["spec"]["holderIdentity"] == "other"


def test_the_kinds_are_served(real: Kube) -> None:
    assert real.missing_kinds() == []
