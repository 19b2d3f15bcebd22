"""`rowmap inspect`: what a file or folder is."""

from __future__ import annotations

import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path

from .. import command, options
from ..command import Command
from ..console import Console

if typing.TYPE_CHECKING:
    from ...exchange.adapters import Known
    from ..inputs import Kind
    from ..text import Fact

TEXT = """\
Say what each path is: a model's folder or .gguf file (layers, experts, top-k,
row bytes, where config.json and the headers disagree), a census, a row map, a
report, a hook's status, or a file of another system (see rowmap formats)."""

USAGE = "PATH... [--model DIR] [--json]"

EXAMPLES = """\
  rowmap inspect models/qwen3-30b
  rowmap inspect census.npz rowmap.json
  rowmap inspect counts-20260917.npz --model models/v41-flash --json
"""


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("path", type=Path, nargs="+", help="file or folder")
    group = parser.add_argument_group("model")
    options.model_folder(group)
    options.parallel(group)
    options.as_json(parser)


def run(args: Namespace, console: Console) -> int:
    from ...formats.base import FormatError

    code = command.OK
    with console.progress(len(args.path)) as progress:
        for number, path in enumerate(args.path):
            progress.step(f"reading {path}")
            try:
                kind, title, facts, wire = _look(path, args)
            except FormatError as error:
                progress.hide()
                console.error(str(error))
                code = command.REFUSED
                continue
            progress.hide()
            if args.json:
                console.json({"path": str(path), **wire})
                continue
            from ..text import facts as laid_out

            console.say(("\n" if number else "") + laid_out(f"{path}: {title or kind}", facts))
    return code


def _look(path: Path, args: Namespace) -> tuple[Kind, str, list[Fact], dict[str, typing.Any]]:
    from ...exchange import registry
    from .. import inputs
    from ..work import describe

    kind, form = inputs.kind_of(path)
    match kind:
        case "model":
            model = inputs.model(path, args.tensor_parallel)
            return kind, "model", describe.of_model(model), {"kind": "model", **model.to_wire()}
        case "census":
            file = inputs.census(path)
            return kind, "census", describe.of_census(file), describe.census_wire(file)
        case "map":
            rows = inputs.row_map(path)
            return kind, "row map", describe.of_map(rows), describe.map_wire(rows)
        case "report":
            report = inputs.report(path)
            facts = [("class", report.traffic_class), ("verdict", report.verdict)]
            facts += [("decision", report.reason), ("says", report.message)]
            return kind, "report", facts, {"kind": "report", **report.to_wire()}
        case "status":
            status = inputs.hook_status(path)
            wire = {"kind": "status", **status.to_wire()}
            return kind, "status of a hook", describe.of_status(status), wire
        case "other":
            entry = registry.FORMATS[form]
            with inputs.naming(path):
                data = registry.read(path, form, _known(args))
            title = f"{form}, {entry.line}"
            return kind, title, describe.of_other(data), describe.other_wire(form, data)


def _known(args: Namespace) -> Known:
    from ...exchange.adapters import Known
    from ...exchange.census_io import layout_of
    from ...models.geometry import to_geometry
    from .. import inputs

    if args.model is None:
        return Known()
    return Known(layout=layout_of(to_geometry(inputs.model(args.model, args.tensor_parallel), 0)))


COMMAND = Command(
    "inspect",
    "say what a model, census, map or other file is",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
