"""Cleaning sums that another system counted: what was there before, what is no layer of the model,
and what the numbers themselves say of how they were counted.

Counters run from the start of a process, so warm-up, graph capture and a usage file that was
loaded are in them: a dump taken before any traffic is subtracted. Counters number layers as they
meet them, so the layers of a draft model (MTP) stand behind the target's: they are split off. Every
row chooses k experts in every layer, so the sums of all layers are equal, and a multiple of k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..exchange.base import Counts, Layout
from ..exchange.layers import is_draft
from ..exchange.tables import require_layers, spans
from ..formats.base import FormatError

I64 = npt.NDArray[np.int64]
_PHASES = ("prefill", "decode")


def subtract(final: Counts, zero: Counts, source: str) -> Counts:
    """`final` without what `zero`, a dump of the same process before any traffic, had counted.

    Sequences, layers and experts must be the same in both. Rows, steps and touched are subtracted
    where both have them and dropped otherwise, as they would not fit the counts. Raises FormatError
    for a negative result (the process was restarted in between, or the dumps are swapped), and for
    a result without any selection.
    """
    for name in ("layer_ids", "experts"):
        found, expected = getattr(zero.layout, name), getattr(final.layout, name)
        if found != expected:
            raise FormatError(source, f"baseline {name}", list(found), f"{list(expected)}")
    if zero.decode.shape != final.decode.shape:
        shape = list(zero.decode.shape)
        raise FormatError(source, "baseline counts", shape, f"shape {list(final.decode.shape)}")
    decode = _minus(final.decode, zero.decode, final, source, "decode")
    prefill = None
    taken = f"baseline of {int(zero.decode.sum())} decode"
    if final.prefill is not None:
        if zero.prefill is None:
            raise FormatError(source, "baseline prefill", "none", "counts, as in the final dump")
        prefill = _minus(final.prefill, zero.prefill, final, source, "prefill")
        taken += f" and {int(zero.prefill.sum())} prefill"
    if not decode.any() and (prefill is None or not prefill.any()):
        expected = "selections after the baseline was taken"
        raise FormatError(source, "counts", "none beyond the baseline", expected)
    steps, touched = _steps_minus(final, zero, source)
    return replace(
        final,
        decode=decode,
        prefill=prefill,
        rows=_rows_minus(final, zero, source),
        steps=steps,
        touched=touched,
        notes=(*final.notes, f"{taken} selections subtracted"),
    )


def _minus(ours: I64, theirs: I64, final: Counts, source: str, phase: str) -> I64:
    out = ours - theirs
    bad = np.argwhere(out < 0)
    if bad.size:
        t, layer, expert = (int(i) for i in bad[0])
        place = f"{phase}[{final.names[t]},layer {final.layout.layer_ids[layer]},expert {expert}]"
        found = f"{int(ours[t, layer, expert])} after a baseline of {int(theirs[t, layer, expert])}"
        expected = "no less than the baseline (one process, not restarted in between)"
        raise FormatError(source, place, found, expected)
    return out


def _rows_minus(final: Counts, zero: Counts, source: str) -> I64 | None:
    if final.rows is None or zero.rows is None:
        return None
    if zero.rows.shape != final.rows.shape:
        shape = list(zero.rows.shape)
        raise FormatError(source, "baseline rows", shape, f"shape {list(final.rows.shape)}")
    rows = final.rows - zero.rows
    bad = np.argwhere(rows < 0)
    if bad.size:
        t, phase = (int(i) for i in bad[0])
        found = f"{int(final.rows[t, phase])} after a baseline of {int(zero.rows[t, phase])}"
        place = f"rows[{final.names[t]},{_PHASES[phase]}]"
        raise FormatError(source, place, found, "no less than the baseline")
    return rows


def _steps_minus(final: Counts, zero: Counts, source: str) -> tuple[I64 | None, I64 | None]:
    if final.steps is None or final.touched is None or zero.steps is None or zero.touched is None:
        return None, None
    steps, touched = final.steps.copy(), final.touched.copy()
    at = len(zero.steps)
    if at > len(steps) or zero.touched.shape != (at, *touched.shape[1:]):
        found = list(zero.touched.shape)
        raise FormatError(
            source, "baseline touched", found, f"steps x layers within {list(touched.shape)}"
        )
    steps[:at] -= zero.steps
    touched[:at] -= zero.touched
    if (steps < 0).any() or (touched < 0).any():
        raise FormatError(source, "steps", "fewer than in the baseline", "no less than it")
    return steps, touched


def split_draft(
    counts: Counts, target: Sequence[int], source: str, names: Sequence[str] | None = None
) -> tuple[Counts, Counts | None]:
    """The target's layers, and the draft model's or None where there are none.

    `target` are the absolute ids of the target's MoE layers (its geometry says them); all of them
    must be there. Layers behind the last are the draft's: 40 + 3 in the reference recipe's dumps,
    75 + 1 where the file of a GLM-5.2 has 76. `names`, one a layer, are what the file calls them: a
    name of a draft layer (mtp, nextn, draft, eagle) at a target's place is refused, for then the
    numbers of all layers are in doubt. Rows are the target's; how many a draft model took part in
    is not known. Raises FormatError.
    """
    ids = counts.layout.layer_ids
    last = max(target)
    own = [index for index, layer in enumerate(ids) if layer <= last]
    beyond = [index for index, layer in enumerate(ids) if layer > last]
    if names is not None:
        if len(names) != len(ids):
            raise FormatError(source, "names", f"{len(names)} names", f"{len(ids)}, one a layer")
        for index in own:
            if is_draft(names[index]):
                expected = "a layer of the target model (draft layers stand behind them)"
                raise FormatError(source, f"layer {ids[index]}", names[index], expected)
    require_layers([ids[index] for index in own], target, source)
    if not beyond:
        return counts, None
    note = f"draft layers {spans(ids[index] for index in beyond)} split off"
    return (
        replace(_layers(counts, own), notes=(*counts.notes, note)),
        replace(_layers(counts, beyond), rows=None),
    )


def _layers(counts: Counts, at: list[int]) -> Counts:
    layout = counts.layout
    top_k = layout.top_k
    return replace(
        counts,
        layout=Layout(
            tuple(layout.layer_ids[i] for i in at),
            tuple(layout.experts[i] for i in at),
            None if top_k is None else tuple(top_k[i] for i in at),
        ),
        decode=counts.decode[:, at],
        prefill=None if counts.prefill is None else counts.prefill[:, at],
        touched=None if counts.touched is None else counts.touched[:, at],
    )


def cross_check(counts: Counts, source: str) -> I64:
    """Rows int64[T,2] (prefill, decode) that the sums of all layers agree on.

    Checked for every sequence and phase: each layer's sum is rows x top-k, with the rows that the
    file says or, without them, those of its first layer; no expert is chosen more often than there
    are rows. Without top-k, the rows must be there and tell it. Raises FormatError with what the
    deviation looks like: counted once by each data-parallel rank, rows too many (padding, warm-up,
    rejected drafts), or selections missing (local experts only, a router that drops choices).
    """
    out = np.zeros((len(counts.decode), 2), dtype=np.int64)
    tables = ((0, counts.prefill), (1, counts.decode))
    top_k = _top_k(counts, source)
    for phase, table in tables:
        if table is None:
            continue
        sums = table.sum(axis=2)
        if counts.rows is None:
            out[:, phase] = sums[:, 0] // top_k[0]
        else:
            out[:, phase] = counts.rows[:, phase]
        wanted = out[:, phase, None] * top_k[None, :]
        bad = np.argwhere(sums != wanted)
        if bad.size:
            t, layer = (int(i) for i in bad[0])
            raise _deviation(counts, source, phase, t, layer, sums, wanted, top_k)
        most = table.max(axis=2, initial=0)
        bad = np.argwhere(most > out[:, phase, None])
        if bad.size:
            t, layer = (int(i) for i in bad[0])
            found = f"an expert {int(most[t, layer])} times"
            expected = f"at most once a row ({int(out[t, phase])} rows)"
            raise FormatError(source, _place(counts, phase, t, layer), found, expected)
    if not out.any():
        raise FormatError(source, "counts", "no selection", "counts of real traffic")
    return out


def _top_k(counts: Counts, source: str) -> I64:
    """Top-k of each layer, int64[L]: the layout's, or selections by rows where it has none."""
    if counts.layout.top_k is not None:
        return np.array(counts.layout.top_k, dtype=np.int64)
    if counts.rows is None or not counts.rows[:, 1].any():
        expected = "top-k, or rows of decode that tell it"
        raise FormatError(source, "layout", "neither top-k nor rows", expected)
    # A median, so that one odd layer is named by the check and does not decide.
    total = np.median(counts.decode.sum(axis=(0, 2)))
    top_k = max(1, int(total) // int(counts.rows[:, 1].sum()))
    return np.full(len(counts.layout.layer_ids), top_k, dtype=np.int64)


def _place(counts: Counts, phase: int, t: int, layer: int) -> str:
    return f"{_PHASES[phase]}[{counts.names[t]},layer {counts.layout.layer_ids[layer]}]"


def _deviation(
    counts: Counts,
    source: str,
    phase: int,
    t: int,
    layer: int,
    sums: I64,
    wanted: I64,
    top_k: I64,
) -> FormatError:
    found, expected, k = int(sums[t, layer]), int(wanted[t, layer]), int(top_k[layer])
    place = _place(counts, phase, t, layer)
    if counts.rows is None:
        first = counts.layout.layer_ids[0]
        if found % k:
            hint = "a router that drops choices, or narrowed ids"
            text = f"a multiple of top-k {k} ({hint})"
        else:
            text = f"{expected} as in layer {first} (each row passes every layer)"
        return FormatError(source, place, f"{found} selections", text)
    base = f"rows x top-k = {expected}"
    if expected and found > expected and (sums[t] % wanted[t] == 0).all():
        times = found // expected
        if (sums[t] == times * wanted[t]).all():
            hint = f"all layers {times} x: counted by each of {times} data-parallel ranks?"
            return FormatError(source, place, f"{found} selections", f"{base} ({hint})")
    if found > expected:
        hint = f"{(found - expected) / k:g} rows more: padding, warm-up or rejected drafts?"
    else:
        part = (expected - found) / expected
        hint = f"{part:.0%} missing: local experts only, or a router that drops choices?"
    return FormatError(source, place, f"{found} selections", f"{base} ({hint})")
