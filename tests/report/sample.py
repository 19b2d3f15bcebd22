"""A realistic report: 40 layers of 384 experts, 295 of them hot, lognormal skew, simulated.

Shares are computed from the simulated counts as the product does it; the parts that need other
inputs (speeds, other classes) have numbers of the same size as published ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rowmap_jobs.formats.census import Capture, OffPolicy, Selection
from rowmap_jobs.formats.evidence import (
    Band,
    Baselines,
    Change,
    Drift,
    Effect,
    Evidence,
    Interval,
    Matrix,
    Point,
    Ranks,
    Roofline,
    Skew,
    Support,
    Unique,
)
from rowmap_jobs.formats.report import LayerReport, Report
from rowmap_jobs.formats.rowmap import Geometry
from rowmap_jobs.formats.run import ColdShares, Counted
from rowmap_jobs.placement import hot_mask, positional_mask
from rowmap_jobs.report import Plots
from tests.formats.samples import FINGERPRINT, digest

LAYERS, EXPERTS, TOP_K, HOT, SESSIONS = 40, 384, 6, 295, 64
ROW_BYTES = 18_800_640
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


def geometry(layers: int = LAYERS, experts: int = EXPERTS, hot: int = HOT) -> Geometry:
    return Geometry(
        experts=experts,
        top_k=min(TOP_K, experts),
        hot_rows=hot,
        moe_layers=tuple(range(layers)),
        whole_layers=(layers, layers + 1),
        row_bytes=ROW_BYTES,
    )


@dataclass(frozen=True)
class Traffic:
    """Simulated decode counts by session int64[S,L,E] and tokens int64[S]; the active hot rows."""

    counts: I64
    tokens: I64
    active: npt.NDArray[np.bool_]


def simulate(shape: Geometry, sessions: int = SESSIONS, seed: int = 5) -> Traffic:
    """Lognormal popularity by layer, a little of its own in every session."""
    rng = np.random.default_rng(seed)
    layers, experts = len(shape.moe_layers), int(np.max(shape.experts))  # type: ignore[arg-type]
    width = rng.uniform(0.9, 1.6, size=(layers, 1))
    taste = rng.normal(size=(layers, experts))
    before = 0.45 * taste + 0.89 * rng.normal(size=taste.shape)
    tokens = rng.integers(200, 1100, size=sessions)
    counts = np.empty((sessions, layers, experts), dtype=np.int64)
    for index, number in enumerate(tokens):
        own = np.exp(width * taste + rng.normal(0, 0.25, size=taste.shape))
        share = own / own.sum(axis=1, keepdims=True)
        counts[index] = rng.multinomial(number * shape.top_k, share)
    active = hot_mask((np.exp(width * before) * 1e6).astype(np.int64), shape)
    return Traffic(counts, tokens, active)


def cold(counts: I64, hot: npt.NDArray[np.bool_]) -> float:
    """Share of counts int64[...,L,E] outside of the hot rows."""
    return float(np.where(hot, 0, counts).sum() / max(int(counts.sum()), 1))


def build(
    shape: Geometry | None = None, sessions: int = SESSIONS, **over: Any
) -> tuple[Report, Plots]:
    """Report and plots of one simulated run; keywords replace fields of the report."""
    shape = shape or geometry()
    traffic = simulate(shape, sessions)
    total = traffic.counts.sum(axis=0)
    hot = hot_mask(total, shape)
    left = [hot_mask(total - one, shape) for one in traffic.counts]
    missed = np.stack(
        [np.where(m, 0, c).sum(axis=1) for m, c in zip(left, traffic.counts, strict=True)]
    )
    plots = Plots(counts=total, hot=hot, active=traffic.active)
    report = Report(**{**_fields(shape, traffic, missed, plots), **over})
    return report, plots


def without_active(plots: Plots) -> Plots:
    """The same plots on a lane without an active map."""
    return replace(plots, active=None)


def _fields(shape: Geometry, traffic: Traffic, missed: I64, plots: Plots) -> dict[str, Any]:
    total, sessions = plots.counts, len(traffic.tokens)
    position = positional_mask(shape, total.shape[1])
    in_layer = np.maximum(total.sum(axis=1), 1)
    own, by_position = missed.sum(axis=0) / in_layer, np.where(position, 0, total).sum(1) / in_layer
    share = float(missed.sum() / total.sum())
    others = {"batch-ja": share + 0.17, "prose": share + 0.085}
    unseen = (total == 0).sum(axis=1)
    return {
        "run": "lane-a.agent-29933314",
        "lane": "lane-a",
        "traffic_class": "agent",
        "created": 1_795_000_000,
        "window": (1_794_395_200, 1_795_000_000),
        "digest": digest("map"),
        "row_set_digest": digest("rows"),
        "census_digest": digest("census"),
        "verdict": "ready",
        "accepted": True,
        "reason": "Accepted",
        "message": f"cold share {share:.2%} (leave one session out), "
        f"{cold(total, position):.2%} by position, {int(traffic.tokens.sum())} decode tokens of "
        f"{sessions} sessions",
        "fingerprint": FINGERPRINT,
        "geometry": shape,
        "capture": Capture(
            method="forced",
            engine="vLLM",
            engine_version="0.32.0",
            runner="v1",
            hook_digest=digest("hook"),
            missed=0,
            recomputed=0,
        ),
        "selection": Selection(seed=0, considered=212, used=181),
        "off_policy": OffPolicy(top1=0.83, mean_logprob=-0.41, n=4096),
        "trick_check": {"selections": 30976, "moved": 0},
        "counted": Counted(
            sessions=sessions,
            transcripts=181,
            decode_tokens=int(traffic.tokens.sum()),
            prefill_tokens=412_306,
            considered=212,
            skipped={"TooLong": 3, "Multimodal": 28},
            fidelity={"tokens": 150, "rendered": 31},
        ),
        "rendering_refused": {"ToolCallsRewritten": 4},
        "cold": ColdShares(
            own=share,
            in_sample=cold(total, plots.hot),
            positional=cold(total, position),
            others=others,
        ),
        "own_interval": (share * 0.965, share * 1.04),
        "headroom": 0.98,
        "notes": (
            f"{int(unseen.sum())} experts were never chosen in decode; they rank last, by id.",
            "28 transcripts have images and were not counted.",
        ),
        "layers": tuple(
            LayerReport(
                layer=layer,
                own=float(own[i]),
                positional=float(by_position[i]),
                others={name: float(own[i]) + other - share for name, other in others.items()},
                never_seen=int(unseen[i]),
                undecided=int(6 + (i * 7) % 11),
            )
            for i, layer in enumerate(shape.moe_layers)
        ),
        "evidence": evidence(shape, traffic, plots, share),
    }


def evidence(shape: Geometry, traffic: Traffic, plots: Plots, share: float) -> Evidence:
    total, counts = plots.counts, traffic.counts
    active, moved = cold(total, traffic.active), int((plots.hot & ~traffic.active).sum())
    sessions = len(counts)
    points = []
    for first in (1, 2, 4, 8, 16, 32, 48):
        if first < sessions:
            hot = hot_mask(counts[:first].sum(axis=0), shape)
            points.append(
                Point(
                    sessions=first,
                    tokens=int(traffic.tokens[:first].sum()),
                    own=cold(counts[first:], hot),
                    overlap=float((hot & plots.hot).sum() / max(int(plots.hot.sum()), 1)),
                )
            )
    down = -np.sort(-total, axis=1)
    part = np.cumsum(down, axis=1) / np.maximum(total.sum(axis=1, keepdims=True), 1)
    tops = [float(part[:, max(total.shape[1] * p // 100 - 1, 0)].mean()) for p in (1, 5, 10)]
    random = 1 - float(plots.hot.mean())
    oracle = share * 0.71
    unseen = {
        str(layer): tuple(np.flatnonzero(total[i] == 0).tolist())
        for i, layer in enumerate(shape.moe_layers)
    }
    unseen = {layer: ids for layer, ids in unseen.items() if ids}
    worst = np.argsort(
        -np.where(plots.hot, 0, total).sum(axis=1) / np.maximum(total.sum(axis=1), 1)
    )
    edge = down[:, min(int(plots.hot[0].sum()), total.shape[1]) - 1]
    ranks = {
        "jaccard": 0.71,
        "spearman": 0.807,
        "kendall": 0.64,
        "spearman_border": 0.31,
        "kendall_border": 0.22,
    }
    return Evidence(
        baselines=Baselines(
            random=random, oracle=oracle, headroom=(random - share) / (random - oracle)
        ),
        skew=Skew(
            gini=0.688,
            gini_uniform=0.031,
            entropy=0.842,
            top1=tops[0],
            top5=tops[1],
            top10=tops[2],
            max_by_mean=float((down[:, 0] / total.mean(axis=1)).mean()),
        ),
        support=Support(
            hits_median=float(np.median(total)),
            hits_border=float(np.median(edge)),
            under_20=int((total < 20).sum()),
            never_seen=int((total == 0).sum()),
            undecided=431,
            never=unseen,
        ),
        unique=tuple(
            Unique(rows=n, expected=e, measured=m)
            for n, e, m in (
                (1, 6.0, 6.0),
                (2, 10.9, 10.1),
                (4, 19.2, 16.8),
                (6, 26.1, 22.5),
                (8, 32.3, None),
            )
        ),
        convergence=tuple(points),
        bands=(
            Band(from_tokens=0, to_tokens=4096, sessions=41, tokens=24_310, own=share * 0.97),
            Band(from_tokens=4096, to_tokens=32768, sessions=19, tokens=12_020, own=share * 1.04),
            Band(from_tokens=32768, to_tokens=131072, sessions=4, tokens=2_311, own=share * 1.22),
        ),
        halves=Ranks(overlap=0.951, churn=0.162, **ranks),
        worst_layers=tuple(shape.moe_layers[i] for i in worst[:5]),
        against_active=Ranks(
            overlap=1 - moved / max(int(plots.hot.sum()), 1), churn=0.275, **ranks
        ),
        change=Change(
            active_digest=digest("active"),
            new_digest=digest("map"),
            active=active,
            new=share,
            improvement=active - share,
            interval=Interval(low=(active - share) * 0.94, high=(active - share) * 1.05),
            rows_moved=moved,
            bytes_moved=moved * ROW_BYTES,
        ),
        drift=Drift(
            active=active,
            refit=share,
            regret=active - share,
            interval=Interval(low=(active - share) * 0.94, high=(active - share) * 1.05),
            recommend=True,
        ),
        matrix=Matrix(
            classes=("agent", "batch-ja", "prose"),
            shares=(
                (share, 0.193, 0.104),
                (share + 0.17, 0.018, 0.188),
                (share + 0.085, 0.171, 0.016),
            ),
            regret=(0.175, 0.172, 0.153),
            minimax="prose",
            blend_regret=0.161,
            blend_refused=True,
        ),
        effects=(
            Effect(
                traffic_class="batch-ja",
                now=0.188,
                then=0.193,
                tokens_per_second=Interval(low=82, high=104),
            ),
            Effect(traffic_class="prose", now=0.121, then=0.104),
        ),
        roofline=Roofline(
            concurrency=1,
            rows_per_step=6,
            link_bytes_per_second=360e9,
            memory_bytes_per_second=7.1e12,
            measured_share=active,
            measured_tokens_per_second=121.0,
            now=Interval(low=98, high=144),
            predicted=Interval(low=124, high=161),
            gain=Interval(low=0.52, high=0.84),
            ceiling=161.0,
            slow_bytes_per_token=share * LAYERS * TOP_K * ROW_BYTES,
        ),
    )
