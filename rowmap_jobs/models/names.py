"""Names of tensors: which layer, which expert, and which part of it.

model.layers.3.mlp.experts.17.down_proj.weight_scale_inv      one expert's own
model.layers.3.mlp.experts.gate_up_proj                       all experts of a layer in one
model.layers.3.moe.gate_proj.weight                           the same, beside the router
mtp.0.ffn.experts.5.w1.weight                                 a draft layer
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Part = Literal["routed", "shared", "vision", "rest"]

_LAYER = re.compile(r"^((?:[\w-]+\.)*?)(?:layers|blocks|block|h)\.([0-9]{1,6})\.(.+)$", re.ASCII)
_DRAFT_LAYER = re.compile(r"^((?:[\w-]+\.)*?(?:mtp|mtp_layers))\.([0-9]{1,6})\.(.+)$", re.ASCII)
_DRAFT = frozenset({"mtp", "mtp_layers", "nextn", "draft", "draft_model", "dspark", "eagle"})
_SHARED = frozenset({"shared_expert", "shared_experts", "share_expert", "shared_mlp", "shared_moe"})
_VISION = frozenset({"vision_moe", "vision_experts"})
_ROUTING = frozenset(
    {"gate", "router", "e_score_correction_bias", "expert_bias", "per_expert_scale", "tid2eid"}
)
_BESIDE = frozenset({"moe", "block_sparse_moe"})

ROLES = {
    "gate_up_proj": "gate_up", "input_linear": "gate_up", "w13": "gate_up",
    "gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "v1": "up",
    "down_proj": "down", "output_linear": "down", "w2": "down",
}  # fmt: skip
"""Names of the matrices of an expert."""

_ROLE = re.compile(rf"^(?:[\w]+\.)*?({'|'.join(ROLES)})(?:[._](.+))?$", re.ASCII)
_STACKED = frozenset(ROLES) - {"w1", "w2", "w3", "v1"}


class Place(NamedTuple):
    """Where a tensor belongs."""

    stack: str
    """What stands before the layer's number: one model may have several stacks of layers."""
    draft: bool
    layer: int
    part: Part
    container: str = ""
    expert: int | None = None
    """None for a tensor with a slice for each expert."""
    leaf: str = ""


def place(name: str) -> Place | None:
    """Place of a tensor by its checkpoint name; None outside of all layers."""
    match = _DRAFT_LAYER.match(name) or _LAYER.match(name)
    if match is None:
        return None
    stack, layer, rest = match.group(1).rstrip("."), int(match.group(2)), match.group(3)
    draft = not _DRAFT.isdisjoint(stack.split("."))
    parts = rest.split(".")
    if not _SHARED.isdisjoint(parts):
        return Place(stack, draft, layer, "shared")
    if "experts" in parts[:-1]:
        index = parts.index("experts") + 1
    elif len(parts) > 1 and parts[0] in _BESIDE and _is_matrix(parts[1]):
        index = 1
    else:
        return Place(stack, draft, layer, "rest")
    container, tail = parts[:index], parts[index:]
    expert = None
    if len(tail) > 1 and tail[0].isascii() and tail[0].isdigit() and len(tail[0]) < 8:
        expert, tail = int(tail[0]), tail[1:]
    leaf = ".".join(tail)
    if not _ROUTING.isdisjoint(tail):
        return Place(stack, draft, layer, "rest")
    part: Part = "routed" if _VISION.isdisjoint(container) else "vision"
    return Place(stack, draft, layer, part, ".".join(container), expert, leaf)


def _is_matrix(name: str) -> bool:
    match = _ROLE.match(name)
    return match is not None and match.group(1) in _STACKED


def role_and_kind(leaf: str) -> tuple[str, str]:
    """Which matrix a tensor belongs to (gate, up, gate_up, down, other), and what it is to it."""
    match = _ROLE.match(leaf)
    if match is None:
        return "other", "other"
    return ROLES[match.group(1)], _kind(match.group(2) or "weight")


def _kind(tail: str) -> str:
    for word, kind in (
        ("shape", "shape"), ("zero", "zero"), ("zeros", "zero"), ("scale", "scale"),
        ("g_idx", "index"), ("bias", "bias"),
    ):  # fmt: skip
        if word in tail:
            return kind
    return "weight" if tail.split(".")[0] in _WEIGHTS else "other"


_WEIGHTS = frozenset({"weight", "blocks", "qweight", "weight_packed", "packed", "w"})
