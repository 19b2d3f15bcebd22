"""vLLM's Triton kernels on a CPU: the interpreter runs them, and vLLM is told that this is fine.

Stands for the GPU that tests have not. Import it before vLLM.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _CpuBackend(importlib.abc.MetaPathFinder):
    """Adds a backend named "cpu" to triton.backends: vLLM's CPU build asks for one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            execute(module)
            module.backends["cpu"] = module.Backend(compiler=None, driver=_Driver)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def _as_numbers(handle: Any) -> Any:
    """A bf16 operand as fp32 with the same values."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return TensorHandle(wide, tl.float32)


def _mend_dot() -> None:
    """The interpreter multiplies bf16 matrices as the integers of their bits; here as numbers."""
    from triton.runtime.interpreter import InterpreterBuilder

    original = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return original(self, _as_numbers(a), _as_numbers(b), *args)

    InterpreterBuilder.create_dot = create_dot


sys.meta_path.insert(0, _CpuBackend())
_mend_dot()
