"""How well the counts decide which rows are hot: hits per expert and rows at the border."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..formats.evidence import Support
from ..formats.rowmap import Geometry, per_layer
from ..placement import hot_rows, never_seen

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

BORDER_Z = 2.0
FEW_HITS = 20
"""Below it an expert's place is noise (exllamav3 warns at the same number)."""


def border_mask(total: I64, geometry: Geometry) -> Mask:
    """True for rows whose side of the border is within two standard errors, bool[L,E].

    For a hot row of count c against the first cold row's count d, and the other way round:
    |c - d| / sqrt(c + d) < 2, counts being nearly Poisson. `total` is int64[L,E].
    """
    mask = np.zeros(total.shape, dtype=np.bool_)
    for index, (layer, hot) in enumerate(zip(geometry.moe_layers, hot_rows(geometry), strict=True)):
        experts = per_layer(geometry.experts, layer)
        if not 0 < hot < experts:
            continue
        order = np.argsort(-total[index, :experts], kind="stable")
        counts = total[index, order].astype(np.float64)
        against = np.where(np.arange(experts) < hot, counts[hot], counts[hot - 1])
        width = np.sqrt(np.maximum(counts + against, 1.0))
        mask[index, order] = np.abs(counts - against) < BORDER_Z * width
    return mask


def border(total: I64, geometry: Geometry) -> list[int]:
    """How many rows of each layer are undecided: `border_mask`, counted."""
    return [int(count) for count in border_mask(total, geometry).sum(axis=1)]


def support(total: I64, geometry: Geometry) -> Support:
    """Hits of experts over all layers and what they cannot decide; `total` is int64[L,E]."""
    hits, last = [], []
    for index, (layer, hot) in enumerate(zip(geometry.moe_layers, hot_rows(geometry), strict=True)):
        counts = total[index, : per_layer(geometry.experts, layer)]
        hits.append(counts)
        if hot:
            last.append(int(np.sort(counts)[::-1][hot - 1]))
    every = np.concatenate(hits)
    return Support(
        hits_median=float(np.median(every)),
        hits_border=float(np.median(last)) if last else 0.0,
        under_20=int((every < FEW_HITS).sum()),
        never_seen=int((every == 0).sum()),
        undecided=sum(border(total, geometry)),
        never=never_seen(total, geometry),
    )
