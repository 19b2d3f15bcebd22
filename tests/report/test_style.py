"""Colours: text is readable on every ground it stands on, light and dark (WCAG 2.2, 1.4.3)."""

from __future__ import annotations

import re

import pytest

from rowmap_jobs.report import style

TEXT = sorted(set(style.LIGHT) - {"bg", "panel", "line", "edge"})
Colour = tuple[float, float, float]


def rgb(value: str) -> Colour:
    red, green, blue = (int(value[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


def luminance(colour: Colour) -> float:
    parts = [c / 255 for c in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Colour, other: Colour) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def mix(one: Colour, other: Colour, percent: float) -> Colour:
    red, green, blue = (
        a * percent / 100 + b * (1 - percent / 100) for a, b in zip(one, other, strict=True)
    )
    return red, green, blue


def test_the_measure_itself() -> None:
    assert contrast(rgb("#000000"), rgb("#ffffff")) == pytest.approx(21)
    assert contrast(rgb("#777777"), rgb("#ffffff")) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [style.LIGHT, style.DARK], ids=["light", "dark"])
class TestContrast:
    @pytest.mark.parametrize("name", TEXT)
    @pytest.mark.parametrize("ground", ["bg", "panel"])
    def test_text(self, scheme: dict[str, str], name: str, ground: str) -> None:
        assert contrast(rgb(scheme[name]), rgb(scheme[ground])) >= 4.5

    @pytest.mark.parametrize("ground", ["bg", "panel"])
    def test_bounds_of_parts(self, scheme: dict[str, str], ground: str) -> None:
        assert contrast(rgb(scheme["edge"]), rgb(scheme[ground])) >= 3

    @pytest.mark.parametrize("percent", style.TINTS)
    def test_cells_of_the_matrix(self, scheme: dict[str, str], percent: int) -> None:
        ground = mix(rgb(scheme["own"]), rgb(scheme["bg"]), percent)
        assert contrast(rgb(scheme["text"]), ground) >= 4.5


def test_both_schemes_have_every_colour_that_the_sheet_uses() -> None:
    used = set(re.findall(r"var\(--([a-z]+)\)", style.sheet())) - {"tone"}
    assert used <= set(style.LIGHT) == set(style.DARK)


def test_the_sheet_loads_nothing_and_can_stand_in_a_page() -> None:
    sheet = style.sheet()
    assert not [bad for bad in ("url(", "@import", "http", "<", "@font-face") if bad in sheet]
    assert "prefers-color-scheme:dark" in sheet and "prefers-reduced-motion:reduce" in sheet
    assert sheet.count("{") == sheet.count("}")
