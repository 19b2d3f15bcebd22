"""What is not what it should be ends in one line and code 2 or 3, whatever was in the file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmap_jobs.exchange import registry
from rowmap_jobs.formats import census
from tests.cli.made import HOT, MODEL, good, rowmap

Slot = tuple[str, ...]


def slots(made: Path, bad: Path, out: Path) -> dict[str, Slot]:
    """Every argument that names a file, with the bad one there and good ones elsewhere."""
    data, rows = str(made / "code.npz"), str(made / "code.json")
    prose, file, to = str(made / "prose.npz"), str(bad), ("-o", str(out))
    budget, shape = ("--hot", str(HOT)), ("--geometry", rows)
    return {
        "inspect": ("inspect", file),
        "inspect --model": ("inspect", str(made / "code"), "--model", file),
        "import": ("import", "auto", file, "--fingerprint", rows, *to),
        "import --model": ("import", "auto", str(made / "code"), "--model", file, *to),
        "import --fingerprint": ("import", "auto", str(made / "code"), "--fingerprint", file, *to),
        "import --baseline": (
            *("import", "auto", str(made / "code"), "--fingerprint", rows),
            *("--baseline", file, *to),
        ),
        "export": ("export", "recipe", file, *to),
        "merge": ("merge", data, file, *to),
        "filter": ("filter", file, "--phase", "decode", *to),
        "place": ("place", file, *shape, *budget, *to),
        "place --model": ("place", data, "--model", file, *budget, *to),
        "place --geometry": ("place", data, "--geometry", file, *budget, *to),
        "place --hot-per-layer": ("place", data, *shape, "--hot-per-layer", file, *to),
        "place --shrink": ("place", data, *shape, *budget, "--shrink", file, *to),
        "evaluate": ("evaluate", file, "--map", rows),
        "evaluate --map": ("evaluate", data, "--map", file),
        "evaluate --active": ("evaluate", data, "--map", rows, "--active", file),
        "evaluate --other": ("evaluate", data, "--map", rows, "--other", f"prose={file}"),
        "evaluate --other map": (
            *("evaluate", data, "--map", rows),
            *("--other", f"prose={prose},{file}"),
        ),
        "compare": ("compare", rows, file),
        "compare first": ("compare", file, rows),
        "compare --census": ("compare", rows, rows, "--census", file),
        "drift": ("drift", "--active", rows, file),
        "drift --active": ("drift", "--active", file, data),
        "blend": ("blend", f"code={data}", f"prose={file}", *shape, *budget, *to),
        "blend first": ("blend", f"code={file}", f"prose={prose}", *shape, *budget, *to),
        "eplb": ("eplb", file, "--slots", "40", "--devices", "4", *to),
        "report": ("report", file, *to),
        "place --model gguf": ("place", data, "--model", f"{file}.gguf", *budget, *to),
        **{
            f"import {form}": ("import", form, file, "--fingerprint", rows, *to)
            for form in registry.readable()
        },
    }


NAMES = sorted(slots(Path(), Path(), Path()))
HEADS = (
    *(b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"GGUF\x03\0\0\0", b"\x93NUMPY\x01\0", b"\x80\x02"),
    *(b'{"', b'{"layers": {"0": {"hot": [', b'{"accepted": true, "censusDigest": ', b"[24, 24, "),
    *(b'{"hookVersion": "1", "phase": ', b'{"fingerprint": {}, "geometry": {}, "layers": ', b"3,1"),
    *(b"num_slots: ", b"# route_trace v1", b"blk.0.ffn_up_exps=", b"\x10\0\0\0\0\0\0\0{"),
)


@settings(max_examples=80)
@given(name=st.sampled_from(NAMES), head=st.sampled_from(HEADS), raw=st.binary(max_size=64))
def test_random_bytes_are_refused_in_one_line_by_every_argument(
    name: str, head: bytes, raw: bytes, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    bad, out = folder / "bad", folder / "out"
    for path in (bad, bad.with_suffix(".gguf")):
        path.write_bytes(head + raw)
    ran = rowmap(*slots(made, bad, out)[name])
    assert ran.code in (2, 3), (name, ran)
    assert ran.line and not out.exists()
    assert {p.name for p in folder.iterdir()} == {"bad", "bad.gguf"}


OURS = ("code.npz", "code.json", "report.json")
TAKES = [name for name in NAMES if not name.startswith("import ") and "gguf" not in name]


@settings(max_examples=50)
@given(name=st.sampled_from(TAKES), ours=st.sampled_from(OURS), data=st.data())
def test_a_damaged_file_of_ours_never_ends_in_a_traceback(
    name: str, ours: str, data: st.DataObject, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    raw = bytearray(contents(made, ours))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(raw)))
    bad = folder / ours
    bad.write_bytes(raw[: cut if data.draw(st.booleans()) else None])
    ran = rowmap(*slots(made, bad, folder / "out")[name])
    # A byte that nobody reads may change, and a report may have one digit for another.
    assert ran.code in (0, 1, 2, 3), (name, ran)
    said = [line for line in ran.err.splitlines() if not line.startswith("rowmap: note: ")]
    assert len(said) == (ran.code > 1), (name, ran)
    if ran.code < 2 and ours == "code.npz":
        good_one = census.parse((made / ours).read_bytes(), "good")
        assert census.to_bytes(census.parse(bad.read_bytes(), "bad")) == census.to_bytes(good_one)


def contents(made: Path, ours: str) -> bytes:
    if ours == "report.json" and not (made / "out").exists():
        good(
            "evaluate", made / "code.npz", "--map", made / "code.json", "--report-dir", made / "out"
        )
    return (made / ("out" if ours == "report.json" else "") / ours).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_not_there_is_refused_by_its_name(
    name: str, made: Path, tmp_path: Path
) -> None:
    ran = rowmap(*slots(made, tmp_path / "none", tmp_path / "out")[name])
    assert ran.code == 3 and "none" in ran.line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_or_device_in_a_files_place_is_refused(
    name: str, made: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    assert rowmap(*slots(made, tmp_path / "empty", tmp_path / "out")[name]).code == 3
    assert rowmap(*slots(made, Path("/dev/zero"), tmp_path / "out")[name]).code == 3


def test_a_file_of_ours_in_anothers_place_is_told(made: Path, tmp_path: Path) -> None:
    """Census, map and report are easily swapped; what is known of the file is said."""
    census_file, rows, out = made / "code.npz", made / "code.json", tmp_path / "out"
    found = {
        "found a row map, expected a census": ("place", rows, "--model", MODEL, "--hot", 1),
        "found a census, expected a row map": ("drift", census_file, "--active", census_file),
        "found a census, expected a report": ("report", census_file, "-o", out),
        "found a model, expected a census": ("merge", MODEL, "-o", out),
        "found a file of recipe-map (rowmap import reads it), expected a census": (
            *("filter", tmp_path / "away", "--since", "1d", "-o", out),
        ),
    }
    good("export", "recipe-map", rows, "-o", tmp_path / "away")
    for says, arguments in found.items():
        ran = rowmap(*arguments)
        assert ran.code == 3 and f": file: {says}" in ran.line


@pytest.mark.parametrize("name", [name for name in NAMES if "gguf" not in name])
def test_a_file_beyond_all_limits_is_refused_unread(name: str, made: Path, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    huge.touch()
    os.truncate(huge, 1 << 40)
    began = time.process_time()
    ran = rowmap(*slots(made, huge, tmp_path / "out")[name])
    assert ran.code == 3 and "huge" in ran.line and not (tmp_path / "out").exists()
    assert time.process_time() - began < 2


def bent(path: Path, folder: Path, **fingerprint: str) -> Path:
    """A map of another model: same layers, another fingerprint."""
    wire = json.loads(path.read_bytes())
    wire["fingerprint"] |= fingerprint
    out = folder / "bent.json"
    text = json.dumps(wire, sort_keys=True, separators=(",", ":"))
    out.write_text(text + "\n")
    return out


@pytest.mark.parametrize(
    "name", ["evaluate --map", "evaluate --active", "drift --active", "place --geometry"]
)
def test_a_file_of_another_model_is_refused_with_both_fingerprints(
    name: str, made: Path, tmp_path: Path
) -> None:
    other = bent(made / "code.json", tmp_path, router="sha256:" + "0" * 64)
    line = rowmap(*slots(made, other, tmp_path / "out")[name]).line
    assert f"{other}: fingerprint.router: found sha256:000" in line and "expected sha256:" in line


@pytest.mark.parametrize(
    ("budget", "code", "says"),
    [
        (["--hot", "33"], 2, "found 33, expected 0 to 32"),
        (["--hot-per-layer", "[24]"], 3, "found 1 numbers, expected 4"),
        (["--hot-per-layer", '{"0": 1, "1": 1, "2": 1, "9": 1}'], 3, "exactly the layers"),
        (["--hot-per-layer", "[24, 24, 24, true]"], 3, "found True, expected 0 to 32"),
        (["--hot-per-layer", "7"], 3, "a list in layer order"),
    ],
)
def test_budgets_that_the_model_cannot_have(
    budget: list[str], code: int, says: str, made: Path, tmp_path: Path
) -> None:
    if budget[0] == "--hot-per-layer":
        (tmp_path / "rows.json").write_text(budget[1])
        budget = [budget[0], str(tmp_path / "rows.json")]
    ran = rowmap("place", made / "code.npz", "--model", MODEL, *budget)
    assert ran.code == code and says in ran.line


def test_a_census_of_another_shape_is_refused(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 3}))
    (other / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    ran = rowmap("place", made / "code.npz", "--model", other, "--hot", HOT)
    assert ran.code == 3 and "found 32 experts, top-4, expected 32 experts, top-3" in ran.line


def test_terminal_escapes_in_files_are_printed_as_text(made: Path, tmp_path: Path) -> None:
    source, out = made / "code" / "code00-0.npy", tmp_path / "a.npz"
    good("import", "auto", source, "--model", MODEL, "--class", "\x1b[2Jx\u202e", "-o", out)
    shown = good("inspect", out).out
    assert "\\x1b[2Jx\\u202e" in shown and "\x1b" not in shown
    evil = tmp_path / "evil.json"
    evil.write_text('{"\\u001b[31m": 1}')
    line = rowmap("compare", evil, evil).line
    assert "\x1b" not in line
