"""SGLang: `--init-expert-location` files and dumps of its expert distribution recorder.

What is read, from `.pt` (torch zip), `.json` or JSON text (python/sglang/srt/eplb/
expert_location.py, compute_initial_expert_location_metadata, and expert_distribution.py):

- `{"physical_to_logical_map": [L][slots]}`: SGLang passes the object on as keyword arguments, so
  any further key is a TypeError there and a refusal here;
- `{"logical_count": [L][E] or [steps][L][E]}`, also with `rank` and
  `average_utilization_rate_over_window` (the dump of recorder mode stat);
- `{"records": [...], "last_physical_to_logical_map"}` (modes per_token and per_pass).

L is num_hidden_layers, so rows are absolute layers and dense layers are rows of zeros. Written is
JSON of exactly one key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError, canonical_json, load_json
from . import torch_zip
from .base import I64, Counts, Ranking
from .sglang_records import read_records
from .slots import check_slots, to_ranking
from .tables import MAX_CELLS, integers, make_counts, widened

MAX_BYTES = 1 << 30
MAX_JSON = 64 << 20
_KINDS = ("physical_to_logical_map", "logical_count", "records")
_STAT = {"logical_count", "rank", "average_utilization_rate_over_window"}


def read(raw: bytes, source: str, experts: int | None = None) -> Counts | Ranking:
    """A map as a Ranking, counts as Counts (sums: T is 1), from .pt or JSON bytes.

    `experts` is E of the model; without it, it is what the file shows. Raises FormatError.
    """
    data = _load(raw, source)
    if not isinstance(data, dict):
        raise FormatError(source, "top level", type(data).__name__, f"one of {list(_KINDS)}")
    kinds = [kind for kind in _KINDS if kind in data]
    if len(kinds) != 1:
        found = kinds or f"the keys {sorted(map(str, data))[:4]}"
        raise FormatError(source, "top level", found, f"exactly one of {list(_KINDS)}")
    if kinds[0] == "physical_to_logical_map":
        return _read_map(data, source, experts)
    if kinds[0] == "records":
        return read_records(data, source, experts)
    extra = sorted(set(map(str, data)) - _STAT)
    if extra:
        raise FormatError(source, "top level", f"the key {extra[0]}", f"only {sorted(_STAT)}")
    return _read_counts(data, source, experts)


def _load(raw: bytes, source: str) -> object:
    if raw[:2] == b"PK" or raw[:1] == b"\x80":
        return torch_zip.load(raw, source)
    if len(raw) > MAX_JSON:
        raise FormatError(source, "size", f"{len(raw)} bytes of JSON", f"at most {MAX_JSON}")
    return load_json(raw, source)


def table(value: object, source: str, place: str, dims: int) -> I64:
    """A tensor or nested lists of integers as int64. Raises FormatError."""
    if isinstance(value, np.ndarray):
        return widened(tensor(value, source, place, dims), source, place)
    return integers(value, source, place, dims)


def tensor(value: object, source: str, place: str, dims: int) -> npt.NDArray[np.generic]:
    """A tensor of `dims` axes with at most 16 million cells. Raises FormatError."""
    if not isinstance(value, np.ndarray) or value.ndim != dims or not value.size:
        shape = list(value.shape) if isinstance(value, np.ndarray) else type(value).__name__
        raise FormatError(source, place, shape, f"a tensor of {dims} dimensions")
    if value.size > MAX_CELLS:
        raise FormatError(source, place, f"{value.size} cells", f"at most {MAX_CELLS}")
    return value


def _read_map(data: dict[object, object], source: str, experts: int | None) -> Ranking:
    extra = sorted(str(key) for key in data if key != "physical_to_logical_map")
    if extra:
        expected = "physical_to_logical_map alone (SGLang takes no other key)"
        raise FormatError(source, "top level", f"the key {extra[0]} too", expected)
    place = "physical_to_logical_map"
    rows = table(data[place], source, place, 2)
    slots = dict(enumerate(rows.tolist()))
    return to_ranking(slots, source, place, experts)


def _read_counts(data: dict[object, object], source: str, experts: int | None) -> Counts:
    place, value = "logical_count", data["logical_count"]
    notes = ["prefill and decode are not told apart in this file: all counts are given as decode"]
    if "rank" in data and data["rank"] not in (0, None):
        notes.append(f"dump of rank {data['rank']!s:.20}")
    if isinstance(value, np.ndarray) and value.ndim == 3 and value.size:
        steps = len(value)
        if value.dtype.kind not in "iu" or int(value.min()) < 0:
            raise FormatError(source, place, f"{value.dtype} or negative", "counts of 0 or more")
        summed = value.sum(axis=0, dtype=np.int64)
    elif _is_deep(value):
        rows = integers(value, source, place, 3)
        steps = len(rows)
        if int(rows.min()) < 0:
            raise FormatError(source, place, "a negative count", "counts of 0 or more")
        summed = rows.sum(axis=0)
    else:
        steps = 0
        summed = table(value, source, place, 2)
    if summed.size > MAX_CELLS:
        raise FormatError(source, place, f"{summed.size} cells", f"at most {MAX_CELLS}")
    if experts is not None and summed.shape[1] != experts:
        raise FormatError(source, place, f"{summed.shape[1]} experts", f"{experts} of the model")
    if steps:
        notes.append(f"sum of {steps} buffered forward passes, which are no sequences")
    layers = range(len(summed))
    return make_counts(source, summed[None], layers, notes=notes)


def _is_deep(value: object) -> bool:
    for _ in range(2):
        if not isinstance(value, list) or not value:
            return False
        value = value[0]
    return isinstance(value, list)


def write_counts(counts: Counts, layers: int) -> bytes:
    """`{"logical_count": [L][E]}` of the decode counts; `layers` is num_hidden_layers.

    Raises FormatError when a layer lies beyond them or layers differ in experts.
    """
    ids, width = counts.layout.layer_ids, set(counts.layout.experts)
    _check_layers(ids, layers)
    if len(width) != 1:
        raise FormatError("counts", "experts", sorted(width), "one number for all layers")
    out = np.zeros((layers, width.pop()), dtype=np.int64)
    out[list(ids)] = counts.decode.sum(axis=0)[:, : out.shape[1]]
    return canonical_json({"logical_count": out.tolist()})


def write_map(slots: Mapping[int, Sequence[int]], layers: int) -> bytes:
    """`{"physical_to_logical_map": [L][slots]}`; layers without a table get the trivial one.

    The trivial table (slot i holds expert i mod E) is what SGLang itself gives dense layers.
    Raises FormatError for a table with a hole or a layer beyond `layers`.
    """
    experts = check_slots(slots, "map", "slots")
    _check_layers(list(slots), layers)
    count = len(next(iter(slots.values())))
    trivial = [slot % experts for slot in range(count)]
    rows = [[int(e) for e in slots.get(layer, trivial)] for layer in range(layers)]
    return canonical_json({"physical_to_logical_map": rows})


def _check_layers(ids: Sequence[int], layers: int) -> None:
    beyond = [layer for layer in ids if not 0 <= layer < layers]
    if beyond:
        expected = f"0 to {layers - 1}, the layers of the model"
        raise FormatError("map", "layers", f"layer {beyond[0]}", expected)
