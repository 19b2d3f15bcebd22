"""What the hook takes from vLLM's two model runners: V1, and V2, the default wherever Triton is.

The plan of a step (vLLM's SchedulerOutput) is the same for both. They differ in who knows the
order of the batch's rows, in how dummy and warm-up steps reach them, in how a preempted request
comes back (`expertmaps_hook_positions.Ledger.add`), and in where the draft model is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

V1, V2 = "v1", "v2"


def runner_name(worker: Any) -> str:
    """Which model runner a worker has."""
    return V2 if getattr(worker, "use_v2_model_runner", False) else V1


def device_kind(runner: Any) -> str:
    """`cpu`, `cuda`, or what else the engine runs on; torch calls ROCm's devices cuda, too."""
    kind, torch = str(runner.device.type), sys.modules.get("torch")
    rocm = getattr(getattr(torch, "version", None), "hip", None) is not None
    return "rocm" if kind == "cuda" and rocm else kind


def batch_order(runner: Any, name: str) -> list[str]:
    """Requests of the step that ran last, in the order of their rows.

    Read between execute_model and sample_tokens: V2 forgets the batch in the latter. Raises
    RuntimeError when V2 has no batch.
    """
    if name == V1:
        batch = runner.input_batch
        return list(batch.req_ids[: batch.num_reqs])
    state = runner.execute_model_state
    if state is None:
        raise RuntimeError("the V2 model runner keeps no batch after a step")
    return list(state.input_batch.req_ids)


def is_dummy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of execute_model is V2's own dummy run, which feeds no request.

    `args` are what follows the plan: intermediate_tensors, dummy_run.
    """
    return bool(kwargs.get("dummy_run", args[1] if len(args) > 1 else False))


def draft_model(runner: Any) -> Any:
    """The model that drafts tokens; None without one."""
    for owner in ("drafter", "speculator"):
        model = getattr(getattr(runner, owner, None), "model", None)
        if model is not None:
            return model
    return None


def replayed_tokens(runner: Any) -> int:
    """Tokens before the end of a prefix-cache hit that are fed once more, to rebuild a window.

    0 but for models with a bounded replay (vLLM's KVCacheSpec.prefix_replay_tokens).
    """
    groups = getattr(getattr(runner, "kv_cache_config", None), "kv_cache_groups", ())
    windows = (getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) for group in groups)
    return max(map(int, windows), default=0)
