"""Options that several subcommands share. Parsing only: nothing is read here."""

from __future__ import annotations

from argparse import ArgumentParser, _ActionsContainer
from pathlib import Path

from . import units


def as_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def output(parser: ArgumentParser, what: str, required: bool = True) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", required=required, help=f"write {what} here"
    )
    force(parser)


def force(parser: ArgumentParser) -> None:
    parser.add_argument("-f", "--force", action="store_true", help="replace a file that is there")


def model(parser: ArgumentParser) -> None:
    """Where layers, experts and row bytes come from."""
    group = parser.add_argument_group("model (one of)")
    source = group.add_mutually_exclusive_group(required=True)
    model_folder(source)
    source.add_argument(
        "--geometry", type=Path, metavar="FILE", help="row map or status.json of a lane instead"
    )
    parallel(group)


def model_folder(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a model, or its .gguf file"
    )


def parallel(parser: _ActionsContainer) -> None:
    parser.add_argument(
        "--tensor-parallel",
        type=units.positive,
        default=1,
        metavar="N",
        help="accelerators that share each expert (row bytes are of one)",
    )
    parser.add_argument(
        "--drafting",
        action="store_true",
        help="the lane runs the model's draft layers: they are listed as whole",
    )


def budget(parser: ArgumentParser, required: bool = True) -> None:
    """How many rows are hot."""
    group = parser.add_argument_group("hot rows (one of)")
    one = group.add_mutually_exclusive_group(required=required)
    one.add_argument("--hot", type=units.count, metavar="N", help="N rows in every layer")
    one.add_argument(
        "--hot-per-layer",
        type=Path,
        metavar="FILE",
        help="JSON: a list in layer order, or {layer: rows}",
    )
    one.add_argument(
        "--hot-bytes",
        type=units.size,
        metavar="SIZE",
        help="as many rows in every layer as fit, scales included: 180GiB",
    )
    one.add_argument(
        "--global-bytes",
        type=units.size,
        metavar="SIZE",
        help="one ranking over all layers under this budget (llama.cpp)",
    )
    one.add_argument(
        "--global-rows", type=units.count, metavar="N", help="the same with N rows in all"
    )
    group.add_argument(
        "--quantum",
        type=units.positive,
        metavar="Q",
        help="with --hot: spread the N rows a layer over the layers in steps of Q",
    )


def shrink(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("small classes")
    group.add_argument(
        "--shrink",
        type=Path,
        nargs="+",
        default=[],
        metavar="POOLED",
        help="censuses of the lane's other traffic that a small one leans on",
    )
    group.add_argument(
        "--kappa",
        type=units.number,
        metavar="TOKENS",
        help="weight of the pool (default: the experts of a layer)",
    )


def filters(parser: ArgumentParser, sessions: bool = True) -> None:
    """Which transcripts are kept."""
    group = parser.add_argument_group("keep only")
    group.add_argument("--phase", choices=("prefill", "decode"), help="rows of this phase")
    group.add_argument(
        "--since", type=units.moment, metavar="TIME", help="2026-09-17, @seconds, or 7d (ago)"
    )
    group.add_argument("--until", type=units.moment, metavar="TIME", help="before this time")
    if sessions:
        group.add_argument(
            "--sessions", type=units.integers, metavar="IDS", help="session numbers: 0,3,8-11"
        )
    group.add_argument(
        "--fidelity",
        type=units.words,
        metavar="WORDS",
        help="of tokens, rendered, generated, live (comma-separated)",
    )
    group.add_argument(
        "--prompt-tokens",
        type=units.span,
        metavar="LOW:HIGH",
        help="prompts of LOW to HIGH tokens, HIGH excluded",
    )
