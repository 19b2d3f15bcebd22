"""Files are whole or not there, and old ones stay unless --force says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from rowmap_jobs.cli.command import UsageError
from rowmap_jobs.cli.output import save, staged
from rowmap_jobs.formats.base import FormatError
from tests.cli.made import HOT, MODEL, good, rowmap


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_old_file_is_kept_without_force(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    out.write_text("old")
    what = ("place", made / "code.npz", "--model", MODEL, "--hot", HOT, "-o", out)
    ran = rowmap(*what)
    assert ran.code == 2 and f"{out}: found a file, expected a new name, or --force" in ran.line
    assert out.read_text() == "old"
    good(*what, "--force")
    assert out.read_bytes() == (made / "code.json").read_bytes() and names(tmp_path) == [out.name]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("/proc/rows.json", "/proc/rows.json: output: found "),
        ("/nowhere/rows.json", "found no folder /nowhere"),
        ("/dev/null", "found no regular file"),
        ("/tmp", "found a folder"),
        ("/etc/hostname/rows.json", "found "),
    ],
)
def test_places_where_nothing_can_be_written(place: str, says: str, made: Path) -> None:
    what = ("place", made / "code.npz", "--model", MODEL, "--hot", HOT)
    ran = rowmap(*what, "-o", place)
    assert ran.code == 3 and says in ran.line
    ran = rowmap("export", "recipe", made / "code.npz", "-o", place)
    assert ran.code == 3 and says in ran.line


def test_a_taken_name_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    # The census is not even there.
    for what in (
        ("merge", "none.npz"),
        ("filter", "none.npz", "--phase", "decode"),
        ("place", "none.npz", "--model", "none", "--hot", "1"),
        ("import", "auto", "none", "--model", "none"),
        ("export", "recipe", "none"),
        ("blend", "a=none", "b=none", "--model", "none", "--hot", "1"),
        ("eplb", "none", "--slots", "1", "--devices", "1"),
        ("report", "none"),
    ):
        assert "--force" in rowmap(*what, "-o", tmp_path / "out").line, what


def test_a_folder_for_reports_may_be_new_but_not_its_parents(made: Path, tmp_path: Path) -> None:
    what = ("evaluate", made / "code.npz", "--map", made / "code.json", "--report-dir")
    good(*what, tmp_path / "new")
    ran = rowmap(*what, tmp_path / "a" / "b")
    assert ran.code == 3 and "a folder to write in" in ran.line
    ran = rowmap(*what, made / "code.npz")
    assert ran.code == 3 and "found File exists" in ran.line


class Stop(BaseException):
    """Something that no `except Exception` sees."""


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_an_interruption_while_files_are_made_leaves_none(
    folder: bool, force: bool, tmp_path: Path
) -> None:
    def make() -> None:
        with staged(tmp_path / "x", force, folder) as path:
            for name in ("x", "x.meta.json"):
                (path / name if folder else path.with_name(name)).write_text("half")
            raise Stop

    with pytest.raises(Stop):
        make()
    assert names(tmp_path) == []


def test_what_was_made_moves_together(tmp_path: Path) -> None:
    with staged(tmp_path / "x", force=False) as path:
        path.write_text("whole")
        path.with_name("x.meta.json").write_text("beside")
        assert len(names(tmp_path)) == 1 and names(tmp_path)[0].endswith(".part")
    assert names(tmp_path) == ["x", "x.meta.json"]
    with staged(tmp_path / "f", force=False, folder=True) as path:
        (path / "0.npy").write_text("0")
    assert names(tmp_path / "f") == ["0.npy"]
    with pytest.raises(UsageError), staged(tmp_path / "f", True, folder=True):
        pass


def test_a_write_that_fails_is_one_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FormatError, match="found No space left on device, expected a folder"):
        save(tmp_path / "x", b"data", force=False)
    assert names(tmp_path) == []
