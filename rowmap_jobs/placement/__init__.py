"""Placement: rankings, budgets, small classes, blends of classes and replicas."""

from __future__ import annotations

from .rank import (
    hot_mask,
    hot_rows,
    map_mask,
    never_seen,
    place,
    positional_mask,
    ranking,
    top_mask,
)

__all__ = [
    "hot_mask",
    "hot_rows",
    "map_mask",
    "never_seen",
    "place",
    "positional_mask",
    "ranking",
    "top_mask",
]
