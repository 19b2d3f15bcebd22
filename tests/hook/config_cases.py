"""What the hook makes of vLLM's own configurations, without an engine; a script for its Python.

`config_cases.py HOOK_FOLDER MODEL refusals|hashes`: prints one JSON object. Most configurations
are built by vLLM from arguments. Some it refuses to build on a CPU: for those a field of a real,
built configuration is set, and the result says so.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, sys.argv[1])

import expertmaps_hook_capture as capture
import expertmaps_hook_env as env
import expertmaps_hook_model as model
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

BUILT: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"enable_lora": True},
    "tensor parallel": {"tensor_parallel_size": 2},
    "expert parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "one expert parallel rank": {"enable_expert_parallel": True},
    "pipeline parallel": {"pipeline_parallel_size": 2},
    "data parallel": {"data_parallel_size": 2},
    "ngram": {"speculative_config": NGRAM},
    "pooling": {"runner": "pooling"},
    "weight transfer": {"weight_transfer_config": {"backend": "nccl"}},
    "return routed experts": {"enable_return_routed_experts": True},
    "sleep mode": {"enable_sleep_mode": True},
    "eplb": {"enable_expert_parallel": True, "enable_eplb": True},
    "prefetch offload": {"offload_group_size": 2},
    "prefetch offload by name": {"offload_backend": "prefetch", "offload_group_size": 2},
    "shared weights": {"load_format": "ipc_cache"},
}
CHANGED: dict[str, tuple[str, str, Any]] = {
    "sleep mode": ("model_config", "enable_sleep_mode", True),
    "eplb": ("parallel_config", "enable_eplb", True),
    "dbo": ("parallel_config", "enable_dbo", True),
    "return routed experts": ("aux_output_config", "enable_return_routed_experts", True),
    "weight transfer": ("", "weight_transfer_config", object()),
    "adaptive verification": ("speculative_config", "enable_adaptive_verification", True),
    "custom drafts": ("speculative_config", "method", "custom_class"),
    "hidden states": ("speculative_config", "method", "extract_hidden_states"),
    "drafts that are trimmed": ("speculative_config", "method", "ngram_gpu"),
    "fast prefill": ("cache_config", "kv_sharing_fast_prefill", True),
    "loads that are computed again": (
        "",
        "kv_transfer_config",
        SimpleNamespace(kv_load_failure_policy="recompute"),
    ),
}


def build(**arguments: Any) -> Any:
    """A configuration as `vllm serve` makes it."""
    return EngineArgs(model=sys.argv[2], max_model_len=256, **arguments).create_engine_config()


def change(name: str) -> Any:
    """A built configuration with one of its fields set."""
    owner, field, value = CHANGED[name]
    found = build(**({"speculative_config": NGRAM} if owner == "speculative_config" else {}))
    target = getattr(found, owner) if owner else found
    assert hasattr(target, field), f"vLLM has no {owner}.{field}"
    object.__setattr__(target, field, value)
    return found


def reason(check: Any, config: Any) -> str | None:
    try:
        check(config)
    except env.HookError as failure:
        return failure.reason
    return None


def refusals() -> dict[str, dict[str, Any]]:
    """Reasons for serving and for counting, and whether vLLM built the configuration itself."""
    found = {}
    for name in [*BUILT, *(name for name in CHANGED if name not in BUILT)]:
        built = name in BUILT
        try:
            config = build(**BUILT[name]) if built else change(name)
        except Exception:
            if name not in CHANGED:
                raise
            built, config = False, change(name)
        serve = reason(model.check_config, config)
        found[name] = {
            "built": built,
            "serve": serve,
            "count": serve or reason(lambda config: capture.check_config(config, "v1"), config),
        }
    return found


class Monolithic(MoERunner):
    """A layer whose kernel routes by itself, as vLLM's binding looks at it: no CPU has one."""

    _quant_method = SimpleNamespace(is_monolithic=True, moe_kernel=None)
    layer_id = 0

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


class Unknown(Monolithic):
    """A layer with a router that is none of vLLM's."""

    _quant_method = SimpleNamespace(is_monolithic=False)
    router = SimpleNamespace()


def captures() -> dict[str, str | None]:
    """Reasons where vLLM's own binding of its capture finds nothing to bind to."""
    config = build()
    models = {
        "monolithic kernel": torch.nn.Sequential(Monolithic()),
        "unknown router": torch.nn.Sequential(Unknown()),
        "no expert layer": torch.nn.Linear(2, 2),
    }
    return {
        name: reason(lambda config, made=made: capture.bind(made, config), config)
        for name, made in models.items()
    }


def device_refusals() -> dict[str, str | None]:
    """Reasons before rows move between device and host memory, from vLLM's own fields."""
    kernel = type("TrtLlmMxfp4ExpertsModular", (), {})()
    method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=kernel))
    layer = SimpleNamespace(routed_experts=SimpleNamespace(quant_method=method))
    item = model.MoeLayer(0, layer)
    plain, custom, tuned = (build(enable_flashinfer_autotune=on) for on in (False, False, True))
    assert hasattr(custom.model_config, "enable_cumem_allocator")
    object.__setattr__(custom.model_config, "enable_cumem_allocator", True)
    return {
        name: reason(lambda config: model.check_device_config(config, [item], os.environ), config)
        for name, config in (("plain", plain), ("custom allocator", custom), ("tuned", tuned))
    }


def hashes() -> list[str]:
    """vLLM's compile hash in this environment: of the variables, and of the configuration."""
    from vllm.compilation.caching import aot_compile_hash_factors
    from vllm.config import set_current_vllm_config
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    config = build()
    with set_current_vllm_config(config):
        return [*map(str, aot_compile_hash_factors(config)), config.compute_hash()]


if __name__ == "__main__":
    if sys.argv[3] == "hashes":
        print(json.dumps(hashes()))
    else:
        print(
            json.dumps(
                {"configs": refusals(), "captures": captures(), "devices": device_refusals()}
            )
        )
