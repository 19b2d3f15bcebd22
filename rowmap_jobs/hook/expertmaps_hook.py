"""Entry point of the expertmaps hook for vLLM (`vllm.general_plugins`).

vLLM calls `register` in every process it starts: API server, engine core, workers and the helper
that inspects models. It stays light there (no torch) and acts only where a worker is imported.
Environment: EXPERTMAPS_MODE (off, serve, count), EXPERTMAPS_MAP, EXPERTMAPS_DIR,
EXPERTMAPS_COLD_DIR, EXPERTMAPS_TIER (overlay, mlock), EXPERTMAPS_STATUS_PORT,
EXPERTMAPS_CAPTURE_SLOTS, EXPERTMAPS_DEVICE_GUARD_BYTES, EXPERTMAPS_HOST_GUARD_BYTES. None of
them is in vLLM's compile hash.
"""

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

WORKER_MODULE = "vllm.v1.worker.gpu_worker"
OWNER_MARK = "EXPERTMAPS_PRIVATE_OWNER"
"""Process that already reports a failure for this engine; inherited by its children."""

logger = logging.getLogger("vllm.expertmaps")
_registered = False


def register() -> None:
    """Arm the hook in this process. Never raises; may be called more than once."""
    global _registered
    if _registered:
        return
    _registered = True
    if not any(os.environ.get(f"EXPERTMAPS_{name}") for name in ("MODE", "DIR", "STATUS_PORT")):
        return  # mounted, but not asked for anything
    try:
        _arm()
    except Exception as error:
        _report(error)


def _arm() -> None:
    # Imported here and by name: a broken module is then a reported failure, and vLLM's helper
    # processes that never ask for anything load this file alone.
    env = importlib.import_module("expertmaps_hook_env")
    importlib.import_module("expertmaps_hook_status").mark_boot()
    version = env.engine_version()
    env.check_engine(version)

    def patch(module: ModuleType) -> None:
        try:
            importlib.import_module("expertmaps_hook_worker").patch_worker(module.Worker, version)
        except Exception as error:
            _report(error)

    when_imported(WORKER_MODULE, patch)


def _report(error: BaseException) -> None:
    """There is no worker to report for: let the first process that fails do it."""
    try:
        owner = os.environ.setdefault(OWNER_MARK, str(os.getpid()))
        if owner == str(os.getpid()):
            importlib.import_module("expertmaps_hook_http").report_failure(error)
    except Exception:
        logger.exception("expertmaps: nothing to report with; serving without the hook")


class _PostImport(importlib.abc.MetaPathFinder):
    """Calls a function with a named module right after its import."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute, function = spec.loader.exec_module, self._function

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call a function with a module now, or as soon as something imports it."""
    module = sys.modules.get(name)
    if module is not None:
        function(module)
    else:
        sys.meta_path.insert(0, _PostImport(name, function))
