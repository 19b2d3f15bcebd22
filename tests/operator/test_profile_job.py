"""The Job of a profile: what of the lane's pod it carries, and what it keeps away from whom."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from expertmaps_operator.api.reasons import Reason
from expertmaps_operator.build.profile_job import CACHE_MOUNT, ProfileParts, Refusal, profile_job
from rowmap_jobs.formats import names
from rowmap_jobs.formats.base import sha256_digest
from rowmap_jobs.formats.run import RunSpec
from tests.operator import expertmap_world as world

RUN = world.FIRST_RUN
TOKEN_MOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def parts(workload: dict[str, Any] | None = None, **more: Any) -> ProfileParts:
    fields: dict[str, Any] = {
        "map": world.expert_map(),
        "lane": world.lane(),
        "traffic_class": world.traffic_class(),
        "workload": workload or world.workload(),
        "settings": world.settings(),
        "other_map_digests": {},
        "frozen_geometry": None,
        **more,
    }
    return ProfileParts(**fields)


def built(workload: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    job = profile_job(parts(workload, **more), RUN)
    assert not isinstance(job, Refusal), job
    json.dumps(job)
    return job


def pod(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def container(job: dict[str, Any], name: str) -> dict[str, Any]:
    both = pod(job)["initContainers"] + pod(job)["containers"]
    return next(item for item in both if item["name"] == name)


def env(job: dict[str, Any], name: str = "vllm") -> dict[str, str]:
    items = container(job, name)["env"]
    assert len({item["name"] for item in items}) == len(items), "a variable twice"
    return {item["name"]: item.get("value", "") for item in items}


def mounts(job: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    return {item["mountPath"]: item for item in container(job, name)["volumeMounts"]}


def refused(workload: dict[str, Any], **more: Any) -> Refusal:
    found = profile_job(parts(workload, **more), RUN)
    assert isinstance(found, Refusal)
    assert "\n" not in found.message
    return found


def test_nothing_of_the_lane_selects_the_pod() -> None:
    job = built()
    selector = world.workload()["spec"]["selector"]["matchLabels"]
    for metadata in (job["metadata"], job["spec"]["template"]["metadata"]):
        assert not set(selector.items()) & set(metadata["labels"].items())
        assert "team" not in metadata["labels"]
        assert "prometheus.io/scrape" not in metadata["annotations"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels[names.LABEL_ROLE] == names.ROLE_PROFILE
    assert labels[names.LABEL_MAP] == "lane-a.agent"
    assert labels[names.LABEL_LANE] == "lane-a"
    assert labels["sidecar.istio.io/inject"] == "false"


def test_the_map_owns_the_job() -> None:
    (owner,) = built()["metadata"]["ownerReferences"]
    assert owner == {
        "apiVersion": "expertmaps.dev/v1alpha1",
        "kind": "ExpertMap",
        "name": "lane-a.agent",
        "uid": world.MAP_UID,
        "controller": True,
    }


def test_containers_and_their_order() -> None:
    job = built()
    names_ = [item["name"] for item in pod(job)["initContainers"]]
    assert names_ == ["fetch-model", "probe", "vllm"]
    assert [item["name"] for item in pod(job)["containers"]] == ["runner"]
    assert container(job, "probe")["args"] == ["probe"]
    assert container(job, "runner")["args"] == ["profile"]
    engine = container(job, "vllm")
    assert engine["restartPolicy"] == "Always"
    assert engine["command"] == ["/bin/sh", "-c", "exec vllm serve /models/m"]
    assert engine["resources"] == world.engine_of(world.workload())["resources"]
    assert pod(job)["restartPolicy"] == "Never"


def test_engine_loses_what_would_touch_the_lane() -> None:
    engine = container(built(), "vllm")
    assert "livenessProbe" not in engine
    assert "lifecycle" not in engine
    assert engine["ports"] == [{"name": "http", "containerPort": 8000}]


def test_post_start_stays() -> None:
    workload = world.workload()
    world.engine_of(workload)["lifecycle"]["postStart"] = {"exec": {"command": ["true"]}}
    assert list(container(built(workload), "vllm")["lifecycle"]) == ["postStart"]


def test_startup_probe_is_the_readiness_probe_with_the_pending_deadline() -> None:
    probe = container(built(), "vllm")["startupProbe"]
    assert probe["httpGet"] == {"path": "/health", "port": "http"}
    assert probe["successThreshold"] == 1
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 3600


def test_startup_probe_of_the_lane_is_kept() -> None:
    workload = world.workload()
    own = {"exec": {"command": ["ready"]}, "periodSeconds": 30, "failureThreshold": 1000}
    world.engine_of(workload)["startupProbe"] = own
    assert container(built(workload), "vllm")["startupProbe"] == {**own, "successThreshold": 1}


def test_startup_probe_without_any() -> None:
    workload = world.workload()
    del world.engine_of(workload)["readinessProbe"]
    probe = container(built(workload), "vllm")["startupProbe"]
    assert probe["httpGet"] == {"path": "/health", "port": 8000}


def test_engine_counts() -> None:
    found = env(built())
    assert found["PYTHONPATH"] == "/opt/expertmaps/hook"
    assert found["EXPERTMAPS_MODE"] == "count"
    assert found["EXPERTMAPS_DIR"] == "/var/run/expertmaps"
    assert found["EXPERTMAPS_STATUS_PORT"] == "9477"
    assert int(found["EXPERTMAPS_CAPTURE_SLOTS"]) >= 64
    assert found["HF_HUB_OFFLINE"] == "1"


def test_own_python_path_comes_after_the_hook() -> None:
    workload = world.workload()
    world.engine_of(workload)["env"].append({"name": "PYTHONPATH", "value": "/mine:/other"})
    assert env(built(workload))["PYTHONPATH"] == "/opt/expertmaps/hook:/mine:/other"


def test_an_adopted_template_gives_the_same_job() -> None:
    plain = built()
    workload = world.workload()
    template, engine = workload["spec"]["template"], world.engine_of(workload)
    template["metadata"]["annotations"][names.ANNOTATION_MAP_DIGEST] = "sha256:1"
    engine["env"] += [
        {"name": "PYTHONPATH", "value": "/opt/expertmaps/hook"},
        {"name": "EXPERTMAPS_MODE", "value": "serve"},
        {"name": "EXPERTMAPS_MAP", "value": "/etc/expertmaps/rowmap.json"},
    ]
    for volume, path in (
        (names.VOLUME_HOOK, names.HOOK_MOUNT),
        (names.VOLUME_MAP, names.MAP_MOUNT),
        (names.VOLUME_RUN, names.RUN_DIR),
    ):
        engine["volumeMounts"].append({"name": volume, "mountPath": path})
        template["spec"]["volumes"].append({"name": volume, "configMap": {"name": "old"}})
    assert built(workload) == plain


@pytest.mark.parametrize(
    ("value", "wanted"), [("", "expertmaps"), ("lora, other", "lora,other,expertmaps")]
)
def test_plugins_without_ours_are_refused(value: str, wanted: str) -> None:
    workload = world.workload()
    world.engine_of(workload)["env"].append({"name": "VLLM_PLUGINS", "value": value})
    found = refused(workload)
    assert found.reason == Reason.ENV_CONFLICT
    assert found.message.endswith(f"write VLLM_PLUGINS={wanted}")


def test_plugins_with_ours_are_kept() -> None:
    workload = world.workload()
    world.engine_of(workload)["env"].append({"name": "VLLM_PLUGINS", "value": "a,expertmaps"})
    assert env(built(workload))["VLLM_PLUGINS"] == "a,expertmaps"


def test_python_path_from_elsewhere_is_refused() -> None:
    workload = world.workload()
    source = {"configMapKeyRef": {"name": "c", "key": "k"}}
    world.engine_of(workload)["env"].append({"name": "PYTHONPATH", "valueFrom": source})
    assert refused(workload).reason == Reason.ENV_CONFLICT


def test_compile_caches_are_its_own() -> None:
    job = built()
    found = env(job)
    for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert found[name].startswith(f"{CACHE_MOUNT}/")
    assert "FLASHINFER_WORKSPACE_BASE" not in found
    assert "XDG_CACHE_HOME" not in found
    own = mounts(job, "vllm")[CACHE_MOUNT]
    volume = next(item for item in pod(job)["volumes"] if item["name"] == own["name"])
    assert volume == {"name": "expertmaps-cache", "emptyDir": {}}


def test_models_stay_where_the_cache_home_was() -> None:
    workload = world.workload()
    world.engine_of(workload)["env"].append({"name": "XDG_CACHE_HOME", "value": "/cache/"})
    found = env(built(workload))
    assert found["XDG_CACHE_HOME"] == f"{CACHE_MOUNT}/xdg"
    assert found["HF_HOME"] == "/cache/huggingface"


def test_what_the_lane_shares_is_read_only() -> None:
    job = built()
    found = mounts(job, "vllm")
    for path in ("/cache", "/models", "/opt/vllm"):
        assert found[path]["readOnly"] is True
    assert "readOnly" not in found["/dev/shm"]
    assert mounts(job, "fetch-model")["/models"]["readOnly"] is True


def test_volumes_that_nobody_mounts_are_left_out() -> None:
    job = built()
    there = [item["name"] for item in pod(job)["volumes"]]
    assert len(set(there)) == len(there)
    assert "unused" not in there
    used = {
        mount["name"]
        for item in pod(job)["initContainers"] + pod(job)["containers"]
        for mount in item["volumeMounts"]
    }
    assert used == set(there)


def test_hook_files_are_required() -> None:
    job = built()
    volume = next(item for item in pod(job)["volumes"] if item["name"] == names.VOLUME_HOOK)
    assert volume["configMap"] == {
        "name": f"lane-a-hook-{'5' * 16}",
        "optional": False,
        "items": [{"key": "expertmaps_hook.py", "path": "expertmaps_hook.py"}],
    }


def test_credentials_reach_the_runner_alone() -> None:
    job = built()
    secrets = {
        item["name"] for item in pod(job)["volumes"] if "secret" in item or "projected" in item
    }
    assert secrets == {
        "expertmaps-s3-store",
        "expertmaps-s3-transcripts",
        "expertmaps-token",
    }
    for name in ("vllm", "fetch-model"):
        mounted = {item["name"] for item in container(job, name)["volumeMounts"]}
        assert not mounted & secrets
        assert TOKEN_MOUNT not in mounts(job, name)
        assert names.ENV_RUN not in {i["name"] for i in container(job, name).get("env", [])}
    for name in ("probe", "runner"):
        found = mounts(job, name)
        for path in (
            "/etc/expertmaps/s3/store",
            "/etc/expertmaps/s3/transcripts",
            TOKEN_MOUNT,
        ):
            assert found[path]["readOnly"] is True
    spec = pod(job)
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == "expertmaps-runner"
    assert spec["enableServiceLinks"] is False
    assert "shareProcessNamespace" not in spec


def test_a_token_of_the_users_own_volumes_is_not_minted_for_the_engine() -> None:
    workload = world.workload()
    sources = [{"serviceAccountToken": {"path": "t"}}, {"configMap": {"name": "c"}}]
    workload["spec"]["template"]["spec"]["volumes"].append(
        {"name": "mine", "projected": {"sources": sources}}
    )
    world.engine_of(workload)["volumeMounts"].append({"name": "mine", "mountPath": "/mine"})
    volume = next(item for item in pod(built(workload))["volumes"] if item["name"] == "mine")
    assert volume["projected"]["sources"] == [{"configMap": {"name": "c"}}]


def test_certificates() -> None:
    tc = world.traffic_class(
        transcripts=world.s3("transcripts", caBundleConfigMapRef={"name": "ca"})
    )
    job = built(traffic_class=tc)
    mount = mounts(job, "runner")["/etc/expertmaps/s3/transcripts-ca"]
    volume = next(item for item in pod(job)["volumes"] if item["name"] == mount["name"])
    assert volume["configMap"]["name"] == "ca"


def test_identity_of_the_locations() -> None:
    own = world.s3("store", credentialsSecretRef=None, serviceAccountName="cloud")
    job = built(lane=world.lane(store=own))
    assert pod(job)["serviceAccountName"] == "cloud"
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert annotations["eks.amazonaws.com/skip-containers"] == "fetch-model,vllm"


def test_two_identities_are_refused() -> None:
    lane = world.lane(store=world.s3("store", credentialsSecretRef=None, serviceAccountName="a"))
    tc = world.traffic_class(
        transcripts=world.s3("transcripts", credentialsSecretRef=None, serviceAccountName="b")
    )
    found = refused(world.workload(), lane=lane, traffic_class=tc)
    assert found.reason == Reason.INVALID_SPEC
    assert "a (store), b (transcripts)" in found.message


def test_placement() -> None:
    spec = pod(built())
    template = world.workload()["spec"]["template"]["spec"]
    for key in ("nodeSelector", "tolerations", "runtimeClassName", "imagePullSecrets"):
        assert spec[key] == template[key]
    assert list(spec["affinity"]) == ["nodeAffinity"]
    assert "topologySpreadConstraints" not in spec
    assert "priorityClassName" not in spec
    assert spec["terminationGracePeriodSeconds"] == 30


def test_host_network_is_left() -> None:
    workload = world.workload()
    workload["spec"]["template"]["spec"].update(hostNetwork=True, hostPID=True, hostUsers=False)
    spec = pod(built(workload))
    assert "hostNetwork" not in spec
    assert "hostPID" not in spec
    assert spec["hostUsers"] is False


def test_priority_is_the_profiles_own() -> None:
    map_ = world.expert_map(profile={"priorityClassName": "low"})
    assert pod(built(map=map_))["priorityClassName"] == "low"


def test_deadlines_and_failures() -> None:
    spec = built()["spec"]
    assert spec["activeDeadlineSeconds"] == 3600 + 7200
    assert spec["backoffLimit"] == 1
    assert "ttlSecondsAfterFinished" not in spec
    final = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert [rule["onExitCodes"]["containerName"] for rule in final] == ["runner", "probe"]
    assert {value for rule in final for value in rule["onExitCodes"]["values"]} == {42}


def test_runner_has_no_privilege() -> None:
    for name in ("probe", "runner"):
        runner = container(built(), name)
        security = runner["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == 65532
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert runner["terminationMessagePath"] == "/dev/termination-log"
        assert set(runner["resources"]["requests"]) == {"cpu", "memory"}


def test_run_spec() -> None:
    other = {"prose": "sha256:" + "9" * 64}
    job = built(other_map_digests=other, frozen_geometry=world.row_map().geometry)
    raw = env(job, "runner")[names.ENV_RUN]
    spec = RunSpec.from_bytes(raw.encode(), "env")
    assert raw == env(job, "probe")[names.ENV_RUN]
    assert (spec.kind, spec.run, spec.lane, spec.map) == ("Profile", RUN, "lane-a", "lane-a.agent")
    assert spec.owner.uid == world.WORKLOAD_UID
    assert (spec.owner.kind, spec.owner.name) == ("Deployment", "vllm-a")
    assert spec.window_seconds == 168 * 3600
    assert spec.acceptance.max_cold_share_vs_positional == 0.5
    assert spec.hot_experts_per_layer == 2
    assert spec.other_map_digests == other
    assert spec.frozen_geometry == world.row_map().geometry
    assert spec.server_url == "http://127.0.0.1:8000"
    assert job["metadata"]["annotations"][names.ANNOTATION_RUN_SPEC_HASH] == sha256_digest(
        raw.encode()
    )


def test_a_dollar_in_a_prefix_is_no_variable() -> None:
    tc = world.traffic_class(transcripts=world.s3("transcripts", prefix="$(HOME)/$$x/"))
    raw = env(built(traffic_class=tc), "runner")[names.ENV_RUN]
    assert '"prefix":"$$(HOME)/$$$$x/"' in raw


def test_bytes_of_residency() -> None:
    lane = world.lane(residency={"hotBytes": "2Gi"})
    raw = env(built(lane=lane), "runner")[names.ENV_RUN]
    assert RunSpec.from_bytes(raw.encode(), "env").hot_bytes == 2 << 30


@pytest.mark.parametrize("residency", [{}, {"hotBytes": "1Gi", "hotExpertsPerLayer": 1}])
def test_residency_is_one_of_two(residency: dict[str, Any]) -> None:
    found = refused(world.workload(), lane=world.lane(residency=residency))
    assert found.reason == Reason.INVALID_SPEC


def test_a_window_of_nothing_is_refused() -> None:
    found = refused(world.workload(), traffic_class=world.traffic_class(window="0h"))
    assert found.reason == Reason.INVALID_SPEC
    assert "windowSeconds" in found.message or "window_seconds" in found.message


def test_a_container_that_is_not_there_is_refused() -> None:
    found = refused(world.workload(), lane=world.lane(containerName="sglang"))
    assert found.reason == Reason.CONTAINER_NOT_FOUND
    assert "exporter, vllm" in found.message


def test_block_volumes_are_refused() -> None:
    workload = world.workload()
    world.engine_of(workload)["volumeDevices"] = [{"name": "disk", "devicePath": "/dev/x"}]
    assert refused(workload).reason == Reason.VOLUME_NOT_SHAREABLE


@pytest.mark.parametrize("name", ["runner", "probe"])
def test_names_of_containers_do_not_collide(name: str) -> None:
    workload = world.workload()
    world.engine_of(workload)["name"] = name
    job = built(workload, lane=world.lane(containerName=name))
    there = [item["name"] for item in pod(job)["initContainers"] + pod(job)["containers"]]
    assert there == ["fetch-model", "probe", f"lane-{name}", "runner"]


def test_the_workload_is_not_changed() -> None:
    workload = world.workload()
    before = copy.deepcopy(workload)
    built(workload)
    assert workload == before
