"""From a checkpoint's tensors to the rows of each layer: what one expert is made of.

A layer either has tensors for each expert, or tensors with a slice for each, or both. Every expert
must be there with the same tensors; what no expert owns (one scale for all) is no part of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..formats.base import FormatError
from .config import MAX_EXPERTS
from .names import Place, place, role_and_kind
from .safetensors import Tensor
from .tensors import RowTensor, divided

Owned = tuple[Place, Tensor]


@dataclass
class LayerTensors:
    """Tensors of one layer by the part that they belong to."""

    routed: list[Owned] = field(default_factory=list)
    shared: int = 0
    vision: int = 0


@dataclass(frozen=True)
class LayerRows:
    """Experts of one layer and the tensors of one of them."""

    experts: int
    tensors: tuple[RowTensor, ...]

    @property
    def row_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


Stacks = dict[tuple[str, bool], dict[int, LayerTensors]]
"""Layers by (what stands before their number, whether they are draft layers)."""


def group(tensors: Iterable[Tensor]) -> Stacks:
    """Sort tensors by stack and layer; what belongs to no layer is left out."""
    stacks: Stacks = {}
    for tensor in tensors:
        where = place(tensor.name)
        if where is None:
            continue
        layer = stacks.setdefault((where.stack, where.draft), {}).setdefault(
            where.layer, LayerTensors()
        )
        if where.part == "routed":
            layer.routed.append((where, tensor))
        elif where.part == "shared":
            layer.shared += 1
        elif where.part == "vision":
            layer.vision += 1
    return stacks


def rows_of(
    owned: Sequence[Owned], layer: int, source: str, modal: tuple[int, ...], parts: int
) -> LayerRows:
    """Rows of one layer.

    `modal` are the experts by configuration, one number for each modality: it decides where the
    headers alone do not (experts stacked along the first dimension, image experts behind those of
    text). `parts` accelerators share an expert's width. Raises FormatError.
    """
    containers = sorted({where.container for where, _ in owned})
    if len(containers) > 1:
        raise FormatError(source, f"layer {layer}", containers, "one block of experts")
    single = [item for item in owned if item[0].expert is not None]
    fused = [item for item in owned if item[0].expert is None]
    experts = _count(single, fused, layer, source, modal)
    kept = experts
    if len(modal) > 1 and sum(modal) == experts:
        kept = modal[0]
    rows = _single_rows(single, experts, kept, layer, source)
    rows += _fused_rows(fused, experts, source)
    if not any(row.nbytes for row in rows if row.kind == "weight"):
        raise FormatError(source, f"layer {layer}", "no weights of an expert", "its matrices")
    return LayerRows(kept, tuple(divided(row, parts, source) for row in rows))


def _count(
    single: Sequence[Owned],
    fused: Sequence[Owned],
    layer: int,
    source: str,
    modal: tuple[int, ...],
) -> int:
    if single:
        ids = {where.expert for where, _ in single if where.expert is not None}
        count = max(ids) + 1
        if count > MAX_EXPERTS or len(ids) != count:
            # At most one more than there are tensors: the first that is missing.
            absent = next(expert for expert in range(count) if expert not in ids)
            found = f"no expert {absent}, but expert {max(ids)}"
            raise FormatError(source, f"layer {layer}", found, "experts from 0 without a gap")
        return count
    leading = {tensor.shape[0]: tensor.name for _, tensor in fused if len(tensor.shape) > 2}
    if len(leading) > 1:
        (one, name), (other, second) = list(leading.items())[:2]
        found = f"{one} experts in {name}, {other} in {second}"
        raise FormatError(source, f"layer {layer}", found, "one number of experts")
    count = next(iter(leading), modal[0] if modal else 0)
    if not 1 <= count <= MAX_EXPERTS:
        expected = f"1 to {MAX_EXPERTS} (flat tensors: config.json has to say how many)"
        raise FormatError(source, f"layer {layer}", f"{count} experts", expected)
    return count


def _single_rows(
    single: Sequence[Owned], experts: int, kept: int, layer: int, source: str
) -> list[RowTensor]:
    """Tensors of expert 0, once it is sure that the others up to `kept` have the same."""
    by_expert: list[dict[str, Tensor]] = [{} for _ in range(experts if single else 0)]
    for where, tensor in single:
        leaves = by_expert[where.expert or 0]
        if where.leaf in leaves:
            raise FormatError(source, tensor.name, "a second tensor of the same", "one")
        leaves[where.leaf] = tensor
    for expert, leaves in enumerate(by_expert[:kept]):
        _check_same(by_expert[0], leaves, f"layer {layer}, expert {expert}", source)
    container = single[0][0].container if single else ""
    rows = []
    for leaf, tensor in sorted(by_expert[0].items()) if by_expert else ():
        role, kind = role_and_kind(leaf)
        if kind != "shape":
            name = f"{container}.{{}}.{leaf}"
            rows.append(RowTensor(name, role, kind, tensor.dtype, tensor.shape, tensor.nbytes))
    return rows


def _check_same(
    first: dict[str, Tensor], other: dict[str, Tensor], where: str, source: str
) -> None:
    if first.keys() != other.keys():
        leaf = sorted(first.keys() ^ other.keys())[0]
        found = f"no {leaf}" if leaf in first else f"{leaf}, which expert 0 has not"
        raise FormatError(source, where, found, "the tensors of expert 0")
    for leaf, tensor in other.items():
        if (tensor.dtype, tensor.shape) != (first[leaf].dtype, first[leaf].shape):
            found = f"{leaf} {tensor.dtype} {list(tensor.shape)}"
            expected = f"{first[leaf].dtype} {list(first[leaf].shape)} as expert 0"
            raise FormatError(source, where, found, expected)


def _fused_rows(fused: Sequence[Owned], experts: int, source: str) -> list[RowTensor]:
    rows = []
    for where, tensor in sorted(fused, key=lambda item: item[0].leaf):
        role, kind = role_and_kind(where.leaf)
        shape = _slice(tensor, experts, kind, source)
        if shape is not None and kind != "shape":
            name, nbytes = f"{where.container}.{where.leaf}", tensor.nbytes // experts
            rows.append(RowTensor(name, role, kind, tensor.dtype, shape, nbytes))
    return rows


def _slice(tensor: Tensor, experts: int, kind: str, source: str) -> tuple[int, ...] | None:
    """Shape of one expert's part; None for a number that all experts use."""
    shape = tensor.shape
    if shape and shape[0] == experts:
        return shape[1:]
    if all(size == 1 for size in shape):
        return None
    if len(shape) == 2 and kind == "weight" and shape[0] % experts == 0 and shape[0] > experts:
        return (shape[0] // experts, shape[1])
    found = f"{list(shape)}"
    raise FormatError(source, tensor.name, found, f"{experts} experts along its first dimension")
