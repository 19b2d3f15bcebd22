"""Absolute layer ids in the names that engines give their layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..formats.base import FormatError

MAX_LAYER = 4095

_NUMBERED = re.compile(r"(?:^|\.)(?:layers?|blk|block|h)\.(\d{1,4})(?=\.|$)")
_ATTRIBUTE = re.compile(r"_?layer_(?:idx|id)=(\d{1,4})")
_DRAFT = re.compile(r"(?:^|[._=])(?:mtp|nextn|draft|dspark|eagle|spec)[a-z]*\d*(?=[._=]|$)", re.I)


def layer_id(name: str) -> int | None:
    """The absolute layer id that a name says, or None.

    Known are `7`, `layer.7`, `model.layers.7.mlp.experts`, `blk.7.ffn_gate_exps.weight` and the
    reference hook's `layer_idx=7`, `layer_id=7`, `layer_name=<module>`. A name with two numbers
    of layers says neither.
    """
    if len(name) > 512:
        return None
    name = name.removeprefix("layer_name=").removeprefix("_layer_name=")
    whole = _ATTRIBUTE.fullmatch(name) or re.fullmatch(r"(\d{1,4})", name)
    found = [whole.group(1)] if whole else _NUMBERED.findall(name)
    if len(found) != 1 or not found[0].isascii():
        return None
    value = int(found[0])
    return value if value <= MAX_LAYER else None


def is_draft(name: str) -> bool:
    """True where a name says that the layer is a draft model's (MTP, nextn, EAGLE and so on)."""
    return bool(_DRAFT.search(name[:512]))


def layer_ids(names: Sequence[str], source: str, place: str) -> tuple[int, ...]:
    """Ids of all names, in their order. Raises FormatError: no number, or one twice."""
    out: dict[int, str] = {}
    for name in names:
        number = layer_id(name)
        if number is None:
            raise FormatError(source, place, name, "names with the layer's number, as layers.7")
        if number in out:
            raise FormatError(source, place, f"layer {number} twice", "each layer once")
        out[number] = name
    return tuple(out)
