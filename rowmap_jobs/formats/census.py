"""The census: counted expert selections, `census.npz` (design: arrays below, no other members).

counts int64[T,P,L,E], rows int64[T,P], layer_ids/experts/top_k int32[L], session int32[T],
transcript_id uint8[T,32], fidelity uint8[T], prompt_len int32[T], created int64[T] (Unix seconds)
and `header` uint8[n] (JSON). Both or neither of steps int64[N], decode steps by the rows of a step
(steps[n-1] had n rows), and touched int64[N,L], distinct experts summed over those steps.
P is prefill, decode. A transcript here is one sequence that the engine was fed: turns of a session
that extend each other are one, named by the last turn's id, with prompt_len the start of its last
segment. Invariant for every transcript, phase, layer:
counts[t,p,l,:experts[l]].sum() == rows[t,p] * top_k[l], and zero beyond experts[l].
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from .base import Digest, FormatError, MisfitError, Strict, canonical_json
from .rowmap import Fingerprint

PREFILL, DECODE = 0, 1
FIDELITY = ("tokens", "rendered", "generated", "live")
MAX_UNPACKED = 2 << 30
MAX_TRANSCRIPTS = 20000
MAX_EXPERTS = 1 << 16
MAX_ROWS = 1 << 40
MAX_STEPS = 1 << 32
MAX_STEP_ROWS = 4096

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]


class Capture(Strict):
    """How the counts were taken."""

    method: Literal["forced", "live", "native"]
    engine: str
    engine_version: str
    runner: str
    hook_digest: Digest | None = None
    """None where no hook of ours counted: counts that the engine itself gave."""
    missed: int = Field(ge=0)
    recomputed: int = Field(ge=0)

    @model_validator(mode="after")
    def _hook(self) -> Self:
        if self.method == "forced" and self.hook_digest is None:
            raise MisfitError("hookDigest", "none", "the digest of the hook (method forced)")
        return self


class Selection(Strict):
    """Which transcripts were counted and why others were not."""

    seed: int
    considered: int = Field(ge=0)
    used: int = Field(ge=0)
    skipped: dict[str, int] = Field(default_factory=dict)


class OffPolicy(Strict):
    """On a sample: was the recorded text likely written by this model?"""

    top1: float
    mean_logprob: float
    n: int = Field(ge=0)


class Speculation(Strict):
    """Speculative decoding of the lane, where it has any."""

    k: int
    acceptance: float


class CensusHeader(Strict):
    """The JSON header."""

    format: Literal["expertmaps-census"] = "expertmaps-census"
    version: Literal[1] = 1
    fingerprint: Fingerprint
    phases: tuple[Literal["prefill"], Literal["decode"]] = ("prefill", "decode")
    traffic_class: str = Field(alias="class")
    window: tuple[int, int]
    """Unix seconds: from, to."""
    capture: Capture
    selection: Selection
    off_policy: OffPolicy | None = None
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Census:
    """A census in memory; `check` holds for every instance that `parse` returns."""

    header: CensusHeader
    counts: I64
    rows: I64
    layer_ids: I32
    experts: I32
    top_k: I32
    session: I32
    transcript_id: U8
    fidelity: U8
    prompt_len: I32
    created: I64
    steps: I64 | None = None
    touched: I64 | None = None

    def decode(self) -> I64:
        """Decode counts summed over transcripts, int64[L,E]."""
        return np.asarray(self.counts[:, DECODE].sum(axis=0), dtype=np.int64)


_DTYPES: Mapping[str, tuple[type, int]] = {
    "header": (np.uint8, 1),
    "counts": (np.int64, 4),
    "rows": (np.int64, 2),
    "layer_ids": (np.int32, 1),
    "experts": (np.int32, 1),
    "top_k": (np.int32, 1),
    "session": (np.int32, 1),
    "transcript_id": (np.uint8, 2),
    "fidelity": (np.uint8, 1),
    "prompt_len": (np.int32, 1),
    "created": (np.int64, 1),
    "steps": (np.int64, 1),
    "touched": (np.int64, 2),
}
_OPTIONAL = ("steps", "touched")


def to_bytes(census: Census) -> bytes:
    """Deterministic deflated npz (fixed member order and times): equal censuses, equal bytes."""
    check(census, "census")
    header = np.frombuffer(canonical_json(census.header.to_wire()), dtype=np.uint8)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _DTYPES:
            array = header if name == "header" else getattr(census, name)
            if array is None:
                continue
            body = io.BytesIO()
            np.lib.format.write_array(body, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(
                zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0)),
                body.getvalue(),
                zipfile.ZIP_DEFLATED,
            )
    return out.getvalue()


def parse(raw: bytes, source: str) -> Census:
    """Read a census whole. Raises FormatError; unpacks at most 2 GiB and never a pickle."""
    arrays = _read_members(raw, source)
    header = CensusHeader.from_bytes(arrays.pop("header").tobytes(), f"{source} header")
    census = Census(header=header, **arrays)  # type: ignore[arg-type]  # dtypes: _read_array
    check(census, source)
    return census


def _read_members(raw: bytes, source: str) -> dict[str, npt.NDArray[np.generic]]:
    every = {f"{name}.npy" for name in _DTYPES}
    optional = {f"{name}.npy" for name in _OPTIONAL}
    try:
        archive = zipfile.ZipFile(io.BytesIO(raw))
    except Exception as error:  # zipfile raises many kinds on damaged bytes
        raise FormatError(source, "archive", type(error).__name__, "an npz file") from None
    with archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        expected = every if optional & set(names) else every - optional
        if len(names) != len(set(names)) or set(names) != expected:
            found = sorted(set(names) ^ expected)[:4] or "a member twice"
            raise FormatError(source, "members", found, "exactly the members of a census")
        total = sum(info.file_size for info in infos)
        if total > MAX_UNPACKED:
            raise FormatError(source, "unpacked size", f"{total} bytes", f"at most {MAX_UNPACKED}")
        present = [name for name in _DTYPES if f"{name}.npy" in expected]
        return {name: _read_array(archive, name, source) for name in present}


def _read_array(archive: zipfile.ZipFile, name: str, source: str) -> npt.NDArray[np.generic]:
    dtype, ndim = _DTYPES[name]
    limit = archive.getinfo(f"{name}.npy").file_size
    try:
        with archive.open(f"{name}.npy") as member:
            body = member.read(limit + 1)
        if len(body) > limit:
            raise FormatError(source, name, "more bytes than declared", f"{limit} bytes")
        array = np.lib.format.read_array(io.BytesIO(body), allow_pickle=False)
    except FormatError:
        raise
    except Exception as error:  # numpy and zlib raise many kinds on damaged bytes
        raise FormatError(source, name, f"{type(error).__name__}", "a .npy array") from None
    if array.dtype != np.dtype(dtype) or array.ndim != ndim:
        found = f"{array.dtype} with {array.ndim} dimensions"
        raise FormatError(source, name, found, f"{np.dtype(dtype)} with {ndim} dimensions")
    return array


def check(census: Census, source: str) -> None:
    """All invariants of a census. Raises FormatError naming the first that fails."""
    transcripts, phases, layers, width = census.counts.shape
    fits = 0 <= transcripts <= MAX_TRANSCRIPTS and phases == 2 and width <= MAX_EXPERTS
    if not fits or layers < 1:
        expected = f"[T<={MAX_TRANSCRIPTS}, 2, L>=1, E<={MAX_EXPERTS}]"
        raise FormatError(source, "counts", list(census.counts.shape), expected)
    if 2 * layers * width * 8 > MAX_UNPACKED:
        # Without a transcript an array of any shape is empty, and so are its bytes.
        expected = f"at most {MAX_UNPACKED} bytes a transcript"
        raise FormatError(source, "counts", list(census.counts.shape), expected)
    shapes = {
        "rows": (transcripts, 2),
        "transcript_id": (transcripts, 32),
        **dict.fromkeys(("layer_ids", "experts", "top_k"), (layers,)),
        **dict.fromkeys(("session", "fidelity", "prompt_len", "created"), (transcripts,)),
    }
    for name, shape in shapes.items():
        found = getattr(census, name).shape
        if found != shape:
            raise FormatError(source, name, list(found), f"shape {list(shape)}")
    if (np.diff(census.layer_ids.astype(np.int64)) <= 0).any() or census.layer_ids[0] < 0:
        raise FormatError(source, "layer_ids", census.layer_ids.tolist(), "ascending layer ids")
    if (census.experts < 1).any() or (census.experts > width).any():
        raise FormatError(source, "experts", census.experts.tolist(), f"1 to {width} a layer")
    if (census.top_k < 1).any() or (census.top_k > census.experts).any():
        raise FormatError(source, "top_k", census.top_k.tolist(), "1 to experts a layer")
    if (census.fidelity >= len(FIDELITY)).any():
        raise FormatError(
            source, "fidelity", int(census.fidelity.max()), f"0 to {len(FIDELITY) - 1}"
        )
    if (census.prompt_len < 0).any():
        raise FormatError(source, "prompt_len", int(census.prompt_len.min()), "0 or more")
    first, last = census.header.window
    if first > last:
        raise FormatError(source, "header window", [first, last], "from the earlier to the later")
    _check_ids(census, source)
    _check_counts(census, source)
    _check_touched(census, source)


def _check_ids(census: Census, source: str) -> None:
    """A transcript counts once: in two sessions it would be judged by a map that has seen it.

    Zeros are no id.
    """
    seen = Counter(row.tobytes() for row in census.transcript_id)
    del seen[bytes(32)]
    name, times = next(iter(seen.most_common(1)), (b"", 0))
    if times > 1:
        found = f"{name.hex()[:16]}... {times} times"
        raise FormatError(source, "transcript_id", found, "each transcript once")


def _check_touched(census: Census, source: str) -> None:
    """A step of n rows reads at least k experts of a layer, and at most n x k or all of them."""
    steps, touched = census.steps, census.touched
    if steps is None and touched is None:
        return
    if steps is None or touched is None:
        missing = "steps" if steps is None else "touched"
        raise FormatError(source, missing, "none", "steps and touched, or neither")
    if not 1 <= len(steps) <= MAX_STEP_ROWS:
        raise FormatError(source, "steps", list(steps.shape), f"[1 to {MAX_STEP_ROWS} rows a step]")
    expected = (len(steps), len(census.layer_ids))
    if touched.shape != expected:
        raise FormatError(source, "touched", list(touched.shape), f"shape {list(expected)}")
    if int(steps.min()) < 0 or int(steps.max()) > MAX_STEPS:
        found = int(steps.min()) if int(steps.min()) < 0 else int(steps.max())
        raise FormatError(source, "steps", found, f"0 to {MAX_STEPS}")
    top_k = census.top_k.astype(np.int64)[None, :]
    rows = np.arange(1, len(steps) + 1, dtype=np.int64)[:, None]
    least = steps[:, None] * top_k
    most = steps[:, None] * np.minimum(rows * top_k, census.experts)
    bad = np.argwhere((touched < least) | (touched > most))
    if bad.size:
        n, layer = (int(v) for v in bad[0])
        place = f"touched[{n + 1} rows,layer {int(census.layer_ids[layer])}]"
        expected_sum = f"{int(least[n, layer])} to {int(most[n, layer])} ({int(steps[n])} steps)"
        raise FormatError(source, place, f"{int(touched[n, layer])} experts", expected_sum)


def _check_counts(census: Census, source: str) -> None:
    if census.counts.size and (int(census.counts.min()) < 0 or int(census.rows.min()) < 0):
        raise FormatError(source, "counts", "a negative count", "counts of 0 or more")
    if census.counts.size and int(max(census.counts.max(), census.rows.max())) > MAX_ROWS:
        # Sums over experts and products with top-k stay far inside int64.
        raise FormatError(source, "rows", f"more than {MAX_ROWS}", f"at most {MAX_ROWS}")
    beyond = np.arange(census.counts.shape[3])[None, :] >= census.experts[:, None]
    if census.counts[:, :, beyond].any():
        raise FormatError(source, "counts", "a count beyond experts", "zero beyond experts")
    sums = census.counts.sum(axis=3)
    wanted = census.rows[:, :, None] * census.top_k.astype(np.int64)[None, None, :]
    bad = np.argwhere(sums != wanted)
    if bad.size:
        t, p, layer = (int(v) for v in bad[0])
        place = f"counts[{t},{('prefill', 'decode')[p]},layer {int(census.layer_ids[layer])}]"
        raise FormatError(
            source,
            place,
            f"{int(sums[t, p, layer])} selections",
            f"rows x top-k = {int(wanted[t, p, layer])}",
        )
    # A row has k distinct experts, so no expert can be chosen more often than there are rows.
    most = census.counts.max(axis=3, initial=0)
    bad = np.argwhere(most > census.rows[:, :, None])
    if bad.size:
        t, p, layer = (int(v) for v in bad[0])
        place = f"counts[{t},{('prefill', 'decode')[p]},layer {int(census.layer_ids[layer])}]"
        raise FormatError(
            source,
            place,
            f"an expert {int(most[t, p, layer])} times",
            f"at most once a row ({int(census.rows[t, p])} rows)",
        )
