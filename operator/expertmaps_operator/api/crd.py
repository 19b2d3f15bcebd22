"""Writes the CRDs from the models: `python -m expertmaps_operator.api.crd crds/` (or --check)."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from rowmap_jobs.formats.names import GROUP, VERSION

from .crd_rules import FIELD_RULES, MODEL_RULES, PATTERN_MESSAGES, ROOT_RULES
from .expertlane import ExpertLaneSpec, ExpertLaneStatus
from .expertmap import ExpertMapSpec, ExpertMapStatus
from .meta import cel
from .trafficclass import TrafficClassSpec, TrafficClassStatus

Schema = dict[str, Any]

HEADER = """\
# Made of the models in operator/expertmaps_operator/api by `python -m expertmaps_operator.api.crd`.
"""
INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Column:
    """One column of `kubectl get`; wide ones are seen with `-o wide`."""

    name: str
    json_path: str
    description: str
    type: str = "string"
    wide: bool = False


@dataclass(frozen=True)
class Kind:
    """What is not in the models of a kind."""

    kind: str
    plural: str
    short_name: str
    description: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[Column, ...]


def _condition(name: str, type_: str, field: str, description: str, wide: bool = False) -> Column:
    path = f'.status.conditions[?(@.type=="{type_}")].{field}'
    return Column(name, path, description, wide=wide)


_READY = (
    _condition("Ready", "Ready", "status", "Status of the condition Ready."),
    _condition("Reason", "Ready", "reason", "Reason of the condition Ready."),
)
_MESSAGE = _condition("Message", "Ready", "message", "Message of the condition Ready.", wide=True)
_AGE = Column("Age", ".metadata.creationTimestamp", "Time since it was created.", "date")

KINDS = (
    Kind(
        kind="TrafficClass",
        plural="trafficclasses",
        short_name="tc",
        description="TrafficClass says what one kind of traffic is and where its recorded "
        "transcripts are.",
        spec=TrafficClassSpec,
        status=TrafficClassStatus,
        columns=(
            Column("Window", ".spec.window", "Age up to which transcripts are counted."),
            Column("Sessions", ".status.sessions", "Sessions of the last run.", "integer"),
            *_READY,
            Column(
                "Tokens", ".status.decodeTokens", "Decode tokens of the last run.", "integer", True
            ),
            Column("Bucket", ".spec.transcripts.s3.bucket", "Bucket of transcripts.", wide=True),
            Column("Prefix", ".spec.transcripts.s3.prefix", "Prefix of transcripts.", wide=True),
            _MESSAGE,
            _AGE,
        ),
    ),
    Kind(
        kind="ExpertLane",
        plural="expertlanes",
        short_name="lane",
        description="ExpertLane is one model server workload, and says which traffic class it "
        "serves now.",
        spec=ExpertLaneSpec,
        status=ExpertLaneStatus,
        columns=(
            Column("Wanted", ".status.effectiveTrafficClass", "Class the lane should serve."),
            Column("Class", ".status.active.trafficClass", "Class of the map in force."),
            *_READY,
            _condition(
                "Progressing", "Progressing", "reason", "Reason of the condition Progressing."
            ),
            Column("Replicas", ".status.replicas", "Desired pods.", "integer"),
            Column("Updated", ".status.updatedReplicas", "Pods updated.", "integer", True),
            Column("Workload", ".spec.workloadRef.name", "Workload of the lane.", wide=True),
            Column("Digest", ".status.active.digest", "Digest of the map in force.", wide=True),
            _MESSAGE,
            _AGE,
        ),
    ),
    Kind(
        kind="ExpertMap",
        plural="expertmaps",
        short_name="em",
        description="ExpertMap is the map of one traffic class on one lane, and says how it is "
        "measured.",
        spec=ExpertMapSpec,
        status=ExpertMapStatus,
        columns=(
            Column("Lane", ".spec.laneRef.name", "Lane of the map."),
            Column("Class", ".spec.trafficClassRef.name", "Traffic class of the map."),
            *_READY,
            _condition("Profiling", "Profiling", "reason", "Reason of the condition Profiling."),
            Column("Cold%", ".status.accepted.coldSharePercent", "Cold share with the map."),
            Column(
                "Positional%",
                ".status.accepted.positionalColdSharePercent",
                "Cold share with a map by position.",
                wide=True,
            ),
            Column("Run", ".status.run.name", "Newest profile run.", wide=True),
            Column("Digest", ".status.accepted.digest", "Digest of the map.", wide=True),
            _MESSAGE,
            _AGE,
        ),
    ),
)


class _Converter:
    """Makes a structural schema of a model's JSON schema."""

    def __init__(self, model: type[BaseModel], is_spec: bool) -> None:
        schema = model.model_json_schema(by_alias=True)
        self._definitions: Mapping[str, Schema] = schema.pop("$defs", {})
        self._name = model.__name__
        self._root = schema
        self._is_spec = is_spec

    def convert(self) -> Schema:
        return self._object(self._name, self._root)

    def _value(self, source: Schema) -> Schema:
        name, node = self._flatten(source)
        if "properties" in node:
            return self._object(name, node)
        out: Schema = {}
        for key in ("description", "type", "format", "enum", "default"):
            if key in node:
                out[key] = node[key]
        for key, value in node.items():
            if key.startswith(("min", "max", "x-kubernetes-")) or key == "pattern":
                out[key] = value
        if "const" in node:
            out["enum"] = [node["const"]]
        if node["type"] == "integer":
            narrow = node.get("maximum", INT32_MAX + 1) <= INT32_MAX
            out.setdefault("format", "int32" if narrow else "int64")
        if node["type"] == "array":
            out["items"] = self._value(node["items"])
        if isinstance(node.get("additionalProperties"), dict):
            out["additionalProperties"] = self._value(node["additionalProperties"])
        if out.get("default", ...) is None or not self._is_spec:
            out.pop("default", None)
        if self._is_spec and out.get("pattern") in PATTERN_MESSAGES:
            pattern = out.pop("pattern")
            rule = cel(f"self.matches(r'{pattern}')", PATTERN_MESSAGES[pattern])
            out["x-kubernetes-validations"] = [rule]
        return out

    def _flatten(self, source: Schema) -> tuple[str, Schema]:
        """Follow references and drop null from unions; outer keys win over inner ones."""
        name, node = "", dict(source)
        while "$ref" in node or "anyOf" in node:
            if "anyOf" in node:
                branches = [one for one in node.pop("anyOf") if one.get("type") != "null"]
                if len(branches) != 1:
                    raise ValueError(f"{self._name}: a union of {len(branches)} types: {source}")
                inner = branches[0]
            else:
                name = node.pop("$ref").rpartition("/")[2]
                inner = self._definitions[name]
            node = {**inner, **node}
        return name, node

    def _object(self, name: str, node: Schema) -> Schema:
        properties: Schema = {}
        required = node.get("required", [])
        for field, source in node["properties"].items():
            converted = self._value(source)
            optional = field not in required and "anyOf" not in source
            if self._is_spec and optional and "properties" in converted:
                # In full, because the API server holds a default against the rules as it stands.
                fields: Schema = converted["properties"]
                converted["default"] = {
                    key: one["default"] for key, one in fields.items() if "default" in one
                }
            rules = FIELD_RULES.get((name, field), [])
            if rules:
                own = converted.get("x-kubernetes-validations", [])
                converted["x-kubernetes-validations"] = [*own, *rules]
            properties[field] = converted
        out: Schema = {"description": node["description"], "type": "object"}
        if required:
            out["required"] = list(required)
        out["properties"] = properties
        if name in MODEL_RULES:
            out["x-kubernetes-validations"] = list(MODEL_RULES[name])
        return out


def schema(kind: Kind) -> Schema:
    """The structural schema of a kind."""
    status = _Converter(kind.status, is_spec=False).convert()
    return {
        "description": kind.description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {
                "description": f"Version of the API that the object is written in, "
                f"{GROUP}/{VERSION}.",
                "type": "string",
            },
            "kind": {"description": f"Kind of the object, {kind.kind}.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": _Converter(kind.spec, is_spec=True).convert(),
            "status": status,
        },
        "x-kubernetes-validations": ROOT_RULES[kind.kind],
    }


def _column(column: Column) -> Schema:
    out: Schema = {
        "name": column.name,
        "type": column.type,
        "description": column.description,
        "jsonPath": column.json_path,
    }
    return {**out, "priority": 1} if column.wide else out


def crd(kind: Kind) -> Schema:
    """The CustomResourceDefinition of a kind."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [_column(column) for column in kind.columns],
        "schema": {"openAPIV3Schema": schema(kind)},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
                "shortNames": [kind.short_name],
                # Not `expertmaps`: kubectl would then show all kinds for `kubectl get expertmaps`.
                "categories": ["expertmaps-all"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


class _Dumper(yaml.SafeDumper):
    """Block style, no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def render(kind: Kind) -> str:
    """The file of a kind's CRD."""
    text = yaml.dump(crd(kind), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return HEADER + text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or say which ones differ."""
    parser = argparse.ArgumentParser(prog="python -m expertmaps_operator.api.crd")
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args(arguments)
    stale: list[Path] = []
    for folder, kind in itertools.product(options.folders, KINDS):
        path: Path = folder / f"{kind.plural}.yaml"
        text = render(kind)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    verb = "differs from the models" if options.check else "written"
    for path in stale:
        sys.stdout.write(f"{path} {verb}\n")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
