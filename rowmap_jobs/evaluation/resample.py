"""Intervals over resampled sessions: the cluster bootstrap.

Selections of one session depend on each other, so what is drawn again are whole sessions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BOOTSTRAPS = 1000
AT_A_TIME = 1 << 20
"""Weights held at a time: memory stays small however many sessions there are."""


def spread(
    part: npt.NDArray[np.int64],
    whole: npt.NDArray[np.int64],
    seed: int,
    unknown: tuple[float, float],
) -> tuple[float, float]:
    """95% interval of sum(part) / sum(whole), int64[S] each, by the percentile bootstrap.

    Deterministic in `seed`. Fewer than two sessions, or nothing in `whole`: `unknown`.
    """
    sessions = len(part)
    if sessions < 2 or not whole.sum():
        return unknown
    rng = np.random.default_rng(seed)
    sums = np.stack([part, whole], axis=1).astype(np.float64)
    chances = np.full(sessions, 1.0 / sessions)
    step = max(1, AT_A_TIME // sessions)
    shares = []
    for start in range(0, BOOTSTRAPS, step):
        # Multinomial weights are how often each session is drawn in a resample.
        draws = rng.multinomial(sessions, chances, size=min(step, BOOTSTRAPS - start))
        drawn = draws.astype(np.float64) @ sums
        shares.append(drawn[:, 0] / np.maximum(drawn[:, 1], 1.0))
    low, high = np.quantile(np.concatenate(shares), (0.025, 0.975))
    return (float(low), float(high))
