"""The report as a page and as a terminal summary, both with the same words. Pure."""

from __future__ import annotations

from .page import render
from .plots import Plots
from .terminal import summary

__all__ = ["Plots", "render", "summary"]
