"""Tables and figures: captions, headers with their scope, boxes that scroll by keyboard. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .markup import Raw, el, join


def box(content: Raw, name: str, tall: bool = False) -> Raw:
    """A region that scrolls by itself, so that the page never does sideways."""
    kind = "scroll tall" if tall else "scroll"
    return el("div", content, class_=kind, role="region", aria_label=name, tabindex=0)


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Raw],
    kind: str | None = None,
    tall: bool = False,
) -> Raw:
    """A table in its box. `rows` are from `row`; `heads` may be empty for a list of pairs."""
    head = None
    if heads:
        cells = [el("th", heads[0], scope="col", class_="left")]
        cells += [el("th", name, scope="col") for name in heads[1:]]
        head = el("thead", el("tr", *cells))
    body = el("tbody", *rows)
    # The caption keeps to the box while the table below it scrolls.
    words = el("caption", el("span", caption))
    return box(el("table", words, head, body, class_=kind), caption, tall)


def row(name: str, *cells: str, here: bool = False) -> Raw:
    """A row that its first cell names; a cell that is a finished <td> stays as it is."""
    done = (cell if isinstance(cell, Raw) else el("td", cell) for cell in cells)
    return el("tr", el("th", name, scope="row"), *done, class_="here" if here else None)


def wide(value: str) -> Raw:
    """A cell of code that may break into lines."""
    return el("td", el("code", value), class_="wide")


def pairs(caption: str, cells: Mapping[str, str]) -> Raw:
    """Names and numbers; nothing when there are none."""
    if not cells:
        return Raw("")
    return table(caption, ("what", "value"), [row(name, value) for name, value in cells.items()])


def columns(*parts: Raw | None, kind: str = "pair") -> Raw | None:
    """Parts side by side where there is room; nothing when there are none."""
    inside = [part for part in parts if part]
    return el("div", *inside, class_=kind) if inside else None


def figure(name: str, picture: Raw, caption: str, *more: Raw | None) -> Raw:
    """A named picture in its box, with a caption and whatever belongs to it."""
    words = el("figcaption", el("span", name, class_="name"), ". " + caption)
    return el("figure", box(picture, f"{name}: picture"), *more, words, aria_label=name)


def details(summary: str, *content: Raw) -> Raw:
    """Folded content that opens without a script."""
    return el("details", el("summary", summary), *content)


def section(anchor: str, heading: str, *content: Raw | None) -> Raw:
    """A section with its heading; nothing when it has no content."""
    inside = join(content)
    if not inside:
        return Raw("")
    name = f"{anchor}-heading"
    return el("section", el("h2", heading, id=name), inside, id=anchor, aria_labelledby=name)
