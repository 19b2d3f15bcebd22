"""Predicted decode speed from what a step must read, anchored at one measured pair.

Seconds per token of a sequence, with c the cold share of selections:

    t(c) = t0 + sum_l(b_l U_l) / a x [c / link + (1 - c) / memory]

b_l bytes of a row of layer l, U_l distinct experts that a step reads there, a tokens that a
sequence gains per step. t0, everything else, comes from the measured pair. Against two published
pairs of one machine the formula's slope was 7 to 19% too small; the band allows for 20% both ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..formats.base import FormatError
from ..formats.evidence import Interval, Roofline
from ..formats.rowmap import Geometry, per_layer

DEVIATION = 0.2
"""By how much of its slope the formula may be off."""


@dataclass(frozen=True)
class Speed:
    """A lane's memory and one measured decode speed at its own concurrency.

    Bandwidths in bytes a second: `link` is what cold rows come over, `memory` where hot rows are.
    `measured_tokens_per_second` is of one sequence, under a map that left `measured_share` cold.
    A step has `drafts` speculated rows a sequence besides its own, of which `accepted_drafts`
    become tokens on average. `unique` are measured distinct experts of a layer and step, where
    known. Raises FormatError for numbers that cannot be.
    """

    link_bytes_per_second: float
    memory_bytes_per_second: float
    measured_share: float
    measured_tokens_per_second: float
    concurrency: int = 1
    drafts: int = 0
    accepted_drafts: float = 0.0
    unique: float | None = None

    def __post_init__(self) -> None:
        positive = (
            "link_bytes_per_second",
            "memory_bytes_per_second",
            "measured_tokens_per_second",
            "concurrency",
            *(("unique",) if self.unique is not None else ()),
        )
        for name in positive:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise FormatError("speed", name, value, "a number above 0")
        if not 0 <= self.measured_share <= 1:
            raise FormatError("speed", "measured_share", self.measured_share, "0 to 1")
        if self.drafts < 0:
            raise FormatError("speed", "drafts", self.drafts, "0 or more")
        if not 0 <= self.accepted_drafts <= self.drafts:
            expected = f"0 to {self.drafts} (drafts)"
            raise FormatError("speed", "accepted_drafts", self.accepted_drafts, expected)
        if self.link_bytes_per_second >= self.memory_bytes_per_second:
            expected = f"less than memory's {self.memory_bytes_per_second:g}"
            raise FormatError(
                "speed", "link_bytes_per_second", f"{self.link_bytes_per_second:g}", expected
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of a full step: every sequence with its drafts."""
        return self.concurrency * (1 + self.drafts)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gains per step."""
        return 1.0 + self.accepted_drafts


@dataclass(frozen=True)
class Fit:
    """The formula for one lane. Seconds are per token of one sequence."""

    slope: float
    """Seconds that a cold share of 1 costs above one of 0."""
    floor: float
    """Seconds that reading everything from fast memory takes: nothing is faster."""
    share: float
    seconds: float
    """The measured pair."""
    bytes_per_token: float
    """Expert bytes read per token, hot and cold."""

    def at(self, share: float, factor: float = 1.0) -> float:
        """Tokens a second at a cold share, with the slope `factor` times the formula's."""
        seconds = self.seconds + factor * self.slope * (share - self.share)
        return 1.0 / max(seconds, self.floor)

    @property
    def ceiling(self) -> float:
        """Tokens a second that no map is predicted to exceed: the upper end at a cold share of 0.

        Where nothing is cold at the measured pair, its own speed.
        """
        return self.band(0.0).high

    def band(self, share: float) -> Interval:
        """Tokens a second at a cold share, over slopes within the deviation of the formula."""
        ends = [self.at(share, factor) for factor in (1 - DEVIATION, 1 + DEVIATION)]
        return Interval(low=min(ends), high=max(ends))

    def gain(self, share: float, base: float) -> Interval:
        """Ratio of tokens a second at `share` to those at `base`, less 1, over the same slopes."""
        ends = [
            self.at(share, factor) / self.at(base, factor) - 1.0
            for factor in (1 - DEVIATION, 1 + DEVIATION)
        ]
        return Interval(low=min(ends), high=max(ends))

    def implied_share(self, tokens_per_second: float) -> Interval:
        """The cold share that a measured speed speaks of, over the same slopes."""
        ends = [
            self.share + (1.0 / tokens_per_second - self.seconds) / (factor * self.slope)
            for factor in (1 - DEVIATION, 1 + DEVIATION)
        ]
        return Interval(low=min(ends), high=max(ends))


def fit(speed: Speed, geometry: Geometry, unique: Sequence[float]) -> Fit:
    """Anchor the formula at the measured pair; `unique` are distinct experts a step, by layer.

    `speed.unique`, where given, holds for every layer instead. Raises FormatError when the
    measured speed is higher than the bandwidths allow at the measured share.
    """
    used = list(unique) if speed.unique is None else [speed.unique] * len(geometry.moe_layers)
    step_bytes = sum(
        count * per_layer(geometry.row_bytes, layer)
        for count, layer in zip(used, geometry.moe_layers, strict=True)
    )
    read = step_bytes / speed.tokens_per_step
    slope = read * (1 / speed.link_bytes_per_second - 1 / speed.memory_bytes_per_second)
    floor = read / speed.memory_bytes_per_second
    seconds = 1.0 / speed.measured_tokens_per_second
    least = floor + (1 - DEVIATION) * slope * speed.measured_share
    if seconds < least:
        raise FormatError(
            "speed",
            "measured_tokens_per_second",
            f"{speed.measured_tokens_per_second:g}",
            f"at most {1 / least:.4g}: reading {read / 2**20:.0f} MiB of experts a token takes the "
            f"rest at a cold share of {speed.measured_share:.2%}; check the bandwidths",
        )
    return Fit(slope, floor, speed.measured_share, seconds, read)


def roofline(fitted: Fit, speed: Speed, own: float, by_lot: float, now: float | None) -> Roofline:
    """The section of the report: `own`, `by_lot` and `now` (the active map's) are cold shares."""
    return Roofline(
        concurrency=speed.concurrency,
        rows_per_step=speed.rows_per_step,
        link_bytes_per_second=speed.link_bytes_per_second,
        memory_bytes_per_second=speed.memory_bytes_per_second,
        measured_share=speed.measured_share,
        measured_tokens_per_second=speed.measured_tokens_per_second,
        now=None if now is None else fitted.band(now),
        predicted=fitted.band(own),
        gain=fitted.gain(own, by_lot),
        ceiling=fitted.ceiling,
        slow_bytes_per_token=fitted.bytes_per_token * own,
    )
