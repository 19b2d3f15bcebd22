"""Lets vLLM's V2 model runner start on a CPU: its Triton kernels run in Triton's interpreter.

A stand-in for the accelerator that tests have not: the runner, its scheduler's plans and vLLM's
layers are the real ones, the Triton kernels are interpreted, and nothing here says how they behave
on hardware. Python imports this by its name from a folder on PYTHONPATH, before anything of Triton.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backends(importlib.abc.MetaPathFinder):
    """Adds an active backend for CPUs to Triton's list when it is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            module.backends["cpu"] = module.Backend(compiler=None, driver=_Driver)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Backends())
