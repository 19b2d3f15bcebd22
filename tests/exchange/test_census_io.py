"""Imported counts as a census of the model that the caller names, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from rowmap_jobs.exchange import census_io
from rowmap_jobs.exchange.base import Counts, Layout
from rowmap_jobs.formats import census as census_format
from rowmap_jobs.formats.rowmap import Geometry
from tests.exchange.made import line_of
from tests.exchange.routings import counted, ids, routings, same
from tests.formats.samples import FINGERPRINT
from tests.formats.samples import census as sample

LAYOUT = Layout((3, 7), (6, 6), (2, 2))
CAPTURE = census_io.native_capture("exllamav3", "0.9", b"the file")
ORIGIN = census_io.Origin("agent", (100, 200), CAPTURE)


def prompt(t: int) -> np.ndarray:
    return counted(ids(4 + t, 2, 6, 2, 50 + t), 6)


def made(sequences: int = 2) -> Counts:
    decode = np.stack([counted(ids(9 + t, 2, 6, 2, t), 6) for t in range(sequences)])
    prefill = np.stack([prompt(t) for t in range(sequences)])
    names = tuple(f"request {t}" for t in range(sequences))
    return Counts(replace(LAYOUT, top_k=None), decode, prefill, None, names, True)


def census(counts: Counts, origin: census_io.Origin = ORIGIN, layout: Layout = LAYOUT) -> Any:
    return census_io.to_census(counts, layout, FINGERPRINT, origin, "x.npz")


def test_a_census_has_the_counts_and_says_where_they_are_from() -> None:
    found = census(made())
    assert found.rows.tolist() == [[4, 9], [5, 10]]
    assert np.array_equal(found.counts[:, 1], made().decode)
    assert np.array_equal(found.counts[:, 0], np.stack([prompt(0), prompt(1)]))
    assert found.layer_ids.tolist() == [3, 7] and found.top_k.tolist() == [2, 2]
    assert found.session.tolist() == [0, 1] and found.created.tolist() == [200, 200]
    assert found.prompt_len.tolist() == [4, 5] and found.fidelity.tolist() == [3, 3]
    assert found.header.capture == CAPTURE and found.header.capture.method == "native"
    assert found.header.traffic_class == "agent" and found.header.selection.used == 2
    again = census_format.parse(census_format.to_bytes(found), "census.npz")
    assert np.array_equal(again.counts, found.counts)


def test_ids_of_transcripts_tell_sequences_apart_and_stay() -> None:
    one, two = census(made()), census(made())
    assert np.array_equal(one.transcript_id, two.transcript_id)
    assert len({bytes(row) for row in one.transcript_id}) == 2
    other = census(replace(made(), names=("request 0", "request \udc80")))
    assert (other.transcript_id[1] != one.transcript_id[1]).any()


def test_sessions_are_the_callers() -> None:
    found = census(made(), replace(ORIGIN, sessions=(4, 4)))
    assert found.session.tolist() == [4, 4]
    line = line_of(lambda: census(made(), replace(ORIGIN, sessions=(4,))))
    assert line == "x.npz: sessions: found 1 sessions, expected 2, one a sequence"


def test_without_prefill_there_are_no_prefill_rows() -> None:
    found = census(replace(made(), prefill=None))
    assert found.rows.tolist() == [[0, 9], [0, 10]] and not found.counts[:, 0].any()


@given(routings(one_width=False))
def test_counts_become_a_census_and_come_back(counts: Counts) -> None:
    data = census(counts, layout=counts.layout)
    back = census_io.from_census(data)
    assert same(back, counts, but=["names"])
    again = census(back, layout=back.layout)
    assert census_format.to_bytes(again) == census_format.to_bytes(data)


def test_a_census_of_ours_comes_back_whole() -> None:
    steps = np.array([3, 0, 2], dtype=np.int64)
    touched = np.array([[6, 6], [0, 0], [7, 6]], dtype=np.int64)
    data = replace(sample(), steps=steps, touched=touched)
    census_format.check(data, "census.npz")
    counts = census_io.from_census(data)
    assert counts.steps is not None and counts.touched is not None
    found = census(counts, layout=counts.layout)
    for name in ("counts", "rows", "transcript_id", "steps", "touched"):
        assert np.array_equal(getattr(found, name), getattr(data, name))


def test_the_layout_of_a_geometry() -> None:
    geometry = Geometry(
        experts={"3": 6, "7": 5}, top_k=2, hot_rows=3, moe_layers=(3, 7), row_bytes=10
    )
    assert census_io.layout_of(geometry) == Layout((3, 7), (6, 5), (2, 2))


def change(**over: Any) -> Counts:
    return replace(made(), **over)


@pytest.mark.parametrize(
    ("counts", "layout", "message"),
    [
        (made(), Layout((3, 7, 8), (6,) * 3, (2,) * 3), "layers: found no layer 8, expected"),
        (made(), Layout((3,), (6,), (2,)), "layers: found a layer 7 beyond, expected layers 3"),
        (made(), Layout((3, 7), (6, 8), (2, 2)), "layer 7: found 6 experts, expected 8, the model"),
        (made(), Layout((3, 7), (6, 6), None), "top-k: found none, expected the model's top-k"),
        (
            change(layout=replace(LAYOUT, top_k=(3, 3))),
            LAYOUT,
            "layer 3: found top-k 3, expected 2",
        ),
        (change(layout=Layout((7, 3), (6, 6), None)), LAYOUT, "layers: found [7, 3], expected asc"),
        (change(decode=made().decode * 0, prefill=None), LAYOUT, "counts: found no selection"),
        (change(decode=made().decode[:0], names=()), LAYOUT, "sequences: found none, expected one"),
        (change(names=("a",)), LAYOUT, "names: found 1 names, expected 2, one for each sequence"),
        (
            change(rows=np.array([[4, 9], [5, 11]])),
            LAYOUT,
            "decode[request 1,layer 3]: found 20 selections, expected rows x top-k = 22",
        ),
        (
            change(rows=np.array([[2, 3], [2, 3]]), prefill=None),
            LAYOUT,
            "decode[request 0,layer 3]: found 18 selections, expected rows x top-k = 6",
        ),
    ],
)
def test_counts_that_are_not_the_models(counts: Counts, layout: Layout, message: str) -> None:
    assert f"x.npz: {message}" in line_of(lambda: census(counts, layout=layout))


def test_one_layer_that_lacks_a_row() -> None:
    counts = made()
    counts.decode[1, 1, int(counts.decode[1, 1].argmax())] -= 2
    line = line_of(lambda: census(counts))
    assert "decode[request 1,layer 7]: found 18 selections, expected 20 as in layer 3" in line


def test_a_fidelity_that_is_none() -> None:
    line = line_of(lambda: census(made(), replace(ORIGIN, fidelity="heard")))
    assert line == (
        "x.npz: fidelity: found heard, expected one of tokens, rendered, generated, live"
    )
