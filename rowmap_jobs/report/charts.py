"""Line and bar charts as SVG of a fixed size: no script, colours by class, shapes by series. Pure.

Text has its own size whatever the window is; a chart wider than the window scrolls in its box.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .markup import Raw, el

_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 34, 38
_HEIGHT, _BARE = 230, 22
"""Height, and the room above a chart that has no legend."""
_SHAPES = {
    "own": ("M{x} {y}m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0", None),
    "position": ("M{x} {y}m-3 -3h6v6h-6z", "2 3"),
    "active": ("M{x} {y}m0 -4l4 7h-8z", "7 3"),
}
"""Marker and dash pattern of each series: colour is never the only sign."""


_MOST = 1e12
"""The largest number that an axis reaches to."""


@dataclass(frozen=True)
class Series:
    """One line: its kind (own, position, active), its name, a value for each place."""

    kind: str
    name: str
    values: Sequence[float]


@dataclass(frozen=True)
class Frame:
    """The plotting area and its vertical scale from 0 to `top`."""

    width: int
    top: float
    shares: bool
    head: int = _TOP
    height: int = _HEIGHT

    @property
    def below(self) -> int:
        return self.height - _BOTTOM

    def y(self, value: float) -> float:
        high = self.below - self.head
        return self.below - high * min(max(value / self.top, 0.0), 1.0)

    def grid(self) -> list[Raw]:
        """Horizontal lines with their numbers."""
        out = []
        for value in ticks(self.top):
            y = round(self.y(value)) + 0.5
            right = self.width - _RIGHT
            kind = "axis" if value == 0 else "grid"
            out.append(el("path", class_=kind, d=f"M{_LEFT} {y}H{right}"))
            label = f"{value * 100:g}%" if self.shares else f"{value:g}"
            out.append(el("text", label, x=_LEFT - 6, y=y + 4, text_anchor="end"))
        return out

    def svg(self, name: str, across: str, parts: Sequence[Raw]) -> Raw:
        """The finished chart; `across` names the horizontal axis."""
        foot = el("text", across, class_="soft", x=_LEFT, y=self.height - 6)
        return el(
            "svg",
            *self.grid(),
            *parts,
            foot,
            role="img",
            aria_label=name,
            width=self.width,
            height=self.height,
            viewBox=f"0 0 {self.width} {self.height}",
        )


def ticks(top: float) -> list[float]:
    """0 and the round steps up to `top` (1, 2 or 5 times a power of ten), six at most."""
    raw = top / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * (1 - 1e-9))
    return [round(step * i, 12) for i in range(int(top / step + 1e-9) + 1)]


def ceiling(values: Sequence[float]) -> float:
    """Upper end of an axis for the values: a little room, and never 0."""
    most = max((v for v in values if math.isfinite(v)), default=0.0)
    return min(most, _MOST) * 1.08 if most > 1e-9 else 1.0


def layer_lines(layers: Sequence[int], series: Sequence[Series], name: str) -> Raw:
    """Shares by layer, a line for each series, with a legend above."""
    step = _step(layers)
    wide = max(_wide(layers), _LEFT + sum(map(_legend_width, series)))
    frame = Frame(wide, ceiling([v for s in series for v in s.values]), shares=True)
    places = [_LEFT + step * (i + 0.5) for i in range(len(layers))]
    parts = [*_legend(series), *_layer_axis(layers, frame, step)]
    for one in series:
        parts += _line(frame, one, places)
    return frame.svg(name, "layer", parts)


def layer_bars(
    layers: Sequence[int],
    values: Sequence[float],
    name: str,
    marked: Collection[int] = (),
    kind: str = "own",
    shares: bool = True,
) -> Raw:
    """A bar for each layer; marked layers are solid, the others pale.

    The id of a marked layer stands above its bar where there is room for it.
    """
    step = _step(layers)
    frame = Frame(_wide(layers), ceiling(values), shares, _BARE)
    parts = _layer_axis(layers, frame, step)
    free = 0.0
    for index, (layer, value) in enumerate(zip(layers, values, strict=True)):
        x, y = _LEFT + step * index, frame.y(value)
        pale = f"{kind} pale" if marked and layer not in marked else kind
        parts.append(
            el("rect", class_=pale, x=x + 1.5, y=y, width=step - 3.0, height=frame.below - y)
        )
        middle = x + step / 2
        if layer in marked and middle >= free:
            free = middle + 10 + 7 * len(str(layer))
            parts.append(el("text", str(layer), x=middle, y=y - 5, text_anchor="middle"))
    return frame.svg(name, "layer", parts)


def curve(
    xs: Sequence[float], series: Series, name: str, across: str, top: float | None = None
) -> Raw:
    """A share against a number on a logarithmic axis, with a marker at every point."""
    frame = Frame(360, ceiling(series.values) if top is None else top, True, _BARE)
    low, high = math.log10(max(min(xs), 1.0)), math.log10(max(*xs, 1.0))
    wide = frame.width - _LEFT - _RIGHT - 24

    def place(value: float) -> float:
        part = (math.log10(max(value, 1.0)) - low) / (high - low) if high > low else 0.5
        return _LEFT + 12 + wide * part

    parts = []
    last = -math.inf
    for value in xs:
        x = place(value)
        parts.append(el("path", class_="axis", d=f"M{x:.1f} {frame.below}v4"))
        if x - last >= 48:
            label = f"{value / 1000:.3g}k" if value >= 1000 else f"{value:.3g}"
            parts.append(el("text", label, x=x, y=frame.below + 17, text_anchor="middle"))
            last = x
    parts += _line(frame, series, [place(value) for value in xs])
    return frame.svg(name, across, parts)


def _line(frame: Frame, series: Series, places: Sequence[float]) -> list[Raw]:
    shape, dashes = _SHAPES[series.kind]
    at = [(x, frame.y(v)) for x, v in zip(places, series.values, strict=True)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    marks = "".join(shape.format(x=f"{x:.1f}", y=f"{y:.1f}") for x, y in at)
    return [
        el("path", class_=f"line {series.kind}", d=path, stroke_dasharray=dashes),
        el("path", class_=series.kind, d=marks),
    ]


def _legend(series: Sequence[Series]) -> list[Raw]:
    out, x = [], float(_LEFT)
    for one in series:
        shape, dashes = _SHAPES[one.kind]
        out.append(el("path", class_=f"line {one.kind}", d=f"M{x} 14h28", stroke_dasharray=dashes))
        out.append(el("path", class_=one.kind, d=shape.format(x=x + 14, y=14)))
        out.append(el("text", one.name, x=x + 34, y=18))
        x += _legend_width(one)
    return out


def _legend_width(one: Series) -> int:
    return 34 + 7 * len(one.name) + 18


def _step(layers: Sequence[int]) -> int:
    return min(max(520 // len(layers), 7), 40)


def _wide(layers: Sequence[int]) -> int:
    return max(_LEFT + _step(layers) * len(layers) + _RIGHT, 240)


def _layer_axis(layers: Sequence[int], frame: Frame, step: int) -> list[Raw]:
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * step >= 26 or n == 100)
    return [
        el(
            "text",
            str(layer),
            x=_LEFT + step * (index + 0.5),
            y=frame.below + 17,
            text_anchor="middle",
        )
        for index, layer in enumerate(layers)
        if index % every == 0
    ]
