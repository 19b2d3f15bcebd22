"""config.json of a model: the same number under many names, often in a nested text model.

Spellings are those of vLLM's transformers_utils/model_arch_config_convertor.py, and of the
transformers classes and remote code that it leaves to them. Nothing is assumed: a number that no
spelling gives is a refusal that names all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..formats.base import FormatError, load_json
from .values import is_count, read_bounded, shown

FILE = "config.json"
MAX_BYTES = 16 << 20
SECTIONS = ("text_config", "llm_config", "language_config")
"""Where wrappers for images and sound keep the language model; looked through before the top."""
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 16

LAYERS = ("num_hidden_layers", "num_layers", "n_layers")
EXPERTS = (
    "num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts",
    "ffn_config.moe_num_experts",
)  # fmt: skip
TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k",
    "moe_k", "experts_per_token", "ffn_config.moe_top_k",
)  # fmt: skip
HIDDEN = ("hidden_size", "d_model")
WIDTH = (
    "moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size",
    "ffn_config.ffn_hidden_size",
)  # fmt: skip
DRAFT_LAYERS = (
    "num_nextn_predict_layers", "n_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules",
    "num_mtp_layers",
)  # fmt: skip
SHARED = (
    "n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "shared_intermediate_size", "share_expert_dim",
)  # fmt: skip
DTYPE = ("dtype", "torch_dtype")
QUANT = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Config:
    """A decoded config.json: the language model's own section (or the top level), then the top."""

    source: str
    text: Mapping[str, Any]
    top: Mapping[str, Any]
    section: str = ""
    """Name of the nested section, empty when the model stands at the top level."""

    def get(self, name: str) -> Any:
        """Value of a (dotted) name, in the section first; None when neither has it."""
        for part in (self.text, self.top):
            value: Any = part
            for key in name.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def first(self, names: tuple[str, ...]) -> tuple[str, Any] | None:
        """The first of several spellings that has a value, with that value."""
        for name in names:
            value = self.get(name)
            if value is not None:
                return name, value
        return None

    def missing(self, names: tuple[str, ...], what: str) -> FormatError:
        """The refusal of a number that no spelling gives."""
        where = f"{self.section} and the top level" if self.section else "the top level"
        expected = f"{'one of ' if len(names) > 1 else ''}{', '.join(names)}"
        return FormatError(self.source, what, f"nothing in {where}", expected)

    def integer(
        self, names: tuple[str, ...], what: str, least: int = 1, most: int = MAX_EXPERTS
    ) -> int:
        """An integer by any of its spellings. Raises FormatError: missing, or not in the range."""
        found = self.first(names)
        if found is None:
            raise self.missing(names, what)
        name, value = found
        if not is_count(value, least) or value > most:
            raise FormatError(self.source, name, shown(value), f"an integer {least} to {most}")
        return int(value)

    def optional(self, names: tuple[str, ...], default: int, most: int = MAX_LAYERS) -> int:
        """Like `integer` from 0, with a value for when no spelling is there."""
        return default if self.first(names) is None else self.integer(names, names[0], 0, most)

    @property
    def model_type(self) -> str:
        """model_type of the language model; empty when there is none."""
        value = self.get("model_type")
        return value if isinstance(value, str) else ""


_NOT_FINITE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|-?Infinity|NaN', re.DOTALL)
"""A string, to pass over it, or one of the words that JSON does not have."""


def load(path: Path) -> Config:
    """Read a config.json. Raises FormatError.

    `Infinity`, which Python writes and Nemotron-H's configuration has, is read as null: no number
    that is looked for can be infinite.
    """
    raw = read_bounded(path, MAX_BYTES)
    if b"Infinity" in raw or b"NaN" in raw:
        raw = _NOT_FINITE.sub(lambda word: word[0] if word[0][:1] == b'"' else b"null", raw)
    return parse(load_json(raw, str(path)), str(path))


def parse(data: object, source: str) -> Config:
    """Find the language model in a decoded config.json. Raises FormatError."""
    if not isinstance(data, dict):
        raise FormatError(source, "top level", shown(data), "a JSON object")
    for section in SECTIONS:
        nested = data.get(section)
        if isinstance(nested, dict) and nested:
            return Config(source, nested, data, section)
    return Config(source, data, data)


def experts(config: Config) -> int | None:
    """Routed experts that the configuration names; None when it names none (or 0): dense.

    A list has one count for each modality (Ernie VL): the first is that of text.
    """
    found = config.first(EXPERTS)
    if found is None:
        return None
    name, value = found
    if isinstance(value, list) and value:
        value = value[0]
    if not is_count(value) or value > MAX_EXPERTS:
        raise FormatError(config.source, name, shown(value), f"an integer 0 to {MAX_EXPERTS}")
    return int(value) or None


def top_k(config: Config) -> int:
    """Experts of one token; of a list (one for each layer or modality) the largest.

    Raises FormatError naming all spellings.
    """
    found = config.first(TOP_K)
    if found is None:
        raise config.missing(TOP_K, "experts of a token")
    name, value = found
    values = value if isinstance(value, list) and value else [value]
    if not all(is_count(item, 1) and item <= MAX_EXPERTS for item in values):
        raise FormatError(config.source, name, shown(value), f"an integer 1 to {MAX_EXPERTS}")
    return int(max(values))


def width(config: Config, names: tuple[str, ...]) -> int:
    """Width of one expert by the family's spellings; of a list the first. Raises FormatError."""
    found = config.first(names)
    if found is None:
        raise config.missing(names, "width of an expert")
    name, value = found
    if isinstance(value, list) and value:
        value = value[0]
    if not is_count(value, 1) or value >= 1 << 31:
        raise FormatError(config.source, name, shown(value), "an integer from 1")
    return int(value)


def dtype(config: Config) -> str | None:
    """Type of plain weights, such as bfloat16; None when the file does not say it."""
    for part in (config.top, config.text):
        for name in DTYPE:
            value = part.get(name)
            if isinstance(value, str) and value:
                return value.removeprefix("torch.")
    return None


def quantization(config: Config) -> Mapping[str, Any] | None:
    """The quantisation section, at the top level first as vLLM looks for it; None for plain."""
    for part in (config.top, config.text):
        for name in QUANT:
            value = part.get(name)
            if isinstance(value, dict) and value:
                return value
    return None
