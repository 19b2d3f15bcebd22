"""The count file that the hook writes for one sequence, and whether it is what was fed.

`<id>.npz`: counts int64[2,L,E] and rows int64[2] (prefill, decode), bad int64 (rows whose ids were
missing, repeated or out of range), recomputed int64. `<id>.skip`: a word that says why not.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .formats.base import FormatError
from .formats.census import DECODE
from .formats.rowmap import per_layer
from .formats.status import ModelGeometry

MEMBERS = {"counts": 3, "rows": 1, "bad": 0, "recomputed": 0}
_WORD = re.compile(r"[A-Z][A-Za-z0-9]{0,63}")

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """What the counts of a model look like."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    top_k: int

    @property
    def width(self) -> int:
        return max(self.experts)

    @property
    def bytes_per_sequence(self) -> int:
        return 2 * len(self.layers) * self.width * 8


def shape_of(geometry: ModelGeometry) -> Shape:
    """The shape for a hook's geometry."""
    layers = geometry.moe_layers
    experts = tuple(per_layer(geometry.experts, layer) for layer in layers)
    return Shape(layers, experts, geometry.top_k)


@dataclass(frozen=True)
class Counts:
    """Counts of one sequence: int64[2,L,E] selections, int64[2] rows."""

    counts: I64
    rows: I64
    bad: int
    recomputed: int


def read(raw: bytes, source: str, shape: Shape) -> Counts:
    """Read a count file whole. Raises FormatError; never unpickles."""
    limit = shape.bytes_per_sequence + (1 << 16)
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            infos = {info.filename: info.file_size for info in archive.infolist()}
            if set(infos) != {f"{name}.npy" for name in MEMBERS} or sum(infos.values()) > limit:
                found = f"{len(infos)} members of {sum(infos.values())} bytes"
                raise FormatError(source, "members", found, f"{sorted(MEMBERS)} within {limit}")
            arrays = {name: _array(archive, name, limit) for name in MEMBERS}
    except FormatError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise many kinds on damaged bytes
        raise FormatError(source, "archive", type(error).__name__, "an npz file") from None
    for name, dimensions in MEMBERS.items():
        array = arrays[name]
        if array.dtype != np.dtype(np.int64) or array.ndim != dimensions:
            found = f"{array.dtype} with {array.ndim} dimensions"
            raise FormatError(source, name, found, f"int64 with {dimensions} dimensions")
        if array.size and int(array.min()) < 0:
            raise FormatError(source, name, "a negative number", "numbers of 0 or more")
    expected = (2, len(shape.layers), shape.width)
    if arrays["counts"].shape != expected or arrays["rows"].shape != (2,):
        raise FormatError(source, "counts", list(arrays["counts"].shape), f"shape {list(expected)}")
    return Counts(arrays["counts"], arrays["rows"], int(arrays["bad"]), int(arrays["recomputed"]))


def _array(archive: zipfile.ZipFile, name: str, limit: int) -> Any:
    with archive.open(f"{name}.npy") as member:
        body = member.read(limit)
    return np.lib.format.read_array(io.BytesIO(body), allow_pickle=False)


def fault(counts: Counts, fed: int, decode_rows: int, shape: Shape) -> str | None:
    """Why the counts are not those of `fed` rows with `decode_rows` of decode; None: they are.

    Checked: no bad row; all rows (a prefix-cache hit loses some, padding adds some); rows x top-k
    selections in every layer (a layer that was not captured has none); no expert more than once
    a row (a row has k distinct ids, so a constant placeholder shows here).
    """
    total = int(counts.rows.sum())
    if counts.bad:
        return "BadRows"
    if total < fed or int(counts.rows[DECODE]) < decode_rows:
        return "RowsLost"
    if total > fed or int(counts.rows[DECODE]) > decode_rows:
        return "RowsExtra"
    beyond = np.arange(shape.width)[None, :] >= np.asarray(shape.experts)[:, None]
    if counts.counts[:, beyond].any():
        return "ExpertsOutOfRange"
    if (counts.counts.sum(axis=2) != counts.rows[:, None] * shape.top_k).any():
        return "SelectionsWrong"
    if (counts.counts.max(axis=2, initial=0) > counts.rows[:, None]).any():
        return "ExpertsRepeated"
    return None


def skip_reason(raw: bytes) -> str:
    """The word in a skip file (plain or `{"reason": ...}`), else HookSkipped."""
    text = raw[:4096].decode("utf-8", "replace").strip()
    if text.startswith("{"):
        try:
            text = str(json.loads(text).get("reason"))
        except (ValueError, AttributeError):
            return "HookSkipped"
    return text if _WORD.fullmatch(text) else "HookSkipped"


def take(folder: Path, count_id: str, shape: Shape) -> Counts | str | None:
    """The counts of an id, or a word why there are none, or None while the hook works.

    The file is removed once read, as far as this user may.
    """
    for path in (folder / f"{count_id}.npz", folder / f"{count_id}.skip"):
        if not path.is_file():
            continue
        try:
            raw = path.read_bytes()
            if path.suffix == ".skip":
                return skip_reason(raw)
            return read(raw, path.name, shape)
        except FormatError:
            return "CountsDamaged"
        except OSError:
            return "CountsUnreadable"
        finally:
            # The folder may be another user's: then the files go with the pod's emptyDir.
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return None
