"""Self-test of a moved layer: the engine's own kernel on fixed input, before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_model import MoeLayer
else:
    from expertmaps_hook_model import MoeLayer

TOKENS = (1, 8, 64)


def choices(experts: int, top_k: int, hot: tuple[int, ...]) -> list[list[int]]:
    """Pools of experts that the input is routed to: hot only, cold only, both.

    A pool with fewer experts than a row chooses is filled from the other side.
    """
    warm = sorted(hot)
    cold = sorted(set(range(experts)) - set(hot))
    mixed = [row for pair in zip(warm, cold, strict=False) for row in pair]
    pools = [warm + cold[: max(0, top_k - len(warm))], cold + warm[: max(0, top_k - len(cold))]]
    return [*pools, mixed if len(mixed) >= top_k else warm + cold]


def probe(item: MoeLayer, hot: tuple[int, ...]) -> list[Any]:
    """Outputs of the layer's expert kernel for hot, cold and mixed routes of several sizes."""
    import torch

    container = item.container
    container._ensure_moe_quant_config_init()
    top_k, outputs = int(container.top_k), []
    dtype = container.moe_config.in_dtype
    generator = torch.Generator().manual_seed(item.layer)
    with torch.inference_mode():
        for pool in choices(item.experts, top_k, hot):
            for tokens in TOKENS:
                hidden = torch.randn(tokens, int(container.hidden_size), generator=generator)
                weights = torch.rand(tokens, top_k, generator=generator) + 0.1
                routes = torch.stack(
                    [torch.randperm(len(pool), generator=generator)[:top_k] for _ in range(tokens)]
                )
                result = container.forward_modular(
                    x=hidden.to(dtype),
                    topk_weights=weights / weights.sum(-1, keepdim=True),
                    topk_ids=torch.tensor(pool)[routes].to(_id_type(container)),
                    shared_experts=None,
                    shared_experts_input=None,
                )
                outputs.append(result.clone().contiguous())
    return outputs


def _id_type(container: Any) -> Any:
    import torch

    return container.quant_method.topk_indices_dtype or torch.int32
