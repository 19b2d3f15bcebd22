"""`probe`: before an engine boots, is the store writable and are there transcripts enough?"""

from __future__ import annotations

from collections import deque

from . import selection, store
from .formats.run import Counted, RunSpec, Verdict
from .log import say
from .reasons import Reason
from .services import Services


def run(spec: RunSpec, services: Services) -> Verdict:
    """Raises RunError for everything that would make the profile fail without its engine."""
    store.probe(services.store(spec), spec.run)
    bucket = services.transcripts(spec)
    bucket.check_bucket()
    since = selection.window_start(services.now(), spec.window_seconds)
    tally = selection.Tally()
    deque(selection.read(bucket, since, tally), maxlen=0)
    place = bucket.url(bucket.location.prefix)
    selection.check_enough(tally, place, since, spec.min_transcripts)
    message = (
        f"{place}: {len(tally.sessions)} sessions, {tally.in_window} transcripts, "
        f"{tally.broken} broken lines"
    )
    say(message)
    return Verdict(
        run=spec.run,
        outcome="Probed",
        reason=Reason.PROBED,
        message=message,
        counted=Counted(
            sessions=len(tally.sessions),
            transcripts=0,
            decode_tokens=0,
            prefill_tokens=0,
            considered=tally.in_window,
            skipped=dict(sorted(tally.skipped.items())),
        ),
    )
