"""New files: whole or not there, and never over an old one unless told so.

A file is written under another name in the same folder, synced, and renamed when it is whole. An
interruption, a full disk or a refusal on the way leaves neither.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..exchange.streams import replacing
from ..formats.base import FormatError
from .command import UsageError


def check_free(path: Path, force: bool) -> None:
    """Refuse a name that is taken, before the work is done.

    Raises UsageError for a file that is there without `force`, FormatError for what no file can
    replace (a folder, a device) and for a folder that is not there.
    """
    source = str(path)
    try:
        taken, folder, file = os.path.lexists(path), path.is_dir(), path.is_file()
        homeless = not taken and not path.parent.is_dir()
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from None
    if homeless:
        raise FormatError(source, "output", f"no folder {path.parent}", "a folder that exists")
    if taken and not file:
        found = "a folder" if folder else "no regular file"
        raise FormatError(source, "output", found, "the name of a file")
    if taken and not force:
        raise UsageError(f"{source}: found a file, expected a new name, or --force")


def save(path: Path, raw: bytes, force: bool) -> None:
    """Write a file. Raises UsageError as `check_free`, FormatError when it cannot be written."""
    check_free(path, force)
    try:
        with replacing(path) as out:
            out.write(raw)
    except OSError as error:
        raise _refusal(path, error) from None


def save_all(folder: Path, files: Mapping[str, bytes], force: bool) -> None:
    """Write several files of a folder, which may be new: all of them or none, nor the folder.

    Raises as `save`.
    """
    new = not os.path.lexists(folder)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        found = error.strerror or type(error).__name__
        raise FormatError(str(folder), "folder", found, "a folder to write in") from None
    try:
        for name in files:
            check_free(folder / name, force)
        with ExitStack() as stack:
            # None gets its name before all of them are written.
            for name, raw in files.items():
                stack.enter_context(replacing(folder / name)).write(raw)
    except BaseException as error:
        if new:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise _refusal(folder, error) from None
        raise


@contextmanager
def staged(target: Path, force: bool, folder: bool = False) -> Iterator[Path]:
    """A path of the same name in a folder of its own, for writers that make files by themselves.

    What they made, files beside it included, moves to where `target` is when the block ends well.
    With `folder` the path is a folder to be filled, which may not be there yet. Raises UsageError
    for a name that is taken, FormatError when it cannot be written.
    """
    if folder:
        _check_no_folder(target)
    else:
        check_free(target, force)
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    except OSError as error:
        raise _refusal(target, error) from None
    try:
        inner = stage / target.name
        if folder:
            inner.mkdir()
        yield inner
        # The file that was asked for comes last: with it, all that belongs to it is there.
        made = sorted(stage.iterdir(), key=lambda path: (path.name == target.name, path.name))
        for path in made:
            if path.name != target.name:
                check_free(target.parent / path.name, force)
        for path in made:
            path.replace(target.parent / path.name)
    except OSError as error:
        raise _refusal(target, error) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _check_no_folder(target: Path) -> None:
    try:
        taken = os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir()))
    except (OSError, ValueError) as error:
        raise _refusal(target, error) from None
    if taken:
        raise UsageError(f"{target}: found something there, expected a new folder's name")


def _refusal(path: Path, error: OSError | ValueError) -> FormatError:
    found = error.strerror if isinstance(error, OSError) else None
    expected = "a folder that can be written to, with room in it"
    return FormatError(str(path), "output", found or type(error).__name__, expected)
