"""Which layers have experts, for each family of models: one rule a kind, one table of families.

Rules follow the model code of vLLM 0.32 and the configuration classes of transformers 5.19. The
defaults in the table are those of these classes, for fields that real config.json files leave out;
no size (layers, experts, top-k, widths) has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..formats.base import FormatError
from .config import DRAFT_LAYERS, LAYERS, MAX_LAYERS, WIDTH, Config
from .values import is_count, shown

MOE_WORDS = frozenset({"sparse", "moe", "hash_moe"})
DENSE_WORDS = frozenset({"dense", "mlp"})
HASHED = "hash_moe"

Layers = tuple[int, ...]


@dataclass(frozen=True)
class Fields:
    """What a rule sees: the configuration, the family's defaults, and the number of layers."""

    config: Config
    defaults: Mapping[str, Any]
    layers: int

    def get(self, name: str) -> Any:
        value = self.config.get(name)
        return self.defaults.get(name) if value is None else value

    def integer(self, name: str, least: int = 0) -> int:
        value = self.get(name)
        if value is None:
            raise self.config.missing((name,), "layers with experts")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise FormatError(self.config.source, name, shown(value), f"an integer from {least}")
        return value

    def per_layer(self, name: str) -> list[Any] | None:
        """A list with an entry for each layer, without those of draft layers; None if absent."""
        value = self.get(name)
        if value is None:
            return None
        draft = self.config.optional(DRAFT_LAYERS, 0)
        if not isinstance(value, list | str) or len(value) not in (
            self.layers,
            self.layers + draft,
        ):
            length = f"{len(value)} entries" if isinstance(value, list | str) else shown(value)
            raise FormatError(self.config.source, name, length, f"one for each of {self.layers}")
        return list(value[: self.layers])


Rule = Callable[[Fields], Layers | None]
"""Absolute ids of the layers with experts; None when the field of the rule is not there."""


def every(fields: Fields) -> Layers | None:
    """All layers."""
    return tuple(range(fields.layers))


def first_of(*rules: Rule) -> Rule:
    """The first rule whose field is there."""

    def rule(fields: Fields) -> Layers | None:
        return next((found for each in rules if (found := each(fields)) is not None), None)

    return rule


def sparse_step(fields: Fields) -> Layers | None:
    """Every `decoder_sparse_step`-th layer, but those of `mlp_only_layers` (Qwen)."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = _layer_ids(fields, "mlp_only_layers")
    return tuple(i for i in range(fields.layers) if (i + 1) % step == 0 and i not in dense)


def dense_first(name: str) -> Rule:
    """From a count of dense layers on, each `moe_layer_freq`-th (DeepSeek)."""

    def rule(fields: Fields) -> Layers | None:
        start = fields.integer(name)
        step = fields.get("moe_layer_freq")
        step = 1 if step is None or isinstance(step, list) else fields.integer("moe_layer_freq", 1)
        return tuple(i for i in range(fields.layers) if i >= start and i % step == 0)

    return rule


def layer_types(fields: Fields) -> Layers | None:
    """`mlp_layer_types`: a word for each layer."""
    words = fields.per_layer("mlp_layer_types")
    if words is None:
        return None
    for word in words:
        if not isinstance(word, str) or word not in MOE_WORDS | DENSE_WORDS:
            expected = f"one of {', '.join(sorted(MOE_WORDS | DENSE_WORDS))}"
            raise FormatError(fields.config.source, "mlp_layer_types", shown(word), expected)
    return tuple(i for i, word in enumerate(words) if word in MOE_WORDS)


def flags(fields: Fields) -> Layers | None:
    """`moe_layer_freq` as a list: not 0 where the layer has experts (MiMo, MiniMax M3)."""
    if not isinstance(fields.get("moe_layer_freq"), list):
        return None
    values = fields.per_layer("moe_layer_freq") or []
    if not all(is_count(value) for value in values):
        raise FormatError(fields.config.source, "moe_layer_freq", "no integers", "0 or 1 each")
    return tuple(i for i, value in enumerate(values) if value)


def named(name: str) -> Rule:
    """A list of layer ids, or a string of them with commas (Llama 4, Step)."""

    def rule(fields: Fields) -> Layers | None:
        if fields.get(name) is None:
            return None
        ids = _layer_ids(fields, name)
        return tuple(sorted(layer for layer in ids if layer < fields.layers))

    return rule


def interleaved(fields: Fields) -> Layers | None:
    """Each `interleave_moe_layer_step`-th layer (Llama 4); 0 is a dense model."""
    step = fields.integer("interleave_moe_layer_step")
    return tuple(i for i in range(fields.layers) if step and (i + 1) % step == 0)


def period(fields: Fields) -> Layers | None:
    """Layers at `expert_layer_offset` of each `expert_layer_period` (Jamba)."""
    length = fields.integer("expert_layer_period", 1)
    offset = fields.integer("expert_layer_offset")
    if offset >= length:
        expected = f"less than expert_layer_period, {length}"
        raise FormatError(fields.config.source, "expert_layer_offset", offset, expected)
    return tuple(i for i in range(fields.layers) if i % length == offset)


def window(fields: Fields) -> Layers | None:
    """Each `moe_layer_interval`-th layer from a start to an end index (Ernie).

    Indices of the variant for images are lists: the first is that of text. End -1 is the last.
    """

    def text(name: str) -> int:
        value = fields.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= MAX_LAYERS:
            raise FormatError(fields.config.source, name, shown(value), "an integer from -1")
        return value

    interval, start = fields.integer("moe_layer_interval", 1), text("moe_layer_start_index")
    end = text("moe_layer_end_index")
    end = fields.layers - 1 if end == -1 else end
    return tuple(i for i in range(fields.layers) if (i + 1) % interval == 0 and start <= i <= end)


def pattern(fields: Fields) -> Layers | None:
    """A letter for each layer in `hybrid_override_pattern`, E for experts (Nemotron-H)."""
    letters = fields.get("hybrid_override_pattern")
    if letters is None:
        return None
    if not isinstance(letters, str):
        source = fields.config.source
        raise FormatError(source, "hybrid_override_pattern", shown(letters), "a string")
    return tuple(i for i, letter in enumerate(letters) if letter == "E")


def blocks(name: str) -> Rule:
    """A word for each layer in a list of block types (Nemotron-H)."""

    def rule(fields: Fields) -> Layers | None:
        words = fields.get(name)
        if words is None:
            return None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise FormatError(fields.config.source, name, shown(words), "a word for each layer")
        return tuple(i for i, word in enumerate(words) if word == "moe")

    return rule


def block_configs(fields: Fields) -> Layers | None:
    """`block_configs[].block_type == "moe"` (pruned Nemotron-H)."""
    configs = fields.get("block_configs")
    if not isinstance(configs, list) or not all(isinstance(block, dict) for block in configs):
        return None
    return tuple(i for i, block in enumerate(configs) if block.get("block_type") == "moe")


def _layer_ids(fields: Fields, name: str) -> frozenset[int]:
    """Ids of a list or of a string with commas; none when the field is not there."""
    value = fields.get(name)
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        value = [int(part) if part.isascii() and part.isdigit() else part for part in parts[:4096]]
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(is_count(item) for item in value):
        raise FormatError(fields.config.source, name, shown(value), "layer ids")
    return frozenset(value)


@dataclass(frozen=True)
class Family:
    """How the experts of a family are laid out."""

    rule: Rule
    width: tuple[str, ...] = WIDTH
    """Spellings of an expert's width."""
    latent: tuple[str, ...] = ()
    """Spellings of the width that experts see instead of the hidden size, where it is set."""
    layers: tuple[str, ...] = LAYERS
    """Spellings of the number of layers; of a list or a pattern it is the length."""
    matrices: int = 3
    """3: gate, up, down. 2: up and down without a gate."""
    biases: bool = False
    quant: str | None = None
    """Where the field that names the experts' own format is read from."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    switch: str | None = None
    """A field that must be true for the layers to have experts at all."""
    identity: str | None = None
    """Field with the number of experts behind the real ones that only pass their input on."""
    plain: bool = False
    """vLLM keeps unquantised experts of it as w13_weight and w2_weight, and nothing else (a router
    with a correction bias, say, would register it beside them)."""


_INTERMEDIATE = ("intermediate_size",)
_STEP = {"decoder_sparse_step": 1}
_FREQ = {"moe_layer_freq": 1}
_QWEN = Family(sparse_step, defaults=_STEP, plain=True)
_QWEN35 = Family(every, plain=True)
_DEEPSEEK = Family(first_of(layer_types, dense_first("first_k_dense_replace")), defaults=_FREQ)
_DEEPSEEK4 = Family(first_of(layer_types, every), quant="expert_dtype")
_GLM = Family(first_of(layer_types, dense_first("first_k_dense_replace")))
_ERNIE = {"moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
_ERNIE_VL = Family(first_of(layer_types, window), defaults=_ERNIE)
_MIXTRAL = Family(every, _INTERMEDIATE, plain=True)
_MINIMAX3 = Family(first_of(layer_types, flags, every), _INTERMEDIATE)
_LEADING = Family(dense_first("num_dense_layers"))
_MIMO = Family(first_of(layer_types, flags))
_STEP3 = Family(first_of(layer_types, named("moe_layers_enum")))
_KIMI = Family(
    first_of(layer_types, dense_first("first_k_dense_replace")), defaults=_FREQ,
    latent=("routed_expert_hidden_size",),
)  # fmt: skip
_NEMOTRON = Family(
    first_of(block_configs, pattern, blocks("layers_block_type"), blocks("layer_types")),
    layers=("block_configs", "hybrid_override_pattern", "layers_block_type", "layer_types",
            *LAYERS),
    latent=("moe_latent_size",), matrices=2,
)  # fmt: skip
_GEMMA4 = Family(every, switch="enable_moe_block")

FAMILIES: dict[str, Family] = {
    "mixtral": _MIXTRAL,
    "phimoe": _MIXTRAL,
    "olmoe": _MIXTRAL,
    "minimax_m2": Family(every, _INTERMEDIATE),
    "granitemoe": Family(every, _INTERMEDIATE),
    "qwen2_moe": _QWEN,
    "qwen3_moe": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_vl_moe_text": _QWEN,
    "qwen3_next": _QWEN,
    "qwen3_5_moe": _QWEN35,
    "qwen3_5_moe_text": _QWEN35,
    "qwen4_exp": Family(every),
    "qwen4_exp_text": Family(every),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK4,
    "deepseek_v41": Family(every, quant="expert_dtype"),
    "deepseek_v41_text": Family(every, quant="expert_dtype"),
    "dots1": _GLM,
    "glm4_moe": _GLM,
    "glm4v_moe": _GLM,
    "glm4v_moe_text": _GLM,
    "glm4_moe_lite": _GLM,
    "glm_moe_dsa": Family(_GLM.rule, defaults={"first_k_dense_replace": 3}),
    "gpt_oss": Family(every, _INTERMEDIATE, biases=True),
    "llama4": Family(
        first_of(named("moe_layers"), interleaved), _INTERMEDIATE,
        defaults={"interleave_moe_layer_step": 1},
    ),
    "jamba": Family(period, _INTERMEDIATE),
    "ernie4_5_moe": Family(window, defaults=_ERNIE),
    "ernie4_5_moe_vl": _ERNIE_VL,
    "ernie4_5_vl_moe": _ERNIE_VL,
    "ernie4_5_vl_moe_text": _ERNIE_VL,
    "minimax_m3": _MINIMAX3,
    "minimax_m3_vl": _MINIMAX3,
    "minimax_m3_text": _MINIMAX3,
    "minimax_m3_vl_text": _MINIMAX3,
    # num_hidden_layers counts its attention layers, two for each layer with experts.
    "longcat_flash": Family(
        every, layers=("num_layers",), identity="zero_expert_num"
    ),
    "lfm2_moe": _LEADING,
    "afmoe": _LEADING,
    "mimo_v2": _MIMO,
    "mimo_v2_flash": _MIMO,
    "mimo_v2_omni": _MIMO,
    "step3_text": _STEP3,
    "step3_vl": _STEP3,
    "step3p5": _STEP3,
    "step3p7": _STEP3,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_puzzle": _NEMOTRON,
    "kimi_linear": _KIMI,
    "kimi_k3": _KIMI,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "dbrx": Family(every),
}  # fmt: skip
FAMILIES["llama4_text"] = FAMILIES["llama4"]
"""By model_type of the language model, or of the wrapper around it."""


def family_of(config: Config) -> tuple[str, Family | None]:
    """model_type and its family; the section's first, then the wrapper's. None when unknown."""
    names = [part.get("model_type") for part in (config.text, config.top)]
    known = [name for name in names if isinstance(name, str) and name]
    for name in known:
        if name in FAMILIES:
            return name, FAMILIES[name]
    return (known[0] if known else ""), None
