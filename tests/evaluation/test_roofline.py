"""Predicted speed, against the published pairs of one machine.

DeepSeek-V4.1-Flash on a GB300: 40 layers, 18,800,640 bytes a row, five drafts of which 29.8% are
accepted, 22.5 distinct experts a layer and step, 340 GB/s for cold rows and 4.2 TB/s for hot ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.evaluation.roofline import Fit, Speed, fit, roofline
from rowmap_jobs.formats.base import FormatError
from tests.evaluation.traffic import GEOMETRY, layout

BEFORE = Speed(
    link_bytes_per_second=340e9,
    memory_bytes_per_second=4.2e12,
    measured_share=0.253,
    measured_tokens_per_second=89.3,
    drafts=5,
    accepted_drafts=5 * 0.298,
    unique=22.5,
)
AFTER = replace(BEFORE, measured_share=0.0155, measured_tokens_per_second=153.1)


def fitted(speed: Speed) -> Fit:
    return fit(speed, GEOMETRY, [0.0] * 40)


def test_the_slope_with_and_without_drafts() -> None:
    plain = replace(BEFORE, drafts=0, accepted_drafts=0.0, unique=6.0)
    assert fitted(plain).slope * 1e3 == pytest.approx(12.2, abs=0.05)
    assert fitted(BEFORE).slope * 1e3 == pytest.approx(18.4, abs=0.05)


@pytest.mark.parametrize(
    ("share", "before", "after"),
    [(0.253, 89.3, 153.1), (0.232, 89.3, 153.1), (0.253, 88.74, 153.28), (0.232, 88.74, 153.28)],
)
def test_published_pairs_lie_in_the_band(share: float, before: float, after: float) -> None:
    """The positional share of the pair is known as 23.2 to 25.3%."""
    band = fitted(replace(BEFORE, measured_share=share, measured_tokens_per_second=before)).band(
        0.0155
    )
    assert band.low < after < band.high
    back = fitted(replace(AFTER, measured_tokens_per_second=after)).band(share)
    assert back.low < before < back.high
    # And a band that holds everything would say nothing.
    assert band.high / band.low < 1.35


def test_a_mixed_map_that_ran_slower_left_about_five_percent_cold() -> None:
    found = fitted(AFTER).implied_share(137.8)
    assert found.low < 0.05 < found.high and found.high - found.low < 0.025
    band = fitted(AFTER).band(0.05)
    assert band.low < 137.8 < band.high


def test_nothing_cold_is_the_ceiling() -> None:
    assert fitted(AFTER).at(0.0) == pytest.approx(160, abs=1)
    band = fitted(AFTER).band(AFTER.measured_share)
    assert band.low == band.high == pytest.approx(153.1)
    # The steep end of the band: a map can be predicted to reach it.
    assert fitted(AFTER).ceiling == fitted(AFTER).band(0.0).high > 160


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 2.0), st.floats(0, 1), st.floats(0.3, 0.95))
def test_nothing_is_predicted_above_the_ceiling(
    share: float, own: float, unique: float, lot: float, slack: float
) -> None:
    shape = layout(2, 8, 4)
    speed = Speed(10.0, 100.0, share, 1.0)
    most = fit(replace(speed, measured_tokens_per_second=1e-9), shape, [unique] * 2)
    allowed = slack / (most.floor + most.slope * share)
    speed = replace(speed, measured_tokens_per_second=allowed)
    found = roofline(fit(speed, shape, [unique] * 2), speed, own, lot, share)
    assert found.now is not None
    assert found.ceiling >= found.predicted.high >= found.predicted.low
    assert found.ceiling >= found.now.high


def test_bytes_by_layer_and_share_by_hand() -> None:
    # Layer 0 reads 2 rows of 100 bytes, layer 1 3 rows of 10: 230 bytes, in 2 tokens a step.
    shape = layout(2, 8, 4).model_copy(update={"row_bytes": {"0": 100, "1": 10}})
    speed = Speed(10.0, 100.0, 0.5, 0.05, drafts=1, accepted_drafts=1.0)
    found = fit(speed, shape, [2.0, 3.0])
    assert found.bytes_per_token == 115 and found.floor == pytest.approx(1.15)
    assert found.slope == pytest.approx(115 * (1 / 10 - 1 / 100))
    # 20 seconds measured; a tenth of the share saves 0.1 of the slope.
    assert 1 / found.at(0.4) == pytest.approx(20 - 1.035)


def test_nothing_is_faster_than_fast_memory() -> None:
    # Measured just above what the bandwidths allow: the steep end would be negative seconds.
    shape = layout(1, 8, 4)
    edge = Speed(1.0, 1000.0, 1.0, 1 / (0.05 + 0.81 * 49.95))
    found = fit(edge, shape, [5.0])
    assert found.band(0.0).high == pytest.approx(1 / found.floor)


def test_the_section_names_bands_for_now_then_and_lots() -> None:
    found = roofline(fitted(BEFORE), BEFORE, own=0.0155, by_lot=89 / 384, now=0.253)
    assert found.rows_per_step == 6 and found.now is not None
    assert found.now.low == found.now.high == pytest.approx(89.3)
    assert found.predicted == fitted(BEFORE).band(0.0155)
    # From lots to the map, 21.6 points of cold share at 14.7 to 22 ms a unit.
    assert 0.4 < found.gain.low < 0.5 < found.gain.high < 0.85
    # 40 layers x 22.5 rows x 17.93 MiB / 2.49 tokens, 1.55% of it slow.
    assert found.slow_bytes_per_token == pytest.approx(6.795e9 * 0.0155, rel=1e-3)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"link_bytes_per_second": 0.0}, "link_bytes_per_second: found 0.0, expected a number"),
        ({"memory_bytes_per_second": float("nan")}, "memory_bytes_per_second: found nan"),
        ({"measured_tokens_per_second": float("inf")}, "measured_tokens_per_second: found inf"),
        ({"measured_share": 23.2}, "measured_share: found 23.2, expected 0 to 1"),
        ({"concurrency": 0}, "concurrency: found 0"),
        ({"drafts": -1}, "drafts: found -1, expected 0 or more"),
        ({"accepted_drafts": 5.5}, "accepted_drafts: found 5.5, expected 0 to 5 (drafts)"),
        ({"unique": 0.0}, "unique: found 0.0"),
        ({"link_bytes_per_second": 5e12}, "found 5e+12, expected less than memory's 4.2e+12"),
    ],
)
def test_numbers_that_cannot_be(over: dict[str, float], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        replace(BEFORE, **over)  # type: ignore[arg-type]
    assert str(refused.value).startswith("speed: ") and message in str(refused.value)


def test_a_speed_that_the_bandwidths_forbid() -> None:
    with pytest.raises(FormatError) as refused:
        fitted(replace(BEFORE, measured_tokens_per_second=300.0))
    assert "measured_tokens_per_second: found 300, expected at most 187" in str(refused.value)
    assert "cold share of 25.30%; check the bandwidths" in str(refused.value)
