"""vLLM's routed experts become the counts that they are, or are refused in one line."""

from __future__ import annotations

import base64
import gzip
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import routed
from rowmap_jobs.exchange.base import Counts, Layout
from rowmap_jobs.exchange.synthetic import deal
from tests.exchange.made import line_of, passes_or_refuses
from tests.exchange.routings import counted, ids, npy, routings, same

E, K = 9, 2
LAYOUT = Layout((1, 2, 4), (E, E, E), (K, K, K))
OPTIONS = routed.Options(layout=LAYOUT)


def recorded(rows: int, seed: int = 0, dtype: str = "u1") -> np.ndarray:
    """An array [rows, 6 layers, 2] as vLLM fills it: layers 0, 3 and 5 are dense."""
    out = np.zeros((rows, 6, K), dtype=dtype)
    out[:, [1, 2, 4]] = ids(rows, 3, E, K, seed)
    return out


def expected(array: np.ndarray, prompt: int) -> tuple[np.ndarray, np.ndarray]:
    moe = array[:, [1, 2, 4]]
    return counted(moe[:prompt], E), counted(moe[prompt:], E)


def save(folder: Path, name: str, raw: bytes, usage: Any = None) -> Path:
    path = folder / name
    path.write_bytes(raw)
    if usage is not None:
        (folder / f"{name.split('.')[0]}.json").write_text(json.dumps(usage))
    return path


def is_of(counts: Counts, arrays: list[tuple[np.ndarray, int]]) -> bool:
    pairs = [expected(array, prompt) for array, prompt in arrays]
    assert counts.layout == LAYOUT and counts.prefill is not None and counts.rows is not None
    return (
        np.array_equal(counts.prefill, np.stack([before for before, _ in pairs]))
        and np.array_equal(counts.decode, np.stack([after for _, after in pairs]))
        and counts.rows.tolist() == [[p, len(a) - p] for a, p in arrays]
        and counts.per_sequence
    )


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<i8", "i1"])
@pytest.mark.parametrize("prompt", [0, 3, 11])
def test_rows_before_the_prompts_end_are_prefill(tmp_path: Path, dtype: str, prompt: int) -> None:
    array = recorded(11, dtype=dtype)
    usage = {"usage": {"prompt_tokens": prompt, "completion_tokens": 12 - prompt}}
    path = save(tmp_path, "a.npy", npy(array), usage)
    counts = routed.read(path, OPTIONS)
    assert is_of(counts, [(array, prompt)]) and counts.names == ("a.npy",)


def response(array: np.ndarray, prompt: int, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(array) + 1 - prompt},
        "choices": [{"index": 0, "routed_experts": base64.b64encode(npy(array)).decode()}],
    }


def test_every_way_to_keep_them_gives_the_same(tmp_path: Path) -> None:
    arrays = [(recorded(7 + n, n), 2 + n) for n in range(3)]
    usages = [{"prompt_tokens": prompt} for _, prompt in arrays]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README").write_text("not read")
    for n, (array, _) in enumerate(arrays):
        raw = npy(array)
        save(folder, f"{n}.npy.gz" if n else "0.npy", gzip.compress(raw) if n else raw, usages[n])
    one = b"".join(npy(array) for array, _ in arrays)
    members = tmp_path / "members.npz"
    np.savez_compressed(members, a=arrays[0][0], b=arrays[1][0], c=arrays[2][0])
    (tmp_path / "members.json").write_text(json.dumps(usages))
    records = [response(*pair, f"r{n}") for n, pair in enumerate(arrays)]
    lines = "\n".join(json.dumps(record) for record in records).encode()
    pairs = "\n".join(json.dumps({"request": {}, "response": r}) for r in records).encode()
    names = {
        folder: ("0.npy", "1.npy.gz", "2.npy.gz"),
        save(tmp_path, "one.npy", one, usages): ("one.npy", "one.npy#1", "one.npy#2"),
        save(tmp_path, "two.npy.gz", gzip.compress(one), usages): (
            "two.npy.gz",
            "two.npy.gz#1",
            "two.npy.gz#2",
        ),
        members: ("members.npz/a", "members.npz/b", "members.npz/c"),
        save(tmp_path, "x.jsonl", lines): ("r0", "r1", "r2"),
        save(tmp_path, "y.jsonl.gz", gzip.compress(pairs)): ("r0", "r1", "r2"),
    }
    for path, expected_names in names.items():
        counts = routed.read(path, OPTIONS)
        assert is_of(counts, arrays), path
        assert counts.names == expected_names


def test_without_a_layout_layers_of_zeros_are_dense_and_ids_stay_absolute(tmp_path: Path) -> None:
    path = save(tmp_path, "a.npy", npy(recorded(11)), {"prompt_tokens": 3})
    counts = routed.read(path, routed.Options(experts=E))
    assert counts.layout == LAYOUT
    assert counts.notes == ("layers [0, 3, 5] are zero throughout: taken for dense",)


@given(routings())
def test_what_is_written_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, made: Counts
) -> None:
    folder = tmp_path_factory.mktemp("routed")
    routed.write(made, folder)
    found = routed.read(folder, routed.Options(layout=made.layout))
    assert same(found, made, but=["names"])


@pytest.mark.parametrize("layers", [4, 40])
@pytest.mark.parametrize("rows", [8, 9, 40, 724, 20_000])
def test_any_number_of_rows_comes_back(rows: int, layers: int, tmp_path: Path) -> None:
    """Dealt in order of their ids, equal rows lie side by side: what readers refuse as repeated."""
    rng = np.random.default_rng(rows)
    liking = rng.normal(0.0, 1.3, (layers, 32))
    ids = np.argsort(-(liking + rng.gumbel(size=(min(rows, 724), layers, 32))), axis=2)[:, :, :4]
    ids = np.resize(ids, (rows, layers, 4))
    decode = np.array([[np.bincount(ids[:, i].ravel(), minlength=32) for i in range(layers)]])
    layout = Layout(tuple(range(layers)), (32,) * layers, (4,) * layers)
    whole = np.array([[0, rows]])
    made = Counts(layout, decode, np.zeros_like(decode), whole, ("a",), per_sequence=True)
    routed.write(made, tmp_path)
    assert same(routed.read(tmp_path, routed.Options(layout=layout)), made, but=["names"])


@given(st.integers(1, 300), st.integers(0, 4095))
def test_rows_are_dealt_once_each_in_the_same_order_always(rows: int, layer: int) -> None:
    dealt = deal(np.ones(rows, dtype=np.int64), rows, 1, layer)[:, 0]
    assert sorted(dealt.tolist()) == list(range(rows))
    assert (dealt == deal(np.ones(rows, dtype=np.int64), rows, 1, layer)[:, 0]).all()


def test_the_order_of_dealt_rows_is_the_same_on_every_machine() -> None:
    assert deal(np.ones(8, dtype=np.int64), 8, 1, 3)[:, 0].tolist() == [3, 5, 0, 4, 1, 7, 2, 6]


def test_counts_that_are_no_routing_are_not_written(tmp_path: Path) -> None:
    counts = routed.read(save(tmp_path, "a.npy", npy(recorded(5)), {"prompt_tokens": 1}), OPTIONS)
    assert counts.rows is not None
    counts.rows[0, 1] += 1
    line = line_of(lambda: routed.write(counts, tmp_path))
    assert "decode[0,layer 1]: found 8 selections" in line


def test_padding_is_skipped_and_said(tmp_path: Path) -> None:
    array = recorded(8, dtype="<i2")
    padded = np.concatenate([array, np.full((5, 6, K), -1, dtype="<i2")])
    padded[8:, [0, 3, 5]] = 0
    whole = np.concatenate([array, np.full((5, 6, K), -1, dtype="<i2")])
    counts = routed.read(save(tmp_path, "a.npy", npy(whole), {"prompt_tokens": 3}), OPTIONS)
    assert is_of(counts, [(array, 3)])
    assert "5 rows of padding (-1) were skipped" in counts.notes


def test_a_prompt_whose_start_was_not_returned(tmp_path: Path) -> None:
    array = recorded(10)
    record = response(array[2:], 5, "r")
    record["usage"] = {"prompt_tokens": 5, "completion_tokens": 6}
    line = {"request": {"routed_experts_prompt_start": 2}, "response": record}
    counts = routed.read(save(tmp_path, "x.jsonl", json.dumps(line).encode()), OPTIONS)
    assert is_of(counts, [(array[2:], 3)])


def test_several_choices_are_several_sequences(tmp_path: Path) -> None:
    arrays = [(recorded(7, 1), 3), (recorded(9, 2), 3)]
    record = response(*arrays[0], "r")
    record["choices"] += response(*arrays[1], "r")["choices"]
    record["usage"]["completion_tokens"] = 12
    counts = routed.read(save(tmp_path, "x.jsonl", json.dumps(record).encode()), OPTIONS)
    assert is_of(counts, arrays) and counts.names == ("r#0", "r#1")


def test_an_aborted_request_is_left_out_and_said(tmp_path: Path) -> None:
    array = recorded(7)
    gone = {"id": "gone", "usage": {}, "choices": [{"routed_experts": None}]}
    lines = f"{json.dumps(gone)}\n{json.dumps(response(array, 3, 'r'))}\n"
    counts = routed.read(save(tmp_path, "x.jsonl", lines.encode()), OPTIONS)
    assert is_of(counts, [(array, 3)])
    assert counts.notes == ("1 choices had no routed_experts (aborted): left out",)


def test_prompt_rows_of_zeros_are_refused_unless_decode_alone_is_read(tmp_path: Path) -> None:
    array = recorded(20)
    array[:4] = 0
    path = save(tmp_path, "a.npy", npy(array), {"prompt_tokens": 6})
    line = line_of(lambda: routed.read(path, OPTIONS))
    assert "array 0 prefill[row 0,layer 1]: found ids [0, 0] in every layer" in line
    options = routed.Options(layout=LAYOUT, decode_only=True)
    counts = routed.read(path, options)
    assert counts.prefill is None and counts.rows is not None
    assert counts.rows.tolist() == [[0, 14]]
    assert np.array_equal(counts.decode[0], expected(array, 6)[1])
    path = save(tmp_path, "b.npy", npy(array), {"prompt_tokens": 20})
    assert "found no rows" in line_of(lambda: routed.read(path, options))


def test_touched_counts_distinct_experts_of_steps(tmp_path: Path) -> None:
    array = recorded(13)
    path = save(tmp_path, "a.npy", npy(array), {"prompt_tokens": 3})
    counts = routed.read(path, routed.Options(layout=LAYOUT, touched=(1, 3)))
    assert counts.steps is not None and counts.touched is not None
    assert counts.steps.tolist() == [10, 0, 3]
    by_hand = [
        sum(len(set(array[3 + at : 6 + at, layer].ravel().tolist())) for at in (0, 3, 6))
        for layer in (1, 2, 4)
    ]
    assert counts.touched.tolist() == [[20, 20, 20], [0, 0, 0], by_hand]


def change(array: np.ndarray, at: Any, value: Any) -> np.ndarray:
    out = array.copy()
    out[at] = value
    return out


ROW = recorded(20)
REFUSED: list[tuple[np.ndarray, Any, str]] = [
    (np.zeros((20, 6, K), "u1"), 3, "[row 0,layer 1]: found ids [0, 0] in every layer, expected"),
    (change(ROW, (9, 2, 0), E), 3, "decode[layer 2]: found id 9, expected ids 0 to 8 (physical"),
    (change(ROW, (9, 2), 255), 3, "decode[layer 2]: found id 255, expected ids 0 to 8 (-1 as"),
    (change(ROW, (9, 4), 3), 3, "decode[row 6,layer 4]: found ids [3, 3], expected 2 distinct ids"),
    (change(ROW, (9, 3, 1), 3), 3, "decode[layer 3]: found id 3, expected zeros (a layer without"),
    (ROW.astype("f4"), 3, "array 0: found float32 with 3 dimensions, expected integers"),
    (ROW[:, :, 0], 3, "array 0: found uint8 with 2 dimensions, expected integers"),
    (ROW[:, :4], 3, "array 0: found 4 layers, expected layer 4 of the model among them"),
    (ROW[:, :, :1], 3, "array 0: found 1 ids a row, expected top-k [2], the model's"),
    (ROW[:0], 0, "array 0: found [0, 6, 2], expected [tokens - 1"),
    (ROW, 21, "array 0: found a prompt of 21 tokens from token 0, expected 0 to 20"),
    (ROW, {"prompt_tokens": 3, "completion_tokens": 19}, "array 0: found 20 rows, expected 21"),
    (ROW, {"prompt_tokens": True}, "a.json: prompt_tokens: found True, expected a number of"),
    (ROW, {"prompt_tokens": -1}, "a.json: prompt_tokens: found -1, expected a number of tokens"),
    (ROW, {}, "a.json: prompt_tokens: found None, expected a number of tokens"),
    (ROW, [{"prompt_tokens": 3}] * 2, "sidecar: found 2 entries for 1 arrays, expected one entry"),
    (ROW, [], "sidecar: found 0 entries, expected one for each array (array 0 has none)"),
    (ROW, None, "prompt_tokens: found none, expected a.json with prompt_tokens"),
]


@pytest.mark.parametrize(("array", "usage", "message"), REFUSED)
def test_what_is_no_routing(tmp_path: Path, array: np.ndarray, usage: Any, message: str) -> None:
    sidecar = {"prompt_tokens": usage} if type(usage) is int else usage
    path = save(tmp_path, "a.npy", npy(array), sidecar)
    assert message in line_of(lambda: routed.read(path, OPTIONS))


def test_the_same_routing_for_one_token_after_another(tmp_path: Path) -> None:
    array = np.zeros((20, 6, K), dtype="u1")
    array[:] = np.repeat(ids(10, 6, E, K), 2, axis=0)
    options = routed.Options(experts=E)
    path = save(tmp_path, "a.npy", npy(array), {"prompt_tokens": 0})
    assert "equal to the row before in every layer" in line_of(lambda: routed.read(path, options))


def test_arrays_of_two_models_in_one_folder(tmp_path: Path) -> None:
    save(tmp_path, "a.npy", npy(recorded(5)), {"prompt_tokens": 1})
    save(tmp_path, "b.npy", npy(np.concatenate([recorded(5)] * 2, axis=1)), {"prompt_tokens": 1})
    line = line_of(lambda: routed.read(tmp_path, OPTIONS))
    assert "b.npy: array 0: found [12, 2] layers and ids, expected [6, 2] as in" in line


@pytest.mark.parametrize("kind", ["link", "pipe", "empty", "name", "nothing"])
def test_folders_and_names_that_are_refused(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if kind == "link":
        (folder / "a.npy").symlink_to(save(tmp_path, "b.npy", npy(ROW)))
    elif kind == "pipe":
        os.mkfifo(folder / "a.npy")
    path = {"name": save(tmp_path, "a.bin", npy(ROW)), "nothing": tmp_path / "no.npy"}
    message = {
        "link": "a.npy: found a link or no file, expected a regular file",
        "pipe": "a.npy: found a link or no file, expected a regular file",
        "empty": "files: found none, expected files named .npy.gz, .npy, .npz",
        "name": "name: found a.bin, expected a name that ends in",
        "nothing": "file: found No such file or directory",
    }
    line = line_of(lambda: routed.read(path.get(kind, folder), OPTIONS))
    assert message[kind] in line


def test_neither_layout_nor_experts(tmp_path: Path) -> None:
    path = save(tmp_path, "a.npy", npy(ROW), {"prompt_tokens": 1})
    assert "the model's layout or number" in line_of(lambda: routed.read(path, routed.Options()))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "line 1: found list, expected a JSON object"),
        (b"{}", "line 1: found no choices, expected a response with choices"),
        (b'{"response": 1}', "line 1: found no response, expected a response"),
        (b'{"choices": [{"routed_experts": 1}]}', "line 1: found choices[0] of another form"),
        (b'{"choices": ["a"]}', "line 1: found choices[0] of another form"),
        (b'{"choices": [{"routed_experts": "A"}]}', "usage: found NoneType, expected an object"),
        (
            b'{"usage": {"prompt_tokens": 1}, "choices": [{"routed_experts": "A"}]}',
            "line 1 choices[0]: found damaged base64",
        ),
        (
            b'{"usage": {"prompt_tokens": 1}, "choices": [{"routed_experts": "AAAA"}]}',
            "line 1 choices[0]: found b'\\x00\\x00\\x00', expected a .npy array",
        ),
        (
            b'{"usage": {"prompt_tokens": 1}, "choices": [{"routed_experts": ""}]}',
            "line 1 choices[0]: found no bytes, expected a .npy array",
        ),
        (b'{"choices": [{"routed_experts": null}]}', "routed_experts: found no rows"),
    ],
)
def test_lines_that_are_no_response(tmp_path: Path, line: bytes, message: str) -> None:
    assert message in line_of(lambda: routed.read(save(tmp_path, "x.jsonl", line), OPTIONS))


def test_more_base64_than_the_array_declares(tmp_path: Path) -> None:
    record = response(ROW, 3, "r")
    record["choices"][0]["routed_experts"] = base64.b64encode(npy(ROW) + b"x").decode()
    path = save(tmp_path, "x.jsonl", json.dumps(record).encode())
    assert "more bytes than the header declares" in line_of(lambda: routed.read(path, OPTIONS))


WHOLE = {
    "a.npy": npy(ROW),
    "a.npy.gz": gzip.compress(npy(ROW), mtime=0),
    "a.jsonl": json.dumps(response(ROW, 3, "r")).encode(),
}


@given(st.sampled_from(sorted(WHOLE)), st.integers(0, 1 << 30), st.integers(0, 255))
def test_damage_is_refused_or_still_routing(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, change: int
) -> None:
    """What has a checksum gives the same or nothing; in the others every row has k distinct ids."""
    raw = bytearray(WHOLE[name])
    at %= len(raw)
    if change:
        raw[at] ^= change
    else:
        del raw[at:]
    path = save(tmp_path_factory.mktemp("x"), name, bytes(raw), {"prompt_tokens": 3})
    found = passes_or_refuses(lambda: routed.read(path, OPTIONS))
    if found is None:
        return
    if name == "a.npy.gz":
        assert is_of(found, [(ROW, 3)])
    assert (found.decode.sum(axis=2) == found.rows[:, 1:] * K).all()
    assert (found.decode.max(axis=2) <= found.rows[:, 1:]).all()


@given(st.binary(max_size=300), st.sampled_from(["a.npy", "a.npy.gz", "a.npz", "a.jsonl"]))
def test_random_bytes_are_refused(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, name: str
) -> None:
    path = save(tmp_path_factory.mktemp("x"), name, raw, {"prompt_tokens": 3})
    line_of(lambda: routed.read(path, OPTIONS))


@pytest.mark.parametrize("form", ["npy.gz", "folder", "jsonl"])
def test_memory_is_bounded_by_the_counts_not_by_the_file(tmp_path: Path, form: str) -> None:
    pool = ids(256, 40, 64, 6).astype("<u2")
    rows = np.random.default_rng(0).integers(0, 256, 16_000)
    array = pool[rows]
    size = 8 * array.nbytes
    if form == "folder":
        path = tmp_path
        for n in range(8):
            save(path, f"{n}.npy", npy(array), {"prompt_tokens": 100})
    elif form == "npy.gz":
        raw = npy(np.concatenate([array] * 8))
        path = save(tmp_path, "a.npy.gz", gzip.compress(raw, 0), {"prompt_tokens": 100})
        del raw
    else:
        path = tmp_path / "x.jsonl"
        record = json.dumps(response(array[:2000], 100, "r")).encode()
        path.write_bytes(b"\n".join([record] * 64))
    del array
    tracemalloc.start()
    counts = routed.read(path, routed.Options(experts=64))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    held = 2 * counts.decode.nbytes
    assert used < held + (40 << 20) < size, (used, held, size)
