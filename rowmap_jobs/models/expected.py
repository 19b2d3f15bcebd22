"""What config.json alone says of a model: layers, experts, top-k and bytes, each or why not.

Headers are preferred, so a number that cannot be told from the configuration is no refusal here:
it is kept as a gap, and is raised when there are no headers to fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..formats.base import FormatError
from . import config as configuration
from .config import DRAFT_LAYERS, HIDDEN, MAX_EXPERTS, MAX_LAYERS, Config
from .families import HASHED, Family, Fields, family_of
from .tensors import RowTensor, bias_bytes, expert_tensors, scheme_of
from .values import is_count

T = TypeVar("T")


@dataclass
class Expected:
    """Numbers by config.json; None where it does not say, with the reason in `gaps`."""

    source: str
    model_type: str
    family: Family | None
    dense: bool = False
    """The configuration describes a model without routed experts."""
    layers: int | None = None
    moe_layers: tuple[int, ...] | None = None
    experts: dict[int, int] | None = None
    top_k: int | None = None
    hidden: int | None = None
    tensors: tuple[RowTensor, ...] | None = None
    draft: int = 0
    identity: int = 0
    hashed: tuple[int, ...] = ()
    """Layers that route by a table of token ids."""
    modal: tuple[int, ...] = ()
    """Experts of each modality, where there are several; that of text first."""
    gaps: dict[str, FormatError] = field(default_factory=dict)

    @property
    def row_bytes(self) -> int | None:
        return None if self.tensors is None else sum(each.nbytes for each in self.tensors)


def expect(config: Config, parts: int) -> Expected:
    """Everything that a configuration says; `parts` accelerators share an expert's width.

    Raises FormatError only when more accelerators are asked for than the width can be divided by.
    """
    name, family = family_of(config)
    out = Expected(config.source, name, family)

    def tell(what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except FormatError as error:
            out.gaps[what] = error
            return None

    out.draft = tell("draft", lambda: config.optional(DRAFT_LAYERS, 0)) or 0
    out.top_k = tell("top_k", lambda: configuration.top_k(config))
    out.hidden = tell("hidden", lambda: config.integer(HIDDEN, "hidden size", most=1 << 24))
    experts = tell("experts", lambda: configuration.experts(config))
    out.modal = _modal(config) or ((experts,) if experts else ())
    if family is None:
        known = f"{name or 'none'}, which is no known family"
        out.gaps["moe_layers"] = FormatError(config.source, "model_type", known, "headers to read")
        out.layers = tell("layers", lambda: _layers(config, configuration.LAYERS))
        out.dense = experts is None and "experts" not in out.gaps
        return out
    out.layers = tell("layers", lambda: _layers(config, family.layers))
    off = family.switch is not None and config.get(family.switch) is False
    blocks = _block_experts(config)
    out.dense = off or (experts is None and not blocks and "experts" not in out.gaps)
    out.identity = _identity(config, family)
    out.hashed = _hashed(config, name)
    if out.layers is not None:
        fields = Fields(config, family.defaults, out.layers)
        out.moe_layers = tell("moe_layers", lambda: _rule(family, fields))
    if out.moe_layers is not None and not out.dense:
        out.experts = {i: blocks.get(i, experts or 0) for i in out.moe_layers}
        out.dense = not any(out.experts.values())
    if not blocks:
        out.tensors = tell("tensors", lambda: _tensors(config, family, parts))
    return out


def _layers(config: Config, names: tuple[str, ...]) -> int:
    found = config.first(names)
    if found is not None and isinstance(found[1], list | str):
        if not 1 <= len(found[1]) <= MAX_LAYERS:
            length = f"{len(found[1])} entries"
            raise FormatError(config.source, found[0], length, f"1 to {MAX_LAYERS}")
        return len(found[1])
    return config.integer(names, "number of layers", most=MAX_LAYERS)


def _rule(family: Family, fields: Fields) -> tuple[int, ...]:
    found = family.rule(fields)
    if found is None:
        source = fields.config.source
        raise FormatError(source, "layers with experts", "no field that names them", "headers")
    return found


def _tensors(config: Config, family: Family, parts: int) -> tuple[RowTensor, ...]:
    inputs = None
    if family.latent and config.first(family.latent) is not None:
        inputs = config.integer(family.latent, family.latent[0], most=1 << 24)
    hidden = inputs or config.integer(HIDDEN, "hidden size", most=1 << 24)
    width = configuration.width(config, family.width)
    if width % parts:
        found = f"a width of {width} on {parts} accelerators"
        raise FormatError(config.source, "width of an expert", found, "one that they can share")
    scheme = scheme_of(config, family)
    return expert_tensors(scheme, family, hidden, width // parts, bias_bytes(config))


def _modal(config: Config) -> tuple[int, ...]:
    """Experts of each modality where the configuration has a list of them."""
    found = config.first(configuration.EXPERTS)
    if found is None or not isinstance(found[1], list) or len(found[1]) < 2:
        return ()
    return tuple(found[1]) if all(is_count(item, 1) for item in found[1]) else ()


def _block_experts(config: Config) -> dict[int, int]:
    """Experts of each layer of a pruned model (`block_configs`)."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list):
        return {}
    counts = {
        i: block.get("n_routed_experts")
        for i, block in enumerate(blocks[:MAX_LAYERS])
        if isinstance(block, dict) and block.get("block_type") == "moe"
    }
    return {i: count for i, count in counts.items() if is_count(count, 1, MAX_EXPERTS)}


def _identity(config: Config, family: Family) -> int:
    value = config.get(family.identity) if family.identity else None
    return value if is_count(value) else 0


def _hashed(config: Config, name: str) -> tuple[int, ...]:
    """DeepSeek V4: the first layers choose by token id (`mlp_layer_types` or `num_hash_layers`)."""
    if name != "deepseek_v4":
        return ()
    words = config.get("mlp_layer_types")
    if isinstance(words, list):
        return tuple(i for i, word in enumerate(words[:MAX_LAYERS]) if word == HASHED)
    count = config.get("num_hash_layers")
    return tuple(range(count)) if is_count(count) and count <= MAX_LAYERS else ()


def dense_refusal(expected: Expected, source: str, found: str) -> FormatError:
    """The refusal of a model without routed experts, by its name."""
    name = expected.model_type or "a model without model_type"
    return FormatError(
        source, "model_type", f"{name}: a dense model ({found})", "a mixture-of-experts model"
    )
