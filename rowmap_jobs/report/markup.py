"""HTML and SVG as strings in which everything is escaped unless it was built here. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

_VOID = frozenset({"br", "link", "meta"})
# Control characters, lone surrogates and marks that reorder text: none of them belongs on a page.
_BAD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]"
)

Attribute = str | int | float | bool | None


class Raw(str):
    """Finished markup; any other string is text and gets escaped."""

    __slots__ = ()


def text(value: str) -> Raw:
    """`value` as text of a page: escaped, what cannot be shown replaced by U+FFFD."""
    return Raw(escape(_BAD.sub("�", value), quote=True))


def join(parts: Iterable[str | None]) -> Raw:
    """Parts one after the other; None is left out."""
    return Raw("".join(p if isinstance(p, Raw) else text(p) for p in parts if p is not None))


def el(name: str, /, *children: str | None, **attributes: Attribute) -> Raw:
    """One element. `class_="x"` is class="x", `aria_label` is aria-label; None and False are left
    out, True is an attribute without a value, and a float has at most two decimals.
    """
    out = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        out.append(f" {key}" if value is True else f' {key}="{text(_plain(value))}"')
    out.append(">")
    if name not in _VOID:
        out += [join(children), f"</{name}>"]
    return Raw("".join(out))


def _plain(value: Attribute) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return str(value)
