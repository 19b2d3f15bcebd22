"""The geometry of a GGUF model: layers with `ffn_*_exps` tensors and the bytes of their slices.

Metadata by llama.cpp's names: `<arch>.block_count, expert_count, expert_used_count,
leading_dense_block_count, nextn_predict_layers`. Blocks of the prediction layers are counted in
block_count and stand at its end.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..formats.base import FormatError
from .config import MAX_EXPERTS, MAX_LAYERS
from .gguf import Gguf, GgufTensor
from .gguf import read as read_header
from .model import Disagreement, Model, Whole
from .tensors import RowTensor

_EXPERTS = re.compile(
    r"^blk\.([0-9]{1,6})\.ffn_(gate_up|gate|up|down)_exps\.(weight|bias|scale|input_scale)$"
)
_SHARED = re.compile(r"^blk\.([0-9]{1,6})\.ffn_(?:gate|up|down)_shexp\.weight$")
_BLOCK = re.compile(r"^blk\.([0-9]{1,6})\.")
_OTHER = re.compile(r"^blk\.[0-9]+\.(?!ffn_norm_)[a-z0-9_]+_exps\.")
"""ffn_norm_exps is one norm before all experts."""


def read(path: Path, tensor_parallel: int = 1) -> Model:
    """Geometry from the header of a GGUF file (or of all parts of a split one).

    llama.cpp gives each expert whole to one place, so more than one accelerator is refused.
    Raises FormatError.
    """
    if tensor_parallel != 1:
        found = str(tensor_parallel)
        raise FormatError(str(path), "tensor parallel size", found, "1 (a GGUF row is never split)")
    return model_of(read_header(path))


def model_of(header: Gguf) -> Model:
    """Geometry of a header that was read. Raises FormatError."""
    source = header.source
    architecture = header.values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise FormatError(source, "general.architecture", "none", "the model's architecture")
    experts = _integer(header, f"{architecture}.expert_count", MAX_EXPERTS) or 0
    layers = _expert_tensors(header)
    if not layers:
        found = f"{architecture}: a dense model (no ffn_*_exps tensor, expert_count {experts})"
        raise FormatError(source, "general.architecture", found, "a mixture-of-experts model")
    key = f"{architecture}.expert_used_count"
    top_k = _integer(header, key, MAX_EXPERTS)
    if not top_k:
        raise FormatError(source, key, top_k if top_k == 0 else "none", "the experts of a token")
    blocks = _integer(header, f"{architecture}.block_count", MAX_LAYERS)
    nextn = _integer(header, f"{architecture}.nextn_predict_layers", MAX_LAYERS) or 0
    end = blocks - nextn if blocks is not None else max(layers) + 1
    draft = tuple(sorted(layer for layer in layers if layer >= end))
    counts: dict[int, int] = {}
    tensors: dict[int, tuple[RowTensor, ...]] = {}
    for layer in sorted(layers):
        if layer < end:
            counts[layer], tensors[layer] = _rows(layers[layer], layer, source)
            if top_k > counts[layer]:
                found = f"{top_k} of {counts[layer]} experts in layer {layer}"
                raise FormatError(source, key, found, f"at most {counts[layer]}")
    if not counts:
        found = f"experts in layers {list(draft)[:8]} alone"
        raise FormatError(source, f"{architecture}.block_count", found, f"some before {end}")
    return Model(
        source=source,
        model_type=architecture,
        evidence="gguf",
        top_k=top_k,
        experts=counts,
        tensors=tensors,
        whole=_whole(header, counts, draft, end),
        disagreements=_compare(header, architecture, experts, counts, end),
    )


def _integer(header: Gguf, key: str, most: int) -> int | None:
    value = header.values.get(key)
    if isinstance(value, tuple) and value and all(isinstance(item, int) for item in value):
        # Some architectures have one number for each layer.
        value = max(int(item) for item in value)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise FormatError(header.source, key, str(value)[:80], f"an integer 0 to {most}")
    return value


def _expert_tensors(header: Gguf) -> dict[int, list[GgufTensor]]:
    layers: dict[int, list[GgufTensor]] = {}
    for tensor in header.tensors:
        match = _EXPERTS.match(tensor.name)
        if match is not None:
            layers.setdefault(int(match.group(1)), []).append(tensor)
        elif _OTHER.match(tensor.name):
            expected = "ffn_gate_exps, ffn_up_exps, ffn_down_exps or ffn_gate_up_exps"
            raise FormatError(header.source, tensor.name, "an unknown tensor of experts", expected)
    return layers


def _rows(tensors: list[GgufTensor], layer: int, source: str) -> tuple[int, tuple[RowTensor, ...]]:
    """Experts of a layer, and one expert's slice of each tensor: nbytes / experts."""
    weights = [tensor for tensor in tensors if tensor.name.endswith(".weight")]
    counts = {tensor.dimensions[2] if len(tensor.dimensions) == 3 else 0 for tensor in weights}
    if len(counts) != 1 or not 1 <= min(counts) <= MAX_EXPERTS:
        found = f"experts {sorted(counts)} in the third dimension"
        raise FormatError(source, f"layer {layer}", found, "one number of experts in its weights")
    roles = {_role(tensor) for tensor in weights}
    if "down" not in roles or not roles & {"up", "gate_up"}:
        raise FormatError(source, f"layer {layer}", sorted(roles), "up and down matrices")
    experts = counts.pop()
    rows = []
    for tensor in sorted(tensors):
        if tensor.dimensions[-1:] != (experts,):
            if all(size == 1 for size in tensor.dimensions):
                continue
            found = f"dimensions {list(tensor.dimensions)}"
            raise FormatError(source, tensor.name, found, f"{experts} experts in the last one")
        kind = tensor.name.rpartition(".")[2]
        shape = tuple(reversed(tensor.dimensions[:-1]))
        name = _BLOCK.sub("", tensor.name)
        nbytes = tensor.nbytes // experts
        rows.append(RowTensor(name, _role(tensor), kind, tensor.type, shape, nbytes))
    return experts, tuple(rows)


def _role(tensor: GgufTensor) -> str:
    match = _EXPERTS.match(tensor.name)
    return match.group(2) if match is not None else "other"


def _whole(
    header: Gguf, counts: dict[int, int], draft: tuple[int, ...], end: int
) -> tuple[Whole, ...]:
    blocks: set[int] = set()
    shared: set[int] = set()
    for tensor in header.tensors:
        block, is_shared = _BLOCK.match(tensor.name), _SHARED.match(tensor.name)
        if block is not None:
            blocks.add(int(block.group(1)))
        if is_shared is not None:
            shared.add(int(is_shared.group(1)))
    dense = tuple(sorted(i for i in blocks if i < end and i not in counts))
    out = []
    if draft:
        out.append(Whole("draft", draft))
    if dense:
        out.append(Whole("dense", dense))
    if shared:
        out.append(Whole("shared", tuple(sorted(i for i in shared if i < end))))
    return tuple(out)


def _compare(
    header: Gguf, architecture: str, experts: int, counts: dict[int, int], end: int
) -> tuple[Disagreement, ...]:
    """Metadata against tensors: every number that differs, with both."""
    out = []
    for layer, count in counts.items():
        if count != experts:
            out.append(Disagreement(f"experts of layer {layer}", str(experts), str(count)))
            break
    leading = _integer(header, f"{architecture}.leading_dense_block_count", MAX_LAYERS)
    if leading is not None and leading != min(counts) and leading < end:
        what = "first layer with experts"
        out.append(Disagreement(what, str(leading), str(min(counts))))
    return tuple(out)
