"""Objects of the API server as models. What cannot be read is said, never raised."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from rowmap_jobs.formats import rowmap
from rowmap_jobs.formats.base import FormatError, refusal
from rowmap_jobs.formats.names import ANNOTATION_MAP_DIGEST, MAP_FILE, hex16, map_configmap

from ..api.expertlane import ExpertLane
from ..api.expertmap import ExpertMap
from ..api.trafficclass import TrafficClass
from ..snapshot import Invalid, MapObject
from .kube import Manifest

Model = TypeVar("Model", ExpertLane, ExpertMap, TrafficClass)

MAX_PARSED_MAPS = 64


def custom(model: type[Model], manifest: Mapping[str, Any]) -> Model | Invalid:
    """A custom resource: Invalid when its spec cannot be read, an empty status when that cannot."""
    metadata = manifest.get("metadata") or {}
    parts = {"metadata": metadata, "spec": manifest.get("spec") or {}}
    try:
        return model.model_validate({**parts, "status": manifest.get("status") or {}})
    except ValidationError:
        pass
    try:
        return model.model_validate(parts)
    except ValidationError as error:
        name, generation = metadata.get("name"), metadata.get("generation")
        source = f"{model.__name__} {name}"
        return Invalid(
            name=str(name),
            generation=generation if isinstance(generation, int) else 0,
            message=str(refusal(source, error)),
            status=manifest.get("status") or {},
        )


def readable(model: type[Model], manifests: list[Manifest]) -> list[Model]:
    """Those that can be read, by name."""
    parsed = (custom(model, manifest) for manifest in manifests)
    return sorted(
        (item for item in parsed if not isinstance(item, Invalid)),
        key=lambda item: item.metadata.name,
    )


class MapReader:
    """Reads map ConfigMaps. They are immutable, so each version is parsed once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parsed: OrderedDict[tuple[str, str], MapObject] = OrderedDict()

    def by_digest(self, lane: str, manifests: list[Manifest]) -> dict[str, MapObject]:
        """The lane's maps by annotated digest; of two for one digest, the one we would name so."""
        found: dict[str, MapObject] = {}
        for manifest in sorted(manifests, key=lambda item: str(item["metadata"]["name"])):
            item = self._read(manifest)
            if item is None:
                continue
            if item.digest in found and item.name != map_configmap(lane, item.digest):
                continue
            found[item.digest] = item
        return found

    def _read(self, manifest: Manifest) -> MapObject | None:
        metadata = manifest["metadata"]
        key = (str(metadata.get("uid", "")), str(metadata.get("resourceVersion", "")))
        with self._lock:
            cached = self._parsed.get(key)
            if cached is not None:
                self._parsed.move_to_end(key)
                return cached
        item = map_object(manifest)
        if item is not None and all(key):
            with self._lock:
                self._parsed[key] = item
                if len(self._parsed) > MAX_PARSED_MAPS:
                    self._parsed.popitem(last=False)
        return item


def map_object(manifest: Mapping[str, Any]) -> MapObject | None:
    """The map in a ConfigMap, re-hashed; None when its annotation claims no digest."""
    metadata = manifest.get("metadata") or {}
    name = str(metadata.get("name"))
    digest = str((metadata.get("annotations") or {}).get(ANNOTATION_MAP_DIGEST))
    try:
        hex16(digest)
    except ValueError:
        return None
    source = f"ConfigMap {name}"
    text = (manifest.get("data") or {}).get(MAP_FILE)
    try:
        if not isinstance(text, str):
            raise FormatError(source, f"data.{MAP_FILE}", "nothing", "the row map")
        parsed = rowmap.parse(text.encode("utf-8"), source, digest)
    except FormatError as error:
        return MapObject(name=name, digest=digest, row_map=None, error=str(error))
    except UnicodeEncodeError:
        return MapObject(name=name, digest=digest, row_map=None, error=f"{source}: not UTF-8")
    return MapObject(name=name, digest=digest, row_map=parsed, error=None)
