"""Cold share of a class's traffic under the other class's map, from the stored censuses."""

from __future__ import annotations

import json

import numpy as np

from rowmap_jobs.formats import census, names, rowmap
from tests.demo.deploy import STORE, get, s3
from tests.demo.kube import Kube
from tests.demo.settings import CLASSES, LANE


def other_shares(kube: Kube, traffic_class: str) -> dict[str, str]:
    """Percent of the class's decode selections that each other class's map leaves cold."""
    statuses = {name: (kube.get("expertmap", f"{LANE}.{name}") or {})["status"] for name in CLASSES}
    with s3(kube) as client:
        report = json.loads(get(client, statuses[traffic_class]["accepted"]["reportKey"]))
        digest = report["censusDigest"]
        raw = get(client, names.census_key(STORE["prefix"], digest))
        counts = census.parse(raw, digest)
        shares = {}
        for name in CLASSES:
            if name == traffic_class:
                continue
            wanted = statuses[name]["accepted"]["digest"]
            body = get(client, names.map_key(STORE["prefix"], wanted))
            other = rowmap.parse(body, wanted, wanted)
            shares[name] = f"{100 * cold_share(counts, other):.2f}"
    return shares


def cold_share(counts: census.Census, row_map: rowmap.RowMap) -> float:
    """Share of decode selections whose row is cold, 0 to 1."""
    decode = counts.decode()
    cold = sum(
        int(decode[i, np.array(row_map.layers[str(layer)].cold, dtype=np.int64)].sum())
        for i, layer in enumerate(counts.layer_ids.tolist())
    )
    return cold / int(decode.sum())
