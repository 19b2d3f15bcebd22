"""The reference recipe's dumps and row maps: what its hook really writes, and what it can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import recipe
from rowmap_jobs.exchange.base import Counts, Layout, Ranking
from tests.exchange.made import line_of, passes_or_refuses
from tests.exchange.routings import counted, ids, routings, same, summed

E, K = 8, 2
ADDRESSES = tuple(f"id={140000 + 16 * n}" for n in range(5))
"""Two of the model's layers and a draft model's three, named as the hook names most."""


def tables(rows: int, seed: int) -> np.ndarray:
    """Counts int64[5,8] as the hook has them: the draft layers see fewer rows."""
    own = counted(ids(rows, 2, E, K, seed), E)
    draft = counted(ids(rows // 2, 3, E, K, seed + 1), E)
    return np.concatenate([own, draft])


def dump(
    path: Path,
    decode: np.ndarray,
    prefill: np.ndarray,
    names: tuple[str, ...] = ADDRESSES,
    ts: str = "20260917-183654",
    **over: Any,
) -> Path:
    """A file as the hook writes it."""
    arrays = {
        "cnt_dec": decode,
        "cnt_pre": prefill,
        "cnt_all": decode + prefill,
        "n_dec": decode.any(axis=1).astype(np.int64),
        "n_pre": prefill.any(axis=1).astype(np.int64),
        "names": np.asarray(names),
        "decode_T": np.int64(16),
        "E": np.int64(decode.shape[1]),
        "L": np.int64(len(decode)),
        "reason": np.asarray("periodic"),
        "ts": np.asarray(ts),
    }
    np.savez_compressed(path, **{**arrays, **over})
    return path


ZERO = tables(4, 7), tables(2, 8)
FINAL = ZERO[0] + tables(30, 1), ZERO[1] + tables(50, 2)


def test_draft_rows_are_split_off_and_the_baseline_is_subtracted(tmp_path: Path) -> None:
    final = dump(tmp_path / "final.npz", *FINAL)
    zero = dump(tmp_path / "zero.npz", *ZERO, ts="20260917-180000")
    counts = recipe.read(final, layers=(0, 3), baseline=zero, top_k=K)
    assert counts.layout == Layout((0, 3), (E, E), (K, K))
    assert np.array_equal(counts.decode[0], tables(30, 1)[:2])
    assert counts.prefill is not None
    assert np.array_equal(counts.prefill[0], tables(50, 2)[:2])
    assert counts.rows is None and not counts.per_sequence
    assert any("rows 2-4 are a draft model's" in note for note in counts.notes)


def test_without_a_baseline_warm_up_is_in_and_said(tmp_path: Path) -> None:
    counts = recipe.read(dump(tmp_path / "final.npz", *FINAL), layers=(0, 3))
    assert np.array_equal(counts.decode[0], FINAL[0][:2])
    assert any("warm-up" in note for note in counts.notes)


@pytest.mark.parametrize(
    ("names", "layers"),
    [
        (("layer_idx=3", "layer_idx=7", "mtp.0", "mtp.1", "mtp.2"), None),
        (("layer_idx=7", "layer_idx=3", "mtp.0", "mtp.1", "mtp.2"), None),
        (("layer_name=model.layers.3.mlp", "layer_name=model.layers.7.mlp", *ADDRESSES[:3]), "no"),
        (tuple(f"layer_idx={layer}" for layer in (3, 7, 8, 9, 10)), (3, 7)),
        (tuple(f"layer_idx={layer}" for layer in (3, 7, 0, 1, 2)), (3, 7)),
        (tuple(f"layer_idx={layer}" for layer in (3, 7, 3, 4, 5)), (3, 7)),
        (("id=1", "id=2", "eagle.0", "eagle.1", "eagle.2"), (3, 7)),
    ],
)
def test_names_say_which_layers_are_the_models(
    tmp_path: Path, names: tuple[str, ...], layers: Any
) -> None:
    path = dump(tmp_path / "x.npz", *FINAL, names=names)
    if layers == "no":
        line = line_of(lambda: recipe.read(path))
        assert "names[2]: found id=140000, expected a layer's number" in line
        return
    counts = recipe.read(path, layers=layers)
    assert counts.layout.layer_ids == (3, 7)
    order = [1, 0] if names[0] == "layer_idx=7" else [0, 1]
    assert np.array_equal(counts.decode[0], FINAL[0][order])


@pytest.mark.parametrize(
    ("names", "layers", "message"),
    [
        (ADDRESSES, None, "names: found id=140000, expected names with the layer's number"),
        (ADDRESSES, range(6), "names: found 5 rows, expected 6, one for each layer of the model"),
        (("mtp.0", *ADDRESSES[:4]), (0, 1), "names[0]: found mtp.0, expected the model's own"),
        (
            tuple(f"layer_idx={layer}" for layer in (0, 1, 0, 2, 3)),
            None,
            "names[2]: found layer 0 twice, expected each layer once (a draft model's?)",
        ),
        (
            tuple(f"layer_idx={layer}" for layer in (0, 1, 2, 4, 5)),
            (0, 1, 2, 3),
            "layers: found no layer 3, expected layers 0-3",
        ),
    ],
)
def test_layers_in_doubt_are_refused(
    tmp_path: Path, names: tuple[str, ...], layers: Any, message: str
) -> None:
    path = dump(tmp_path / "x.npz", *FINAL, names=names)
    assert message in line_of(lambda: recipe.read(path, layers=layers))


def test_prefill_dumped_in_the_middle_of_a_step_is_left_out(tmp_path: Path) -> None:
    ahead = FINAL[1].copy()
    ahead[0, :2] += 5
    counts = recipe.read(dump(tmp_path / "x.npz", FINAL[0], ahead), layers=(0, 3))
    assert counts.prefill is None
    assert any("in the middle of a step" in note for note in counts.notes)
    line = line_of(lambda: recipe.read(dump(tmp_path / "y.npz", ahead, FINAL[1]), layers=(0, 3)))
    assert "cnt_dec[layer " in line and "as in the other layers" in line


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"cnt_all": FINAL[0]}, "cnt_all[0,"),
        ({"E": np.int64(9)}, "cnt_dec: found [5, 8], expected shape [5, 9] (L and E)"),
        ({"L": np.int64(4)}, "cnt_dec: found [5, 8], expected shape [4, 8] (L and E)"),
        ({"L": np.int64(0)}, "L and E: found 0 layers, 8 experts"),
        ({"names": np.asarray(ADDRESSES[:4])}, "names: found [4], expected shape [5]"),
        ({"names": np.arange(5)}, "names: found int64 with 1 dimensions, expected text"),
        ({"n_dec": np.zeros(5, np.int64)}, "n_dec[0]: found 0 calls with counts in cnt_dec"),
        ({"cnt_dec": -FINAL[0]}, "cnt_dec[0,"),
        ({"cnt_dec": FINAL[0].astype("f4")}, "cnt_dec: found float32 with 2 dimensions"),
        ({"names": np.array([{}] * 5)}, "names: found type |O, expected numbers or names"),
    ],
)
def test_files_that_do_not_fit_themselves(tmp_path: Path, over: Any, message: str) -> None:
    path = dump(tmp_path / "x.npz", *FINAL, **over)
    assert f"x.npz: {message}" in line_of(lambda: recipe.read(path, layers=(0, 3)))


@pytest.mark.parametrize(
    ("zero", "over", "message"),
    [
        (FINAL, {"names": ADDRESSES[::-1]}, "names: found rows of other names, expected those of"),
        (ZERO, {"ts": "20260918-000000"}, "ts: found 20260918-000000, expected a dump from before"),
        ((FINAL[0] + 1, FINAL[1]), {}, "expected no less than the baseline"),
        (FINAL, {}, "counts: found none beyond the baseline, expected selections"),
        (tuple(t[:, :7] for t in ZERO), {}, "baseline experts: found [7, 7]"),
    ],
)
def test_a_baseline_of_something_else(tmp_path: Path, zero: Any, over: Any, message: str) -> None:
    final = dump(tmp_path / "final.npz", *FINAL)
    before = dump(tmp_path / "zero.npz", *zero, **{"ts": "20260917-180000", **over})
    line = line_of(lambda: recipe.read(final, layers=(0, 3), baseline=before))
    assert message in line


def test_a_dump_before_any_traffic_is_no_profile(tmp_path: Path) -> None:
    nothing = np.zeros((5, E), np.int64)
    path = dump(tmp_path / "x.npz", nothing, nothing)
    assert "cnt_dec: found no selection" in line_of(lambda: recipe.read(path, layers=(0, 3)))


@given(routings())
def test_sums_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, made: Counts
) -> None:
    path = tmp_path_factory.mktemp("recipe") / "x.npz"
    recipe.write(made, path)
    found = recipe.read(path, top_k=(made.layout.top_k or (0,))[0])
    assert same(found, summed(made), but=["rows"])


@given(st.integers(0, 1 << 30), st.integers(0, 255))
def test_damage_is_refused_or_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, at: int, change: int
) -> None:
    path = dump(tmp_path_factory.mktemp("recipe") / "x.npz", *FINAL)
    raw = bytearray(path.read_bytes())
    at %= len(raw)
    if change:
        raw[at] ^= change
    else:
        del raw[at:]
    path.write_bytes(bytes(raw))
    found = passes_or_refuses(lambda: recipe.read(path, layers=(0, 3)))
    if found is not None:
        assert np.array_equal(found.decode[0], FINAL[0][:2])


def test_what_is_written_reads_as_a_dump_for_its_own_tools(tmp_path: Path) -> None:
    counts = recipe.read(dump(tmp_path / "x.npz", *FINAL), layers=(0, 3))
    recipe.write(counts, tmp_path / "y.npz")
    with np.load(tmp_path / "y.npz") as found:
        assert int(found["E"]) == E and int(found["L"]) == 2
        assert np.array_equal(found["cnt_all"], found["cnt_dec"] + found["cnt_pre"])
        assert found["names"].tolist() == ["layer_idx=0", "layer_idx=3"]


LAYOUT = Layout((0, 2), (4, 4), None)
ROWS = {"0": {"cold": [2, 0], "hot": [3, 1]}, "2": {"cold": [3, 2], "hot": [0, 1]}}


@pytest.mark.parametrize("data", [{"layers": ROWS}, ROWS, {"layers": ROWS, "version": 1}])
def test_a_row_map_is_read_as_the_hook_reads_it(tmp_path: Path, data: Any) -> None:
    path = tmp_path / "rowmap.json"
    path.write_text(json.dumps(data))
    found = recipe.read_map(path, LAYOUT)
    assert found.order == {0: (3, 1, 0, 2), 2: (0, 1, 2, 3)}
    assert found.complete and found.hot == {0: 2, 2: 2}


def layers(**over: Any) -> Any:
    return {**{key: {**rows} for key, rows in ROWS.items()}, **over}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"0": ROWS["0"]}, "layers: found no layer 2, expected layers 0, 2"),
        (layers(**{"5": ROWS["2"]}), "layers: found layer 5, expected the model's layers 0, 2"),
        (layers(**{"00": ROWS["2"]}), "layers: found layer 00, expected the model's layers 0, 2"),
        (
            layers(**{"2": {"hot": [0, 1], "cold": [1, 2, 3]}}),
            "layers.2: found expert 1 hot and cold, expected one of them",
        ),
        (
            layers(**{"2": {"hot": [0, 0], "cold": [1, 2, 3]}}),
            "layers.2.hot: found expert 0 twice, expected each once",
        ),
        (
            layers(**{"2": {"hot": [0, 1], "cold": [2]}}),
            "layers.2: found expert 3 in no list, expected each of 0..3 once",
        ),
        (
            layers(**{"2": {"hot": [0, 1], "cold": [2, 3, 4]}}),
            "layers.2: found expert 4 out of range, expected each of 0..3 once",
        ),
        (
            layers(**{"2": {"hot": [0, -1], "cold": [1, 2, 3]}}),
            "layers.2: found expert -1 out of range",
        ),
        (layers(**{"2": {"hot": [True, 0], "cold": [2, 3]}}), "layers.2.hot: found list, expected"),
        (layers(**{"2": {"hot": [1.0, 0], "cold": [2, 3]}}), "layers.2.hot: found list, expected"),
        (layers(**{"2": {"hot": [0, 1]}}), "layers.2.cold: found NoneType, expected a list"),
        (layers(**{"2": 7}), "layers.2.hot: found NoneType, expected a list of expert ids"),
        ([1], "layers: found NoneType, expected an object of layers"),
        ({"layers": []}, "layers: found list, expected an object of layers"),
    ],
)
def test_what_is_no_row_map_of_the_model(tmp_path: Path, data: Any, message: str) -> None:
    path = tmp_path / "rowmap.json"
    path.write_text(json.dumps(data))
    assert message in line_of(lambda: recipe.read_map(path, LAYOUT))


@given(st.integers(1, 3), st.integers(1, 7), st.data())
def test_a_row_map_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, count: int, experts: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("map") / "rowmap.json"
    hot = data.draw(st.integers(0, experts))
    order = {3 * n: tuple(data.draw(st.permutations(range(experts)))) for n in range(count)}
    made = Ranking(order, complete=True, hot=dict.fromkeys(order, hot))
    recipe.write_map(made, path)
    found = recipe.read_map(path, Layout(tuple(order), (experts,) * count, None))
    assert found == made
    raw = json.loads(path.read_text())
    assert set(raw) == {"layers"}
    for layer, rows in raw["layers"].items():
        # The hook's own check.
        assert len(rows["hot"]) == hot and not set(rows["hot"]) & set(rows["cold"])
        assert set(rows["hot"]) | set(rows["cold"]) == set(range(experts))
        assert rows["cold"][::-1] == list(order[int(layer)][hot:])


@pytest.mark.parametrize(
    ("ranking", "message"),
    [
        (Ranking({0: (1, 0)}, complete=False, hot={0: 1}), "ranking: found an incomplete one"),
        (Ranking({0: (1, 0)}, complete=True), "ranking: found an incomplete one"),
        (
            Ranking({0: (1, 0), 1: (0, 1)}, complete=True, hot={0: 1, 1: 2}),
            "layers: found hot and cold [(1, 1), (2, 0)], expected one size of each",
        ),
        (Ranking({0: (1, 1)}, complete=True, hot={0: 1}), "layers.0: found expert 1 hot and cold"),
    ],
)
def test_a_map_the_hook_could_not_read_is_not_written(
    tmp_path: Path, ranking: Ranking, message: str
) -> None:
    path = tmp_path / "rowmap.json"
    assert message in line_of(lambda: recipe.write_map(ranking, path))
    assert not path.exists()


@given(st.binary(max_size=200))
def test_random_bytes_are_no_map(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("map") / "rowmap.json"
    path.write_bytes(raw)
    line_of(lambda: recipe.read_map(path, LAYOUT))
    line_of(lambda: recipe.read(path, layers=(0, 3)))


def test_a_file_that_unpacks_to_more_than_any_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dump(tmp_path / "x.npz", *FINAL)
    monkeypatch.setattr(recipe, "_LIMIT", 1000)
    assert "unpacked size: found" in line_of(lambda: recipe.read(path, layers=(0, 3)))
