"""Pictures: the PNG decodes to its pixels, light is hot, the axis has round steps."""

from __future__ import annotations

import itertools
import re
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rowmap_jobs.report import Plots, heatmap, png
from rowmap_jobs.report.charts import Series, ceiling, curve, layer_bars, layer_lines, ticks
from tests.formats.samples import row_map
from tests.report.sample import geometry

Pixels = npt.NDArray[np.uint8]
COLOURS = [(i, 255 - i, i // 2) for i in range(256)]


def decode(raw: bytes) -> tuple[Pixels, list[tuple[int, ...]], bytes]:
    """Pixels, palette and alpha of an indexed PNG; checks signature, order and checksums."""
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, []
    while at < len(raw):
        (size,) = struct.unpack(">I", raw[at : at + 4])
        kind, body = raw[at + 4 : at + 8], raw[at + 8 : at + 8 + size]
        (crc,) = struct.unpack(">I", raw[at + 8 + size : at + 12 + size])
        assert crc == zlib.crc32(kind + body)
        chunks.append((kind, body))
        at += 12 + size
    assert [kind for kind, _ in chunks] == [b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"]
    found = dict(chunks)
    width, height, *rest = struct.unpack(">IIBBBBB", found[b"IHDR"])
    assert rest == [8, 3, 0, 0, 0]
    lines = np.frombuffer(zlib.decompress(found[b"IDAT"]), dtype=np.uint8).reshape(
        height, width + 1
    )
    assert not lines[:, 0].any()
    colours = found[b"PLTE"]
    return (
        lines[:, 1:],
        [tuple(colours[i : i + 3]) for i in range(0, len(colours), 3)],
        found[b"tRNS"],
    )


@given(arrays.arrays(np.uint8, arrays.array_shapes(min_dims=2, max_dims=2, max_side=20)))
def test_a_picture_decodes_to_its_pixels(pixels: Pixels) -> None:
    found, palette, alpha = decode(png.encode(pixels, COLOURS, clear=255))
    assert (found == pixels).all() and palette == COLOURS
    assert alpha == b"\xff" * 255 + b"\x00"


@pytest.mark.parametrize(
    ("pixels", "colours", "clear"),
    [
        (np.zeros((0, 3), np.uint8), COLOURS, 0),
        (np.zeros(3, np.uint8), COLOURS, 0),
        (np.full((1, 1), 9, np.uint8), COLOURS[:9], 0),
        (np.zeros((1, 1), np.uint8), COLOURS[:9], 9),
        (np.zeros((1, 1), np.uint8), [*COLOURS, (0, 0, 0)], 0),
    ],
)
def test_a_picture_that_cannot_be_is_refused(pixels: Pixels, colours: Any, clear: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        png.encode(pixels, colours, clear)


def light(index: int) -> float:
    red, green, blue = heatmap.palette()[index]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_the_ramp_grows_lighter_at_every_step() -> None:
    steps = [light(i) for i in range(heatmap.STEPS)]
    assert all(a < b for a, b in itertools.pairwise(steps))
    assert light(heatmap.NEVER) < steps[0]


@given(st.data())
def test_light_is_hot_in_the_rank_heatmap(data: st.DataObject) -> None:
    experts = data.draw(st.integers(2, 40))
    rows = data.draw(st.integers(0, experts))
    shape = geometry(2, experts, rows)
    counts = data.draw(arrays.arrays(np.int64, (2, experts), elements=st.integers(0, 50)))
    order = np.argsort(-counts, axis=1, kind="stable")
    hot = np.zeros(counts.shape, dtype=bool)
    np.put_along_axis(hot, order[:, :rows], True, axis=1)
    pixels = heatmap.rank_pixels(Plots(counts, hot), shape)
    assert ((pixels == heatmap.NEVER) == (counts == 0)).all()
    for line, row, warm in zip(pixels, order, hot, strict=True):
        seen = [int(line[e]) for e in row if line[e] != heatmap.NEVER]
        assert seen == sorted(seen, reverse=True)
        hottest_cold = [line[e] for e in row if not warm[e] and line[e] != heatmap.NEVER][:1]
        coldest_hot = [line[e] for e in row if warm[e] and line[e] != heatmap.NEVER][-1:]
        if hottest_cold and coldest_hot:
            assert int(coldest_hot[0]) - int(hottest_cold[0]) >= 10, "the border shows"


def test_selections_by_rank_are_relative_to_the_mean_of_their_layer() -> None:
    shape = geometry(2, 4, 2)
    counts = np.array([[10, 160, 40, 0], [1000, 16000, 4000, 0]], dtype=np.int64)
    pixels = heatmap.use_pixels(Plots(counts, counts > 20), shape)
    assert (pixels[0] == pixels[1]).all()
    assert pixels[0, 0] > pixels[0, 1] > pixels[0, 2] and pixels[0, 3] == heatmap.NEVER
    flat = heatmap.use_pixels(
        Plots(np.full((1, 4), 7, np.int64), counts[:1] > 20), geometry(1, 4, 2)
    )
    assert set(flat[0].tolist()) == {round((heatmap.STEPS - 1) / 2)}


def test_columns_beyond_a_layers_experts_are_transparent() -> None:
    shape = geometry(2, 4, 2).model_copy(update={"experts": {"0": 4, "1": 2}})
    counts = np.array([[1, 2, 3, 4], [5, 6, 0, 0]], dtype=np.int64)
    plots = Plots(counts, counts > 2)
    for pixels in (heatmap.rank_pixels(plots, shape), heatmap.use_pixels(plots, shape)):
        assert (pixels == heatmap.CLEAR).tolist() == [[False] * 4, [False, False, True, True]]


def test_rows_that_move_and_shares_of_the_active_map() -> None:
    counts = np.array([[4, 3, 2, 1]], dtype=np.int64)
    hot, active = np.array([[1, 1, 0, 0]], dtype=bool), np.array([[1, 0, 0, 1]], dtype=bool)
    plots = Plots(counts, hot, active)
    moved, share = plots.moved(), plots.active_share()
    assert moved is not None and moved.tolist() == [1]
    assert share is not None and share.tolist() == [0.5]
    assert Plots(counts, hot).moved() is None and Plots(counts, hot).active_share() is None


def test_plots_of_counts_and_maps() -> None:
    rows = row_map()
    counts = np.arange(12, dtype=np.int64).reshape(2, 6)
    plots = Plots.of(counts, rows, rows)
    assert plots.counts.tolist() == counts[:, :4].tolist()
    assert plots.hot.tolist() == [[False, True, False, True], [True, True, False, False]]
    assert plots.moved() is not None and not np.any(plots.moved())
    plots.fits(rows.geometry)
    assert Plots.of(counts, rows).active is None


@given(st.floats(1e-9, 1e12))
def test_an_axis_has_a_few_round_steps_from_zero(top: float) -> None:
    steps = ticks(top)
    assert steps[0] == 0 and steps[-1] <= top * (1 + 1e-6) and 2 <= len(steps) <= 6


@pytest.mark.parametrize("values", [[], [0.0], [float("nan")], [float("inf")], [1e308]])
def test_an_axis_without_usable_values_still_is_one(values: list[float]) -> None:
    assert 0 < ceiling(values) < float("inf")


def test_series_differ_by_shape_and_dashes_as_well_as_by_colour() -> None:
    shapes, dashes = set(), set()
    for kind in ("own", "active", "position"):
        chart = layer_lines([3], [Series(kind, "x", [0.1])], "name")
        line = re.findall(
            r'<path class="line [a-z]+" d="M[^"]*h28"( stroke-dasharray="[^"]*")?', chart
        )
        (mark,) = set(re.findall(rf'class="{kind}" d="M[0-9. ]+([^"]*)"', chart))
        shapes.add(mark)
        dashes.add(line[0])
    assert len(shapes) == len(dashes) == 3


@pytest.mark.parametrize("layers", [1, 2, 40, 94, 300])
def test_charts_of_any_number_of_layers(layers: int) -> None:
    ids = list(range(layers))
    chart = layer_bars(ids, [0.01 * i for i in ids], "bars", marked=(0,))
    assert chart.count("<rect") == layers


def test_a_curve_of_one_point() -> None:
    assert "nan" not in curve([1000.0], Series("own", "x", [0.1]), "one", "tokens")
