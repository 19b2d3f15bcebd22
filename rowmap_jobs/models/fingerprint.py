"""The fingerprint of a plain checkpoint: equal to what the hook finds inside vLLM.

Router and tokenizer are hashed by the hook's own code. The shape is what vLLM 0.32 allocates for
unquantised experts (layers/fused_moe/unquantized_fused_moe_method.py, `create_weights`):
`w13_weight` [E, 2I, H] and `w2_weight` [E, H, I] in the type that it loads with, on one
accelerator. What quantised experts become depends on the kernels of the node, and is not guessed.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..formats.base import FormatError
from ..formats.rowmap import Fingerprint
from . import config as configuration
from .config import HIDDEN, Config
from .families import FAMILIES, family_of
from .geometry import read
from .model import Model
from .tensors import RowTensor

FROM_A_LANE = "plain weights; otherwise take it from a lane (--fingerprint CENSUS, MAP or STATUS)"

QUANT_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_PLAIN = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def of_folder(folder: Path, dtype: str | None = None) -> Fingerprint:
    """Fingerprint of a model's folder, for a lane that loads it on one accelerator.

    Backends that pad the width of an expert (FlashInfer's TRTLLM kernels to 128) have another
    shape: take it from the lane there.

    `dtype` is the lane's `--dtype` where it is set (bfloat16, float16 or float32). Raises
    FormatError: quantised weights, a family whose tensors inside the engine cannot be told, no
    router or tokenizer.
    """
    model = read(folder)
    if model.evidence != "headers":
        raise FormatError(str(folder), "fingerprint", f"a model by {model.evidence}", FROM_A_LANE)
    config = configuration.load(folder / configuration.FILE)
    _check_plain(model, config)
    loaded = dtype or _loading_type(model, config)
    if loaded not in QUANT_NAMES:
        raise FormatError(str(folder), "dtype", loaded, f"one of {', '.join(QUANT_NAMES)}")
    hidden = config.integer(HIDDEN, "hidden size", most=1 << 24)
    checkpoint = hook_checkpoint()
    layers = list(model.layers)
    return Fingerprint(
        shape=_shape_digest(model, hidden, loaded),
        router=_hashed(checkpoint, folder, lambda: checkpoint.router_digest(folder, layers)),
        quant=QUANT_NAMES[loaded],
        tokenizer=_hashed(checkpoint, folder, lambda: checkpoint.tokenizer_digest(folder)),
    )


def _check_plain(model: Model, config: Config) -> None:
    quant = configuration.quantization(config)
    if quant is not None:
        found = f"{quant.get('quant_method', 'weights with a quantization_config')}"
        raise FormatError(config.source, "quantization_config", found, FROM_A_LANE)
    name, family = family_of(config)
    if family is None or not family.plain:
        plain = ", ".join(sorted(each for each, entry in FAMILIES.items() if entry.plain))
        raise FormatError(config.source, "model_type", name or "none", f"{plain}; {FROM_A_LANE}")
    for layer in model.layers:
        for row in model.tensors[layer]:
            if row.kind != "weight" or row.dtype not in _PLAIN or len(row.shape) != 2:
                found = f"{row.dtype} {row.kind}"
                raise FormatError(model.source, f"layer {layer}, {row.name}", found, FROM_A_LANE)


def _loading_type(model: Model, config: Config) -> str:
    """The type that vLLM loads with by itself: that of config.json, or of the weights.

    Raises FormatError for float32, which it loads as what the accelerator prefers.
    """
    said = configuration.dtype(config)
    stored = {_PLAIN[row.dtype] for rows in model.tensors.values() for row in rows}
    name = said or (stored.pop() if len(stored) == 1 else "several types")
    if name not in ("bfloat16", "float16"):
        raise FormatError(config.source, "dtype", name, "the lane's --dtype: say which it has")
    return name


def _shape_digest(model: Model, hidden: int, dtype: str) -> str:
    """As the hook's `shape_digest`: canonical JSON of [name, shape, type] of each layer."""
    wire = {}
    for layer in model.layers:
        experts, width = model.experts[layer], _width(model, layer, hidden)
        wire[str(layer)] = [
            ["w13_weight", [experts, 2 * width, hidden], dtype],
            ["w2_weight", [experts, hidden, width], dtype],
        ]
    text = json.dumps(wire, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode() + b"\n").hexdigest()


def _width(model: Model, layer: int, hidden: int) -> int:
    """Width of an expert by its matrices, which have to be gate, up and down of one width."""
    rows = {row.role: row for row in model.tensors[layer]}
    gated = rows.keys() in ({"gate", "up", "down"}, {"gate_up", "down"})
    if len(rows) != len(model.tensors[layer]) or not gated:
        found = ", ".join(sorted(rows))
        raise FormatError(model.source, f"layer {layer}", found, "gate, up and down matrices")
    width = _other(rows["down"], hidden, model.source)
    for role, row in rows.items():
        expected = 2 * width if role == "gate_up" else width
        if _other(row, hidden, model.source) != expected:
            found = f"{list(row.shape)}"
            raise FormatError(model.source, f"layer {layer}, {row.name}", found, f"{expected} wide")
    return width


def _other(row: RowTensor, hidden: int, source: str) -> int:
    """The dimension of a matrix that is not the hidden size, whichever way round it is stored."""
    if hidden not in row.shape:
        found = f"{list(row.shape)}"
        raise FormatError(source, row.name, found, f"the hidden size {hidden} as a dimension")
    return row.shape[0] * row.shape[1] // hidden


def hook_checkpoint() -> ModuleType:
    """The hook's checkpoint module. Its modules are flat where it runs, so one name is lent."""
    package, flat = "rowmap_jobs.hook", "expertmaps_hook_env"
    lent = flat not in sys.modules
    if lent:
        sys.modules[flat] = importlib.import_module(f"{package}.{flat}")
    try:
        return importlib.import_module(f"{package}.expertmaps_hook_checkpoint")
    finally:
        if lent:
            del sys.modules[flat]


def _hashed(checkpoint: ModuleType, folder: Path, digest: Callable[[], str]) -> str:
    """A digest of the hook's, its refusal as ours."""
    try:
        return digest()
    except OSError as error:
        found = error.strerror or "unreadable"
        raise FormatError(str(folder), "checkpoint", found, "readable files") from None
    except Exception as error:
        if not isinstance(error, checkpoint.HookError):
            raise
        message = str(error).removeprefix(f"{folder}: ")
        raise FormatError(str(folder), "checkpoint", message, FROM_A_LANE) from None
