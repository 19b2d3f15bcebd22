"""The hook inside a worker: one session around the life of the engine's model runner.

Whatever goes wrong is undone, reported as a reason, and leaves the engine serving as if the hook
were not there.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_capture as capture
    from . import expertmaps_hook_env as env
    from . import expertmaps_hook_installers as installers
    from . import expertmaps_hook_map as rowmap
    from . import expertmaps_hook_model as model
    from . import expertmaps_hook_runner as runners
    from . import expertmaps_hook_selftest as selftest
    from .expertmaps_hook_autotune import Watch
    from .expertmaps_hook_counts import Counters
    from .expertmaps_hook_cuda import CudaResidency
    from .expertmaps_hook_device import CudaDevice
    from .expertmaps_hook_http import Published, publish, report_failure
    from .expertmaps_hook_plan import Bytes
    from .expertmaps_hook_rehome import Residency
    from .expertmaps_hook_status import Status, compile_evidence
else:
    import expertmaps_hook_capture as capture
    import expertmaps_hook_env as env
    import expertmaps_hook_installers as installers
    import expertmaps_hook_map as rowmap
    import expertmaps_hook_model as model
    import expertmaps_hook_runner as runners
    import expertmaps_hook_selftest as selftest
    from expertmaps_hook_autotune import Watch
    from expertmaps_hook_counts import Counters
    from expertmaps_hook_cuda import CudaResidency
    from expertmaps_hook_device import CudaDevice
    from expertmaps_hook_http import publish, report_failure
    from expertmaps_hook_plan import Bytes
    from expertmaps_hook_rehome import Residency
    from expertmaps_hook_status import Status, compile_evidence

ATTRIBUTE = "_expertmaps_session"
WRITERS = (
    "reload_weights", "start_weight_update", "start_draft_weight_update", "update_weights",
    "reset_weights",
)  # fmt: skip
READERS = ("compute_weight_checksums", "save_sharded_state", "save_tensorized_model")
"""Calls of a worker that read all weights: rows that left the device are not where they look."""


class Session:
    """One worker's hook."""

    def __init__(self, worker: Any, settings: env.Settings, version: str) -> None:
        self.worker, self.settings = worker, settings
        self.status = Status(settings, version, int(worker.rank), _pod_ranks(worker))
        self.residency: Residency | CudaResidency | None = None
        self.capture: capture.Capture | None = None
        self._undo: list[Any] = []
        self._warm = self._closed = self._loaded = False
        self._pid = os.getpid()
        self._ended: capture.Capture | None = None
        self._runner_name = runners.runner_name(worker)
        self.status.set(runner=self._runner_name)
        self.autotune = Watch(os.environ)
        self.status.provide("compile", lambda: {**compile_evidence(), **self.autotune.wire()})
        self.publisher: Published | None = publish(self.status, settings)
        atexit.register(self.close)

    @property
    def runner(self) -> Any:
        return self.worker.model_runner

    def load(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The engine's own load, then the hook's work. Only the engine's errors leave this."""
        shapes: dict[int, list[Any]] = {}
        try:
            if self.settings.problem is not None:
                raise self.settings.problem
            if self.settings.mode != "off":
                self._check()
        except Exception as error:
            self._fail(error)
        if self.settings.mode == "off" or self.status.phase == "Failed":
            result = original(*args, **kwargs)
        else:
            with ExitStack() as recording:
                try:
                    shapes = recording.enter_context(model.recorded_shapes())
                except Exception as error:
                    self._fail(error)
                result = original(*args, **kwargs)
        try:
            if self.settings.mode != "off" and self.status.phase != "Failed":
                self._hook(shapes)
        except Exception as error:
            self._fail(error)
        try:
            self._follow()
        except Exception as error:
            self._fail(error)
        self._loaded = True
        return result

    def _check(self) -> None:
        """What is known before weights are loaded."""
        model.check_config(self.worker.vllm_config)
        if self.settings.mode == "count":
            capture.check_config(self.worker.vllm_config, self._runner_name)

    def _hook(self, shapes: dict[int, list[Any]]) -> None:
        config, loaded = self.worker.vllm_config, self.runner.get_model()
        layers = model.find_layers(loaded)
        model.check_layers(layers, runners.device_kind(self.runner))
        layers = model.on_device(layers, self.runner.device.type)
        shape = model.model_shape(layers, model.draft_layers(self.runner, layers))
        fingerprint = model.fingerprint(config, layers, shapes)
        self.status.set(fingerprint=fingerprint, geometry=model.wire_geometry(shape))
        if self.settings.mode == "serve":
            self._serve(layers, shape, fingerprint)
        else:
            self._count(loaded, shape)

    def _serve(
        self, layers: list[model.MoeLayer], shape: rowmap.ModelShape, fingerprint: dict[str, str]
    ) -> None:
        raw = rowmap.read_map(self.settings.map_path)
        chosen = rowmap.parse_map(raw, shape, fingerprint)
        residency = self._residency(layers, chosen.hot)
        # Before the move: what a failed move could not put back is tried again, and told.
        self._undo.append(residency.undo)
        most = int(self.worker.vllm_config.scheduler_config.max_num_batched_tokens)
        residency.move(functools.partial(selftest.probe, most=most))
        self.residency = residency
        self._refuse_writers()
        kernels = installers.wire_kernels(item.container for item in layers)
        said = {**residency.wire(), "kernels": kernels}
        self.status.set(
            generation=1, mapDigest=chosen.digest, rowSetDigest=chosen.row_set_digest,
            residency=said,
        )  # fmt: skip
        env.logger.info("expertmaps: map %s in force: %s", chosen.digest, said)

    def _residency(
        self, layers: list[model.MoeLayer], hot: Mapping[int, tuple[int, ...]]
    ) -> Residency | CudaResidency:
        """Where the rows go on this worker's device. Raises HookError with nothing changed."""
        settings, device = self.settings, self.runner.device
        if device.type == "cpu":
            return Residency(layers, hot, settings.cold_directory, settings.tier)
        model.check_device_config(self.worker.vllm_config, layers, os.environ)
        memory = CudaDevice(device)
        guard = Bytes(settings.device_guard, settings.host_guard)
        return CudaResidency(layers, hot, memory, memory.pinned(), guard)

    def _refuse_writers(self) -> None:
        """No weight changes under the hook: moved rows are read-only, and counts belong to the
        weights whose fingerprint was read. Nor is one read where only its shell is left."""
        away = self.settings.mode == "serve" and self.runner.device.type != "cpu"
        for name in WRITERS + READERS * away:
            self._stand_in(name, functools.partial(_refuse_call, name))
        if away:
            # The engine has paused its scheduler by then: an error here would leave it paused.
            self._stand_in("sleep", _no_sleep)

    def _stand_in(self, name: str, call: Any) -> None:
        """Put a call over one of the worker's, where it has that."""
        if hasattr(self.worker, name):
            setattr(self.worker, name, call)
            self._undo.append(functools.partial(delattr, self.worker, name))

    def _count(self, loaded: Any, shape: rowmap.ModelShape) -> None:
        # Compiled code looks the capture up at each step: once loaded it stays, and only writes.
        self._undo.append(lambda: None if self._loaded else capture.unbind(loaded))
        capturer = capture.bind(loaded, self.worker.vllm_config)
        counters = Counters(
            capturer.device_buffer, shape.experts, shape.top_k, self.settings.capture_slots
        )
        try:
            self.capture = capture.Capture(counters, self.settings.directory / capture.FOLDER)
        except OSError as error:
            raise env.HookError("DirectoryUnusable", str(error)) from error
        self._refuse_writers()
        self.status.provide("counting", self.capture.wire)

    def _follow(self) -> None:
        """Watch steps and the end of warm-up."""
        runner, worker = self.runner, self.worker
        execute, warm_up = runner.execute_model, worker.compile_or_warm_up_model

        @functools.wraps(execute)
        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            # V2 sends its dummy runs, and before it serves whole made-up requests, through here.
            if not self._warm or runners.is_dummy(args, kwargs):
                return execute(scheduled, *args, **kwargs)
            self._before(scheduled)
            result = execute(scheduled, *args, **kwargs)
            self._after(scheduled)
            return result

        @functools.wraps(warm_up)
        def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
            result = warm_up(*args, **kwargs)
            self._warmed_up()
            return result

        runner.execute_model = execute_model
        worker.compile_or_warm_up_model = compile_or_warm_up_model

    def _before(self, scheduled: Any) -> None:
        if self.capture is not None:
            try:
                self.capture.before(scheduled)
            except Exception as error:
                self._fail(error, "CountFailed")

    def _after(self, scheduled: Any) -> None:
        if self.capture is not None:
            try:
                rows = scheduled.total_num_scheduled_tokens
                order = runners.batch_order(self.runner, self._runner_name) if rows else []
                self.capture.after(scheduled, order)
            except Exception as error:
                self._fail(error, "CountFailed")
        if scheduled.total_num_scheduled_tokens:
            self.status.stepped()

    def _warmed_up(self) -> None:
        try:
            if self.residency is not None:
                self.residency.evict()  # the profiling run has read rows of every expert
        except Exception:
            env.logger.warning("expertmaps: cold pages not dropped", exc_info=True)
        try:
            if self.capture is not None:
                self.capture.ledger.replayed = runners.replayed_tokens(self.runner)
        except Exception as error:
            self._fail(error, "CountFailed")
        self._warm = True
        try:
            self.autotune.look(self.runner)
        except Exception:
            env.logger.warning("expertmaps: no evidence of the autotuner", exc_info=True)
        self.status.ready()
        if self.publisher is not None:
            self.publisher.changed()

    def _fail(self, error: BaseException, reason: str = "HookFailed") -> None:
        """Undo everything and say why."""
        failure = env.as_failure(error, reason)
        env.logger.error(
            "expertmaps: serving without the hook: %s", failure,
            exc_info=None if isinstance(error, env.HookError) else error,
        )  # fmt: skip
        self.status.fail(failure)
        self.status.set(generation=0, mapDigest=None, rowSetDigest=None, residency=None)
        if self.capture is not None:
            # What was counted stays in the status; nothing more is.
            self.capture.end(failure.reason)
            self._ended, self.capture = self.capture, None
        self._take_back()
        self.residency = None
        if self.publisher is not None:
            self.publisher.changed()

    def _take_back(self) -> None:
        """Undo everything. What cannot be undone is told, and no weight update may write to it."""
        complete = True
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                env.logger.exception("expertmaps: undo")
                self.status.add(env.as_failure(error, "UndoFailed"))
                complete = False
        if not complete:
            self._refuse_writers()

    def close(self) -> None:
        """The engine stops: write what is there."""
        if self._closed or os.getpid() != self._pid:  # a forked child ends: not the engine
            return
        self._closed = True
        atexit.unregister(self.close)  # else it keeps the model of an engine that has ended
        if self.capture is not None:
            self.capture.end("Stopped")
        for counted in filter(None, (self.capture, self._ended)):
            counted.join()
        if self.status.phase != "Failed":
            self.status.set(phase="Stopped")
        if self.publisher is not None:
            self.publisher.close()


def _pod_ranks(worker: Any) -> int:
    """Workers in this pod that belong together."""
    parallel = getattr(getattr(worker, "vllm_config", None), "parallel_config", None)
    return int(getattr(parallel, "local_world_size", 1))


def _refuse_call(name: str, *args: Any, **kwargs: Any) -> Any:
    reason = "WeightReloadUnsupported" if name in WRITERS else "WeightReadUnsupported"
    raise RuntimeError(
        f"expertmaps: {reason}: {name} while the hook serves a map or counts; "
        "start the engine with EXPERTMAPS_MODE=off for it"
    )


def _no_sleep(*args: Any, **kwargs: Any) -> None:
    """As vLLM's own does on a CPU. With sleep mode, whose memory can go, no map is served."""
    env.logger.warning("expertmaps: SleepModeUnsupported: the engine pauses and frees no memory")


def _report(error: Exception) -> None:
    """A worker without a session: say why where the session would have spoken."""
    env.logger.error("expertmaps: no session; serving without the hook", exc_info=error)
    try:
        report_failure(error)
    except Exception:
        env.logger.exception("expertmaps: nor a status")


def patch_worker(worker_class: Any, version: str) -> None:
    """Wrap Worker.load_model and Worker.shutdown. Raises HookError when they are not there."""
    if not (
        callable(getattr(worker_class, "load_model", None))
        and callable(getattr(worker_class, "shutdown", None))
    ):
        raise env.HookError("HookUnsupported", "vLLM's Worker has no load_model or shutdown")
    load, shutdown = worker_class.load_model, worker_class.shutdown

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            session = Session(self, env.settings(), version)
            setattr(self, ATTRIBUTE, session)
        except Exception as error:
            _report(error)
            return load(self, *args, **kwargs)
        return session.load(functools.partial(load, self), *args, **kwargs)

    @functools.wraps(shutdown)
    def shut_down(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = getattr(self, ATTRIBUTE, None)
        if session is not None:
            try:
                session.close()
            except Exception:
                env.logger.exception("expertmaps: not closed")
        return shutdown(self, *args, **kwargs)

    worker_class.load_model, worker_class.shutdown = load_model, shut_down
