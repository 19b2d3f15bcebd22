"""The geometry of a model: layers with experts, experts, top-k and bytes, from its files.

    model = read(Path("models/qwen3-30b"), tensor_parallel=2)
    geometry = to_geometry(model, hot_rows=96)

Headers hold; config.json fills what they cannot say (top-k), and where the two disagree both
numbers are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ..formats.base import FormatError, refusal
from ..formats.rowmap import Geometry, PerLayer
from . import config as configuration
from . import gguf_model, safetensors
from .config import Config
from .expected import Expected, dense_refusal, expect
from .model import Disagreement, Model, Whole, folded
from .rows import LayerRows, LayerTensors, Stacks, group, rows_of

MAX_PARALLEL = 1 << 10

__all__ = ["Disagreement", "Model", "Whole", "read", "to_geometry"]


def read(path: Path, tensor_parallel: int = 1) -> Model:
    """Read a model's folder (config.json, *.safetensors headers) or a .gguf file.

    Of a model on several accelerators (`tensor_parallel`) the bytes are those of one of them.
    Raises FormatError in one line: no such model, a dense model (by its name), top-k that nothing
    says (with all spellings), headers that lie, experts that are not alike.
    """
    if not 1 <= tensor_parallel <= MAX_PARALLEL:
        found = str(tensor_parallel)
        raise FormatError(str(path), "tensor parallel size", found, f"1 to {MAX_PARALLEL}")
    if path.suffix == ".gguf" and not path.is_dir():
        return gguf_model.read(path, tensor_parallel)
    if not path.is_dir():
        raise FormatError(str(path), "path", "no folder", "a model's folder or a .gguf file")
    config = path / configuration.FILE
    tensors = safetensors.read_folder(path)
    if not tensors and not config.is_file():
        return gguf_model.read(_only_gguf(path), tensor_parallel)
    parsed = configuration.load(config) if config.is_file() else Config(str(config), {}, {})
    expected = expect(parsed, tensor_parallel)
    if not tensors:
        return _from_config(expected, str(path))
    return _from_headers(group(tensors), expected, str(path), tensor_parallel)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    first = [file for file in files if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(first) != 1:
        found = f"{len(first)} .gguf files, no config.json and no .safetensors file"
        raise FormatError(str(folder), "folder", found, "one model")
    return first[0]


def to_geometry(
    model: Model, hot_rows: int | Mapping[int, int], drafting: bool = False
) -> Geometry:
    """The geometry of a map with so many hot rows in every layer, or in each by its id.

    `drafting`: the lane runs the model's own draft layers (speculative decoding), which then are
    its whole layers; without that the engine does not load them. Raises FormatError.
    """
    hot: PerLayer = hot_rows if isinstance(hot_rows, int) else folded(hot_rows)
    try:
        return Geometry(
            experts=folded(model.experts),
            top_k=model.top_k,
            hot_rows=hot,
            moe_layers=model.layers,
            whole_layers=model.whole_layers if drafting else (),
            row_bytes=folded(model.row_bytes),
        )
    except ValidationError as error:
        raise refusal(model.source, error) from None


def _from_config(expected: Expected, source: str) -> Model:
    if expected.dense:
        raise dense_refusal(expected, expected.source, "config.json names no routed experts")
    for what in ("experts", "layers", "moe_layers", "top_k", "tensors"):
        if what in expected.gaps:
            raise expected.gaps[what]
    if not expected.moe_layers or not expected.experts or not expected.tensors:
        found = "no numbers of its layers"
        raise FormatError(expected.source, "layers with experts", found, "headers to read")
    layers, total = expected.moe_layers, expected.layers or 0
    dense = tuple(i for i in range(total) if i not in set(layers))
    notes = ["No headers: layers and bytes are by config.json and the family's rule."]
    return _checked(
        Model(
            source=source,
            model_type=expected.model_type,
            evidence="config",
            top_k=expected.top_k or 0,
            experts=expected.experts,
            tensors=dict.fromkeys(layers, expected.tensors),
            whole=_whole(draft=tuple(range(total, total + expected.draft)), dense=dense, shared=()),
            identity_experts=expected.identity,
            notes=(*notes, *_notes(expected)),
        )
    )


def _from_headers(stacks: Stacks, expected: Expected, source: str, parts: int) -> Model:
    main, draft = _stacks(stacks, expected, source)
    routed = {i: layer for i, layer in sorted(main.items()) if layer.routed}
    if not routed:
        said = "no" if expected.dense or not expected.modal else str(expected.modal[0])
        found = f"its headers have no experts, config.json says {said}"
        raise dense_refusal(expected, source, found)
    if expected.top_k is None:
        raise expected.gaps["top_k"]
    rows = {
        i: rows_of(layer.routed, i, source, expected.modal, parts) for i, layer in routed.items()
    }
    shared = tuple(i for i, layer in sorted(main.items()) if layer.shared)
    vision = tuple(
        i for i, layer in routed.items() if layer.vision or _beyond(layer, rows[i].experts)
    )
    model = Model(
        source=source,
        model_type=expected.model_type,
        evidence="headers",
        top_k=expected.top_k,
        experts={i: each.experts for i, each in rows.items()},
        tensors={i: each.tensors for i, each in rows.items()},
        whole=_whole(draft, tuple(i for i in sorted(main) if i not in routed), shared, vision),
        identity_experts=expected.identity,
        disagreements=_compare(rows, expected),
        notes=(*_gap_notes(expected), *_notes(expected)),
    )
    return _checked(model)


def _beyond(layer: LayerTensors, experts: int) -> bool:
    return any((where.expert or 0) >= experts for where, _ in layer.routed)


def _stacks(
    stacks: Stacks, expected: Expected, source: str
) -> tuple[dict[int, LayerTensors], tuple[int, ...]]:
    """The layers of the model itself, and the absolute ids of draft layers with experts."""
    own = {name: layers for (name, draft), layers in stacks.items() if not draft}
    experts = {
        name: layers
        for name, layers in own.items()
        if any(layer.routed for layer in layers.values())
    }
    if len(experts) > 1:
        found = ", ".join(sorted(name or "(none)" for name in experts))
        raise FormatError(source, "layers with experts", f"below {found}", "one stack of layers")
    main = next(iter(experts.values()), {})
    total = expected.layers if expected.layers is not None else max(main, default=-1) + 1
    draft = {i for i, layer in main.items() if i >= total and layer.routed}
    for (_, is_draft), layers in stacks.items():
        if is_draft:
            draft |= {total + i for i, layer in layers.items() if layer.routed}
    return {i: layer for i, layer in main.items() if i < total}, tuple(sorted(draft))


def _whole(
    draft: tuple[int, ...],
    dense: tuple[int, ...],
    shared: tuple[int, ...],
    vision: tuple[int, ...] = (),
) -> tuple[Whole, ...]:
    kinds: tuple[tuple[Literal["draft", "dense", "shared", "vision"], tuple[int, ...]], ...] = (
        ("draft", draft), ("dense", dense), ("shared", shared), ("vision", vision),
    )  # fmt: skip
    return tuple(Whole(kind, layers) for kind, layers in kinds if layers)


def _compare(rows: Mapping[int, LayerRows], expected: Expected) -> tuple[Disagreement, ...]:
    """Config against headers: every number that differs, with both."""
    out = []
    if expected.dense:
        out.append(Disagreement("experts", "none (a dense model)", str(len(rows)) + " layers"))
    elif expected.moe_layers is not None and expected.moe_layers != tuple(rows):
        out.append(
            Disagreement("layers with experts", _ids(expected.moe_layers), _ids(tuple(rows)))
        )
    found: dict[str, tuple[Any, Any, int]] = {}
    for layer, each in rows.items():
        said = expected.modal[0] if expected.modal else None
        said = (expected.experts or {}).get(layer, said)
        pairs = (("experts", said, each.experts), ("row bytes", expected.row_bytes, each.row_bytes))
        for what, config, headers in pairs:
            if config is not None and config != headers:
                found.setdefault(what, (config, headers, layer))
    for what, (config, headers, layer) in found.items():
        out.append(Disagreement(f"{what} of layer {layer}", str(config), str(headers)))
    return tuple(out)


def _ids(layers: tuple[int, ...]) -> str:
    """Layer ids for a sentence: `3 to 77 (75 layers)`."""
    if len(layers) > 1 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]} ({len(layers)} layers)"
    text = ", ".join(map(str, layers[:16]))
    return f"{text}{', ...' if len(layers) > 16 else ''} ({len(layers)} layers)"


def _gap_notes(expected: Expected) -> list[str]:
    notes = []
    if expected.family is None:
        name = expected.model_type or "no model_type"
        notes.append(f"{name}: no known family, so everything but top-k is by the headers alone.")
    for what in ("layers", "moe_layers", "tensors"):
        if what in expected.gaps and not (expected.family is None and what == "moe_layers"):
            notes.append(
                f"By the headers alone, config.json does not say it: {expected.gaps[what]}"
            )
    return notes


def _notes(expected: Expected) -> list[str]:
    notes = []
    if expected.identity:
        notes.append(
            f"{expected.identity} identity experts behind the real ones have no bytes: they are "
            "in no map, and counts of them are dropped."
        )
    if expected.hashed:
        notes.append(
            f"Layers {_ids(expected.hashed)} choose experts by token id: their ranking follows "
            "the vocabulary of the traffic."
        )
    return notes


def _checked(model: Model) -> Model:
    for layer, experts in model.experts.items():
        if model.top_k > experts:
            found = f"{model.top_k} of {experts} experts in layer {layer}"
            raise FormatError(model.source, "experts of a token", found, f"at most {experts}")
        if model.row_bytes[layer] < 1:
            raise FormatError(model.source, f"layer {layer}", "rows of 0 bytes", "1 or more")
    return model
