"""`python -m expertmaps_operator`."""

from __future__ import annotations

import sys

from .main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
