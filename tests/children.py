"""Processes that tests start and that must not outlive them."""

from __future__ import annotations

import ctypes
import signal


def end_with_parent() -> None:
    """For `preexec_fn`: a killed test run leaves no server, no port and no lock behind."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
