"""YAML of outsiders as plain data: no tags, no anchors, no key twice, everything bounded.

An alias may repeat what it names exponentially often; no file read here needs one, so a file with
an anchor or alias is refused before a node is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from ..formats.base import FormatError

MAX_BYTES = 16 << 20
MAX_EVENTS = 4_000_000
MAX_DEPTH = 8

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(raw: bytes, source: str) -> object:
    """Mappings, lists, text, numbers, booleans and None. Raises FormatError."""
    if len(raw) > MAX_BYTES:
        raise FormatError(source, "size", f"{len(raw)} bytes of YAML", f"at most {MAX_BYTES}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(source, f"byte {error.start}", "not UTF-8", "UTF-8 YAML") from None
    try:
        return _document(_events(text, source), source)
    except FormatError:
        raise
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1} column {mark.column + 1}" if mark else "text"
        found = getattr(error, "problem", None) or type(error).__name__
        raise FormatError(source, place, found, "valid YAML") from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise FormatError(source, "text", type(error).__name__, "valid YAML") from None


def _events(text: str, source: str) -> Iterator[Any]:
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        where = _line(event)
        if count > MAX_EVENTS:
            raise FormatError(source, where, f"more than {MAX_EVENTS} nodes", "a smaller file")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise FormatError(source, where, "an anchor or alias", "every value written out")
        tag = getattr(event, "tag", None)
        if tag:
            raise FormatError(source, where, f"the tag {tag}", "plain data")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise FormatError(source, where, f"a nesting of {depth}", f"at most {MAX_DEPTH}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        yield event


def _document(events: Iterator[Any], source: str) -> object:
    value: object = None
    documents = 0
    resolver = yaml.resolver.Resolver()
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise FormatError(source, "text", "a second document", "one document")
            value = _node(next(events), events, resolver, source)
    return value


def _node(event: Any, events: Iterator[Any], resolver: Any, source: str) -> object:
    """One value; recursion is bounded by MAX_DEPTH."""
    if isinstance(event, yaml.ScalarEvent):
        return _scalar(event, resolver, source)
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[object] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_node(event, events, resolver, source))
        return items
    out: dict[object, object] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        where = _line(event)
        if not isinstance(event, yaml.ScalarEvent):
            raise FormatError(source, where, "a collection as a key", "text or a number")
        key = _scalar(event, resolver, source)
        if key in out:
            raise FormatError(source, where, f"the key {event.value} twice", "each key once")
        out[key] = _node(next(events), events, resolver, source)
    return out


def _scalar(event: Any, resolver: Any, source: str) -> object:
    """The value of a scalar; an integer in plain digits, no octal, no 1:30, no date."""
    text: str = event.value
    if not event.implicit[0]:
        return text
    tag = resolver.resolve(yaml.ScalarNode, text, (True, False))
    if tag.endswith(":null"):
        return None
    if tag.endswith(":bool"):
        return text.lower() in ("yes", "true", "on")
    digits = text.removeprefix("-").removeprefix("+")
    if tag.endswith(":int") and digits.isascii() and digits.isdigit() and len(digits) <= 18:
        if digits != "0" and digits.startswith("0"):
            raise FormatError(source, _line(event), text, "an integer without leading zeros")
        return int(text)
    return text


def _line(event: Any) -> str:
    return f"line {event.start_mark.line + 1}"
