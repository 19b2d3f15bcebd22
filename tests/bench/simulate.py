"""True cold share of maps built from N tokens of synthetic routing.

Run with `python tests/bench/simulate.py`.

Routing as in a layer with lognormal popularity: each token takes the first k distinct experts of
independent draws from weights exp(sigma z), which is the same law as Gumbel top-k over the log
weights. sigma is fitted for each layer to a cold share of its best map (the oracle), so that 40
layers with 384 experts, top-6 and 295 hot rows average 2.11% and spread about as one measured model
did (1.08 to 5.01%). The pool is another class of equal skew whose log weights correlate with the
first one's, so much that a map of the pool alone leaves 4.1% of the class cold. What a map leaves
cold in truth is computed from selection probabilities, not from the tokens that it was built from.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rowmap_jobs.placement.profiles import shrink
from rowmap_jobs.placement.rank import top_mask
from rowmap_jobs.placement.vector import choose_vector

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

EXPERTS, TOP_K, HOT = 384, 6, 295
ORACLE, ORACLE_SPREAD = 0.0211, 0.38
"""Cold share of the best map: mean over layers, and standard deviation of its logarithm."""
POOLED = 0.041
SIZES = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
RACES = 300
"""Simulated tokens behind a selection probability."""
DRAWS = 20


@dataclass(frozen=True)
class World:
    """Routing of L layers: weights and true shares of selections, float64[L,E]."""

    weights: F64
    truth: F64
    pool: F64
    """True shares of selections of the pool."""


@dataclass(frozen=True)
class Row:
    """One sample size: shares, averaged over layers and trials, and their spread over trials."""

    tokens: int
    trials: int
    true: float
    in_sample: float
    shrunk: float
    spread: float


def selection(weights: F64, races: F64) -> F64:
    """An expert's share of selections, float64[E], for races of unit exponentials [R,E].

    An expert of rate w is among a token's first k when it arrives before the k-th of the others:
    the mean over races of 1 - exp(-w t), t that arrival, has no bias and little noise. The sum of
    all, k in truth, divides out what noise they share.
    """
    arrivals = races / weights
    first = np.sort(np.partition(arrivals, TOP_K, axis=1)[:, : TOP_K + 1], axis=1)
    among = arrivals <= first[:, TOP_K - 1 : TOP_K]
    others = np.where(among, first[:, TOP_K : TOP_K + 1], first[:, TOP_K - 1 : TOP_K])
    chosen = (1.0 - np.exp(-weights * others)).mean(axis=0)
    return np.asarray(chosen / chosen.sum())


def oracle(truth: F64) -> float:
    """Cold share of the best map of one layer."""
    return float(np.sort(truth)[: truth.size - HOT].sum())


def fitted(z: F64, target: float, races: F64) -> float:
    """sigma of weights exp(sigma z) whose oracle is the target, by bisection."""
    low, high = 1.0, 4.0
    for _ in range(8):
        sigma = (low + high) / 2
        if oracle(selection(np.exp(sigma * z), races)) > target:
            low = sigma
        else:
            high = sigma
    return (low + high) / 2


def world(layers: int, seed: int) -> World:
    """Routing whose oracles average 2.11%, and a pool whose map leaves 4.1% cold."""
    rng = np.random.default_rng(seed)
    normal = NormalDist(0, ORACLE_SPREAD)
    targets = np.exp([normal.inv_cdf((i + 0.5) / layers) for i in range(layers)])
    targets = targets * ORACLE / targets.mean()
    races = rng.exponential(size=(RACES, EXPERTS))
    own, other = rng.standard_normal((2, layers, EXPERTS))
    pairs = zip(own, targets, strict=True)
    sigma = np.array([fitted(z, target, races) for z, target in pairs])[:, None]
    weights = np.exp(sigma * own)
    truth = np.stack([selection(w, races) for w in weights])
    low, high = 0.0, 3.0
    for _ in range(8):
        noise = (low + high) / 2
        pool = np.exp(sigma * (own + noise * other) / np.sqrt(1 + noise**2))
        if true_share(pool, truth) > POOLED:
            high = noise
        else:
            low = noise
    return World(weights, truth, np.stack([selection(w, races) for w in pool]))


def tokens_of(weights: F64, tokens: int, rng: np.random.Generator) -> I64:
    """Chosen experts int64[tokens,k] of one layer: the first k distinct of independent draws."""
    edges = np.cumsum(weights)
    drawn = np.searchsorted(edges, rng.random((tokens, DRAWS)) * edges[-1])
    drawn = np.minimum(drawn, EXPERTS - 1)
    fresh = np.ones(drawn.shape, dtype=np.bool_)
    for later in range(1, DRAWS):
        for before in range(later):
            fresh[:, later] &= drawn[:, later] != drawn[:, before]
    keep = fresh & (np.cumsum(fresh, axis=1) <= TOP_K)
    short = np.flatnonzero(keep.sum(axis=1) < TOP_K)
    chosen = np.empty((tokens, TOP_K), dtype=np.int64)
    rest = np.setdiff1d(np.arange(tokens), short, assume_unique=True)
    chosen[rest] = drawn[rest][keep[rest]].reshape(-1, TOP_K)
    # The few tokens whose draws repeat too often are drawn the long way.
    if short.size:
        arrivals = rng.exponential(size=(short.size, EXPERTS)) / weights
        chosen[short] = np.argpartition(arrivals, TOP_K, axis=1)[:, :TOP_K]
    return chosen


def counted(chosen: I64, parts: int) -> I64:
    """Counts int64[parts,E] of equal runs of tokens."""
    tokens = len(chosen) // parts
    index = np.repeat(np.arange(parts), tokens * TOP_K)
    flat = index * EXPERTS + chosen[: tokens * parts].reshape(-1)
    return np.bincount(flat, minlength=parts * EXPERTS).reshape(parts, EXPERTS)


def true_share(ranked_by: npt.NDArray[np.generic], truth: F64) -> float:
    """True cold share of the map of counts or weights [...,L,E], averaged over layers."""
    layers = truth.shape[0]
    mask = top_mask(ranked_by, [EXPERTS] * layers, [HOT] * layers)
    return float(np.where(mask, 0.0, truth).sum(axis=-1).mean())


def table(routing: World, sizes: tuple[int, ...], seed: int, most_trials: int = 6) -> list[Row]:
    """Maps from disjoint runs of one stream of tokens a layer."""
    layers, longest = len(routing.weights), max(sizes)
    rng = np.random.default_rng([seed, 1])
    streams = [tokens_of(weights, longest, rng) for weights in routing.weights]
    rows = []
    for size in sizes:
        trials = min(longest // size, most_trials)
        runs = [counted(stream[: size * trials], trials) for stream in streams]
        counts = np.stack(runs, axis=1)
        true = [true_share(one, routing.truth) for one in counts]
        leaned = [shrink(one, routing.pool, top_k=TOP_K) for one in counts]
        shrunk = [true_share(weights, routing.truth) for weights in leaned]
        mask = top_mask(counts, [EXPERTS] * layers, [HOT] * layers)
        in_sample = np.where(mask, 0, counts).sum() / counts.sum()
        spread = float(np.std(true)) if trials > 1 else 0.0
        means = float(np.mean(true)), float(in_sample), float(np.mean(shrunk))
        rows.append(Row(size, trials, *means, spread))
    return rows


def vectors(routing: World, quanta: tuple[int, ...]) -> list[tuple[int, float, int, int, int]]:
    """(quantum, oracle cold share, shapes, least rows, most rows) of quantised vectors."""
    layers = len(routing.truth)
    out = []
    for quantum in quanta:
        rows = choose_vector(routing.truth, HOT * layers, quantum)
        mask = top_mask(routing.truth, [EXPERTS] * layers, rows)
        share = float(np.where(mask, 0.0, routing.truth).sum(axis=-1).mean())
        out.append((quantum, share, len(set(rows)), min(rows), max(rows)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="True cold share against sample size.")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start = time.process_time()
    routing = world(given.layers, given.seed)
    best = float(np.mean([oracle(layer) for layer in routing.truth]))
    print(f"{given.layers} layers x {EXPERTS} experts, top-{TOP_K}, {HOT} hot rows a layer")
    alone = true_share(routing.pool, routing.truth)
    print(f"best map {best:.2%}, map of the pool alone {alone:.2%}")
    print("tokens  trials  true cold   spread  in sample  shrunk to the pool")
    for row in table(routing, SIZES, given.seed):
        print(
            f"{row.tokens:6d}  {row.trials:6d}  {row.true:9.2%}  {row.spread:7.2%}  "
            f"{row.in_sample:9.2%}  {row.shrunk:9.2%}"
        )
    for quantum, share, shapes, least, most in vectors(routing, (1, 16, 32)):
        print(f"rows by layer, quantum {quantum}: {share:.2%}, {shapes} shapes, {least} to {most}")
    print(f"{time.process_time() - start:.1f} s CPU")


if __name__ == "__main__":
    main()
