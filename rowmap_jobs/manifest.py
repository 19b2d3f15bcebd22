"""The ConfigMap that carries a row map into a lane's pods. Pure."""

from __future__ import annotations

from typing import Any

from .formats import names
from .formats.rowmap import RowMap
from .formats.run import RunSpec


def config_map(spec: RunSpec, rows: RowMap) -> dict[str, Any]:
    """The immutable ConfigMap of a map, owned by the workload (not as its controller)."""
    labels = {
        names.LABEL_LANE: spec.lane,
        names.LABEL_ROLE: names.ROLE_MAP,
        names.LABEL_DIGEST: names.hex16(rows.digest),
    }
    annotations = {
        names.ANNOTATION_MAP_DIGEST: rows.digest,
        names.ANNOTATION_ROW_SET_DIGEST: rows.row_set_digest,
    }
    if spec.traffic_class is not None:
        labels[names.LABEL_CLASS] = spec.traffic_class
        annotations[names.ANNOTATION_CLASS] = spec.traffic_class
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names.map_configmap(spec.lane, rows.digest),
            "namespace": spec.namespace,
            "labels": labels,
            "annotations": annotations,
            "ownerReferences": [
                {
                    "apiVersion": spec.owner.api_version,
                    "kind": spec.owner.kind,
                    "name": spec.owner.name,
                    "uid": spec.owner.uid,
                    "controller": False,
                }
            ],
        },
        "immutable": True,
        "data": {names.MAP_FILE: rows.to_bytes().decode("utf-8")},
    }
