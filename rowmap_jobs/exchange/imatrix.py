"""llama.cpp's importance matrix in GGUF: counts of the experts, and nothing else of it.

tools/imatrix/imatrix.cpp, save_imatrix: metadata `general.type` = imatrix, and for each tensor
`<name>.in_sum2` and `<name>.counts`, F32 [1, experts] for `blk.N.ffn_*_exps.weight`: how often
each expert was selected in the chunks of the calibration text (prompt processing alone). An F32
holds integers exactly to 16,777,216 only.

Read and never written: llama.cpp refuses a file whose counts have no `in_sum2` beside them, and
llama-quantize divides whatever stands there by the counts and quantises by it. A census has no
activations; a file with zeros or ones in their place would pass for a calibration.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..formats.base import FormatError
from ..models import gguf
from .base import I64, Counts
from .files import read_head
from .streams import opened
from .tables import MAX_CELLS, MAX_EXPERTS, make_counts, spans, widened

EXACT = 1 << 24
_COUNTS = re.compile(r"blk\.(\d{1,4})\.ffn_(?:gate|up|down|gate_up)_exps\.weight\.counts")


def read(path: Path, source: str, top_k: int | None = None) -> Counts:
    """Counts by block and expert; experts that the text never reached are kept with 0 and said.

    Raises FormatError: no GGUF (the format before it has no counts by expert), a model instead of
    an imatrix, no expert tensors (a dense model), tensors of one block that disagree, counts that
    are equal for all experts (converted from the format before), fractions, negative counts.
    """
    if read_head(path, source)[:4] != gguf.MAGIC:
        expected = "a GGUF imatrix (--output-format gguf): the one before has no counts by expert"
        raise FormatError(source, "magic", "no GGUF", expected)
    header = gguf.read(path)
    kind = header.values.get("general.type")
    if kind != "imatrix":
        raise FormatError(source, "general.type", f"{kind!s:.40}", "imatrix")
    by_block: dict[int, I64] = {}
    first: dict[int, str] = {}
    for tensor in header.tensors:
        match = _COUNTS.fullmatch(tensor.name)
        if match is None:
            continue
        counts = _counts(path, tensor, source)
        block = int(match[1])
        if block in by_block and not np.array_equal(by_block[block], counts):
            expected = f"the counts of {first[block]}: one router serves all matrices of a block"
            raise FormatError(source, tensor.name, "other counts", expected)
        by_block.setdefault(block, counts)
        first.setdefault(block, tensor.name)
    if not by_block:
        expected = "blk.N.ffn_*_exps.weight.counts of a mixture of experts"
        raise FormatError(source, "tensors", "no counts of experts", expected)
    return _joined(by_block, header, source, top_k)


def _counts(path: Path, tensor: gguf.GgufTensor, source: str) -> I64:
    dimensions = tensor.dimensions
    if (
        tensor.type != "F32"
        or len(dimensions) < 2
        or dimensions[0] != 1
        or dimensions[2:] != (1,) * len(dimensions[2:])
    ):
        found = f"{tensor.type} {list(dimensions)}"
        raise FormatError(source, tensor.name, found, "F32 [1, experts]")
    if not 2 <= dimensions[1] <= MAX_EXPERTS or tensor.nbytes != 4 * dimensions[1]:
        found = f"{dimensions[1]} counts"
        raise FormatError(source, tensor.name, found, f"2 to {MAX_EXPERTS}, one for each expert")
    with opened(path, source) as stream:
        stream.seek(tensor.offset)
        raw = stream.read(tensor.nbytes)
    if len(raw) != tensor.nbytes:
        raise FormatError(source, tensor.name, f"{len(raw)} bytes", f"{tensor.nbytes}")
    counts = widened(np.frombuffer(raw, "<f4"), source, tensor.name)
    if counts.min() < 0:
        raise FormatError(source, tensor.name, "a negative count", "counts from 0")
    return counts


def _joined(by_block: dict[int, I64], header: gguf.Gguf, source: str, top_k: int | None) -> Counts:
    blocks = sorted(by_block)
    widths = sorted({len(counts) for counts in by_block.values()})
    if len(widths) != 1 or len(blocks) * widths[0] > MAX_CELLS:
        found = f"blocks of {widths[:4]} experts"
        raise FormatError(source, "counts", found, "as many experts in every block")
    table = np.stack([by_block[block] for block in blocks])
    if (table == table[:, :1]).all():
        found = "the same count for all experts of every block"
        expected = "counts by expert: converted files have none"
        raise FormatError(source, "counts", found, expected)
    notes = ["counted in chunks of a calibration text: prompt processing, given as decode"]
    unseen = [block for block in blocks if (by_block[block] == 0).any()]
    if unseen:
        notes.append(f"quantisation by this file lacks data for experts in layers {spans(unseen)}")
    chunks = header.values.get("imatrix.chunk_count")
    if isinstance(chunks, int):
        notes.append(f"{chunks} chunks of {header.values.get('imatrix.chunk_size')} tokens")
    if (table >= EXACT).any():
        notes.append("counts from 16,777,216 up are rounded in this format (F32)")
    return make_counts(source, table[None], blocks, top_k=top_k, notes=notes)
