"""Shared base of the formats: strict models, canonical JSON, digests and one-line refusals."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Annotated, Any, NoReturn, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
Digest = Annotated[str, Field(pattern=DIGEST_PATTERN)]
"""A sha256 in full, spelled `sha256:<64 hex digits>`."""


class FormatError(ValueError):
    """A refusal in one line: which file or object, the place, what was found and expected."""

    def __init__(self, source: str, place: str, found: object, expected: str) -> None:
        self.source, self.place, self.found, self.expected = source, place, found, expected
        text = f"{source}: {place}: found {_short(found)}, expected {expected}"
        super().__init__(" ".join(text.split()))


class MisfitError(ValueError):
    """Raised inside a model's validator: the place below the model, found and expected."""

    def __init__(self, place: str, found: object, expected: str) -> None:
        self.place, self.found, self.expected = place, found, expected
        super().__init__(f"{place}: found {_short(found)}, expected {expected}")


def _short(value: object, limit: int = 120) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Strict(BaseModel):
    """Immutable model in camelCase on the wire that knows all of its fields."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, alias_generator=to_camel
    )

    def to_wire(self) -> dict[str, Any]:
        """The JSON object of this model: camelCase keys, unset optionals left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @classmethod
    def from_wire(cls, data: object, source: str) -> Self:
        """Validate a decoded JSON object whole.

        Raises FormatError that names `source` and the first place that does not fit.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise refusal(source, error) from None

    @classmethod
    def from_bytes(cls, raw: bytes, source: str) -> Self:
        """Decode and validate UTF-8 JSON bytes. Raises FormatError."""
        return cls.from_wire(load_json(raw, source), source)


def refusal(source: str, error: ValidationError) -> FormatError:
    """The first problem of a pydantic error as a FormatError; values of inputs are shortened."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, MisfitError):
        inner = f"{place}.{cause.place}".strip(".")
        return FormatError(source, inner, cause.found, cause.expected)
    if first["type"] == "missing":
        return FormatError(source, place, "none", "a value (the key is required)")
    place = place or "top level"
    found: object = first.get("input")
    if isinstance(found, dict | list):
        found = type(found).__name__
    expected = first["msg"].removeprefix("Value error, ")
    return FormatError(source, place, found, expected)


def load_json(raw: bytes, source: str) -> Any:
    """Decode UTF-8 JSON; what cannot be written back (NaN, infinities, duplicate keys, lone
    surrogates, numbers beyond a double) is refused. Raises FormatError.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise FormatError(source, key, "the key twice", "each key once")
            out[key] = value
        return out

    def no_constant(name: str) -> NoReturn:
        raise FormatError(source, "a number", name, "a finite number")

    def finite(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            no_constant("a number beyond a double")
        return value

    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=no_duplicates,
            parse_constant=no_constant,
            parse_float=finite,
        )
        if "\\" in text and "\\ud" in text.lower():
            canonical_json(value)  # a lone surrogate cannot be encoded
        return value
    except FormatError:
        raise
    except UnicodeEncodeError:
        raise FormatError(source, "a string", "a lone surrogate", "whole characters") from None
    except UnicodeDecodeError as error:
        raise FormatError(source, f"byte {error.start}", "not UTF-8", "UTF-8 JSON") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise FormatError(source, place, error.msg, "valid JSON") from None
    except ValueError:
        raise FormatError(source, "a number", "too many digits", "a number") from None
    except RecursionError:
        raise FormatError(source, "top level", "too deep a nesting", "flat JSON") from None


def canonical_json(value: object) -> bytes:
    """UTF-8, sorted keys, no spaces, one final newline: the form whose sha256 is a digest."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8") + b"\n"


def sha256_digest(data: bytes) -> str:
    """`sha256:<hex>` of the bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
