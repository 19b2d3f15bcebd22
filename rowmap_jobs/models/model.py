"""What was read of a model: immutable, by absolute layer ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..formats.rowmap import PerLayer
from .tensors import RowTensor


@dataclass(frozen=True)
class Whole:
    """Layers that have something no map may split."""

    kind: Literal["draft", "dense", "shared", "vision"]
    """draft: layers with experts behind the model's own (MTP). dense: layers without experts.
    shared: layers with experts that every token uses. vision: layers whose experts for images
    stand beside those of text."""
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Disagreement:
    """config.json and the headers say different things; the headers hold."""

    what: str
    config: str
    headers: str

    def __str__(self) -> str:
        return f"{self.what}: config.json says {self.config}, the headers {self.headers} (holds)"


@dataclass(frozen=True)
class Model:
    """Experts of a model. Bytes are those of one accelerator."""

    source: str
    model_type: str
    evidence: Literal["headers", "config", "gguf"]
    """What layers and bytes come from."""
    top_k: int
    experts: Mapping[int, int]
    """By layer, without identity experts and without those for images."""
    tensors: Mapping[int, tuple[RowTensor, ...]]
    """The tensors of one expert, by layer."""
    whole: tuple[Whole, ...] = ()
    identity_experts: int = 0
    """Ids behind the real experts that a router may choose and that have no bytes."""
    disagreements: tuple[Disagreement, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def layers(self) -> tuple[int, ...]:
        """Absolute ids of the layers with experts, ascending."""
        return tuple(sorted(self.experts))

    @property
    def row_bytes(self) -> dict[int, int]:
        """Bytes of one expert, by layer."""
        return {
            layer: sum(tensor.nbytes for tensor in self.tensors[layer]) for layer in self.layers
        }

    @property
    def whole_layers(self) -> tuple[int, ...]:
        """Draft layers with experts: what a geometry lists as whole."""
        return next((each.layers for each in self.whole if each.kind == "draft"), ())

    @property
    def total_bytes(self) -> int:
        """All experts of all layers."""
        return sum(self.experts[layer] * size for layer, size in self.row_bytes.items())

    def to_wire(self) -> dict[str, Any]:
        """JSON of everything, in camelCase; one integer where all layers agree."""
        return {
            "source": self.source,
            "modelType": self.model_type,
            "evidence": self.evidence,
            "experts": folded(self.experts),
            "topK": self.top_k,
            "moeLayers": list(self.layers),
            "rowBytes": folded(self.row_bytes),
            "totalBytes": self.total_bytes,
            "identityExperts": self.identity_experts,
            "whole": {each.kind: list(each.layers) for each in self.whole},
            "tensors": _folded_tensors(self.tensors),
            "disagreements": [
                {"what": each.what, "config": each.config, "headers": each.headers}
                for each in self.disagreements
            ],
            "notes": list(self.notes),
        }


def folded(values: Mapping[int, int]) -> PerLayer:
    """One integer where all layers agree, otherwise `{layer: integer}`."""
    distinct = set(values.values())
    if len(distinct) == 1:
        return distinct.pop()
    return {str(layer): value for layer, value in sorted(values.items())}


def _folded_tensors(tensors: Mapping[int, tuple[RowTensor, ...]]) -> list[dict[str, Any]]:
    """Groups of layers whose rows are made of the same tensors."""
    groups: dict[tuple[RowTensor, ...], list[int]] = {}
    for layer, rows in sorted(tensors.items()):
        groups.setdefault(rows, []).append(layer)
    return [
        {
            "layers": layers,
            "row": [
                {
                    "name": row.name,
                    "dtype": row.dtype,
                    "shape": list(row.shape),
                    "bytes": row.nbytes,
                }
                for row in rows
            ],
        }
        for rows, layers in groups.items()
    ]
