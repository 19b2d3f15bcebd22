"""`rowmap import`: counts or a placement of another system as a census or row map."""

from __future__ import annotations

import re
import typing
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from .. import command, options, units
from ..command import Command, UsageError
from ..console import Console, Progress

if typing.TYPE_CHECKING:
    from ...exchange.base import Counts, Layout
    from ...formats.rowmap import Fingerprint
    from ..inputs import Shape
    from ..work.imported import Source

TEXT = """\
Read files of another system. Counts become a census, a placement becomes a row
map. FORMAT is a name of rowmap formats, or auto. Files seldom say which model
they are of: --model or --fingerprint does, and their layers, experts and top-k
are held against it. Of several files the census is one; the same transcript in
two of them counts once."""

USAGE = "FORMAT FILE... (--model DIR | --fingerprint FILE) -o FILE [options]"

EXAMPLES = """\
  rowmap import auto counts.npz --baseline counts-zero.npz --model models/moe -o agent.npz
  rowmap import vllm-routed-experts records/ --model models/moe --class agent \\
      --session-by '^([^-]+)' -o agent.npz
  rowmap import imatrix imatrix.gguf --model model.gguf --unbound -o wiki.npz
  rowmap import recipe-map expert_map.json --model models/moe -o rowmap.json
"""


def session_rule(text: str) -> str:
    """`sequence`, `file` or a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        expected = "sequence, file or a regular expression"
        raise ArgumentTypeError(f"found {text!r} ({error}), expected {expected}") from None
    return text


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("format", metavar="FORMAT", help="auto, or a name of rowmap formats")
    parser.add_argument("file", type=Path, nargs="+", metavar="FILE", help="file or folder")
    options.output(parser, "the census (.npz) or row map (.json)")
    group = parser.add_argument_group("model (one at least)")
    options.model_folder(group)
    group.add_argument(
        "--fingerprint",
        type=Path,
        metavar="FILE",
        help="census, row map or status.json of the lane: what quantised weights need",
    )
    group.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="the lane's --dtype, if set"
    )
    group.add_argument(
        "--unbound",
        action="store_true",
        help="go by the model's headers alone (GGUF, quantised): no lane takes such a map",
    )
    options.parallel(group)
    group = parser.add_argument_group("counts")
    group.add_argument(
        "--class",
        dest="traffic_class",
        type=units.label,
        default="default",
        metavar="NAME",
        help="traffic class",
    )
    group.add_argument(
        "--session-by",
        type=session_rule,
        default="sequence",
        metavar="RULE",
        help="sequence (each its own), file, or a pattern whose group names the session",
    )
    group.add_argument(
        "--baseline", type=Path, metavar="FILE", help="dump from before any traffic: subtracted"
    )
    group.add_argument(
        "--created", type=units.moment, metavar="TIME", help="when (default: the file's time)"
    )
    group.add_argument(
        "--prompt-length",
        type=units.count,
        metavar="N",
        help="prompt tokens of routed-experts arrays without a sidecar",
    )
    group.add_argument("--decode-only", action="store_true", help="leave prompt rows unread")
    group.add_argument(
        "--engine-version",
        type=units.label,
        default="unknown",
        metavar="TEXT",
        help="for the header",
    )
    group = parser.add_argument_group("placements")
    group.add_argument(
        "--hot", type=units.count, metavar="N", help="hot rows a layer, where the file has none"
    )


def run(args: Namespace, console: Console) -> int:
    from .. import output

    check(args)
    output.check_free(args.output, args.force)
    with console.progress(2 + len(args.file) + (args.baseline is not None)) as progress:
        progress.step("reading the model")
        fingerprint, layout, shape = identity(args)
        sources = [one(args, path, layout, progress) for path in args.file]
        kinds = {type(source.data).__name__ for source in sources}
        if len(kinds) > 1 or (kinds == {"Ranking"} and len(sources) > 1):
            raise UsageError("import: found several placements, or placements and counts: one each")
        if kinds == {"Ranking"}:
            raw, lines, notes = _map(args, sources[0], shape, fingerprint)
        else:
            raw, lines, notes = _census(args, sources, fingerprint, layout, progress)
        progress.step(f"writing {args.output}")
        output.save(args.output, raw, args.force)
    for note in notes:
        console.note(note)
    console.say(lines)
    return command.OK


def check(args: Namespace) -> None:
    """Refuse what does not fit together, before anything is read. Raises UsageError."""
    from ...exchange.registry import readable

    if args.format != "auto" and args.format not in readable():
        known = ", ".join(readable())
        raise UsageError(f"import: FORMAT: found {args.format!r}, expected auto or one of {known}")
    if args.model is None and args.fingerprint is None:
        raise UsageError("import: found no model, expected --model or --fingerprint")
    if args.unbound and (args.model is None or args.fingerprint is not None):
        raise UsageError("import: --unbound: expected --model, and no --fingerprint")
    if args.baseline is not None and len(args.file) > 1:
        raise UsageError("import: --baseline: expected one FILE, the same process's")


def identity(args: Namespace) -> tuple[Fingerprint, Layout, Shape | None]:
    """Whose experts these are. With both options the model gives the bytes, the file the rest."""
    from ...exchange.census_io import layout_of
    from ...formats.base import FormatError
    from ...models.fingerprint import of_folder
    from ...models.geometry import to_geometry
    from .. import inputs
    from ..work import imported

    if args.model is None:
        return inputs.identity_of(args.fingerprint)
    model = inputs.model(args.model, args.tensor_parallel)
    shape = to_geometry(model, 0, args.drafting)
    layout = layout_of(shape)
    if args.fingerprint is not None:
        fingerprint, theirs, _ = inputs.identity_of(args.fingerprint)
        if theirs != layout:
            expected = f"those of {args.model}"
            raise FormatError(str(args.fingerprint), "layers", "other experts or top-k", expected)
        return fingerprint, layout, shape
    if args.unbound:
        return imported.unbound(model), layout, shape
    return of_folder(args.model, args.dtype), layout, shape


def one(args: Namespace, path: Path, layout: Layout, progress: Progress) -> Source:
    """Read one file or folder."""
    from ...exchange import registry
    from ...exchange.adapters import Known
    from .. import inputs
    from ..work import imported

    progress.step(f"reading {path}")
    with inputs.naming(path):
        form = registry.detect(path) if args.format == "auto" else args.format
        known = Known(
            layout=layout,
            baseline=args.baseline if form == "recipe" else None,
            prompt_tokens=args.prompt_length,
            decode_only=args.decode_only,
        )
        return imported.read(path, form, known, args.created)


def _census(
    args: Namespace,
    sources: list[Source],
    fingerprint: Fingerprint,
    layout: Layout,
    progress: Progress,
) -> tuple[bytes, str, list[str]]:
    from ...formats import census as census_format
    from ...formats.base import sha256_digest
    from .. import inputs, text
    from ..work import describe, imported

    zero = None
    if args.baseline is not None and sources[0].form != "recipe":
        progress.step(f"reading {args.baseline}")
        zero = _baseline(args.baseline, sources[0].form, layout)
    made, notes = [], []
    for source in sources:
        with inputs.naming(source.path):
            census, said = imported.census_of(
                source,
                layout,
                fingerprint,
                args.traffic_class,
                args.session_by,
                zero,
                args.engine_version,
            )
        made.append(census)
        notes += [f"{source.path}: {note}" for note in said]
    census = imported.together(made, [str(source.path) for source in sources])
    raw = census_format.to_bytes(census)
    file = inputs.CensusFile(census, sha256_digest(raw), len(raw))
    forms = ", ".join(sorted({source.form for source in sources}))
    facts = [("from", forms), *describe.of_census(file)]
    return raw, text.facts(f"{args.output}: census", facts), notes


def _baseline(path: Path, form: str, layout: Layout) -> Counts:
    from ...exchange import registry
    from ...exchange.adapters import Known
    from ...exchange.base import Counts
    from ...formats.base import FormatError
    from .. import inputs

    with inputs.naming(path):
        found = registry.read(path, form, Known(layout=layout))
    if not isinstance(found, Counts):
        raise FormatError(str(path), "file", "a placement", "counts")
    return found


def _map(
    args: Namespace, source: Source, shape: Shape | None, fingerprint: Fingerprint
) -> tuple[bytes, str, list[str]]:
    from .. import inputs, text
    from ..work import describe, imported, placed

    if shape is None:
        raise UsageError("import: a placement needs row bytes: expected --model, or a map's file")
    hot = None if args.hot is None else placed.rows(shape, placed.Budget(hot=args.hot))
    with inputs.naming(source.path):
        rows, notes = imported.map_of(source, shape, fingerprint, hot)
    facts = [("from", source.form), *describe.of_map(rows)]
    return rows.to_bytes(), text.facts(f"{args.output}: row map", facts), list(notes)


COMMAND = Command(
    "import",
    "read another system's counts or placement",
    TEXT,
    USAGE,
    EXAMPLES,
    arguments,
    run,
)
