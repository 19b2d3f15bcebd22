"""The row map: a partition in canonical bytes whose digest is its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.base import FormatError, canonical_json, load_json, sha256_digest
from tests.formats.samples import FINGERPRINT, geometry, row_map


@st.composite
def maps(draw: st.DrawFn) -> rowmap.RowMap:
    """Valid maps; experts, hot rows and bytes uniform or by layer."""
    layers = sorted(draw(st.sets(st.integers(0, 99), min_size=1, max_size=4)))
    experts = {layer: draw(st.integers(2, 9)) for layer in layers}
    hot = {layer: draw(st.integers(0, experts[layer])) for layer in layers}
    order = random.Random(draw(st.integers(0, 1 << 30)))
    rows = {}
    for layer in layers:
        ids = list(range(experts[layer]))
        order.shuffle(ids)
        rows[layer] = (ids[: hot[layer]], ids[hot[layer] :])
    shape = geometry(
        experts={str(k): v for k, v in experts.items()},
        hot_rows={str(k): v for k, v in hot.items()},
        moe_layers=tuple(layers),
        top_k=draw(st.integers(1, 2)),
    )
    return rowmap.build(FINGERPRINT, shape, rows, draw(orders(rows)))


@st.composite
def orders(
    draw: st.DrawFn, rows: dict[int, tuple[list[int], list[int]]]
) -> list[tuple[int, int]] | None:
    """No order, or one that merges the layers at will: all hot rows, then all cold ones."""
    if draw(st.booleans()):
        return None
    mixed = random.Random(draw(st.integers(0, 1 << 30)))
    out = []
    for part in (0, 1):
        lists = {layer: list(pair[part])[:: 1 - 2 * part] for layer, pair in rows.items()}
        turns = [layer for layer, ids in lists.items() for _ in ids]
        mixed.shuffle(turns)
        out += [(layer, lists[layer].pop(0)) for layer in turns]
    return out


@given(maps())
def test_round_trip(built: rowmap.RowMap) -> None:
    raw = built.to_bytes()
    assert rowmap.parse(raw, "rowmap.json", built.digest) == built
    assert sha256_digest(raw) == built.digest


@given(maps())
def test_the_row_set_digest_knows_no_order(built: rowmap.RowMap) -> None:
    rows = {
        int(layer): (sorted(part.hot), sorted(part.cold)) for layer, part in built.layers.items()
    }
    again = rowmap.build(built.fingerprint, built.geometry, rows)
    assert again.row_set_digest == built.row_set_digest


@given(maps(), st.integers(0, 1 << 30), st.integers(1, 255))
def test_a_changed_byte_is_another_map_or_none(built: rowmap.RowMap, at: int, change: int) -> None:
    raw = bytearray(built.to_bytes())
    raw[at % len(raw)] ^= change
    with pytest.raises(FormatError):
        rowmap.parse(bytes(raw), "rowmap.json", built.digest)
    try:
        other = rowmap.parse(bytes(raw), "rowmap.json")
    except FormatError as error:
        assert "\n" not in str(error)
    else:
        assert other.to_bytes() == bytes(raw)


@given(st.binary(max_size=300))
def test_random_bytes_never_pass(raw: bytes) -> None:
    with pytest.raises(FormatError):
        rowmap.parse(raw, "rowmap.json")


def bent(change: Callable[[dict[str, Any]], object]) -> bytes:
    wire = load_json(row_map().to_bytes(), "sample")
    change(wire)
    return canonical_json(wire)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update(version=2), "version: found 2, expected Input should be 1"),
        (lambda w: w.update(note=1), "note: found 1, expected Extra inputs are not permitted"),
        (
            lambda w: w["layers"]["0"]["hot"].append(0),
            "layers.0.hot: found 3 rows, expected 2 (geometry.hotRows)",
        ),
        (
            lambda w: w["layers"]["2"]["cold"].pop(),
            "layers.2: found 3 rows, expected 4 (geometry.experts)",
        ),
        (
            lambda w: w["layers"]["0"].update(hot=[3, 3]),
            "layers.0: found a row twice or out of range, expected each of 0..3 once",
        ),
        (
            lambda w: w["layers"]["0"].update(hot=[3, 4]),
            "layers.0: found a row twice or out of range, expected each of 0..3 once",
        ),
        (
            lambda w: w["layers"].pop("2"),
            "layers: found layers ['0'], expected exactly geometry.moeLayers ['0', '2']",
        ),
        (
            lambda w: w["layers"].update({"61": w["layers"]["2"]}),
            "layers: found layers ['0', '2', '61'], expected exactly geometry.moeLayers",
        ),
        (
            lambda w: w["geometry"].update(hotRows=5),
            "geometry.hotRows: found 5 in layer 0, expected 0 to 4 (its experts)",
        ),
        (
            lambda w: w["geometry"].update(hotRows={"0": 2}),
            "geometry.hotRows: found layers ['0'], expected exactly the layers [0, 2]",
        ),
        (
            lambda w: w["geometry"].update(topK=5),
            "geometry.topK: found 5, expected at most 4, the experts of layer 0",
        ),
        (
            lambda w: w["geometry"].update(rowBytes=0),
            "geometry.rowBytes: found 0 in layer 0, expected 1 or more",
        ),
        (
            lambda w: w["geometry"].update(experts=0),
            "geometry.experts: found 0 in layer 0, expected 1 or more",
        ),
        (
            lambda w: w["geometry"].update(moeLayers=[2, 0]),
            "geometry.moeLayers: found [2, 0], expected distinct layer ids from 0 up, ascending",
        ),
        (
            lambda w: w["geometry"].update(experts=10**15),
            "layers.0: found 4 rows, expected 1000000000000000 (geometry.experts)",
        ),
        (
            lambda w: w.update(rowSetDigest="sha256:" + "0" * 64),
            f"rowSetDigest: found sha256:{'0' * 64}, expected {row_map().row_set_digest}",
        ),
        (lambda w: w["fingerprint"].pop("router"), "fingerprint.router: found none, expected"),
    ],
)
def test_refusals_in_one_line(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(FormatError) as refused:
        rowmap.parse(bent(change), "rowmap.json")
    assert str(refused.value).startswith(f"rowmap.json: {message}")
    assert "\n" not in str(refused.value)


def test_the_digest_is_checked_first() -> None:
    raw = row_map().to_bytes()
    with pytest.raises(FormatError) as refused:
        rowmap.parse(raw, "rowmap.json", "sha256:" + "1" * 64)
    expected = f"found {row_map().digest}, expected sha256:{'1' * 64}"
    assert str(refused.value) == f"rowmap.json: sha256: {expected}"


@pytest.mark.parametrize(
    "spelled",
    [
        lambda raw: raw[:-1],
        lambda raw: raw + b"\n",
        lambda raw: raw.replace(b'":', b'": '),
        lambda raw: raw.replace(b'"topK":2', b'"topK":2.0'),
        lambda raw: raw.replace(b'"topK":2', b'"topK":"2"'),
    ],
)
def test_another_spelling_is_refused(spelled: Callable[[bytes], bytes]) -> None:
    with pytest.raises(FormatError) as refused:
        rowmap.parse(spelled(row_map().to_bytes()), "rowmap.json")
    assert str(refused.value) == (
        "rowmap.json: bytes: found another spelling, expected canonical JSON "
        "(sorted keys, no spaces, newline)"
    )


def ordered(order: Any) -> rowmap.RowMap:
    rows = {0: ([3, 1], [0, 2]), 2: ([0, 1], [3, 2])}
    return rowmap.build(FINGERPRINT, geometry(), rows, order)


ORDER = [(2, 0), (0, 3), (0, 1), (2, 1), (0, 2), (2, 2), (2, 3), (0, 0)]


def test_an_order_over_all_layers_round_trips_and_is_optional() -> None:
    built = ordered(ORDER)
    raw = built.to_bytes()
    assert rowmap.parse(raw, "rowmap.json", built.digest) == built
    assert load_json(raw, "raw")["order"][0] == [2, 0]
    # The same sets: nothing to move, but another digest. Without an order no key is written.
    assert built.row_set_digest == row_map().row_set_digest and built.digest != row_map().digest
    assert "order" not in load_json(row_map().to_bytes(), "raw")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.pop(), "order: found 7 rows, expected 8, the rows of all layers"),
        (lambda o: o.append([0, 0]), "order: found 9 rows, expected 8, the rows of all layers"),
        (
            lambda o: o.__setitem__(7, [1, 0]),
            "order.7: found [1, 0], expected a layer of geometry.moeLayers",
        ),
        (lambda o: o.__setitem__(7, [2, 0]), "order.7: found [2, 0], expected each row once"),
        (
            lambda o: o.__setitem__(1, [0, 4]),
            "order.1: found [0, 4], expected expert 3, the next of layers.0",
        ),
        (
            # Another order within a layer than the layer's own lists.
            lambda o: (o.__setitem__(1, [0, 1]), o.__setitem__(2, [0, 3])),
            "order.1: found [0, 1], expected expert 3, the next of layers.0 (hot, then cold",
        ),
        (
            # A cold row of one layer before a hot row of another.
            lambda o: (o.__setitem__(3, [0, 2]), o.__setitem__(4, [2, 1])),
            "order.3: found [0, 2], expected the 4 hot rows first, then the cold ones",
        ),
        (
            lambda o: o.__setitem__(0, [2]),
            "order.0.1: found none, expected a value",
        ),
        (lambda o: o.__setitem__(0, [2, "x"]), "order.0.1: found x, expected"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(
    change: Callable[[list[Any]], object], message: str
) -> None:
    wire = load_json(ordered(ORDER).to_bytes(), "sample")
    change(wire["order"])
    with pytest.raises(FormatError) as refused:
        rowmap.parse(canonical_json(wire), "rowmap.json")
    assert str(refused.value).startswith(f"rowmap.json: {message}")
    assert "\n" not in str(refused.value)


def test_an_order_is_spelled_one_way() -> None:
    raw = ordered(ORDER).to_bytes()
    for other in (b"[2.0,0]", b"[2,false]", b'["2",0]'):
        with pytest.raises(FormatError):
            rowmap.parse(raw.replace(b"[2,0]", other), "rowmap.json")


def test_more_than_a_config_map_holds_is_refused() -> None:
    with pytest.raises(FormatError, match="size: found 1048577 bytes"):
        rowmap.parse(b" " * ((1 << 20) + 1), "rowmap.json")
