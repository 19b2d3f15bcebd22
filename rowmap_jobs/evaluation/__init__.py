"""How good a map is and how far the counts carry: everything by session, pure numbers.

`evaluate` gives the deciding shares; `evidence` everything a report says beyond them.
"""

from __future__ import annotations

from .change import change
from .drift import drift
from .evidence import evidence
from .resample import BOOTSTRAPS
from .roofline import Speed
from .shares import Evaluation, by_session, evaluate, interval, left_out
from .support import BORDER_Z, border

__all__ = [
    "BOOTSTRAPS",
    "BORDER_Z",
    "Evaluation",
    "Speed",
    "border",
    "by_session",
    "change",
    "drift",
    "evaluate",
    "evidence",
    "interval",
    "left_out",
]
