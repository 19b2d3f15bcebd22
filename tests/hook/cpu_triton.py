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


def _widened(handle: Any) -> Any:
    """A bf16 operand as fp32 with the same values; others as they are."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(handle: Any) -> Any:
    """An fp32 operand as bf16, to nearest, ties to even, as GPUs round."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    bits = np.ascontiguousarray(handle.data).view(np.uint32)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    near = np.where(np.isnan(handle.data), (bits >> 16) | 0x40, near)
    return TensorHandle(near.astype(np.uint16), tl.bfloat16)


def _mend_bf16() -> None:
    """The interpreter multiplies bf16 as the integers of their bits and cuts off fp32: mended."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *args)

    def cast_impl(self: Any, handle: Any, kind: Any) -> Any:
        pair = (handle.dtype.scalar, kind.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return _widened(handle)
        if pair == (tl.float32, tl.bfloat16):
            return _rounded(handle)
        return cast(self, handle, kind)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


sys.meta_path.insert(0, _CpuBackend())
_mend_bf16()
