"""What a census says of a map, beyond the shares that decide: one section of report.json.

All shares are of decode selections, 0 to 1. Every part is optional: a run that lacks the input for
it (a second class, an active map, a measured speed) leaves it out, and never fills it with zeros.
"""

from __future__ import annotations

from pydantic import Field

from .base import Digest, Strict


class Interval(Strict):
    """A 95% interval over resampled sessions (percentile bootstrap)."""

    low: float
    high: float


class Baselines(Strict):
    """What the map is compared with."""

    random: float
    """A map drawn by lot: 1 - H/E, weighted by the selections of each layer."""
    oracle: float
    """Each session under the best map for that session alone: no map of H rows can do better."""
    headroom: float | None = None
    """(random - own) / (random - oracle)."""


class Ranks(Strict):
    """Two rankings of the same experts, averaged over layers."""

    overlap: float
    """|hot and hot'| / H."""
    churn: float
    """|cold and hot'| / |cold|: the part of the cold rows that the other ranking makes hot."""
    jaccard: float
    spearman: float | None = None
    """Average ranks for ties; None where a ranking is constant."""
    kendall: float | None = None
    """tau-b."""
    spearman_border: float | None = None
    kendall_border: float | None = None
    """The same over rows that are undecided in one of the rankings or on different sides."""


class Skew(Strict):
    """How unequal the experts are used; averages over layers."""

    gini: float
    gini_uniform: float
    """95th percentile of the Gini index of as many selections of experts drawn by lot."""
    entropy: float
    """Entropy of the selection shares by log(E): 1 is flat."""
    top1: float
    top5: float
    top10: float
    """Share of selections that the hottest 1, 5 and 10 percent of the experts take."""
    max_by_mean: float


class Support(Strict):
    """How well the counts decide the border between hot and cold."""

    hits_median: float
    """Selections of an expert: median over all experts of all layers."""
    hits_border: float
    """Median over layers of the count of the last hot row."""
    under_20: int = Field(ge=0)
    """Experts with fewer than 20 selections: their order is noise."""
    never_seen: int = Field(ge=0)
    undecided: int = Field(ge=0)
    never: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    """The experts without a decode selection, by layer."""


class Point(Strict):
    """Convergence: the map of the first sessions, judged on all later ones."""

    sessions: int
    tokens: int
    own: float
    overlap: float
    """With the map of all sessions."""


class Band(Strict):
    """Sessions whose prompt length lies in [from, to)."""

    from_tokens: int
    to_tokens: int | None = None
    sessions: int
    tokens: int
    own: float
    """Under the map of all sessions but the judged one."""


class Unique(Strict):
    """Distinct experts that a step of `rows` rows reads, averaged over layers."""

    rows: int
    expected: float
    """Sum over experts of 1 - (1 - p)^rows: rows that do not know of each other."""
    cold: float | None = None
    """The part of the expected ones that the map leaves cold; more than of selections."""
    measured: float | None = None


class Change(Strict):
    """The new map against the one in force, on the same transcripts."""

    active_digest: Digest
    new_digest: Digest
    active: float
    new: float
    """Leave-one-session-out; a map from elsewhere (a blend) as it is."""
    improvement: float
    """active - new; the interval is of this difference over resampled sessions."""
    interval: Interval
    rows_moved: int = Field(ge=0)
    """Rows that become hot."""
    bytes_moved: int = Field(ge=0)
    """Their bytes: what has to be read into fast memory."""


class Drift(Strict):
    """A new window under the active map: regret = cold(active) - cold(refit, left out)."""

    active: float
    refit: float
    regret: float
    interval: Interval
    recommend: bool
    """The interval's low end is above 2 points (b12x's gate): profile again."""


class Matrix(Strict):
    """Cold share of each class's traffic (columns) under each class's map (rows)."""

    classes: tuple[str, ...]
    shares: tuple[tuple[float, ...], ...]
    """The diagonal is leave-one-session-out."""
    regret: tuple[float, ...]
    """For each map: the most that any class loses against its own map."""
    minimax: str
    """The single map whose regret is least."""
    blend_regret: float | None = None
    """Regret of the best blend of all classes; above the least single regret it is refused."""
    blend_refused: bool | None = None


class Effect(Strict):
    """What a switch to the new map does to another class's traffic."""

    traffic_class: str = Field(alias="class")
    now: float
    """Cold share under the active map; None is never written: without an active map no effects."""
    then: float
    tokens_per_second: Interval | None = None


class Roofline(Strict):
    """Predicted decode speed of one sequence at the lane's concurrency, from one measured pair."""

    concurrency: int = Field(ge=1)
    rows_per_step: int = Field(ge=1)
    link_bytes_per_second: float = Field(gt=0)
    memory_bytes_per_second: float = Field(gt=0)
    measured_share: float
    measured_tokens_per_second: float = Field(gt=0)
    now: Interval | None = None
    predicted: Interval
    """Tokens a second with the new map: a band of the measured deviation of the formula (20%)."""
    gain: Interval
    """What the new map gains over one drawn by lot: ratio of tokens a second less 1."""
    ceiling: float
    """The upper end of the band at a cold share of zero: nothing is predicted above it."""
    slow_bytes_per_token: float


class Evidence(Strict):
    """Everything that was computed beyond the deciding shares."""

    baselines: Baselines
    skew: Skew
    support: Support
    unique: tuple[Unique, ...] = ()
    convergence: tuple[Point, ...] = ()
    bands: tuple[Band, ...] = ()
    halves: Ranks | None = None
    """Maps of two disjoint halves of the sessions."""
    worst_layers: tuple[int, ...] = ()
    """Layers of the five highest own shares, highest first."""
    against_active: Ranks | None = None
    change: Change | None = None
    drift: Drift | None = None
    matrix: Matrix | None = None
    effects: tuple[Effect, ...] = ()
    roofline: Roofline | None = None
