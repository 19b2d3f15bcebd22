"""What the options of several subcommands stand for: the model, the budget, the pool."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..formats.base import FormatError
from ..formats.census import Census
from ..formats.rowmap import Fingerprint
from ..models.geometry import to_geometry
from ..placement.budget import SOURCE as HOT_ROWS
from . import inputs
from .command import UsageError
from .inputs import Shape
from .work import placed
from .work.placed import Budget


def shape(args: Namespace, fingerprint: Fingerprint, of: Path) -> Shape:
    """Layers, experts, top-k and row bytes by --model or --geometry.

    A file of a lane must be of the same model as `fingerprint`, which is that of the file `of`.
    Raises FormatError.
    """
    if args.model is not None:
        return to_geometry(inputs.model(args.model, args.tensor_parallel), 0, args.drafting)
    found, theirs = inputs.shape_of(args.geometry)
    if theirs is not None:
        inputs.same_model(theirs, fingerprint, args.geometry, str(of))
    return found


def alike(path: Path, model: Shape, fingerprint: Fingerprint, of: Path) -> Census:
    """Another census of the same model. Raises FormatError."""
    census = inputs.census(path).census
    inputs.same_model(census.header.fingerprint, fingerprint, path, str(of))
    with inputs.naming(path):
        placed.fitting(model, census)
    return census


def budget(args: Namespace) -> Budget:
    """The budget options of a command line; a file of rows is read. Raises FormatError."""
    if args.quantum is not None and args.hot is None:
        raise UsageError("--quantum: expected --hot with it")
    rows = None if args.hot_per_layer is None else inputs.rows_by_layer(args.hot_per_layer)
    return Budget(
        hot=args.hot,
        per_layer=rows,
        hot_bytes=args.hot_bytes,
        global_bytes=args.global_bytes,
        global_rows=args.global_rows,
        quantum=args.quantum,
    )


def has_budget(args: Namespace) -> bool:
    """One of the budget options is there."""
    names = ("hot", "hot_per_layer", "hot_bytes", "global_bytes", "global_rows")
    return any(getattr(args, name) is not None for name in names)


@contextmanager
def budget_errors(args: Namespace) -> Iterator[None]:
    """A budget that the model cannot have is a usage error, or the refusal of its file."""
    try:
        yield
    except FormatError as error:
        if error.source != HOT_ROWS:
            raise
        if args.hot_per_layer is None:
            raise UsageError(str(error)) from None
        source = str(args.hot_per_layer)
        raise FormatError(source, error.place, error.found, error.expected) from None


def named_once(pairs: Sequence[tuple[str, str]], option: str) -> dict[str, str]:
    """NAME=VALUE pairs by name. Raises UsageError for a name twice."""
    out: dict[str, str] = {}
    for name, value in pairs:
        if name in out:
            raise UsageError(f"{option}: found {name!r} twice, expected each class once")
        out[name] = value
    return out
