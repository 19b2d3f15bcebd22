"""What preflight says of launches that differ in one thing, without an engine; for vLLM's Python.

`preflight_cases.py HOOK_FOLDER MODEL WORK_FOLDER`: prints one JSON object, an answer by case. Each
is compared with the same plain launch in one process, so options that torch reads on import are
patched where torch keeps them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, sys.argv[1])

import expertmaps_hook_preflight as preflight
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from vllm.config.multimodal import MultiModalConfig

WORK = Path(sys.argv[3])
ARGUMENTS = [sys.argv[2], "--max-model-len", "1024"]
BASE = {
    "HOME": str(WORK / "home"), "XDG_CACHE_HOME": None,
    "VLLM_CACHE_ROOT": None, "TORCHINDUCTOR_CACHE_DIR": None, "TRITON_CACHE_DIR": None,
    "TRITON_HOME": None, "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": None, "DG_JIT_CACHE_DIR": None,
    "VLLM_PLUGINS": "expertmaps",
}  # fmt: skip

ENVIRON: dict[str, dict[str, str]] = {
    "nothing": {},
    "home": {"HOME": str(WORK / "other")},
    "xdg": {"XDG_CACHE_HOME": str(WORK / "xdg")},
    "empty xdg": {"XDG_CACHE_HOME": ""},
    "vllm": {"VLLM_CACHE_ROOT": str(WORK / "vllm")},
    "same by another name": {"VLLM_CACHE_ROOT": str(WORK / "link" / ".cache" / "vllm")},
    "autotune": {"VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(WORK / "tuned")},
    "skipped": {"VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS": "fp4_gemm"},
    "none skipped": {"VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS": ""},
    "inductor": {"TORCHINDUCTOR_CACHE_DIR": str(WORK / "inductor")},
    "triton": {"TRITON_CACHE_DIR": str(WORK / "triton")},
    "triton home": {"TRITON_HOME": str(WORK / "triton")},
    "deep gemm": {"DG_JIT_CACHE_DIR": str(WORK / "gemm")},
    "two": {"VLLM_PLUGINS": "other", "TRITON_CACHE_DIR": str(WORK / "triton")},
}
COMMAND: dict[str, list[str]] = {
    "compile": ["--compilation-config", json.dumps({"cache_dir": str(WORK / "compile")})],
    "additional": ["--additional-config", '{"a": 1}'],
    "encoder": ["--compilation-config", '{"compile_mm_encoder": true}'],
}
PATCHED: dict[str, Callable[[], Any]] = {
    "max autotune": lambda: inductor.patch(max_autotune=True),
    "no graph cache": lambda: inductor.patch(fx_graph_cache=False),
    "no caches": lambda: inductor.patch(force_disable_caches=True),
    "functorch": lambda: functorch.patch(functionalize_rng_ops=True),
    "unnamed": lambda: mock.patch("vllm.__version__", "0.32.0+other"),
}


@contextlib.contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    changed = {**os.environ, **BASE, **changes}
    kept = {name: value for name, value in changed.items() if value is not None}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


def asked(more: list[str] | None = None, **environ: str) -> dict[str, Any]:
    with environment(environ):
        return preflight.factors([*ARGUMENTS, *(more or [])])


@contextlib.contextmanager
def multimodal(encoder_dtype: str | None, compiled: bool) -> Iterator[None]:
    """A language model has no such part: a real, built configuration is given one."""
    original = preflight.engine_config

    def build(arguments: list[str]) -> Any:
        found = original(arguments)
        part = MultiModalConfig(mm_encoder_attn_dtype=encoder_dtype)
        object.__setattr__(found.model_config, "multimodal_config", part)
        found.compilation_config.compile_mm_encoder = compiled
        return found

    with mock.patch.object(preflight, "engine_config", build):
        yield


def flashinfer(folder: str) -> Any:
    """FlashInfer's module of paths, which installs on a machine with a GPU only."""
    found: Any = ModuleType("flashinfer.jit.env")
    found.FLASHINFER_WORKSPACE_DIR = WORK / folder
    jit: Any = ModuleType("flashinfer.jit")
    jit.env = found
    package = ModuleType("flashinfer")
    modules = {"flashinfer": package, "flashinfer.jit": jit, "flashinfer.jit.env": found}
    return mock.patch.dict(sys.modules, modules)


def answers() -> dict[str, Any]:
    (WORK / "link").symlink_to(WORK / "home")
    plain = asked()
    found = {name: asked(**changes) for name, changes in ENVIRON.items()}
    found |= {name: asked(more) for name, more in COMMAND.items()}
    for name, patch in PATCHED.items():
        with patch():
            found[name] = asked()
    said = {name: preflight.compare(plain, one) for name, one in found.items()}
    for name, compiled in (("multimodal", True), ("multimodal, not compiled", False)):
        with multimodal(None, compiled):
            left = asked()
        with multimodal("fp8", compiled):
            said[name] = preflight.compare(left, asked())
    for name, folder in (("another device", "a/0.6.4/100a"), ("another workspace", "b/0.6.4/90a")):
        with flashinfer("a/0.6.4/90a"):
            left = asked()
        with flashinfer(folder):
            said[name] = preflight.compare(left, asked())
    with mock.patch.dict(BASE, VLLM_USE_MEGA_AOT_ARTIFACT="1"):
        left = asked()
        with inductor.patch(max_autotune=True):
            said["max autotune, mega artifact"] = preflight.compare(left, asked())
    return said


if __name__ == "__main__":
    print(json.dumps(answers()))
