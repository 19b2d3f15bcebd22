"""Profiles of several classes: small ones leaned on the pool, and blends that must earn it.

A profile is the decode counts (or weights) of one class, [L,E] with zero beyond a layer's experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.base import FormatError
from ..formats.evidence import Matrix
from ..formats.rowmap import Geometry
from .rank import F64, Mask, checked, hot_mask

Profiles = Mapping[str, npt.NDArray[Any]]
ROUNDS = 32
STEP = 0.5
"""How hard a round of `best_blend` turns towards the class that loses most."""


def normalised(profile: npt.NDArray[Any]) -> F64:
    """Selection shares, float64[L,E]: each layer sums to 1, or stays 0 without selections.

    Otherwise a class that talks more, or a layer that was counted more, would outweigh others.
    """
    wide = checked(profile, "profile").astype(np.float64)
    return np.asarray(wide / np.maximum(wide.sum(axis=1, keepdims=True), 1e-300))


def shrink(
    counts: npt.NDArray[Any],
    pooled: npt.NDArray[Any],
    kappa: float | None = None,
    *,
    top_k: int,
    experts: Sequence[int] | None = None,
) -> F64:
    """Dirichlet shrinkage of a small class: p = (c + kappa q) / (n + kappa), float64[L,E].

    c are a layer's counts, n its tokens (sum of c over top-k), q the pooled profile's P(expert in
    the top-k of a token); so is p, which sums to top-k in each layer. `kappa` is the pool's weight
    in tokens: without it the experts of the layer (`experts` int[L], else the width), which lies
    near the best for 64 to 1,000 tokens in simulation. With n far above kappa p is c / n. An expert
    that this class never chose ranks as the pool says. A layer without any counts is the pool's,
    one without pooled counts is c / n, one without both stays 0. Raises FormatError.
    """
    own, pool = checked(counts, "counts").astype(np.float64), normalised(pooled) * top_k
    if own.shape != pool.shape:
        raise FormatError("pooled", "shape", list(pool.shape), f"{list(own.shape)}, as the counts")
    if top_k < 1:
        raise FormatError("shrinkage", "top-k", top_k, "1 or more")
    if kappa is not None and not 0 <= kappa < np.inf:
        raise FormatError("shrinkage", "kappa", kappa, "a finite number of 0 or more")
    default = [own.shape[1]] * len(own) if experts is None else list(experts)
    weight = np.array(default if kappa is None else [kappa] * len(own), dtype=np.float64)[:, None]
    # A layer that the pool has never seen can lend nothing.
    weight = np.where(pool.sum(axis=1, keepdims=True) > 0, weight, 0.0)
    total = own.sum(axis=1, keepdims=True) / top_k + weight
    return np.asarray((own + weight * pool) / np.where(total > 0, total, 1.0))


def blend(profiles: Profiles, weights: Mapping[str, float]) -> F64:
    """Weighted sum of the layer-normalised profiles, float64[L,E]; each layer sums to 1.

    Raises FormatError when the names differ, shapes differ, or weights are not finite, negative
    or all zero.
    """
    names = _names(profiles)
    if set(weights) != set(names):
        raise FormatError("blend", "weights", sorted(weights), f"one for each of {names}")
    values = [float(weights[name]) for name in names]
    total = sum(values)
    if not all(0 <= value < np.inf for value in values) or not 0 < total < np.inf:
        raise FormatError("blend", "weights", values, "finite numbers of 0 or more, not all 0")
    parts = [
        normalised(profiles[name]) * (w / total) for name, w in zip(names, values, strict=True)
    ]
    return np.asarray(np.sum(parts, axis=0))


def matrix(maps: Mapping[str, Mask], profiles: Profiles) -> F64:
    """Cold shares, float64[maps, classes]: of each profile's selections under each hot mask.

    Rows and columns in sorted order of their names. Raises FormatError for a profile without
    selections and for other shapes.
    """
    names = _names(profiles)
    columns = [checked(profiles[name], name).astype(np.float64) for name in names]
    for name, mask in maps.items():
        if mask.shape != columns[0].shape:
            expected = f"{list(columns[0].shape)}, as the profiles"
            raise FormatError(name, "map", list(mask.shape), expected)
    out = np.empty((len(maps), len(names)))
    for column, profile in enumerate(columns):
        total = profile.sum()
        if total <= 0:
            raise FormatError(names[column], "profile", "no selections", "a counted class")
        for row, name in enumerate(sorted(maps)):
            out[row, column] = np.where(maps[name], 0.0, profile).sum() / total
    return out


def regret(shares: npt.NDArray[Any], own: npt.NDArray[Any]) -> F64:
    """For each map the most that any class loses: max over columns of shares[m,c] - own[c].

    shares float64[maps, classes], own float64[classes] (the class under its own map).
    """
    return np.asarray((shares - own[None, :]).max(axis=1), dtype=np.float64)


@dataclass(frozen=True)
class Blend:
    """One map for all classes, of a weighted mixture of their profiles."""

    weights: dict[str, float]
    profile: F64
    """The mixture, float64[L,E]: place this."""
    regret: float
    """The most that any class loses against its own map."""


def blended(profiles: Profiles, weights: Mapping[str, float], geometry: Geometry) -> Blend:
    """The blend of given weights with its regret. Raises FormatError as `blend` does.

    A blend has seen the traffic that it is judged on, so its loss is against the class's own map on
    the same traffic, in sample: like with like.
    """
    mixed = blend(profiles, weights)
    own = np.diag(matrix({name: hot_mask(profiles[name], geometry) for name in profiles}, profiles))
    loss = matrix({"blend": hot_mask(mixed, geometry)}, profiles)[0] - own
    return Blend(dict(weights), mixed, float(loss.max()))


def best_blend(profiles: Profiles, geometry: Geometry) -> Blend:
    """The blend with the least regret found from equal weights on.

    Each round turns towards the class that loses most (multiplicative weights); the best round
    counts, the first of equals.
    """
    names = _names(profiles)
    shares = np.stack([normalised(profiles[name]) for name in names])
    own = np.diag(matrix({name: hot_mask(profiles[name], geometry) for name in names}, profiles))
    logs, best = np.zeros(len(names)), Blend({}, shares[0], np.inf)
    for _ in range(ROUNDS):
        weights = np.exp(logs - logs.max())
        weights = weights / weights.sum()
        mixed = np.asarray(np.tensordot(weights, shares, axes=1))
        loss = matrix({"blend": hot_mask(mixed, geometry)}, profiles)[0] - own
        worst = float(loss.max())
        if worst < best.regret:
            best = Blend(dict(zip(names, weights.tolist(), strict=True)), mixed, worst)
        if worst <= 0:
            break
        logs = logs + STEP * loss / worst
    return best


def judge(
    profiles: Profiles,
    geometry: Geometry,
    own: Mapping[str, float] | None = None,
    maps: Mapping[str, Mask] | None = None,
) -> Matrix:
    """The map x class matrix with regrets, and whether a blend of all classes is refused.

    `maps` are the hot masks bool[L,E] of the classes' maps, by default those of the profiles. `own`
    are leave-one-session-out shares, which take the diagonal's place; without it the diagonal is in
    sample. A blend is refused when its regret is above the least regret of a single class's map.
    With one class there is nothing to blend. Raises FormatError.
    """
    names = _names(profiles)
    masks = maps or {name: hot_mask(profiles[name], geometry) for name in names}
    for given, what in ((masks, "maps"), (own, "own shares")):
        if given is not None and set(given) != set(names):
            raise FormatError("classes", what, sorted(given), f"exactly {names}")
    shares = matrix(masks, profiles)
    if own is not None:
        np.fill_diagonal(shares, [own[name] for name in names])
    losses = regret(shares, np.diag(shares))
    least = int(np.argmin(losses))
    mixed = best_blend(profiles, geometry) if len(names) > 1 else None
    return Matrix(
        classes=tuple(names),
        shares=tuple(tuple(row) for row in shares.tolist()),
        regret=tuple(losses.tolist()),
        minimax=names[least],
        blend_regret=None if mixed is None else mixed.regret,
        blend_refused=None if mixed is None else refused(mixed.regret, losses),
    )


def refused(blend_regret: float, losses: npt.NDArray[Any]) -> bool:
    """True when some single class's map loses less than the blend does."""
    return bool(blend_regret > float(losses.min()))


def require_blend(judged: Matrix) -> None:
    """Raises FormatError when the matrix refuses its blend: take the named single map instead."""
    if judged.blend_refused:
        least = min(judged.regret)
        raise FormatError(
            "blend",
            "regret",
            f"{judged.blend_regret:.2%} for its worst class",
            f"at most {least:.2%}, what the map of class {judged.minimax} loses; use one map per "
            "class",
        )


def _names(profiles: Profiles) -> list[str]:
    names = sorted(profiles)
    if not names:
        raise FormatError("profiles", "classes", "none", "one or more")
    shape = profiles[names[0]].shape
    for name in names:
        if profiles[name].shape != shape:
            found, wanted = list(profiles[name].shape), f"{list(shape)}, as {names[0]} has"
            raise FormatError(name, "shape", found, wanted)
    return names
