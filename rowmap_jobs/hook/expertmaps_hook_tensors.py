"""Every tensor of a MoE layer that has a row for each expert, wherever a kernel takes it from.

The engine holds some of them in several places: the module, its quantisation method, the
kernel's object and its quantisation config. One tensor is found once, with all its holders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_env import HookError
    from .expertmaps_hook_installers import KERNELS, fused_experts, kernel_class
    from .expertmaps_hook_rows import Layout
else:
    from expertmaps_hook_env import HookError
    from expertmaps_hook_installers import KERNELS, fused_experts, kernel_class
    from expertmaps_hook_rows import Layout

EXPERT_TENSORS = (
    "w13_weight", "w2_weight", "w13_bias", "w2_bias",
    "w13_weight_scale", "w2_weight_scale", "w13_weight_scale_inv", "w2_weight_scale_inv",
    "w13_weight_zero_point", "w2_weight_zero_point",
    "w13_scales", "w2_scales", "w13_qzeros", "w2_qzeros",
)  # fmt: skip
"""Tensors with one row for each expert: weights, biases, then the scales and zero points of vLLM's
FP8, MXFP4, INT8 and INT4 formats. Any other with that first dimension is refused,
unless a kernel's passes are given it."""

UNREAD_TENSORS = frozenset(
    f"{part}_{name}"
    for part in ("w13", "w2")
    for name in (
        "g_idx", "g_idx_sort_indices", "weight_g_idx", "weight_shape", "input_scale",
        "input_global_scale",
    )
)  # fmt: skip
"""What INT4 checkpoints carry for each expert and no kernel here reads: they stay."""

ROUTING_TENSORS = frozenset({"_expert_map", "expert_map", "expert_mask", "e_score_correction_bias"})
"""Small tables about routing that stay whole."""

DESCRIPTORS = ("_a1", "_a2", "_w1", "_w2")
FIELDS = {"scale": "scale", "bias": "bias", "zp": "zp", "alpha_or_gscale": "gscale"}
MODULE_DICTS = ("_parameters", "_buffers", "_modules")
"""Where torch keeps what a module owns; asked for by its own functions."""
OFFLOADED = "_vllm_is_uva_offloaded"
"""vLLM's mark on a parameter that already lies in host memory."""


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor [experts, ...] of a layer."""

    names: tuple[str, ...]
    """All its names, the module's own first."""
    holders: tuple[Any, ...]
    """The distinct objects whose `.data` is this memory."""
    layout: Layout
    offloaded: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_vector(self) -> bool:
        """One number an expert: both sides stay on the device, where reading it costs nothing."""
        return not self.layout.shape


def discover(layer: int, container: Any, experts: int) -> list[ExpertTensor]:
    """The layer's expert tensors in a fixed order.

    Raises HookError naming the tensor: HookUnsupported for one with a row for each expert that
    the layer's kernel is not known to read, UnknownTensor for one that is missing or not laid out
    row by row.
    """
    ensure = getattr(container, "_ensure_moe_quant_config_init", None)
    if ensure is not None:
        ensure()  # the engine makes the config of a layer at its first run
    kernel = kernel_class(container)
    roles = set(KERNELS[kernel].roles if kernel in KERNELS else ())
    given = {id(tensor) for _, tensor in _given(fused_experts(container))}
    found = []
    for called, holders in _grouped(container, experts).values():
        # What the kernel's object holds may reach a launch, under whatever name: only a role's.
        reaches = any(id(holder) in given for holder in holders)
        if not reaches and set(called) <= UNREAD_TENSORS:
            continue
        if not set(called) & (roles if reaches else {*EXPERT_TENSORS, *roles}):
            raise HookError(
                "HookUnsupported",
                f"layer {layer}: {called[0]} {list(holders[0].shape)} has a row for each expert, "
                f"expected only what {kernel} is known to read",
            )
        layout = Layout.of(holders[0], f"layer {layer}: {called[0]}")
        offloaded = any(getattr(holder, OFFLOADED, False) for holder in holders)
        found.append(ExpertTensor(tuple(called), tuple(holders), layout, offloaded))
    names = {name for part in found for name in part.names}
    for name in EXPERT_TENSORS[:2]:
        if name not in names:
            raise HookError("UnknownTensor", f"layer {layer} has no {name} [{experts}, ...]")
    _check_overlap(layer, found, experts)
    return found


def row_names(container: Any, experts: int) -> tuple[str, ...]:
    """Names of the module's own tensors whose rows move between the tiers."""
    owned = ((name, getattr(container, name, None)) for name in EXPERT_TENSORS)
    return tuple(
        name
        for name, tensor in owned
        if tensor is not None and per_expert(tensor, experts) and int(tensor.dim()) > 1
    )


def _grouped(container: Any, experts: int) -> dict[Any, tuple[list[str], list[Any]]]:
    """Names and holders of each piece of memory."""
    groups: dict[Any, tuple[list[str], list[Any]]] = {}
    for name, tensor in _everything(container):
        if name in ROUTING_TENSORS or not per_expert(tensor, experts):
            continue
        place = (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype), tuple(tensor.stride()))
        names, holders = groups.setdefault(place, ([], []))
        if name not in names:
            names.append(name)
        if all(tensor is not holder for holder in holders):
            holders.append(tensor)
    return groups


def _check_overlap(layer: int, found: list[ExpertTensor], experts: int) -> None:
    """Two different views of one memory cannot both be moved."""
    starts = sorted(
        ((int(part.holders[0].data_ptr()), part) for part in found), key=lambda pair: pair[0]
    )
    for (start, left), (following, right) in pairwise(starts):
        if start + left.layout.row_bytes * experts > following:
            raise HookError(
                "HookUnsupported",
                f"layer {layer}: {left.name} and {right.name} share memory, expected each its own",
            )


def per_expert(tensor: Any, experts: int) -> bool:
    """Whether something is a tensor with one row for each expert."""
    return (
        hasattr(tensor, "data_ptr")
        and hasattr(tensor, "shape")
        and int(tensor.dim()) > 0
        and int(tensor.shape[0]) == experts
    )


def _everything(container: Any) -> Iterator[tuple[str, Any]]:
    """Tensors by the name under which each holder has them."""
    # INT4 layers own a weight under two names.
    yield from container.named_parameters(recurse=False, remove_duplicate=False)
    yield from container.named_buffers(recurse=False)
    method = getattr(container, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    prepare = getattr(kernel, "prepare_finalize", None)
    for owner in (container, method, kernel, prepare):
        yield from _attributes(owner)
    yield from _config(getattr(method, "moe_quant_config", None))
    yield from _given(fused_experts(container))


def _given(experts: Any) -> Iterator[tuple[str, Any]]:
    """What a kernel's object may hand to its launches beside the two weights."""
    yield from _attributes(experts)
    yield from _config(getattr(experts, "quant_config", None))


def _config(config: Any) -> Iterator[tuple[str, Any]]:
    yield from _attributes(config)
    for part in DESCRIPTORS:
        for field, word in FIELDS.items():
            value = getattr(getattr(config, part, None), field, None)
            yield f"{part.removeprefix('_')}_{word}", value


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, dict) and name not in MODULE_DICTS:
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        elif isinstance(value, list | tuple):
            yield from ((f"{name}.{place}", item) for place, item in enumerate(value))
        else:
            yield name, value
