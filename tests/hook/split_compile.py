"""The hook's kernels compiled for NVIDIA GPUs, which needs none; for the engine's Python.

`split_compile.py HOOK_FOLDER WORK_FOLDER` prints one line for each architecture.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import expertmaps_hook_kernels as kernels
import plain_experts
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "ids", "slot_of", "hot_ids", "cold_ids", "hot_index", "cold_index", "sorted_ids", "expert_ids",
}  # fmt: skip
ROWS = {"output", "hot_rows", "cold_rows", "a", "b", "c"}


def assembly(function: object, architecture: int, **constants: int) -> str:
    """PTX of a kernel; its machine code is made too."""
    signature = {}
    for name in function.arg_names:  # type: ignore[attr-defined]
        kind = "*i32" if name in POINTERS else "*bf16" if name in ROWS else "i32"
        signature[name] = "constexpr" if name in constants else kind
    for name in {"weights", "scale"} & set(signature):
        signature[name] = "*fp32"
    if "routes" in signature:
        signature["count"] = "*i32"
    source = ASTSource(function, signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


for architecture in (80, 90, 100):
    assembly(kernels.split_kernel, architecture, block=kernels.ID_BLOCK)
    for many in (1, 8):
        text = assembly(kernels.finalize_kernel, architecture, top_k=6, many=many, wide=1024)
        # One rounding a route: a product that is rounded by itself would be another sum.
        assert "fma.rn.f32" in text or "fma.rn.ftz.f32" in text
        assert "mul.f32" not in text and "add.f32" not in text
    assembly(
        plain_experts.grouped_gemm, architecture, top_k=6, weighted=True, block_m=16, block_n=64,
        block_k=64,
    )  # fmt: skip
    print(f"sm_{architecture}", flush=True)
print("done")
