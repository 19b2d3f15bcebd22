"""Progress on stderr: short lines of names and numbers, never contents of transcripts."""

from __future__ import annotations

import sys
import time


def say(text: str) -> None:
    """Write one line with the time of day (UTC)."""
    clock = time.strftime("%H:%M:%SZ", time.gmtime())
    sys.stderr.write(f"{clock} {' '.join(text.split())}\n")
    sys.stderr.flush()
