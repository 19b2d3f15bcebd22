"""The hook's modules are flat, as in a ConfigMap: they are imported from their folder."""

from __future__ import annotations

import sys
from pathlib import Path

HOOK = Path(__file__).parents[2] / "rowmap_jobs" / "hook"
for folder in (HOOK, Path(__file__).parent):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
