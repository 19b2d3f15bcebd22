"""`fetch`: make the ConfigMap of a map again from the store."""

from __future__ import annotations

from . import manifest, store
from .formats.run import RunSpec, Verdict
from .log import say
from .reasons import Reason, RunError
from .services import Services


def run(spec: RunSpec, services: Services) -> Verdict:
    """Raises RunError: ObjectNotFound, ChecksumMismatch, the store's and the API's reasons."""
    if spec.digest is None:
        raise RunError(Reason.INVALID_RUN_SPEC, "EXPERTMAPS_RUN: digest: found none, expected one")
    rows = store.get_map(services.store(spec), spec.digest)
    made = manifest.config_map(spec, rows)
    name = str(made["metadata"]["name"])
    new = services.create(made)
    message = f"ConfigMap {name} {'created' if new else 'is there already'}"
    say(message)
    return Verdict(
        run=spec.run,
        outcome="Fetched",
        reason=Reason.FETCHED,
        message=message,
        digest=rows.digest,
        row_set_digest=rows.row_set_digest,
        config_map=name,
        fingerprint=rows.fingerprint,
        geometry=rows.geometry,
    )
