"""`python -m rowmap_jobs.cli` is `rowmap`."""

from __future__ import annotations

import sys

from .start import main

if __name__ == "__main__":
    sys.exit(main())
