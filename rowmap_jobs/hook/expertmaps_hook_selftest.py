"""Self-test of a moved layer: the engine's own kernel on fixed input, before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import expertmaps_hook_rows as rows
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_installers import fused_experts
    from .expertmaps_hook_model import MoeLayer
else:
    import expertmaps_hook_rows as rows
    from expertmaps_hook_env import HookError
    from expertmaps_hook_installers import fused_experts
    from expertmaps_hook_model import MoeLayer

TOKENS = (1, 8, 64)
LARGEST = 1 << 14
"""Tokens of the largest batch: what such a batch takes has to fit beside the layers."""
TILE_POWERS = range(3, 9)
"""Tiles of 8 to 256 tokens."""
REPEATED = 64
"""Different states in a batch: larger ones repeat them, on other routes."""
PADDING = 3
"""Every third token of a padded batch is padding: all of its routes are -1."""


def more_sizes(most: int, experts: int, hot: int, top_k: int) -> list[int]:
    """Tokens of more batches, up to the engine's largest step, `most` tokens, or LARGEST.

    Kernels choose tiles by the tokens of a batch, or by those that an expert gets: FlashInfer takes
    the next power of two of T * top_k / n, where n are the experts it is given (all, hot or cold
    ones). So: each doubling, the largest, and the first batch beyond each border of each n; every
    combination of tiles that serving meets is then met here.
    """
    last = min(most, LARGEST)
    doublings = [TOKENS[-1] << power for power in range(1, 16)]
    borders = [
        (count << power) // top_k + 1
        for count in (experts, hot, experts - hot)
        for power in TILE_POWERS
    ]
    return sorted({size for size in (*doublings, *borders, last) if 0 < size <= last} - {*TOKENS})


def choices(experts: int, top_k: int, hot: tuple[int, ...]) -> list[list[int]]:
    """Pools of experts that the input is routed to: hot only, cold only, both.

    A pool with fewer experts than a row chooses is filled from the other side.
    """
    warm = sorted(hot)
    cold = sorted(set(range(experts)) - set(hot))
    mixed = [row for pair in zip(warm, cold, strict=False) for row in pair]
    pools = [warm + cold[: max(0, top_k - len(warm))], cold + warm[: max(0, top_k - len(cold))]]
    return [*pools, mixed if len(mixed) >= top_k else warm + cold]


def batch(
    pool: list[int], tokens: int, top_k: int, hidden: int, generator: Any, padded: bool
) -> tuple[Any, Any, Any, Any]:
    """Fixed input: states [S, n], weights and ids [T, k], and which tokens are real, bool [T].

    S is T, or REPEATED for larger batches: the states of all tokens in turns.
    """
    import torch

    states = torch.randn(min(tokens, REPEATED), hidden, generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator) + 0.1
    routes = torch.rand(tokens, len(pool), generator=generator).topk(top_k).indices
    ids, real = torch.tensor(pool)[routes], torch.ones(tokens, dtype=torch.bool)
    if padded:
        real[PADDING - 1 :: PADDING] = False
        ids[~real] = -1
    return states, weights / weights.sum(-1, keepdim=True), ids, real


def one_scale_for_all_rows(config: Any) -> bool:
    """Whether a kernel scales the rows between its two GEMMs by the largest value of all of them.

    `config` is vLLM's FusedMoEQuantConfig; the formula is TritonExperts.apply's own
    (`a2_scale_is_global`): quantised activations, with no scale from the checkpoint and none for
    each row or block. Formats that begin with "mx" scale blocks of 32 values within a row.
    """
    kind = config.quant_dtype
    return (
        kind is not None
        and not str(kind).startswith("mx")
        and config.a2_scale is None
        and config.block_shape is None
        and not config.per_act_token_quant
    )


def probe(
    item: MoeLayer, hot: tuple[int, ...], padding: bool | None = None, most: int = 0
) -> list[Any]:
    """Outputs of the layer's expert kernel for hot, cold and mixed routes of several sizes.

    On an accelerator (`padding` not given) mixed batches up to `most` tokens follow, of which a
    hash for each token is kept, and mixed batches with padding, as the engine makes
    it for a fixed batch size: id -1 on all routes of a token. What a kernel leaves in such a
    token's row is undefined, so only other rows are compared. The CPU's kernel knows no such ids.
    Where one scale is taken over all rows, that which earlier batches left in memory enters it and
    no row is defined, with or without tiers: there is no padded batch then.
    """
    import torch

    container = item.container
    container._ensure_moe_quant_config_init()
    device = next(iter(item.tensors().values())).device
    top_k, outputs = int(container.top_k), []
    hidden = _input_width(container)
    dtype = container.moe_config.in_dtype
    generator = torch.Generator().manual_seed(item.layer)
    pools = choices(item.experts, top_k, hot)
    runs = [(pool, tokens, False) for pool in pools for tokens in TOKENS]
    if device.type != "cpu" if padding is None else padding:
        sizes = more_sizes(most, item.experts, len(hot), top_k)
        runs += [(pools[-1], tokens, False) for tokens in sizes]
        if not one_scale_for_all_rows(fused_experts(container).quant_config):
            runs += [(pools[-1], tokens, True) for tokens in TOKENS]
    with torch.inference_mode():
        for pool, tokens, padded in runs:
            states, weights, ids, real = batch(pool, tokens, top_k, hidden, generator, padded)
            # Made whole on the device: one CPU thread would take minutes for all layers.
            turns = states.to(dtype).to(device).repeat(-(-tokens // REPEATED), 1)[:tokens]
            result = container.forward_modular(
                x=turns,
                topk_weights=weights.to(device),
                topk_ids=ids.to(_id_type(container)).to(device),
                shared_experts=None,
                shared_experts_input=None,
            )
            found = _comparable(result)[real.to(device)].clone().contiguous()
            outputs.append(found if tokens <= TOKENS[-1] else _hashes(found))
    return outputs


def _hashes(output: Any) -> Any:
    """A hash of each token's output, int64 [T]: large outputs are not kept twice."""
    import torch

    return torch.tensor(rows.hashes(output.view(output.shape[0], -1).view(torch.uint8)))


def _input_width(container: Any) -> int:
    """Columns of a layer's input: un-padded where the method pads them itself."""
    if getattr(container.quant_method, "skip_forward_padding", False):
        return int(container.moe_config.hidden_dim_unpadded)
    return int(container.hidden_size)


def _comparable(result: Any) -> Any:
    """A kernel's output by token. One that left its sum to the next layer: the rows it would sum.

    [T, n], or [T, k, n] gathered from rows whose order is the kernel's own.
    """
    rows = getattr(result, "gemm2_permuted", None)
    if rows is None:
        return result
    index = result.expanded_idx_to_permuted_idx.long()
    return rows[index.clamp(min=0)].masked_fill((index < 0).unsqueeze(-1), 0)


def compare(layer: int, before: list[Any], after: list[Any]) -> None:
    """The same bits from both runs, or HookError (SelfTestFailed)."""
    for index, (whole, tiered) in enumerate(zip(before, after, strict=True)):
        if not same_bits(whole, tiered):
            raise HookError("SelfTestFailed", f"layer {layer}: output {index} is not the same bits")


def same_bits(left: Any, right: Any) -> bool:
    """Whether two tensors have one shape and the same bits: -0.0 is not 0.0, NaN equals itself."""
    return bool(
        left.shape == right.shape
        and (left.view(-1).view(_integer(left)) == right.view(-1).view(_integer(right))).all()
    )


def _integer(tensor: Any) -> Any:
    import torch

    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]


def _id_type(container: Any) -> Any:
    import torch

    return container.quant_method.topk_indices_dtype or torch.int32
