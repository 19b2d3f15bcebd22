"""Which file is of which format: a predicate of its first bytes for each; none is read here."""

from __future__ import annotations

import re
from collections.abc import Callable

from . import sniff
from .sniff import Look


def _members(*names: str) -> Callable[[Look], bool]:
    """A .npz with one of these arrays."""
    return lambda seen: not seen.is_folder and any(f"{name}.npy" in seen.names for name in names)


def with_keys(*keys: str) -> Callable[[Look], bool]:
    """A JSON object with one of these keys, not JSON lines of many objects."""
    return lambda seen: bool(set(keys) & set(seen.keys)) and not _is_records(seen)


def _is_records(seen: Look) -> bool:
    return seen.is_lines and bool({"expert_ids", "experts"} & set(_first_keys(seen)))


def _first_keys(seen: Look) -> tuple[str, ...]:
    return seen.keys if seen.is_lines else ()


def is_b12x(seen: Look) -> bool:
    return _is_records(seen) and "expert_ids" in seen.keys


def is_plain(seen: Look) -> bool:
    return _is_records(seen) and "experts" in seen.keys and "layer" in seen.keys


def is_routed(seen: Look) -> bool:
    """An .npy, a .npz or folder of arrays that no other format claims, or lines of responses."""
    if seen.is_folder:
        return any(name.endswith((".npy", ".npy.gz", ".npz")) for name in seen.names)
    if seen.names:
        arrays = all(name.endswith(".npy") for name in seen.names)
        taken = any(_npz(seen) for _npz in (is_recipe, _EXLLAMA_NPZ, _OURS))
        return arrays and not taken
    if seen.head[:6] == b"\x93NUMPY":
        return True
    return seen.first_line.startswith("{") and '"routed_experts"' in seen.text


is_recipe = _members("cnt_dec", "cnt_pre")
_EXLLAMA_NPZ = _members("counts_decode", "counts_prefill", "counts")
_OURS = _members("header")


def is_exllama_npz(seen: Look) -> bool:
    return _EXLLAMA_NPZ(seen) and not _OURS(seen) and not is_recipe(seen)


def is_exllama(seen: Look) -> bool:
    return bool({"ranking", "counts", "census"} & set(seen.tensors))


def of_sglang(*words: str) -> Callable[[Look], bool]:
    found = with_keys(*words)
    return lambda seen: found(seen) or sniff.has_pickled(seen, *words)


def is_trtllm_folder(seen: Look) -> bool:
    ranks = any(re.fullmatch(r"rank\d+\.safetensors", name) for name in seen.names)
    return seen.is_folder and ranks and "meta_info.json" in seen.names


def is_trtllm(seen: Look) -> bool:
    return re.search(r"(?m)^initial_global_assignments\s*:", seen.text) is not None


def is_recipe_map(seen: Look) -> bool:
    """`{"layers": {...}}` or the layers at once; our own maps have a fingerprint beside them."""
    start = r'\s*\{\s*(?:"layers"\s*:\s*\{\s*)?"\d+"\s*:\s*\{\s*"(?:hot|cold)"'
    return re.match(start, seen.text) is not None and "fingerprint" not in seen.keys


def is_trace(seen: Look) -> bool:
    return sniff.integer_rows(seen) == 2


def is_pin(seen: Look) -> bool:
    columns = sniff.integer_rows(seen)
    # A profile has every expert once, a trace every selection.
    return columns == 3 or (columns == 2 and not sniff.repeats(seen))


def is_overrides(seen: Look) -> bool:
    return (
        re.match(r"\s*(?:\S*exps\S*=[A-Za-z]|--n-cpu-moe[ =]\d|-ncmoe[ =]\d)", seen.text)
        is not None
    )


def is_imatrix(seen: Look) -> bool:
    return (
        seen.head[:4] == b"GGUF" and b"general.type\x08\0\0\0\x07\0\0\0\0\0\0\0imatrix" in seen.head
    )


def is_route_trace(seen: Look) -> bool:
    return seen.text.startswith("# route_trace v")
