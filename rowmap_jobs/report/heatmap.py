"""The two heatmaps, layers x experts: ranks by expert, and selections by rank. Pure.

Each is a small indexed PNG inside an SVG that draws axes, border and legend. Lightness grows with
use in both, so they read without colour as well; the tables beside them say the same in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..formats.rowmap import Geometry
from ..placement import ranking
from . import png
from .markup import Raw, el, join
from .plots import I64, Plots, experts_of, hot_of

_STOPS = ("440154", "472c7a", "3b518b", "2c718e", "21908d", "27ad81", "5cc863", "aadc32", "fde725")
"""Viridis at nine even steps: lightness rises evenly, safe for colour-blind readers."""
STEPS = 64
NEVER, CLEAR = STEPS, STEPS + 1
_COLD_TOP, _HOT_BOTTOM = 12, 27
"""Steps of the ramp that the hottest cold row and the coldest hot row get: the gap is the border.
"""
_OCTAVES = 4.0
_LEFT, _TOP, _BOTTOM, _RIGHT = 44, 8, 42, 20
_WIDE = 1152


def palette() -> list[png.Colour]:
    """The ramp from dark to light, then black (never chosen) and the transparent one."""
    stops = np.array([[int(s[i : i + 2], 16) for i in (0, 2, 4)] for s in _STOPS], dtype=float)
    at = np.linspace(0, len(stops) - 1, STEPS)
    ramp = np.stack([np.interp(at, np.arange(len(stops)), stops[:, c]) for c in range(3)], axis=1)
    out: list[png.Colour] = [(int(r), int(g), int(b)) for r, g, b in ramp.round()]
    return [*out, (0, 0, 0), (0, 0, 0)]


def rank_pixels(plots: Plots, geometry: Geometry) -> npt.NDArray[np.uint8]:
    """Palette index of each expert's rank, uint8[L,E]: hot rows light, cold rows dark."""
    experts, width = experts_of(geometry)[:, None], plots.counts.shape[1]
    real = np.arange(width)[None, :] < experts
    place = np.empty(plots.counts.shape, dtype=np.int64)
    # What is no expert ranks behind the experts that were never chosen.
    order = np.argsort(-np.where(real, plots.counts, -1), axis=1, kind="stable")
    np.put_along_axis(place, order, np.arange(width)[None, :], axis=1)
    hot = hot_of(geometry)[:, None]
    warm = STEPS - 1 - place * (STEPS - 1 - _HOT_BOTTOM) // np.maximum(hot - 1, 1)
    dark = _COLD_TOP - (place - hot) * _COLD_TOP // np.maximum(experts - hot - 1, 1)
    out = np.where(plots.hot, np.maximum(warm, _HOT_BOTTOM), np.clip(dark, 0, _COLD_TOP))
    out = np.where(plots.counts > 0, out, NEVER)
    return np.where(real, out, CLEAR).astype(np.uint8)


def use_pixels(plots: Plots, geometry: Geometry) -> npt.NDArray[np.uint8]:
    """Palette index of the selections at each rank, uint8[L,E], hottest first: 2^-4 to 2^4 times
    the layer's mean on a logarithmic ramp.
    """
    experts, width = experts_of(geometry)[:, None], plots.counts.shape[1]
    real = np.arange(width)[None, :] < experts
    down = -np.sort(-np.where(real, plots.counts, -1), axis=1)
    mean = np.maximum(plots.counts.sum(axis=1, keepdims=True), 1) / experts
    octaves = np.log2(np.maximum(down, 1) / mean).clip(-_OCTAVES, _OCTAVES)
    step = np.rint((octaves + _OCTAVES) / (2 * _OCTAVES) * (STEPS - 1))
    return np.where(real, np.where(down > 0, step, NEVER), CLEAR).astype(np.uint8)


@dataclass(frozen=True)
class _Grid:
    """Whole pixels a cell; a page of 400 pixels scrolls it in its box."""

    layers: int
    experts: int

    @property
    def cell(self) -> tuple[int, int]:
        return min(max(_WIDE // self.experts, 1), 24), min(max(320 // self.layers, 4), 16)

    @property
    def inner(self) -> tuple[int, int]:
        return self.experts * self.cell[0], self.layers * self.cell[1]


def by_expert(plots: Plots, geometry: Geometry, name: str) -> Raw:
    """SVG: the rank of every expert in every layer, by expert id."""
    return _draw(rank_pixels(plots, geometry), geometry, name, "expert id")


def by_rank(plots: Plots, geometry: Geometry, name: str) -> Raw:
    """SVG: selections by rank with the border between hot and cold rows."""
    pixels = use_pixels(plots, geometry)
    grid = _Grid(*pixels.shape)
    x, y = grid.cell
    path: list[str] = []
    for index, hot in enumerate(hot_of(geometry).tolist()):
        path.append(f"{'L' if path else 'M'}{_LEFT + hot * x} {_TOP + index * y}v{y}")
    line = "".join(path)
    border = join([el("path", class_="over", d=line), el("path", class_="border", d=line)])
    return _draw(pixels, geometry, name, "rank of the expert in its layer", border)


def _draw(
    pixels: npt.NDArray[np.uint8],
    geometry: Geometry,
    name: str,
    across: str,
    over: Raw | None = None,
) -> Raw:
    grid = _Grid(*pixels.shape)
    wide, high = grid.inner
    image = el(
        "image",
        class_="cells",
        x=_LEFT,
        y=_TOP,
        width=wide,
        height=high,
        preserveAspectRatio="none",
        href=png.data_url(png.encode(pixels, palette(), CLEAR)),
    )
    frame = el("rect", class_="axis", x=_LEFT - 0.5, y=_TOP - 0.5, width=wide + 1, height=high + 1)
    width, height = max(_LEFT + wide + _RIGHT, 340), _TOP + high + _BOTTOM
    labels = [*_layer_labels(geometry.moe_layers, grid), *_expert_labels(grid, across)]
    return el(
        "svg",
        image,
        frame,
        over,
        *labels,
        role="img",
        aria_label=name,
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
    )


def _layer_labels(layers: tuple[int, ...], grid: _Grid) -> list[Raw]:
    high = grid.cell[1]
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * high >= 16 or n == 100)
    return [
        el("text", str(layer), x=_LEFT - 6, y=_TOP + index * high + high / 2 + 4, text_anchor="end")
        for index, layer in enumerate(layers)
        if index % every == 0
    ]


def _expert_labels(grid: _Grid, across: str) -> list[Raw]:
    cell, below = grid.cell[0], _TOP + grid.inner[1]
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n * cell >= 36 or n == 256)
    out = [
        el(
            "text",
            str(expert),
            x=_LEFT + expert * cell + cell / 2,
            y=below + 16,
            text_anchor="middle",
        )
        for expert in range(0, grid.experts, every)
    ]
    return [
        *out,
        el("text", f"layer (down), {across} (across)", class_="soft", x=_LEFT, y=below + 34),
    ]


def _legend(*parts: tuple[int, int, str]) -> Raw:
    """Swatches with their words: (from, to, words) of each stretch of the ramp, dark to light."""
    colours, items = palette(), []
    for low, high, meaning in parts:
        stops = ["#{:02x}{:02x}{:02x}".format(*colours[s]) for s in range(low, high + 1, 3)]
        ground = f"linear-gradient(90deg,{','.join(stops if len(stops) > 1 else stops * 2)})"
        swatch = el("i", class_="swatch", style=f"background:{ground}", aria_hidden="true")
        items.append(el("span", swatch, meaning))
    return el("p", *items, class_="legend")


def rank_legend() -> Raw:
    """Legend of `by_expert`."""
    return _legend(
        (0, _COLD_TOP, "cold rows, darkest is coldest"),
        (_HOT_BOTTOM, STEPS - 1, "hot rows, lightest is hottest"),
        (NEVER, NEVER, "black: never chosen"),
    )


def use_legend() -> Raw:
    """Legend of `by_rank`."""
    return _legend(
        (0, STEPS - 1, "1/16 (dark) to 16 times (light) the layer's mean"),
        (NEVER, NEVER, "black: never chosen"),
    )


def hottest(plots: Plots, layer: int, count: int = 5) -> list[tuple[int, float]]:
    """(expert, share of the layer's selections) of the most chosen experts of row `layer`."""
    row: I64 = plots.counts[layer]
    order = ranking(row[None, :])[0][:count]
    total = max(int(row.sum()), 1)
    return [(int(expert), float(row[expert]) / total) for expert in order if row[expert] > 0]


def cold_rows(plots: Plots, geometry: Geometry, layer: int) -> list[int]:
    """Cold experts of row `layer`, coldest first."""
    experts = int(experts_of(geometry)[layer])
    order = ranking(plots.counts[layer : layer + 1, :experts])[0][::-1]
    return [int(expert) for expert in order if not plots.hot[layer, expert]]
