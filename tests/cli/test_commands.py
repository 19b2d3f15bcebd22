"""What each subcommand says and writes, by small made traffic of two classes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rowmap_jobs.formats import census as census_format
from rowmap_jobs.formats import rowmap as map_format
from rowmap_jobs.formats.census import Census
from rowmap_jobs.formats.report import Report
from rowmap_jobs.formats.rowmap import RowMap
from rowmap_jobs.placement import place
from tests.cli.made import EXPERTS, HOT, LAYERS, MODEL, PROMPT, TOP_K, good, records, routed, rowmap
from tests.models import writers

ROW_BYTES = 110_592


def census(path: Path) -> Census:
    return census_format.parse(path.read_bytes(), path.name)


def row_map(path: Path) -> RowMap:
    return map_format.parse(path.read_bytes(), path.name)


@cache
def counted(traffic: str, sessions: int = 12, rows: int = 724) -> np.ndarray:
    """Decode counts [S,L,E] of the made records."""
    out = np.zeros((sessions, LAYERS, EXPERTS), dtype=np.int64)
    for session, layer in np.ndindex(sessions, LAYERS):
        chosen = routed(traffic, session, rows)[PROMPT:, layer]
        np.add.at(out, (session, layer, chosen.ravel()), 1)
    return out


# import, merge, filter


def test_an_import_counts_every_selection_and_takes_the_models_fingerprint(made: Path) -> None:
    data = census(made / "code.npz")
    assert (data.counts[:, 1] == counted("code")).all()
    assert data.rows.tolist() == [[PROMPT, 700]] * 12
    assert data.header.traffic_class == "code" and data.header.fingerprint.quant == "bf16"
    assert data.header.window == (1_789_639_200, 1_789_639_200)
    assert data.header.capture.engine == "vLLM"


def test_sessions_go_by_sequence_by_file_or_by_a_pattern(tmp_path: Path) -> None:
    source = records(tmp_path / "code", "code", sessions=4, rows=60)
    (source / "code03-0.npy").rename(source / "code02-1.npy")
    (source / "code03-0.json").rename(source / "code02-1.json")
    rules = {"sequence": 4, "file": 1, r"^(\w+)-": 3, r"^\w+(?=-)": 3}
    for number, (rule, expected) in enumerate(rules.items()):
        out = tmp_path / f"{number}.npz"
        good("import", "auto", source, "--model", MODEL, "--session-by", rule, "-o", out)
        assert len(set(census(out).session.tolist())) == expected, rule
    ran = rowmap("import", "auto", source, "--model", MODEL, "--session-by", "x-", "-o", out, "-f")
    assert ran.code == 3 and "expected a name that matches x-" in ran.line


def test_files_of_one_import_make_one_census_and_a_file_twice_counts_once(
    made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "both.npz"
    source = made / "code" / "code00-0.npy"
    other = made / "code" / "code01-0.npy"
    good("import", "auto", source, other, source, "--model", MODEL, "-o", out)
    data = census(out)
    assert sorted(map(tuple, data.rows.tolist())) == [(PROMPT, 700)] * 2
    assert data.header.selection.skipped == {"CountedTwice": 1}


def test_a_fingerprint_may_come_from_a_lanes_file_instead_of_the_model(
    made: Path, tmp_path: Path
) -> None:
    for number, file in enumerate(("code.npz", "code.json")):
        out = tmp_path / f"{number}.npz"
        source = made / "prose" / "prose00-0.npy"
        good("import", "auto", source, "--fingerprint", made / file, "-o", out)
        assert census(out).header.fingerprint == census(made / "code.npz").header.fingerprint


def test_an_unbound_import_is_no_lanes(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "free.npz"
    source = made / "prose" / "prose00-0.npy"
    good("import", "auto", source, "--model", MODEL, "--unbound", "-o", out)
    assert census(out).header.fingerprint.quant == "unbound"
    ran = rowmap("drift", "--active", made / "code.json", out)
    assert ran.code == 3 and "fingerprint.shape" in ran.line


def test_a_baseline_is_subtracted(made: Path, tmp_path: Path) -> None:
    final, zero = tmp_path / "final.json", tmp_path / "zero.json"
    total = counted("code").sum(axis=0)
    zero.write_text(json.dumps({"logical_count": counted("code")[0].tolist()}))
    final.write_text(json.dumps({"logical_count": total.tolist()}))
    out = tmp_path / "rest.npz"
    good("import", "auto", final, "--baseline", zero, "--model", MODEL, "-o", out)
    assert (census(out).decode() == counted("code")[1:].sum(axis=0)).all()


def test_draft_layers_are_left_out_and_said_on_stderr_unless_quiet(
    made: Path, tmp_path: Path
) -> None:
    dump, out = tmp_path / "count.json", tmp_path / "a.npz"
    total = counted("code").sum(axis=0)
    dump.write_text(json.dumps({"logical_count": [*total.tolist(), total[0].tolist()]}))
    arguments = ("import", "auto", dump, "--model", MODEL, "-o", out, "--force")
    assert f"note: {dump}: draft layers 4 split off" in good(*arguments).err
    assert good(*arguments, "--quiet").err == ""
    assert (census(out).decode() == total).all()


def test_merging_the_halves_of_a_census_gives_the_whole(made: Path, tmp_path: Path) -> None:
    first, second, whole = (tmp_path / f"{name}.npz" for name in ("first", "second", "whole"))
    good("filter", made / "code.npz", "--sessions", "0-4", "-o", first)
    good("filter", made / "code.npz", "--sessions", "5-11", "-o", second)
    good("merge", second, first, first, "-o", whole)
    assert (census(whole).decode() == census(made / "code.npz").decode()).all()
    assert len(census(whole).created) == 12
    said = good("inspect", whole).out
    assert "12 sessions, 12 transcripts" in said and "CountedTwice 5" in said


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        (["--phase", "decode"], 12),
        (["--fidelity", "live,tokens"], 12),
        (["--prompt-tokens", "24:25"], 12),
        (["--since", "2026-09-17", "--until", "2026-09-18"], 12),
        (["--sessions", "3,5"], 2),
    ],
)
def test_conditions_keep_whole_transcripts(
    condition: list[str], left: int, made: Path, tmp_path: Path
) -> None:
    out = tmp_path / "some.npz"
    good("filter", made / "code.npz", *condition, "-o", out)
    assert len(census(out).created) == left
    if "--sessions" not in condition:
        good("merge", made / "code.npz", *condition, "-o", out, "-f")


@pytest.mark.parametrize(
    "condition", [["--fidelity", "tokens"], ["--prompt-tokens", "25:"], ["--until", "2026-09-17"]]
)
def test_a_condition_that_leaves_nothing_is_refused_by_the_files_name(
    condition: list[str], made: Path, tmp_path: Path
) -> None:
    ran = rowmap("filter", made / "code.npz", *condition, "-o", tmp_path / "none.npz")
    assert ran.code == 3 and ran.line.startswith(f"{made / 'code.npz'}: ")
    assert "found 0 of 12 transcripts" in ran.line and not list(tmp_path.iterdir())


# place


def test_a_map_is_what_placement_gives(made: Path) -> None:
    data, rows = census(made / "code.npz"), row_map(made / "code.json")
    assert rows == place(data.decode(), data.header.fingerprint, rows.geometry)
    assert rows.geometry.row_bytes == ROW_BYTES and rows.geometry.hot_rows == HOT


def test_budgets_in_rows_bytes_and_by_layer(made: Path, tmp_path: Path) -> None:
    vector = tmp_path / "rows.json"
    vector.write_text('{"0": 20, "1": 24, "2": 26, "3": 26}')
    cases = {
        ("--hot", "24"): [24] * 4,
        ("--hot-bytes", "10MiB"): [(10 << 20) // ROW_BYTES // 4] * 4,
        ("--hot-per-layer", str(vector)): [20, 24, 26, 26],
    }
    for budget, expected in cases.items():
        wire = good("place", made / "code.npz", "--model", MODEL, *budget, "--json").json
        hot = wire["geometry"]["hotRows"]
        assert ([hot] * 4 if isinstance(hot, int) else list(hot.values())) == expected
        assert wire["hotBytes"] == sum(expected) * ROW_BYTES
    for budget, rows in ((("--global-rows", "90"), 90), (("--global-bytes", "10MiB"), 94)):
        wire = good("place", made / "code.npz", "--model", MODEL, *budget, "--json").json
        assert wire["order"] and wire["hotBytes"] == rows * ROW_BYTES
    arguments = ("--hot", "24", "--quantum", "4")
    wire = good("place", made / "code.npz", "--model", MODEL, *arguments, "--json").json
    assert wire["hotBytes"] <= 96 * ROW_BYTES


def test_the_geometry_of_a_lanes_map_stands_in_for_the_model(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "same.json"
    where = ("--geometry", made / "prose.json")
    good("place", made / "code.npz", *where, "--hot", HOT, "-o", out)
    assert out.read_bytes() == (made / "code.json").read_bytes()


def test_without_an_output_nothing_is_written(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = good("place", made / "code.npz", "--model", MODEL, "--hot", 3)
    assert "row map (not written)" in ran.out and not list(tmp_path.iterdir())
    assert f"Fewer hot rows than the {TOP_K} experts of a token" in ran.out.replace("\n", " ")


def test_experts_that_were_never_chosen_come_last_and_are_listed(tmp_path: Path) -> None:
    source = records(tmp_path / "few", "few", sessions=1, rows=PROMPT + 6)
    few, out = tmp_path / "few.npz", tmp_path / "few.json"
    good("import", "auto", source, "--model", MODEL, "-o", few)
    ran = good("place", few, "--model", MODEL, "--hot", HOT, "-o", out)
    never = counted("few", 1, PROMPT + 6)[0] == 0
    assert f"{int(never.sum())} experts, ranked last" in ran.out
    for layer in range(LAYERS):
        cold = row_map(out).layers[str(layer)].cold
        assert set(cold) <= set(np.flatnonzero(never[layer]).tolist())


def test_a_small_class_leans_on_the_pool(made: Path, tmp_path: Path) -> None:
    source = records(tmp_path / "few", "code", sessions=1, rows=PROMPT + 30)
    few = tmp_path / "few.npz"
    good("import", "auto", source, "--model", MODEL, "-o", few)
    alone, leaning, pool = (tmp_path / f"{name}.json" for name in ("alone", "leaning", "pool"))
    base = ("place", few, "--model", MODEL, "--hot", HOT)
    good(*base, "-o", alone)
    good(*base, "--shrink", made / "code.npz", "-o", leaning)
    good(*base, "--shrink", made / "code.npz", "--kappa", "1e9", "-o", pool)
    assert rowmap("compare", pool, made / "code.json").code == 0
    cold = [
        rowmap("compare", path, path, "--census", made / "code.npz", "--json").json["change"]["new"]
        for path in (alone, leaning)
    ]
    assert cold[1] < cold[0]


def test_old_transcripts_count_less_with_a_half_life(tmp_path: Path) -> None:
    files = []
    for name, when in (("old", "2020-01-01"), ("new", "2026-01-01")):
        source = records(tmp_path / name, name, sessions=2, rows=PROMPT + 300)
        files.append(tmp_path / f"{name}.npz")
        what = ("import", "auto", source, "--model", MODEL, "--created", when)
        good(*what, "-o", files[-1])
    both, aged, young = tmp_path / "both.npz", tmp_path / "aged.json", tmp_path / "young.json"
    good("merge", *files, "-o", both)
    good("place", both, "--model", MODEL, "--hot", HOT, "--half-life", "1w", "-o", aged)
    good("place", files[1], "--model", MODEL, "--hot", HOT, "-o", young)
    plain = tmp_path / "plain.json"
    good("place", both, "--model", MODEL, "--hot", HOT, "-o", plain)
    # Ties of the new may be settled by the old, so not the rows but what they leave cold is equal.
    cold = [
        rowmap("compare", path, young, "--census", files[1], "--json").json["change"]
        for path in (aged, plain)
    ]
    assert cold[0]["active"] == cold[0]["new"] < cold[1]["active"]


# evaluate


SPEED = ("--link", "200MB/s", "--memory", "20GB/s", "--measured", "23.2%:89.3")


def test_the_summary_is_the_golden_one_and_the_report_says_the_same(
    made: Path, tmp_path: Path
) -> None:
    arguments = (
        *("evaluate", made / "code.npz", "--model", MODEL, "--hot", HOT, *SPEED),
        *("--active", made / "prose.json", "--other", f"prose={made / 'prose.npz'}"),
        *("--report-dir", tmp_path / "out"),
    )
    ran = good(*arguments)
    golden = Path(__file__).parent / "golden" / "evaluate.txt"
    assert ran.out == golden.read_text(encoding="utf-8")
    raw = (tmp_path / "out" / "report.json").read_bytes()
    report = Report.from_bytes(raw, "report.json")
    assert report.accepted and report.lane is None and report.run is None
    assert report.digest == row_map(made / "code.json").digest
    assert report.evidence is not None and report.evidence.matrix is not None
    assert report.evidence.matrix.classes == ("code", "prose")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "Against the active map" in page
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.json"]
    again = rowmap(*arguments)
    assert again.code == 2 and "--force" in again.line
    assert good(*arguments, "--force").out == ran.out


def test_a_map_of_its_own_census_is_judged_left_out_and_another_as_it_is(made: Path) -> None:
    own = good("evaluate", made / "code.npz", "--map", made / "code.json", "--json").json
    placed = good("evaluate", made / "code.npz", "--model", MODEL, "--hot", HOT, "--json").json
    assert own["cold"] == placed["cold"] and own["cold"]["own"] > own["cold"]["inSample"]
    ran = rowmap("evaluate", made / "code.npz", "--map", made / "prose.json", "--json")
    other, counts = ran.json, counted("code").sum(axis=0)
    hot = row_map(made / "prose.json").layers
    cold = sum(int(counts[layer, list(hot[str(layer)].cold)].sum()) for layer in range(LAYERS))
    assert other["cold"]["own"] == pytest.approx(cold / counts.sum())
    assert any("not placed from this census" in note for note in other["notes"])
    assert other["ownInterval"][0] < other["cold"]["own"] < other["ownInterval"][1]


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (["--min-tokens", "8401"], "TooFewDecodeTokens"),
        (["--max-cold-share", "1%"], "ColdShareTooHigh"),
        (["--max-vs-positional", "0.01"], "ColdShareTooHigh"),
        (["--active", "code.json"], "NotBetterThanCurrent"),
        (["--active", "prose.json", "--min-improvement", "90"], "NotBetterThanCurrent"),
    ],
)
def test_a_gate_that_refuses_is_code_1(
    gate: list[str], reason: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    what = ("evaluate", "code.npz", "--model", MODEL, "--hot", HOT)
    ran = rowmap(*what, *gate)
    assert ran.code == 1 and ran.err == "" and f"rejected: {reason}" in ran.out
    assert good(*what).out.startswith("ready (accepted)")


def test_a_speed_that_cannot_be_is_a_usage_error(made: Path) -> None:
    what = ("evaluate", made / "code.npz", "--map", made / "code.json")
    ran = rowmap(*what, "--link", "3TB/s", "--memory", "3TB/s", "--measured", "23%:89")
    assert ran.code == 2 and "link_bytes_per_second" in ran.line
    ran = rowmap(*what, "--link", "1MB/s", "--memory", "2MB/s", "--measured", "23%:89")
    assert ran.code == 2 and "measured_tokens_per_second" in ran.line


# compare, drift, blend, eplb, report, inspect, formats


def test_comparing_says_what_moves(made: Path) -> None:
    a, b = row_map(made / "code.json"), row_map(made / "prose.json")
    moved = sum(len(set(b.layers[str(i)].hot) - set(a.layers[str(i)].hot)) for i in range(LAYERS))
    ran = rowmap("compare", made / "code.json", made / "prose.json", "--json")
    assert ran.code == 1 and ran.json["rowsMoved"] == moved
    assert ran.json["bytesMoved"] == moved * ROW_BYTES
    assert ran.json["ranks"]["overlap"] == pytest.approx(1 - moved / (LAYERS * HOT))
    text = rowmap("compare", made / "code.json", made / "prose.json").out
    assert f"{moved} become hot" in text and "the maps differ" in text
    same = rowmap("compare", made / "code.json", made / "code.json")
    assert same.code == 0 and "nothing to do" in same.out


def test_drift_recommends_only_for_other_traffic(made: Path) -> None:
    stay = rowmap("drift", "--active", made / "code.json", made / "code.npz")
    assert stay.code == 0 and "keep it" in stay.out
    gone = rowmap("drift", "--active", made / "code.json", made / "prose.npz", "--json")
    assert gone.code == 1 and gone.json["recommend"] and gone.json["interval"]["low"] > 0.02


def test_a_blend_that_loses_is_refused_and_not_written(made: Path, tmp_path: Path) -> None:
    what = ("blend", f"code={made / 'code.npz'}", f"prose={made / 'prose.npz'}", "--model", MODEL)
    out = tmp_path / "both.json"
    fair = good(*what, "--hot", HOT, "-o", out)
    assert "no class loses more" in fair.out and row_map(out).geometry.hot_rows == HOT
    # Whoever gives a class no weight gives it another class's map.
    weights = ("--weights", "code=1", "prose=0.000001", "-o", tmp_path / "bad.json")
    bad = rowmap(*what, "--hot", HOT, *weights, "--json")
    single = bad.json["matrix"]["regret"]
    assert bad.json["refused"] == (bad.json["regret"] > min(single))
    assert (tmp_path / "bad.json").exists() != bad.json["refused"]
    assert bad.code == (1 if bad.json["refused"] else 0)


def test_replicas_even_out_the_load(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "eplb.json"
    ran = good("eplb", made / "code.npz", "--slots", 40, "--devices", 4, "-o", out)
    wire = json.loads(out.read_text())
    assert "8 of them replicas" in ran.out and wire["balance"] > wire["plainBalance"]
    assert [sorted(set(row)) for row in wire["phy2log"]] == [list(range(EXPERTS))] * LAYERS
    ran = rowmap("eplb", made / "code.npz", "--slots", 41, "--devices", 4)
    assert ran.code == 2 and "a multiple of the 4 devices" in ran.line


def test_a_report_is_drawn_again_byte_for_byte(made: Path, tmp_path: Path) -> None:
    what = ("evaluate", made / "code.npz", "--map", made / "code.json")
    first = good(*what, "--active", made / "prose.json", "--report-dir", tmp_path / "out")
    page = tmp_path / "again.html"
    ours = tmp_path / "out" / "report.json"
    plots = ("--census", made / "code.npz", "--map", made / "code.json")
    active = ("--active", made / "prose.json")
    assert good("report", ours, *plots, *active, "-o", page).out == first.out
    assert page.read_bytes() == (tmp_path / "out" / "report.html").read_bytes()
    good("report", ours, "-o", page, "--force")
    ran = rowmap("report", ours, "--census", made / "prose.npz", "--map", made / "code.json")
    assert ran.code == 3 and "which the report names" in ran.line


def test_every_kind_of_file_is_told(made: Path, tmp_path: Path) -> None:
    good("evaluate", made / "code.npz", "--map", made / "code.json", "--report-dir", tmp_path)
    writers.write_safetensors(tmp_path / "model.safetensors", {})
    paths = (MODEL, made / "code.npz", made / "code.json", tmp_path / "report.json")
    kinds = [
        json.loads(line)["kind"] for line in good("inspect", *paths, "--json").out.splitlines()
    ]
    assert kinds == ["model", "census", "map", "report"]
    text = good("inspect", *paths).out
    for words in ("top-4", "12 sessions", "hot rows a layer", "config and headers"):
        assert words in text
    seen = good("inspect", made / "code", "--model", MODEL, "--json").json
    assert seen["kind"] == "vllm-routed-experts" and seen["sequences"] == 12


def test_the_rest_is_inspected_when_one_file_is_refused(made: Path, tmp_path: Path) -> None:
    ran = rowmap("inspect", tmp_path / "none", made / "code.npz")
    assert ran.code == 3 and "No such file" in ran.err and "12 sessions" in ran.out


def test_a_config_that_disagrees_with_the_headers_is_said(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_experts": 64}))
    (model / "model.safetensors").symlink_to(MODEL / "model.safetensors")
    text = " ".join(good("inspect", model).out.split())
    assert "config.json says 64, the headers 32 (holds)" in text


def test_formats_are_listed(made: Path) -> None:
    table, examples = good("formats").out.split("\n\n")
    names = [line.split()[0] for line in table.splitlines()[1:]]
    assert len(names) == 21 and "imatrix" in names
    assert [line.split()[0] for line in examples.splitlines()[1:]] == names
    assert "x.npy uint8[tokens - 1, layers, k] beside x.json with prompt_tokens" in examples
    entries = [json.loads(line) for line in good("formats", "--json").out.splitlines()]
    assert [entry["name"] for entry in entries if not entry["writes"]] == ["imatrix"]


def test_a_merge_of_two_classes_names_both_files(made: Path, tmp_path: Path) -> None:
    code, prose = made / "code.npz", made / "prose.npz"
    ran = rowmap("merge", code, prose, "-o", tmp_path / "both.npz")
    assert ran.code == 3
    assert f"{prose} class: found prose, expected class code as in {code}" in ran.line


def test_a_blend_says_what_it_wrote(made: Path, tmp_path: Path) -> None:
    classes = (f"a={made / 'code.npz'}", f"b={made / 'code.npz'}")
    both = tmp_path / "both.json"
    blend = ("blend", *classes, "--model", MODEL, "--hot", HOT)
    assert "blend (not written)" in good(*blend).out
    assert f"{both}: row map" in good(*blend, "-o", both).out and both.exists()


def test_no_skew_says_why_when_another_reason_came_first(made: Path) -> None:
    slow = ("--link", "1TB/s", "--memory", "3TB/s", "--measured", "20%:1")
    what = ("evaluate", made / "code.npz", "--map", made / "code.json", *slow)
    ran = rowmap(*what, "--min-tokens", 10**9)
    assert ran.code == 1 and "no_skew (rejected: TooFewDecodeTokens)" in ran.out
    assert "Note: no_skew: predicted gain" in ran.out
    alone = rowmap(*what)
    assert "no_skew (rejected: NoSkew)" in alone.out and "Note: no_skew" not in alone.out
