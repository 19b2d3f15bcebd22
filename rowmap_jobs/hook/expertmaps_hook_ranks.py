"""Several ranks in one pod: each writes its own file, rank 0 speaks for all. Standard library only.

Rank 0 writes status.json and answers on the port; rank r writes status-rank<r>.json beside it.
What rank 0 says of the pod follows from all files of this boot: a rank that gave up makes the pod
`Failed` with reason `RankFailed`, one that has another map or is not there yet keeps it from being
ready.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .expertmaps_hook_files import open_regular
else:
    from expertmaps_hook_files import open_regular

IN_FORCE = ("mapDigest", "rowSetDigest", "residency")
MAX_BYTES = 1 << 20

Wire = dict[str, Any]


def file_name(rank: int) -> str:
    """Name of a rank's status file."""
    return "status.json" if rank == 0 else f"status-rank{rank}.json"


def read(folder: Path, ranks: int, since: float) -> list[Wire]:
    """Statuses of the other ranks of this boot, as far as they are there and whole.

    A folder that outlives its container still holds the files of an earlier boot: `since` is when
    this one started, in Unix seconds.
    """
    found = []
    for rank in range(1, ranks):
        try:
            with open_regular(folder / file_name(rank)) as file:
                wire = json.loads(file.read(MAX_BYTES))
            if wire["rank"] == rank and wire["startedAt"] >= int(since):
                found.append(wire)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def of_pod(own: Wire, others: Iterable[Wire], ranks: int) -> Wire:
    """What rank 0 reports, given what the other ranks do."""
    if ranks <= 1 or own["phase"] in ("Failed", "Stopped"):
        return own
    others = list(others)
    for other in others:
        if other.get("phase") == "Failed":
            return _failed(own, other, _error(other))
    for other in others:
        if "Loading" not in (own["phase"], other.get("phase")):
            mine, theirs = own.get("mapDigest"), other.get("mapDigest")
            if mine != theirs:
                return _failed(own, other, f"map: found {theirs}, rank 0 has {mine}")
    waiting = ranks - 1 - sum(other.get("phase") != "Loading" for other in others)
    return {**own, "phase": "Loading"} if waiting else own


def _error(wire: Mapping[str, Any]) -> str:
    error = wire.get("error") or {}
    return f"{error.get('reason', 'HookFailed')}: {error.get('message', '')}"


def _failed(own: Wire, other: Mapping[str, Any], why: str) -> Wire:
    wire = {name: value for name, value in own.items() if name not in IN_FORCE}
    message = " ".join(f"rank {other.get('rank')}: {why}".split())[:1024]
    error = {"reason": "RankFailed", "message": message}
    return {**wire, "phase": "Failed", "generation": 0, "error": error}
