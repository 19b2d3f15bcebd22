"""A census or map that goes out and comes back places the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rowmap_jobs.exchange import registry
from rowmap_jobs.formats import census
from rowmap_jobs.formats.census import Census
from tests.cli.made import HOT, MODEL, good, records, rowmap
from tests.exchange.test_imatrix import gguf, moe
from tests.formats import samples
from tests.models import writers
from tests.models.test_gguf import VALUES, experts

COUNTS = (
    *("recipe", "sglang-counts", "llamacpp-trace", "llamacpp-pin", "exllamav3-npz", "exllamav3"),
    *("exllamav3-json", "b12x", "jsonl", "trtllm-statistics", "route-trace"),
)
BY_SEQUENCE = ("exllamav3-npz", "exllamav3", "jsonl", "route-trace")
SLOTS = ("vllm-ascend", "sglang-map", "trtllm")
ONLY_WRITTEN = ("vllm-expert-to-ep-rank", "vllm-expert-map", "llamacpp-n-cpu-moe")
WHOLE_LAYERS = ("llamacpp-overrides", "llamacpp-n-cpu-moe")
MAPS = ("recipe-map", "llamacpp-pin")


def test_every_format_that_is_written_is_tested() -> None:
    tested = {*COUNTS, *SLOTS, *ONLY_WRITTEN, *WHOLE_LAYERS, *MAPS, "vllm-routed-experts"}
    assert tested == set(registry.writable())


def placed(census: Path, out: Path) -> Path:
    good("place", census, "--model", MODEL, "--hot", HOT, "-o", out)
    return out


@pytest.fixture(scope="module")
def some(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A census of three sessions, and its map beside it."""
    out = tmp_path_factory.mktemp("some") / "some.npz"
    good("filter", made / "code.npz", "--sessions", "0-2", "-o", out)
    return placed(out, out.with_suffix(".json")).with_suffix(".npz")


@pytest.mark.parametrize("form", COUNTS)
def test_counts_that_come_back_place_the_same(form: str, some: Path, tmp_path: Path) -> None:
    away, back = tmp_path / f"away.{form}", tmp_path / "back.npz"
    good("export", form, some, "-o", away)
    good("import", "auto", away, "--model", MODEL, "-o", back)
    same = placed(back, tmp_path / "back.json")
    assert same.read_bytes() == some.with_suffix(".json").read_bytes()
    sequences = good("inspect", back, "--json").json["transcripts"]
    assert sequences == (3 if form in BY_SEQUENCE else 1)


def test_routed_rows_that_come_back_place_the_same(tmp_path: Path) -> None:
    source = records(tmp_path / "few", "few", sessions=5, rows=24 + 7)
    few, back, away = tmp_path / "few.npz", tmp_path / "back.npz", tmp_path / "away"
    good("import", "auto", source, "--model", MODEL, "--decode-only", "-o", few)
    good("export", "vllm-routed-experts", few, "-o", away)
    good("import", "auto", away, "--model", MODEL, "-o", back)
    one, other = placed(few, tmp_path / "few.json"), placed(back, tmp_path / "back.json")
    assert one.read_bytes() == other.read_bytes()
    again = rowmap("export", "vllm-routed-experts", few, "-o", away, "--force")
    assert again.code == 2 and "a new folder's name" in again.line


@pytest.mark.parametrize("form", MAPS)
def test_a_map_that_comes_back_has_the_same_rows(form: str, made: Path, tmp_path: Path) -> None:
    away, back = tmp_path / "away", tmp_path / "back.json"
    good("export", form, made / "code.json", "-o", away)
    good("import", form, away, "--model", MODEL, "-o", back)
    assert rowmap("compare", back, made / "code.json").code == 0
    if form == "recipe-map":
        assert back.read_bytes() == (made / "code.json").read_bytes()


@pytest.mark.parametrize("form", SLOTS)
def test_placements_over_ranks_come_back_as_orders_that_need_a_number_of_hot_rows(
    form: str, made: Path, tmp_path: Path
) -> None:
    away, back = tmp_path / "away", tmp_path / "back.json"
    # vllm-ascend has no place for two replicas of an expert on one device.
    slots = 32 if form == "vllm-ascend" else 40
    good("export", form, made / "code.npz", "--ranks", 4, "--slots", slots, "-o", away)
    ran = rowmap("import", form, away, "--model", MODEL, "-o", back)
    assert ran.code == 3 and "a number of hot rows (--hot)" in ran.line
    good("import", form, away, "--model", MODEL, "--hot", HOT, "-o", back)
    assert f"hot rows a layer     {HOT}" in good("inspect", back).out


def test_whole_layers_go_out_as_overrides(made: Path, tmp_path: Path) -> None:
    rows, whole, back = tmp_path / "rows.json", tmp_path / "whole.json", tmp_path / "back.json"
    rows.write_text("[0, 0, 32, 32]")
    what = ("place", made / "code.npz", "--model", MODEL, "--hot-per-layer", rows)
    good(*what, "-o", whole)
    for form in WHOLE_LAYERS:
        good("export", form, whole, "-o", tmp_path / form)
    assert "--n-cpu-moe 2" in (tmp_path / "llamacpp-n-cpu-moe").read_text()
    good("import", "auto", tmp_path / "llamacpp-overrides", "--model", MODEL, "-o", back)
    assert rowmap("compare", back, whole).code == 0
    split = rowmap("export", "llamacpp-overrides", made / "code.json", "-o", tmp_path / "no")
    assert split.code == 3 and "whole layers only" in split.line


def test_proposals_are_written(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    good("export", "vllm-expert-map", made / "code.npz", "--ranks", 4, "-o", out)
    ran = rowmap("export", "vllm-expert-to-ep-rank", made / "code.npz", "--ranks", 4, "-o", out)
    assert ran.code == 2 and "--force" in ran.line


@pytest.mark.parametrize("form", ["sglang-map", "trtllm", "vllm-ascend", "recipe-map"])
def test_what_the_input_cannot_give_is_refused_and_nothing_is_left(
    form: str, made: Path, tmp_path: Path
) -> None:
    ran = rowmap("export", form, made / "code.npz", "-o", tmp_path / "out")
    says = "expected a row map" if form == "recipe-map" else "found no --ranks"
    assert ran.code == 2 and says in ran.line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", [*COUNTS, *SLOTS])
def test_a_map_is_no_census(form: str, made: Path, tmp_path: Path) -> None:
    rows, out = made / "code.json", tmp_path / "out"
    if registry.FORMATS[form].holds == "counts or map":
        good("export", form, rows, "-o", out)
        return
    ran = rowmap("export", form, rows, "-o", out)
    assert ran.code == 2 and "found a row map in" in ran.line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", [*COUNTS, "vllm-routed-experts"])
def test_what_a_format_has_no_place_for_is_said(form: str, tmp_path: Path) -> None:
    source = records(tmp_path / "two", "two", sessions=2, rows=24 + 300)
    two, away, back = tmp_path / "two.npz", tmp_path / "away", tmp_path / "back.npz"
    good("import", "auto", source, "--model", MODEL, "--session-by", "file", "-o", two)
    noted = good("export", form, two, "-o", away).err
    good("import", form, away, "--model", MODEL, "-o", back)
    seen, whole = (good("inspect", path, "--json").json for path in (back, two))
    lost = {
        "prefill": seen["prefillTokens"] != whole["prefillTokens"],
        "transcripts": seen["transcripts"] != whole["transcripts"],
        "sessions": seen["transcripts"] > 1 and seen["sessions"] != whole["sessions"],
    }
    assert noted.count("\n") == 1
    assert {name for name in lost if lost[name]} == {name for name in lost if name in noted}
    rows_of_ids = form in ("b12x", "jsonl", "route-trace", "vllm-routed-experts")
    assert ("are made up" in noted) == rows_of_ids


def test_a_writer_names_the_input_and_no_file_of_its_own(tmp_path: Path) -> None:
    for form in ("recipe", "exllamav3-npz", "sglang-counts", "trtllm-statistics", "route-trace"):
        uneven = tmp_path / "uneven.npz"
        uneven.write_bytes(census.to_bytes(uneven_census()))
        ran = rowmap("export", form, uneven, "-o", tmp_path / "out")
        assert ran.code == 3 and ran.line.startswith(f"{uneven}: ")
        assert "one number" in ran.line and f"(in {form})" in ran.line and ".part" not in ran.line


@pytest.mark.parametrize(
    "form", ["llamacpp-trace", "llamacpp-pin", "b12x", "jsonl", "vllm-routed-experts"]
)
def test_layers_may_differ_in_experts(form: str, tmp_path: Path) -> None:
    uneven, away, back = tmp_path / "uneven.npz", tmp_path / "away", tmp_path / "back.npz"
    uneven.write_bytes(census.to_bytes(uneven_census()))
    good("export", form, uneven, "-o", away)
    good("import", form, away, "--fingerprint", uneven, "-o", back)
    one, other = (census.parse(path.read_bytes(), path.name) for path in (uneven, back))
    assert (one.decode() == other.decode()).all()
    assert other.experts.tolist() == [4, 12, 8]


def uneven_census() -> Census:
    """Layers 1, 2 and 5 with 4, 12 and 8 experts, of which layer 2 never chooses its last."""
    rng = np.random.default_rng(3)
    counts = np.zeros((1, 2, 3, 12), dtype=np.int64)
    for layer, width in enumerate((4, 11, 8)):
        chosen = np.argsort(rng.random((60, width)), axis=1)[:, :2]
        counts[0, 1, layer, :width] = np.bincount(chosen.ravel(), minlength=width)
    sample = samples.census()
    return Census(
        header=sample.header,
        counts=counts,
        rows=np.array([[0, 60]], dtype=np.int64),
        layer_ids=np.array([1, 2, 5], dtype=np.int32),
        experts=np.array([4, 12, 8], dtype=np.int32),
        top_k=np.array([2, 2, 2], dtype=np.int32),
        session=np.zeros(1, dtype=np.int32),
        transcript_id=np.ones((1, 32), dtype=np.uint8),
        fidelity=np.zeros(1, dtype=np.uint8),
        prompt_len=np.zeros(1, dtype=np.int32),
        created=np.full(1, sample.header.window[1], dtype=np.int64),
    )


def test_a_sidecar_that_is_there_is_not_replaced_unasked(made: Path, tmp_path: Path) -> None:
    (tmp_path / "x.meta.json").write_text("mine")
    ran = rowmap("export", "exllamav3-npz", made / "code.npz", "-o", tmp_path / "x.npz")
    assert ran.code == 2 and "x.meta.json" in ran.line
    assert [p.name for p in tmp_path.iterdir()] == ["x.meta.json"]
    good("export", "exllamav3-npz", made / "code.npz", "-o", tmp_path / "x.npz", "--force")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.meta.json", "x.npz"]


def test_an_imatrix_of_a_gguf_model_becomes_a_list_of_rows_to_pin(tmp_path: Path) -> None:
    model, matrix = tmp_path / "m.gguf", tmp_path / "i.gguf"
    census, rows, pin = (tmp_path / name for name in ("wiki.npz", "rows.json", "pin.csv"))
    mixed = {**experts(0), **experts(1, ("Q4_K", "Q4_K", "Q6_K"))}
    writers.write_gguf(model, VALUES, mixed)
    matrix.write_bytes(gguf(moe({0: [5.0, 0.0, 3.0, 2.0], 1: [4.0, 2.0, 1.0, 3.0]})))
    ran = rowmap("import", "imatrix", matrix, "--model", model, "-o", census)
    assert ran.code == 3 and "plain weights; otherwise take it from a lane" in ran.line
    good("import", "auto", matrix, "--model", model, "--unbound", "-o", census)
    row = 3 * 256 * 512 * 2
    what = ("place", census, "--model", model, "--phase", "all", "--global-bytes", 2 * row)
    good(*what, "-o", rows)
    good("export", "llamacpp-pin", rows, "-o", pin)
    # 0,2 is chosen as often as 1,3 but does not fit; rows of layer 1 have a third of the bytes.
    assert pin.read_text() == "0,0\n1,0\n1,3\n1,1\n"
