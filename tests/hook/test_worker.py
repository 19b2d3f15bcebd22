"""The session around a worker, on stand-ins: phases, failures, what is undone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import expertmaps_hook_env as env
import expertmaps_hook_model as model
import expertmaps_hook_worker as worker_module
import pytest

from rowmap_jobs.formats import status as contract
from tests.api.apiserver import wait_for

STEP = SimpleNamespace(total_num_scheduled_tokens=3)
EMPTY = SimpleNamespace(total_num_scheduled_tokens=0)


class Runner:
    device = SimpleNamespace(type="cpu")
    input_batch = SimpleNamespace(req_ids=["r"], num_reqs=1)

    def get_model(self) -> object:
        return self

    def modules(self) -> list[object]:
        return []

    def execute_model(self, scheduled: Any) -> str:
        return f"ran {scheduled.total_num_scheduled_tokens}"


def worker_class() -> type[Any]:
    class Worker:
        rank = 0
        use_v2_model_runner = False
        vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=8192))
        down = False

        def load_model(self) -> str:
            self.model_runner = Runner()
            return "loaded"

        def compile_or_warm_up_model(self) -> str:
            self.model_runner.execute_model(STEP)
            return "warm"

        def reload_weights(self) -> str:
            return "reloaded"

        def shutdown(self) -> str:
            self.down = True
            return "down"

    return Worker


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("EXPERTMAPS_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("EXPERTMAPS_STATUS_PORT", raising=False)

    def begin(mode: str, **steps: Any) -> Any:
        monkeypatch.setenv("EXPERTMAPS_MODE", mode)
        monkeypatch.setattr(model, "check_config", steps.get("check", lambda _: None))
        monkeypatch.setattr(worker_module.capture, "check_config", lambda *_: None)
        if "hook" in steps:
            monkeypatch.setattr(worker_module.Session, "_hook", steps["hook"])
        monkeypatch.setattr(model, "recorded_shapes", steps.get("shapes", _Nothing))
        made = worker_class()
        worker_module.patch_worker(made, "0.32.0")
        started = made()
        assert started.load_model() == "loaded"
        return started

    return begin


class _Nothing:
    def __enter__(self) -> dict[int, Any]:
        return {}

    def __exit__(self, *_: object) -> None:
        return None


def session(worker: Any) -> worker_module.Session:
    found: worker_module.Session = getattr(worker, worker_module.ATTRIBUTE)
    return found


def state(worker: Any) -> contract.HookStatus:
    return contract.parse(session(worker).status.to_bytes(), "status")


def test_phases_of_an_engine_that_is_only_watched(start: Any, tmp_path: Path) -> None:
    worker = start("off")
    assert state(worker).phase == "Loading"
    assert worker.compile_or_warm_up_model() == "warm"
    assert (state(worker).phase, state(worker).steps) == ("Ready", 0)
    assert worker.model_runner.execute_model(EMPTY) == "ran 0"
    assert state(worker).phase == "Ready"
    assert worker.model_runner.execute_model(STEP) == "ran 3"
    assert (state(worker).phase, state(worker).steps) == ("Serving", 1)
    assert worker.shutdown() == "down" and worker.down
    written = json.loads((tmp_path / "run" / "status.json").read_text())
    assert written["phase"] == "Stopped"


def test_a_refusal_before_the_load_is_served_and_kept(start: Any) -> None:
    def refuse(_: Any) -> None:
        raise env.HookError("EplbUnsupported", "moves experts")

    worker = start("serve", check=refuse, hook=lambda *_: pytest.fail("hooked"))
    worker.compile_or_warm_up_model()
    assert worker.model_runner.execute_model(STEP) == "ran 3"
    found = state(worker)
    assert found.phase == "Failed" and found.error is not None
    assert (found.error.reason, found.steps) == ("EplbUnsupported", 1)
    assert found.boot_seconds is not None


def test_a_rank_above_0_writes_a_file_of_its_own(
    start: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    original = worker_class

    def second() -> type[Any]:
        made = original()
        made.rank = 1
        made.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=2))
        return made

    monkeypatch.setitem(globals(), "worker_class", second)
    worker = start("off")
    worker.compile_or_warm_up_model()
    worker.shutdown()  # writes what is left to write
    names = [path.name for path in (tmp_path / "run").iterdir()]
    assert names == ["status-rank1.json"]
    found = contract.parse((tmp_path / "run" / names[0]).read_bytes(), "rank 1")
    assert (found.rank, found.phase) == (1, "Stopped")


def test_rank_0_of_two_is_ready_with_the_other(
    start: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    original = worker_class

    def first() -> type[Any]:
        made = original()
        made.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=2))
        return made

    monkeypatch.setitem(globals(), "worker_class", first)
    worker = start("off")
    worker.compile_or_warm_up_model()
    own = state(worker)
    assert own.phase == "Loading"
    other = {**session(worker).status.wire(), "rank": 1, "phase": "Ready"}
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "status-rank1.json").write_text(json.dumps(other))
    assert state(worker).phase == "Ready"


def test_autotuner_files_written_during_warm_up_are_evidence(
    start: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", str(tmp_path / "tuned"))
    worker = start("off")
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "autotune_configs.json").write_text("{}")
    worker.compile_or_warm_up_model()
    found = state(worker).compile
    assert found is not None
    assert (found.autotune_files, found.autotune_written, found.hit) == (1, 1, False)


@pytest.mark.parametrize("mode", ["serve", "count"])
def test_any_exception_is_a_named_failure(start: Any, mode: str) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("x")

    found = state(start(mode, hook=broken))
    assert found.error is not None
    assert (found.phase, found.error.reason) == ("Failed", "HookFailed")
    assert "ZeroDivisionError" in found.error.message


def test_an_engine_whose_loader_is_another_serves_unhooked(start: Any) -> None:
    def shapes() -> Any:
        raise AttributeError("no process_weights_after_loading")

    found = state(start("serve", shapes=shapes, hook=lambda *_: pytest.fail("hooked")))
    assert found.error is not None
    assert (found.phase, found.error.reason) == ("Failed", "HookFailed")


def test_what_breaks_beside_the_work_breaks_nothing_else(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start("off")
    session(worker).autotune = SimpleNamespace(  # type: ignore[assignment]
        look=lambda *_: 1 / 0, wire=dict
    )
    monkeypatch.setattr(worker_module.Session, "close", lambda _: 1 / 0)
    assert worker.compile_or_warm_up_model() == "warm"
    assert state(worker).phase == "Ready"
    assert worker.shutdown() == "down" and worker.down


def test_a_worker_without_a_session_says_why(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no home")

    monkeypatch.setattr(worker_module, "Watch", broken)
    worker = start("serve")
    assert worker.model_runner.execute_model(STEP) == "ran 3"
    target = tmp_path / "run" / "status.json"
    wait_for("the status", target.exists, 30)
    found = contract.parse(target.read_bytes(), "status")
    assert found.error is not None
    assert (found.phase, found.error.reason) == ("Failed", "HookFailed")
    assert "no home" in found.error.message


@pytest.mark.parametrize(
    ("kind", "hip", "expected"),
    [("cpu", None, "cpu"), ("cuda", None, "cuda"), ("cuda", "6.4", "rocm"), ("xpu", None, "xpu")],
)
def test_rocm_is_not_taken_for_cuda(
    monkeypatch: pytest.MonkeyPatch, kind: str, hip: str | None, expected: str
) -> None:
    torch = SimpleNamespace(version=SimpleNamespace(hip=hip))
    monkeypatch.setitem(sys.modules, "torch", torch)
    runner = SimpleNamespace(device=SimpleNamespace(type=kind))
    assert worker_module.runners.device_kind(runner) == expected


def test_an_unusable_setting_is_reported(start: Any) -> None:
    found = state(start("rowmap"))
    assert found.error is not None
    assert (found.mode, found.phase, found.error.reason) == ("off", "Failed", "SettingInvalid")


class Rows:
    """A residency that notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def move(self, _: Any) -> None:
        self.done.append("move")

    def evict(self) -> None:
        self.done.append("evict")

    def undo(self) -> None:
        self.done.append("undo")

    def wire(self) -> dict[str, Any]:
        return {
            "hotRows": 1, "coldRows": 1, "hotBytes": 1, "coldBytes": 1, "lockedBytes": 0,
            "tier": "overlay",
        }  # fmt: skip


DIGEST = "sha256:" + "c" * 64


def serving(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    chosen = SimpleNamespace(digest=DIGEST, row_set_digest=DIGEST, hot={0: (0,)})
    monkeypatch.setattr(worker_module.rowmap, "read_map", lambda _: b"")
    monkeypatch.setattr(worker_module.rowmap, "parse_map", lambda *_: chosen)
    monkeypatch.setattr(worker_module, "Residency", lambda *_: rows)

    def hook(self: worker_module.Session, _: Any) -> None:
        self._serve([], SimpleNamespace(), {})  # type: ignore[arg-type]

    return hook


def test_served_rows_are_reported_evicted_and_guarded(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows()
    worker = start("serve", hook=serving(rows, monkeypatch))
    worker.compile_or_warm_up_model()
    found = state(worker)
    assert (found.phase, found.generation, found.map_digest) == ("Ready", 1, DIGEST)
    assert found.residency is not None and rows.done == ["move", "evict"]
    with pytest.raises(RuntimeError, match="WeightReloadUnsupported"):
        worker.reload_weights()


def test_a_late_failure_puts_rows_and_methods_back(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Rows()

    def broken(_: worker_module.Session) -> None:
        raise AttributeError("no seam")

    monkeypatch.setattr(worker_module.Session, "_follow", broken)
    worker = start("serve", hook=serving(rows, monkeypatch))
    found = state(worker)
    assert (found.phase, found.generation, found.map_digest) == ("Failed", 0, None)
    assert found.residency is None
    assert rows.done == ["move", "undo"]
    assert worker.reload_weights() == "reloaded"


def test_rows_that_cannot_be_put_back_are_told_and_stay_guarded(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(Rows):
        def move(self, _: Any) -> None:
            raise env.HookError("SelfTestFailed", "layer 3")

        def undo(self) -> None:
            self.done.append("undo")
            raise env.HookError("UndoIncomplete", "layers [0, 1] are served from their tiers still")

    rows = Stuck()
    worker = start("serve", hook=serving(rows, monkeypatch))
    found = state(worker)
    assert found.error is not None and rows.done == ["undo"]
    assert (found.phase, found.generation, found.error.reason) == ("Failed", 0, "SelfTestFailed")
    assert found.error.message == (
        "layer 3; UndoIncomplete: layers [0, 1] are served from their tiers still"
    )
    with pytest.raises(RuntimeError, match="WeightReloadUnsupported"):
        worker.reload_weights()


def test_the_device_decides_where_rows_go(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU gets tiers with the guards of the settings, a CPU the mapped file."""
    made: dict[str, tuple[Any, ...]] = {}
    device = SimpleNamespace(pinned=lambda: "pinned")
    monkeypatch.setattr(worker_module, "CudaDevice", lambda _: device)
    checked: list[Any] = []
    monkeypatch.setattr(model, "check_device_config", lambda *given: checked.append(given[1]))
    for name in ("CudaResidency", "Residency"):
        monkeypatch.setattr(
            worker_module, name, lambda *found, name=name: made.setdefault(name, found)
        )
    monkeypatch.setenv("EXPERTMAPS_DEVICE_GUARD_BYTES", "5")
    monkeypatch.setenv("EXPERTMAPS_COLD_DIR", "/cold")
    started = session(start("off"))
    started._residency([], {0: (1,)})
    assert made.pop("Residency") == ([], {0: (1,)}, Path("/cold"), "overlay")
    assert not checked
    started.runner.device = SimpleNamespace(type="cuda")
    started._residency([], {0: (1,)})
    assert made == {"CudaResidency": ([], {0: (1,)}, device, "pinned", (5, 10 << 30))}
    assert checked == [[]]


def test_a_gpu_kernel_that_nothing_splits_is_served_unhooked_and_named(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = SimpleNamespace(
        moe_config=SimpleNamespace(num_local_experts=8, num_experts=8),
        expert_map_manager=None,
        quant_method=type("HummingMoEMethod", (), {"moe_kernel": None})(),
    )
    layer = model.MoeLayer(3, SimpleNamespace(routed_experts=container, is_monolithic=False))
    monkeypatch.setattr(model, "find_layers", lambda _: [layer])
    monkeypatch.setattr(Runner, "device", SimpleNamespace(type="cuda"))
    worker = start("serve")
    found = state(worker)
    assert found.error is not None
    assert (found.phase, found.error.reason) == ("Failed", "HookUnsupported")
    assert "kernel of layer 3: found HummingMoEMethod" in found.error.message
    assert worker.model_runner.execute_model(STEP) == "ran 3"


@pytest.mark.parametrize("at", ["plan", "move"])
@pytest.mark.parametrize("reason", ["DeviceMemoryShort", "HostMemoryShort", "PinFailed"])
def test_a_shortage_on_a_gpu_is_served_unhooked_and_named(
    start: Any, monkeypatch: pytest.MonkeyPatch, reason: str, at: str
) -> None:
    class Short(Rows):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            if at == "plan":
                raise env.HookError(reason, "needs 9 bytes, found 5")

        def move(self, _: Any) -> None:
            raise env.HookError(reason, "needs 9 bytes, found 5")

    hook = serving(Rows(), monkeypatch)
    monkeypatch.setattr(worker_module, "CudaResidency", Short)
    monkeypatch.setattr(model, "check_device_config", lambda *_: None)
    monkeypatch.setattr(worker_module, "CudaDevice", lambda _: SimpleNamespace(pinned=object))
    monkeypatch.setattr(Runner, "device", SimpleNamespace(type="cuda"))
    worker = start("serve", hook=hook)
    found = state(worker)
    assert found.error is not None and found.error.message == "needs 9 bytes, found 5"
    assert (found.phase, found.generation, found.error.reason) == ("Failed", 0, reason)
    assert found.residency is None and found.map_digest is None
    assert worker.reload_weights() == "reloaded"
    assert worker.compile_or_warm_up_model() == "warm"
    assert worker.model_runner.execute_model(STEP) == "ran 3"


class Capture:
    """Counting that breaks at its second step."""

    def __init__(self) -> None:
        self.steps, self.closed = 0, ""
        self.ledger = SimpleNamespace(replayed=0)

    def before(self, _: Any) -> None:
        self.steps += 1

    def after(self, _: Any, order: list[str]) -> None:
        assert order == ["r"]
        if self.steps == 2:
            raise RuntimeError("the batch is not what the scheduler planned")

    def end(self, reason: str) -> None:
        self.closed = reason

    def join(self) -> None:
        """Nothing to wait for."""


def test_counting_that_breaks_leaves_the_engine_running(start: Any) -> None:
    capture = Capture()
    undone: list[int] = []

    def hook(self: worker_module.Session, _: Any) -> None:
        self.capture = capture  # type: ignore[assignment]
        self._undo.append(lambda: undone.append(1))

    worker = start("count", hook=hook)
    worker.compile_or_warm_up_model()
    assert state(worker).phase == "Ready"
    for _ in range(3):
        assert worker.model_runner.execute_model(STEP) == "ran 3"
    found = state(worker)
    assert found.error is not None and found.error.reason == "CountFailed"
    assert (found.phase, capture.closed, capture.steps) == ("Failed", "CountFailed", 2)
    assert undone == [1]


original = worker_module.runners.batch_order


class SecondRunner(Runner):
    """V2, as far as the hook looks at it: the batch is there until tokens are sampled."""

    input_batch = None
    execute_model_state: Any = None
    kv_cache_config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(prefix_replay_tokens=n))
                         for n in (0, 128)]
    )  # fmt: skip

    def execute_model(self, scheduled: Any, _: Any = None, dummy_run: bool = False) -> str:
        names = ["dummy"] if dummy_run else ["b", "a"]
        self.execute_model_state = SimpleNamespace(input_batch=SimpleNamespace(req_ids=names))
        return "ran"


class Noted:
    """Counting that notes what it is given."""

    def __init__(self) -> None:
        self.orders: list[list[str]] = []
        self.cleared = 0
        self.ledger = SimpleNamespace(replayed=0)

    def before(self, _: Any) -> None:
        self.cleared += 1

    def after(self, _: Any, order: list[str]) -> None:
        self.orders.append(order)

    def end(self, reason: str) -> None:
        """Nothing to write."""

    def join(self) -> None:
        """Nor to wait for."""


@pytest.fixture
def second(start: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Noted]:
    """A worker that counts on the V2 runner, and its counting."""
    noted, original = Noted(), worker_class

    def made() -> type[Any]:
        found = original()
        found.use_v2_model_runner = True
        return found

    def hook(self: worker_module.Session, _: Any) -> None:
        self.capture = noted  # type: ignore[assignment]

    monkeypatch.setitem(globals(), "worker_class", made)
    monkeypatch.setitem(globals(), "Runner", SecondRunner)
    return start("count", hook=hook), noted


def test_v2_rows_are_in_the_order_of_its_own_batch(second: tuple[Any, Noted]) -> None:
    worker, noted = second
    worker.compile_or_warm_up_model()
    worker.model_runner.execute_model(STEP)
    worker.model_runner.execute_model(EMPTY)
    found = state(worker)
    assert noted.orders == [["b", "a"], []]
    assert (found.runner, found.phase, found.steps, found.error) == ("v2", "Serving", 1, None)
    assert noted.ledger.replayed == 128


def test_v2_warm_up_and_dummy_steps_are_not_counted(second: tuple[Any, Noted]) -> None:
    """V2 sends made-up requests through execute_model before it is ready, and dummies later."""
    worker, noted = second
    worker.model_runner.execute_model(STEP)
    worker.compile_or_warm_up_model()
    worker.model_runner.execute_model(STEP, dummy_run=True)
    worker.model_runner.execute_model(STEP, None, True)
    assert (noted.orders, noted.cleared, state(worker).steps) == ([], 0, 0)
    assert state(worker).phase == "Ready"


def test_v2_without_a_batch_stops_counting_by_name(
    second: tuple[Any, Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, noted = second
    worker.compile_or_warm_up_model()
    monkeypatch.setattr(
        worker_module.runners, "batch_order",
        lambda _, name: original(SimpleNamespace(execute_model_state=None), name),
    )  # fmt: skip
    assert worker.model_runner.execute_model(STEP) == "ran"
    found = state(worker)
    assert found.error is not None and found.error.reason == "CountFailed"
    assert noted.orders == []


def test_a_cache_that_the_hook_cannot_read_stops_counting_alone(second: tuple[Any, Noted]) -> None:
    worker, noted = second
    worker.model_runner.kv_cache_config = SimpleNamespace(kv_cache_groups=[object()])
    assert worker.compile_or_warm_up_model() == "warm"
    assert worker.model_runner.execute_model(STEP) == "ran"
    found = state(worker)
    assert found.error is not None and found.error.reason == "CountFailed"
    assert (found.phase, found.steps, noted.orders) == ("Failed", 1, [])


def test_the_draft_model_is_found_on_both_runners() -> None:
    find, model_ = worker_module.runners.draft_model, object()
    assert find(SimpleNamespace(drafter=SimpleNamespace(model=model_))) is model_
    assert find(SimpleNamespace(speculator=SimpleNamespace(model=model_))) is model_
    assert find(SimpleNamespace(speculator=None)) is None
    assert find(SimpleNamespace(drafter=SimpleNamespace())) is None


def test_the_engines_own_errors_pass_through(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMAPS_MODE", "off")
    made = worker_class()
    made.load_model = lambda self: 1 / 0  # type: ignore[attr-defined]
    worker_module.patch_worker(made, "0.32.0")
    with pytest.raises(ZeroDivisionError):
        made().load_model()


def test_the_status_file_follows_by_itself(start: Any, tmp_path: Path) -> None:
    worker = start("off")
    worker.compile_or_warm_up_model()
    worker.model_runner.execute_model(STEP)
    target = tmp_path / "run" / "status.json"

    def serving() -> bool:
        return target.exists() and json.loads(target.read_text())["phase"] == "Serving"

    wait_for("the new phase", serving, 30)


def test_a_forked_child_that_ends_does_not_end_the_engines_status(
    start: Any, tmp_path: Path
) -> None:
    worker = start("off")
    worker.compile_or_warm_up_model()
    child = os.fork()
    if not child:
        try:
            session(worker).close()
        finally:
            os._exit(session(worker)._closed)  # 1: it took itself for the engine
    assert os.waitpid(child, 0)[1] == 0
    assert state(worker).phase == "Ready"
    target = tmp_path / "run" / "status.json"
    wait_for("the status", target.exists, 30)
    assert json.loads(target.read_text())["phase"] != "Stopped"
    worker.shutdown()
    assert json.loads(target.read_text())["phase"] == "Stopped"


@pytest.mark.parametrize(("loaded", "bound"), [(False, None), (True, "kept")])
def test_a_capture_that_compiled_code_may_look_up_stays(
    start: Any, monkeypatch: pytest.MonkeyPatch, loaded: bool, bound: str | None
) -> None:
    """Taken off before the engine compiled; after that only its rows are dropped."""
    router = SimpleNamespace(capture_fn="kept")
    monkeypatch.setattr(Runner, "modules", lambda _: [SimpleNamespace(router=router)])
    monkeypatch.setattr(worker_module.capture, "bind", lambda *_: SimpleNamespace(device_buffer=1))
    monkeypatch.setattr(worker_module, "Counters", lambda *_: None)
    monkeypatch.setattr(
        worker_module.capture,
        "Capture",
        lambda *_: SimpleNamespace(wire=dict, end=lambda _: None, join=lambda: None),
    )

    def hook(self: worker_module.Session, _: Any) -> None:
        self._count(self.runner, SimpleNamespace(experts={}, top_k=1))  # type: ignore[arg-type]
        if not loaded:
            raise RuntimeError("found late in the load")

    worker = start("count", hook=hook)
    if loaded:
        session(worker)._fail(RuntimeError("broken"), "CountFailed")
    assert session(worker).status.phase == "Failed"
    assert router.capture_fn == bound


@pytest.mark.parametrize(
    ("kind", "checksum", "sleep"),
    [("cpu", "computed", "slept"), ("cuda", RuntimeError, None)],
)
def test_what_reads_all_weights_or_puts_them_to_sleep(
    start: Any, monkeypatch: pytest.MonkeyPatch, kind: str, checksum: Any, sleep: Any
) -> None:
    """On CUDA a moved layer's own tensors are shells. An engine that sleeps has paused already."""
    original = worker_class

    def more() -> type[Any]:
        made = original()
        made.compute_weight_checksums = lambda _: "computed"
        made.sleep = lambda _, level: "slept"
        return made

    monkeypatch.setitem(globals(), "worker_class", more)
    monkeypatch.setattr(Runner, "device", SimpleNamespace(type=kind))
    monkeypatch.setattr(worker_module.Session, "_residency", lambda *_: rows)
    rows = Rows()
    worker = start("serve", hook=serving(rows, monkeypatch))
    assert worker.sleep(level=1) == sleep
    if checksum is RuntimeError:
        with pytest.raises(RuntimeError, match="WeightReadUnsupported: compute_weight_checksums"):
            worker.compute_weight_checksums()
    else:
        assert worker.compute_weight_checksums() == checksum
