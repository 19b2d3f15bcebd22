"""Bytes of one expert by configuration: weights with their scales, zero points and biases.

Bits a weight, with scales: bf16 16; fp8 with one fp32 scale for 128 x 128; mxfp4 4 and one byte for
32; nvfp4 4 and one byte for 16, and two fp32 a matrix; int4 4 and two bytes for a group of 128.
Headers say it better than any formula, and are preferred where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..formats.base import FormatError
from . import config as configuration
from .config import Config
from .families import Family
from .values import is_count, shown

PLAIN_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


@dataclass(frozen=True)
class RowTensor:
    """One tensor's part that belongs to one expert (a fused tensor divided by its experts)."""

    name: str
    """Below the layer; `{}` stands for the expert where each has a tensor of its own."""
    role: str
    """gate, up, gate_up, down, or other."""
    kind: str
    """weight, scale, zero, bias, index or other."""
    dtype: str
    shape: tuple[int, ...]
    """Of the whole expert, on however many accelerators it lies."""
    nbytes: int
    """Of one expert on one accelerator."""


@dataclass(frozen=True)
class Scheme:
    """How a matrix of weights is stored."""

    name: str
    bits: int
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale; 0 is the whole dimension."""
    scale_bytes: int = 0
    zero_bits: int = 0
    """Of one block's zero point."""
    constant: int = 0
    """Bytes that every matrix has beside: global scales."""
    index_bytes: int = 0
    """Of each input's group number."""


def matrix_bytes(scheme: Scheme, outputs: int, inputs: int) -> int:
    """Bytes of a matrix [outputs, inputs] with all that belongs to it."""
    total = -(-outputs * inputs * scheme.bits // 8)
    if scheme.block is not None:
        rows, columns = scheme.block
        blocks = -(-outputs // (rows or outputs)) * -(-inputs // (columns or inputs))
        total += blocks * scheme.scale_bytes + -(-blocks * scheme.zero_bits // 8)
    return total + scheme.constant + scheme.index_bytes * inputs


def expert_tensors(
    scheme: Scheme, family: Family, inputs: int, width: int, bias_bytes: int
) -> tuple[RowTensor, ...]:
    """The matrices of one expert, each with its scales, and its biases.

    `inputs` is the hidden (or latent) size, `width` the expert's own on one accelerator.
    """
    roles = ("gate", "up", "down")[3 - family.matrices :]
    shapes = {role: (inputs, width) if role == "down" else (width, inputs) for role in roles}
    rows = [
        RowTensor(role, role, "weight", scheme.name, shape, matrix_bytes(scheme, *shape))
        for role, shape in shapes.items()
    ]
    if family.biases:
        for role, (outputs, _) in shapes.items():
            nbytes = outputs * bias_bytes
            rows.append(RowTensor(f"{role}_bias", role, "bias", "bias", (outputs,), nbytes))
    return tuple(rows)


def divided(tensor: RowTensor, parts: int, source: str) -> RowTensor:
    """A row tensor with its bytes on one of `parts` accelerators that share an expert's width.

    What has the width as a dimension is divided; scalars, the bias of the down matrix and scales of
    its outputs are whole on each. Raises FormatError when the width cannot be divided.
    """
    if parts == 1 or not _has_width(tensor):
        return tensor
    if tensor.nbytes % parts or not any(size % parts == 0 for size in tensor.shape):
        found = f"{list(tensor.shape)} on {parts} accelerators"
        raise FormatError(source, tensor.name, found, "a width that they can share")
    return replace(tensor, nbytes=tensor.nbytes // parts)


def _has_width(tensor: RowTensor) -> bool:
    several = [size for size in tensor.shape if size > 1]
    if tensor.role == "down":
        if tensor.kind == "index":
            return True
        return len(tensor.shape) > 1 and len(several) == len(tensor.shape)
    return bool(several) and tensor.role != "other" and tensor.kind not in ("index", "other")


def scheme_of(config: Config, family: Family) -> Scheme:
    """How the experts' weights are stored, by config.json. Raises FormatError: not to be told."""
    if family.quant is not None:
        return _own_type(config, family.quant)
    quant = configuration.quantization(config)
    if quant is None:
        return _plain(config)
    method = quant.get("quant_method")
    if not isinstance(method, str):
        method = "modelopt" if "quant_algo" in quant or "quantization" in quant else ""
    method = method.lower().replace("compressed_tensors", "compressed-tensors")
    reader = _METHODS.get(method)
    scheme = reader(quant) if reader is not None else None
    if scheme is None:
        found = f"{method or 'none'}, {_summary(quant)}"
        expected = f"one that says its bytes ({', '.join(sorted(_METHODS))}), or headers"
        raise FormatError(config.source, "quantization_config", found, expected)
    return scheme


def bias_bytes(config: Config) -> int:
    """Bytes of one bias: biases keep the model's plain type, two bytes when it is not said."""
    return PLAIN_BITS.get(configuration.dtype(config) or "", 16) // 8


def _plain(config: Config) -> Scheme:
    name = configuration.dtype(config)
    if name is None:
        raise config.missing(configuration.DTYPE, "type of the weights")
    if name not in PLAIN_BITS:
        raise FormatError(config.source, "dtype", name, f"one of {', '.join(PLAIN_BITS)}")
    return Scheme(name, PLAIN_BITS[name])


MXFP4 = Scheme("mxfp4", 4, (1, 32), 1)
NVFP4 = Scheme("nvfp4", 4, (1, 16), 1, constant=8)


def _own_type(config: Config, name: str) -> Scheme:
    """DeepSeek V4: experts have a type of their own, fp4 unless it is said (vLLM's default)."""
    quant = configuration.quantization(config) or {}
    value = config.get(name)
    value = quant.get(name, "fp4") if value is None else value
    if value == "fp4":
        return MXFP4
    if value == "fp8":
        scale = 1 if quant.get("scale_fmt") == "ue8m0" else 4
        return replace(_fp8(quant) or _FP8, scale_bytes=scale)
    raise FormatError(config.source, name, shown(value), "fp4 or fp8")


_FP8 = Scheme("fp8", 8, (128, 128), 4)


def _fp8(quant: Mapping[str, Any]) -> Scheme | None:
    block = quant.get("weight_block_size")
    if block is None:
        return Scheme("fp8", 8, constant=4)
    if not isinstance(block, list) or len(block) != 2 or not all(is_count(n, 1) for n in block):
        return None
    return replace(_FP8, block=(block[0], block[1]))


def _modelopt(quant: Mapping[str, Any]) -> Scheme | None:
    inner = quant.get("quantization")
    algorithm = quant.get("quant_algo") or (
        inner.get("quant_algo") if isinstance(inner, dict) else None
    )
    # A weight scale and an input scale, fp32 each.
    return {"NVFP4": NVFP4, "FP8": Scheme("fp8", 8, constant=8)}.get(str(algorithm).upper())


def _grouped(quant: Mapping[str, Any]) -> Scheme | None:
    """GPTQ and AWQ: packed integers, fp16 scales and packed zero points of a group."""
    bits, group = quant.get("bits"), quant.get("group_size")
    if not is_count(bits, 2) or bits > 8 or not isinstance(group, int) or group < -1 or group == 0:
        return None
    method = str(quant.get("quant_method")).lower()
    size = 0 if group == -1 else group
    # A GPTQ matrix names the group of each input; AWQ's are in order.
    index = 4 if method.startswith("gptq") else 0
    return Scheme(f"int{bits}", bits, (1, size), 2, zero_bits=bits, index_bytes=index)


def _compressed(quant: Mapping[str, Any]) -> Scheme | None:
    groups = quant.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, dict) else None
    form = quant.get("format")
    if not isinstance(weights, dict):
        return None
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return NVFP4 if form.startswith("nv") else MXFP4
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if form != "pack-quantized" or not is_count(bits, 2) or bits > 8 or not is_count(size, 1):
        return None
    zero = 0 if weights.get("symmetric", True) else bits
    return Scheme(f"int{bits}", bits, (1, size), 2, zero_bits=zero)


_METHODS = {
    "fp8": _fp8,
    "mxfp4": lambda _: MXFP4,
    "modelopt": _modelopt,
    "modelopt_fp4": lambda _: NVFP4,
    "gptq": _grouped,
    "gptq_marlin": _grouped,
    "awq": _grouped,
    "awq_marlin": _grouped,
    "compressed-tensors": _compressed,
}


def _summary(quant: Mapping[str, Any]) -> str:
    plain = {k: v for k, v in quant.items() if isinstance(v, str | int | float)}
    return ", ".join(f"{key} {value}" for key, value in sorted(plain.items())[:4]) or "no details"
